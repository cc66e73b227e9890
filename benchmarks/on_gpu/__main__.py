"""Measure one section in its own process: `benchmarks/gpu.py` starts it, and restarts it after a row loses the GPU."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from on_gpu.bench import FULL, TINY, Bench, Section, Timer, run
from on_gpu.journal import Journal
from on_gpu.peers import found


SECTIONS = {
    "machine": "machine", "correctness": "correctness", "probes": "probes", "casts": "casts", "products": "products",
    "optimizers": "steps", "training": "training",
}  # fmt: skip
"""The module of each section, imported in the section's own process, so that a failing import stops no other
section."""


def rows_of(section: str) -> Section:
    """The function that yields the section's rows."""
    return import_module(f"on_gpu.{SECTIONS[section]}").rows  # type: ignore[no-any-return]


def timer() -> Timer:
    """A function that returns the median milliseconds of a call by CUDA events, with the cache flushed before each."""
    do_bench = found("triton.testing:do_bench")
    return lambda call: float(do_bench(call, warmup=10, rep=60, return_mode="median"))


def untimed(call: Callable[[], Any]) -> float:
    """The timer of a dry run: makes the call and returns 1."""
    call()
    return 1.0


def main() -> None:
    """Measure the rows of one section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--exhaustive", action="store_true")
    parser.add_argument("--dry", action="store_true")
    arguments = parser.parse_args()
    ends = time.monotonic() + arguments.seconds
    device = torch.device("cpu" if arguments.dry else "cuda")
    sizes = TINY if arguments.dry else FULL
    bench = Bench(device, untimed if arguments.dry else timer(), ends, sizes, arguments.exhaustive)
    if not run(arguments.section, rows_of(arguments.section), bench, Journal(arguments.lines)):
        raise SystemExit("the GPU did not answer after a row")


if __name__ == "__main__":
    main()
