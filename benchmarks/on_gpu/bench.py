"""The parameters of sections, and the loop that measures their rows one by one while there is time."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from on_gpu.journal import Journal


Run = Callable[[], Any]
Timer = Callable[[Run], float]
"""Returns the milliseconds of one call by the device's own clock: the median of many."""
ROUNDS = 3
_COMPILED = "torchao", "bitsandbytes", "Transformer Engine", "compiled"
"""Peers whose first call compiles for a minute on a CPU, or that do not support CPUs."""


@dataclass(frozen=True)
class Sizes:
    """The shapes of the bars, or tiny ones that only show that the code runs."""

    elements: int = 1 << 30
    parameters: int = 1 << 30
    square: int = 8192
    rows: int = 16384
    """Rows of the linear layer's input, whose inner and outer widths are `square`."""
    grid: tuple[tuple[int, int, int], ...] = tuple(
        (m, k, n)
        for m in (8192, 16384)
        for k, n in [*((k, n) for k in (1024, 2048, 4096, 8192) for n in (1024, 2048, 4096, 8192)), (4096, 14336)]
    )
    patterns: int = 1 << 32
    chunk: int = 1 << 26
    tensors: tuple[tuple[int, ...], ...] = tuple(((768, 768), (3072, 768), (768,))[i % 3] for i in range(300))
    depth: int = 4096
    """The summed dimension of the probes of accumulation."""
    copied: int = 1 << 31
    """Bytes of the tensor that the copy reads."""


FULL = Sizes()
TINY = Sizes(
    elements=1 << 14, parameters=1 << 12, square=128, rows=256, grid=((64, 32, 48),), patterns=3 << 10, chunk=1 << 10,
    tensors=((16, 24), (24,)), depth=512, copied=1 << 12,
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A row's name, and the function that measures it: it returns figures under `measures`, and anything else to
    store."""

    name: str
    measure: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Bench:
    """The device, clock, time limit and sizes of a section."""

    device: torch.device
    timer: Timer
    ends: float
    """When the section's time is up, by `time.monotonic`."""
    sizes: Sizes = FULL
    exhaustive: bool = False
    now: Callable[[], float] = field(default=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds left."""
        return self.ends - self.now()

    def within(self, share: float) -> Bench:
        """The same with a time limit of that share of the seconds left."""
        return replace(self, ends=self.ends - (1 - share) * max(self.left, 0.0))

    @property
    def on_gpu(self) -> bool:
        """Whether this runs on a GPU, so that figures are measurements."""
        return self.device.type == "cuda"

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor of random normal values: zeros are faster than data on tensor cores, and hide errors."""
        return torch.randn(shape, device=self.device, dtype=dtype)


Section = Callable[[Bench], Iterator[Row]]


def run(section: str, rows: Section, bench: Bench, journal: Journal) -> bool:
    """Measure the rows that the journal does not have yet, until time is up.

    A row that raises stores its error. Returns False if the device did not survive a row: after an illegal access a
    process cannot use its CUDA context any more, but a new process can.
    """
    done = journal.rows()
    for row in rows(bench):
        if (section, row.name) in done:
            continue
        if bench.left <= 0:
            return True
        journal.begin(section, row.name)
        started = bench.now()
        try:
            found = row.measure()
        except Exception as error:
            found = {"failed": error_line(error)}
        found["seconds"] = round(bench.now() - started, 2)
        journal.end(section, row.name, found)
        if bench.on_gpu and not _answers():
            return False
        swept(bench)
    return True


def error_line(error: BaseException) -> str:
    """An error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


def _answers() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def swept(bench: Bench) -> None:
    """Free memory that nothing references any more, including reference cycles of models and optimizers."""
    gc.collect()
    if bench.on_gpu:
        torch.cuda.empty_cache()


def race(bench: Bench, ours: Run, peers: Mapping[str, Callable[[], Run]], traffic: int = 0) -> dict[str, Any]:
    """Time ours, its peers and (with `traffic`) a copy, interleaved in shuffled order, as medians over rounds.

    Args:
        ours: the call that is measured.
        peers: by name, functions that return a peer's call; peers that raise are left out and named.
        traffic: the bytes that ours has to read and write.

    Returns:
        `ms` and `spread` (largest less smallest round, over the median) of each; `measures`: `of copy`, the speed of
        ours as a fraction of the copy's in the same rounds, and `to PEER`, the median of the rounds' ratios.
    """
    runs: dict[str, Run] = {"ours": ours}
    ours()
    left_out: dict[str, str] = {}
    for name, make in peers.items():
        if bench.left <= 0:
            left_out[name] = "time was up before it"
            continue
        try:
            run = make()
            if not bench.on_gpu and any(word in name for word in _COMPILED):
                left_out[name] = "dry run: made, not called"
                continue
            run()
            runs[name] = run
        except Exception as error:
            left_out[name] = error_line(error)
    if traffic:
        runs["copy"] = copying(bench)
    times: dict[str, list[float]] = {name: [] for name in runs}
    shuffled = random.Random(0).sample
    for _ in range(ROUNDS):
        for name in shuffled(list(runs), len(runs)):
            times[name].append(bench.timer(runs[name]))
    ms = {name: statistics.median(found) for name, found in times.items()}
    measures = {f"to {name}": _ratio(times["ours"], times[name]) for name in runs if name not in ("ours", "copy")}
    if traffic:
        speed = 2 * bench.sizes.copied / ms["copy"]
        measures["of copy"] = traffic / ms["ours"] / speed
    spread = {name: (max(found) - min(found)) / ms[name] for name, found in times.items()}
    return {"ms": ms, "spread": spread, "measures": measures, "left_out": left_out, "bytes": traffic}


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def copying(bench: Bench) -> Run:
    """A function that copies a tensor of `sizes.copied` random bytes to another."""
    source = torch.randint(0, 256, (bench.sizes.copied,), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def power(number: int) -> str:
    """A power of two as written in a bar's shape; other numbers unchanged.

    >>> power(1 << 30), power(300)
    ('2^30', '300')
    """
    return f"2^{number.bit_length() - 1}" if number > 0 and number & (number - 1) == 0 else str(number)


def fitting(bench: Bench, wanted: int, bytes_each: float) -> int:
    """`wanted` elements, halved until `bytes_each` bytes for each fit in nine tenths of the free memory."""
    if not bench.on_gpu:
        return wanted
    free, _ = torch.cuda.mem_get_info(bench.device)
    while wanted * bytes_each > 0.9 * free:
        wanted //= 2
    return wanted
