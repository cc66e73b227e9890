"""What a section is given, and how its rows are run: one by one, while there is time, each guarded."""

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
"""Milliseconds of one call, by the device's own clock: the median of many."""
ROUNDS = 3
_COMPILED = "torchao", "bitsandbytes", "Transformer Engine", "compiled"
"""Peers whose first call compiles for a minute on a CPU, or that have no code for one."""


@dataclass(frozen=True)
class Sizes:
    """The shapes that the bars are for, or tiny ones that only show that the code runs."""

    elements: int = 1 << 30
    parameters: int = 1 << 30
    square: int = 8192
    rows: int = 16384
    """Of the linear layer's input; it is `square` wide and gives as many columns."""
    grid: tuple[tuple[int, int, int], ...] = tuple(
        (m, k, n)
        for m in (8192, 16384)
        for k, n in [*((k, n) for k in (1024, 2048, 4096, 8192) for n in (1024, 2048, 4096, 8192)), (4096, 14336)]
    )
    patterns: int = 1 << 32
    chunk: int = 1 << 26
    tensors: tuple[tuple[int, ...], ...] = tuple(((768, 768), (3072, 768), (768,))[i % 3] for i in range(300))
    depth: int = 4096
    """The shared side of the probes of sums."""
    copied: int = 1 << 31
    """Bytes of the tensor that the copy reads."""


FULL = Sizes()
TINY = Sizes(
    elements=1 << 14, parameters=1 << 12, square=128, rows=256, grid=((64, 32, 48),), patterns=3 << 10, chunk=1 << 10,
    tensors=((16, 24), (24,)), depth=512, copied=1 << 12,
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A row by its name, and what measures it: figures under `measures`, and whatever else is worth keeping."""

    name: str
    measure: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Bench:
    """A section's device, clock, time and sizes."""

    device: torch.device
    timer: Timer
    ends: float
    """When the section's time is up, in `time.monotonic`'s seconds."""
    sizes: Sizes = FULL
    exhaustive: bool = False
    now: Callable[[], float] = field(default=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds left."""
        return self.ends - self.now()

    def within(self, share: float) -> Bench:
        """The same for what may take that share of the seconds left."""
        return replace(self, ends=self.ends - (1 - share) * max(self.left, 0.0))

    @property
    def on_gpu(self) -> bool:
        """Whether figures mean something here."""
        return self.device.type == "cuda"

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Random numbers: zeros are faster than data on matrix units, and hide what is wrong."""
        return torch.randn(shape, device=self.device, dtype=dtype)


Section = Callable[[Bench], Iterator[Row]]


def run(section: str, rows: Section, bench: Bench, journal: Journal) -> bool:
    """Measure the rows that the journal does not have yet, until time is up.

    A row that raises says what it raised. Returns False where the device itself was lost by it: a process cannot go on
    with a CUDA context after an illegal access, and the next one can.
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
            found = {"failed": said(error)}
        found["seconds"] = round(bench.now() - started, 2)
        journal.end(section, row.name, found)
        if bench.on_gpu and not _answers():
            return False
        swept(bench)
    return True


def said(error: BaseException) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


def _answers() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def swept(bench: Bench) -> None:
    """Give back what nothing refers to any more; models and their optimizers refer to each other."""
    gc.collect()
    if bench.on_gpu:
        torch.cuda.empty_cache()


def race(bench: Bench, ours: Run, peers: Mapping[str, Callable[[], Run]], traffic: int = 0) -> dict[str, Any]:
    """Time ours, its peers and (where `traffic` is given) a copy, interleaved in shuffled order: medians of the rounds.

    Args:
        ours: what is measured.
        peers: by name, what makes each one's call; one that raises is left out by name.
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
            left_out[name] = said(error)
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
    """A copy from one tensor of `sizes.copied` bytes to another, of random bits."""
    source = torch.randint(0, 256, (bench.sizes.copied,), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def power(number: int) -> str:
    """A power of two as it is written in a bar's shape; other numbers as they are.

    >>> power(1 << 30), power(300)
    ('2^30', '300')
    """
    return f"2^{number.bit_length() - 1}" if number > 0 and number & (number - 1) == 0 else str(number)


def fitting(bench: Bench, wanted: int, bytes_each: float) -> int:
    """The largest halving of `wanted` elements of which `bytes_each` bytes fit in nine tenths of the free memory."""
    if not bench.on_gpu:
        return wanted
    free, _ = torch.cuda.mem_get_info(bench.device)
    while wanted * bytes_each > 0.9 * free:
        wanted //= 2
    return wanted
