"""Versions, the device, and its limits: the speed of a copy and of a bf16 GEMM on random data."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import halfstep
from halfstep.lab.environment import environment
from on_gpu.bench import Bench, Row, copying


PEERS = ("triton", "torchao", "bitsandbytes", "transformer-engine", "llvmlite", "mmaemu")
_ASKED = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"


def rows(bench: Bench) -> Iterator[Row]:
    """The rows on which all later ones depend."""
    yield Row("versions", lambda: versions(bench))
    yield Row("ceiling: copy", lambda: _copy(bench))
    yield Row("ceiling: bf16 product", lambda: _product(bench))
    yield Row("ceiling: bf16 product again", lambda: _product(bench))


def versions(bench: Bench) -> dict[str, Any]:
    """The versions of everything that may affect a figure; the device's name under `gpu`."""
    found: dict[str, Any] = {**environment(), "commit": _commit(), "host": platform.node()}
    found |= {name: _version(name) for name in PEERS}
    if bench.on_gpu:
        known = torch.cuda.get_device_properties(bench.device)
        found |= {
            "capability": list(torch.cuda.get_device_capability(bench.device)),
            "memory": known.total_memory,
            "multiprocessors": known.multi_processor_count,
            "l2": getattr(known, "L2_cache_size", None),
            "cuda": torch.version.cuda,
            "cublas": _version("nvidia-cublas") or _version(f"nvidia-cublas-cu{str(torch.version.cuda)[:2]}"),
            "nvidia-smi": _smi(),
        }
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    folder = halfstep.__path__[0]
    try:
        completed = subprocess.run(
            ["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10
        )
    except OSError:
        return "git is not here"
    return completed.stdout.strip() or "not a clone"


def _smi() -> str:
    if shutil.which("nvidia-smi") is None:
        return "not here"
    command = ["nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()


def _copy(bench: Bench) -> dict[str, Any]:
    ms = bench.timer(copying(bench))
    return {"ms": {"copy": ms}, "measures": {"TB/s": 2 * bench.sizes.copied / ms / 1e9}}


def _product(bench: Bench) -> dict[str, Any]:
    side = bench.sizes.square
    a, b = (bench.normal(side, side, dtype=torch.bfloat16) for _ in range(2))
    ms = bench.timer(lambda: a @ b)
    return {"ms": {"product": ms}, "measures": {"TFLOP/s": 2 * side**3 / ms / 1e9}}
