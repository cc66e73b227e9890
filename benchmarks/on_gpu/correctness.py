"""Bit-exactness: kernel tests of `halfstep doctor`, all 2^32 float32 patterns, tests on a GPU, and memory checks."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import halfstep
from halfstep import formats, quant
from halfstep.kernels.gpu import cast
from halfstep.kernels.selftest.case import outcome
from halfstep.kernels.selftest.matrices import tensor_core_tests
from on_gpu.bench import Bench, Row
from on_gpu.cases import TESTS


ROOT = Path(__file__).resolve().parents[2]
FIRST = (("float8_e4m3fn", "nearest_even"), ("float8_e5m2", "nearest_even"))
"""The formats and roundings that every run compares; all others with `--exhaustive`."""
OTHERS = tuple(
    pair
    for pair in itertools.product(
        ("float8_e4m3fn", "float8_e5m2", "e4m3fnuz", "e5m2fnuz", "e2m1fn", "e3m2fn", "e2m3fn", "int8", "bf16", "fp16"),
        ("nearest_even", "nearest_away", "nearest_up", "toward_zero", "up", "down", "stochastic"),
    )
    if pair not in FIRST
)
_PROCESSES = 16
_SEED = 0x9E3779B97F4A7C15


def rows(bench: Bench) -> Iterator[Row]:
    """The rows on which the validity of all later figures depends, each with a limited share of the time."""
    yield Row("kernels", lambda: kernels(bench.within(0.55)))
    yield Row("units", lambda: _tensor_cores(bench))
    for name, rounding in (*FIRST, *(OTHERS if bench.exhaustive else ())):
        share = 0.9 if bench.exhaustive else 0.25
        yield Row(
            f"all patterns: {name}, {rounding}",
            lambda n=name, r=rounding, s=share: exhaustive(bench.within(s), n, r),  # type: ignore[misc]
        )
    yield Row("tests on a GPU", lambda: _tests(bench.within(0.6)))
    yield Row("compute-sanitizer", lambda: _sanitized(bench.within(0.5), "memcheck"))
    yield Row("compute-sanitizer, races in a program", lambda: _sanitized(bench, "racecheck"))


def kernels(bench: Bench) -> dict[str, Any]:
    """Every Triton kernel's cases for every format compared with the reference, in one process per core, until time is
    up."""
    count = min(os.cpu_count() or 1, _PROCESSES) if bench.on_gpu else 1
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(number) for number in range(count)]
        words = [sys.executable, "-m", "on_gpu.cases", bench.device.type]
        running = []
        for number, file in enumerate(outputs):
            with file.open("w") as out:
                running.append(subprocess.Popen([*words, str(number), str(count)], stdout=out, cwd=ROOT))
        for process in running:
            try:
                process.wait(max(bench.left, 0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        lines = [line for file in outputs for line in file.read_text().splitlines() if line.endswith("}")]
    found = [json.loads(line) for line in lines]
    wrong = [each for each in found if each["difference"] is not None]
    tests = [f"{test.kernel} {test.format}" for test in TESTS]
    unheard = sorted(set(tests) - {f"{each['kernel']} {each['format']}" for each in found})
    compared = sum(each["compared"] for each in found)
    result = f"{len(found) - len(wrong)} of {len(tests)} tests equal the reference ({compared:,} results)"
    if unheard:
        result += f"; {len(unheard)} did not end: {', '.join(unheard[:5])}"
    told_wrong = "".join(f"; {each['kernel']}, {each['format']}: {each['difference']}" for each in wrong)
    return {"result": result + told_wrong, "wrong": wrong, "did not end": unheard}


def _tensor_cores(bench: Bench) -> dict[str, Any]:
    """GEMMs of integers with every way of scaling that this GPU's tensor cores support: a wrong scale layout shows."""
    found = [outcome(test, bench.device) for test in tensor_core_tests(bench.device)] if bench.on_gpu else []
    wrong = [
        {"kernel": each.kernel, "format": each.format, "difference": each.difference}
        for each in found
        if not each.passed
    ]
    return {
        "result": f"{len(found) - len(wrong)} of {len(found)} ways of scaling are exact; wrong: {wrong}",
        "wrong": wrong,
    }


def exhaustive(bench: Bench, name: str, rounding: str) -> dict[str, Any]:
    """Compare float32 patterns from 0 on, as values and as codes, between the kernel and the reference on the same
    device; codes by integer arithmetic too, where the GPU has a conversion instruction.

    Outputs are filled with other values before. Stops at the first chunk that differs, and when time is up.
    """
    format, sizes = formats.get(name), bench.sizes
    instruction = cast.instruction(format, rounding, "saturate", bench.device)
    converted = 0
    seed = _SEED if rounding == "stochastic" else None
    result, compared, different = "", 0, 0
    out = torch.empty(sizes.chunk, device=bench.device)
    for start in range(0, sizes.patterns, sizes.chunk):
        if bench.left <= 0:
            result = "; stopped: time was up"
            break
        x = patterns(start, sizes.chunk, bench.device)
        wrong = _differs(
            halfstep.round_to(x, format, rounding, generator=seed, out=out.fill_(7)), _value(x, format, rounding, seed)
        )
        if format.has_nan:
            codes = quant.encode(x, format, rounding, "saturate", seed)
            wrong |= halfstep.encode(x, format, rounding, generator=seed) != codes
            if instruction is not None:
                stored = torch.full_like(codes, 7)
                cast.run_codes(x, stored, format, rounding, "saturate", seed, by_integers=True)
                wrong |= stored != codes
                converted += x.numel()
        compared += x.numel()
        if different := int(wrong.sum()):
            bits = int(x[wrong][0].view(torch.int32)) & 0xFFFFFFFF
            result = f"; {different} differ in one chunk, the first at 0x{bits:08x}"
            break
    summary = f"{compared:,} of {sizes.patterns:,} patterns compared, {different} differ{result}"
    return {
        "result": summary
        + (f"; {converted:,} by cvt ({instruction}) and by integers" if instruction is not None else "")
    }


def patterns(start: int, count: int, device: torch.device) -> Tensor:
    """The float32 values whose bits are start, start + 1 and so on."""
    return torch.arange(start, start + count, device=device, dtype=torch.int64).to(torch.int32).view(torch.float32)


def _value(x: Tensor, format: formats.Format, rounding: str, seed: int | None) -> Tensor:
    return quant.round_to(x, format, rounding, "saturate", seed)


def _differs(found: Tensor, expected: Tensor) -> Tensor:
    """Where the bits differ, with all NaNs equal."""
    return (found.view(torch.int32) != expected.view(torch.int32)) & ~(found.isnan() & expected.isnan())


def _tests(bench: Bench) -> dict[str, Any]:
    """Run the tests that need a GPU, without the kernels', which have their own row; in parallel if pytest-xdist is
    installed."""
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "--tb=short"]
    words += ["-k", "not every_kernel"]
    words += ["-n", str(_PROCESSES // 2), "--dist", "worksteal"] if find_spec("xdist") else []
    return _executed([*words, str(ROOT / "tests" / "gpu")], bench)


def _sanitized(bench: Bench, check: str) -> dict[str, Any]:
    """Run the kernels' cases under compute-sanitizer, without torch's caching allocator, which would hide out-of-bounds
    accesses."""
    if shutil.which("compute-sanitizer") is None:
        return {"failed": "compute-sanitizer is not here"}
    words = ["compute-sanitizer", "--tool", check, "--error-exitcode", "9"]
    return _executed(
        [*words, sys.executable, "-m", "on_gpu.cases", "cuda", "0", "1"], bench, PYTORCH_NO_CUDA_MEMORY_CACHING="1"
    )


def _executed(words: list[str], bench: Bench, **variables: str) -> dict[str, Any]:
    """The exit code of a command and its last lines, limited to the time that is left."""
    if not bench.on_gpu:
        return {"result": "not in a dry run"}
    limit = max(bench.left, 1.0)
    try:
        completed = subprocess.run(
            words, capture_output=True, text=True, timeout=limit, cwd=ROOT, env={**os.environ, **variables}
        )
    except subprocess.TimeoutExpired as stopped:
        output = stopped.stdout.decode(errors="replace") if stopped.stdout else ""
        return {"failed": f"stopped after {limit:.0f} s: time was up", "output": output[-2000:]}
    lines = (completed.stdout + completed.stderr).strip().splitlines()
    return {"result": f"exit code {completed.returncode}: {''.join(lines[-1:])[:300]}", "output": lines[-30:]}
