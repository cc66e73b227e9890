"""The speed of quantizing a tensor: halfstep, its peers, and a copy of the same bytes, interleaved in one run."""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import halfstep
from halfstep import formats
from halfstep.lab.environment import environment
from harness import keep, ratio, timings
from peers import FLOATS, Peers, Scalar, Way, Ways
from quantize_tables import RESULT, terminal, write_page


SPAN = 0.002
"""The least seconds of a turn."""
CHECKED = 1 << 12
"""Elements of every result that are checked before anything is timed."""
COLUMNS = 1024
SMALL = 1 << 20
"""The most elements for which the slowest peers run."""
OURS, FRESH = "halfstep", "halfstep, fresh memory"
COPY, CLONE = "copy", "copy, fresh memory"
BLOCKS = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "nvfp4", "nf4", "dynamic8")
POSITS = ("posit8_0", "posit8_2", "posit16_1", "posit16_2")


@dataclass(frozen=True)
class Work:
    """A task: the bytes that it reads and writes, the check of its results, and the ways of doing it."""

    name: str
    moved: int
    ways: Ways
    right: Callable[[Tensor], Tensor] | None = None
    """Which of the first CHECKED values are right; None without an independent reference."""


@dataclass(frozen=True)
class Bar:
    """A bar for our time on a task: faster than `against` (work, who) by a factor `at_least`, or its time times
    `at_most`."""

    work: str
    against: tuple[str, str]
    at_least: float | None = None
    at_most: float | None = None
    ours: str = OURS
    large_only: bool = False
    """Only for tensors that exceed every cache."""


@dataclass
class Field:
    """Tasks that are timed together, round by round, so that any two of them can be compared."""

    name: str
    works: list[Work] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)


def values_field(x: Tensor, peers: Peers) -> Field:
    """Tasks from float32 to float32 values of a format."""
    all_values = Field("values")
    out, head = torch.empty_like(x), x.flatten()[:CHECKED]
    torch_e4m3 = ("e4m3fn values", "torch")
    for scalar in FLOATS:
        name = f"{scalar.name} values"
        ways = rounding_ways(x, scalar.name, out) | peers.values(scalar, x, slow=x.numel() <= SMALL)
        all_values.works.append(Work(name, 8 * x.numel(), ways, equal_to(peers.round(scalar, head))))
        if scalar.ml_dtypes:
            all_values.bars.append(Bar(name, (name, "ml_dtypes"), at_least=25))
        all_values.bars += [
            Bar(name, torch_e4m3, at_least=6),
            Bar(name, (name, "unit-scaling"), at_least=20),
            Bar(name, (name, "qtorch"), at_least=15),
            Bar(name, torch_e4m3, at_least=2.5, ours=FRESH, large_only=True),
        ]
    for scalar in FLOATS[:3]:
        name = f"{scalar.name} values, stochastic"
        ways = rounding_ways(x, scalar.name, out, "stochastic") | peers.stochastic(scalar, x, slow=x.numel() <= SMALL)
        all_values.works.append(Work(name, 8 * x.numel(), ways, neighbours(scalar, head, peers)))
        all_values.bars += [
            Bar(name, (name, "qtorch"), at_least=50),
            Bar(name, (f"{scalar.name} values", OURS), at_most=1.3),
        ]
    for posit in POSITS:
        name = f"{posit} values"
        right = equal_to(nearest(posit, head))
        all_values.works.append(Work(name, 8 * x.numel(), rounding_ways(x, posit, out), right))
        all_values.bars.append(Bar(name, ("e4m3fn values", OURS), at_most=1.3))
    all_values.works += copies(all_values.works, x)
    return all_values


def codes_field(x: Tensor, peers: Peers) -> Field:
    """Tasks from float32 to packed codes and scales, and back."""
    codes = Field("codes")
    head, size = x.flatten()[:CHECKED], x.numel()
    for scalar in FLOATS[:3]:
        name, bits = f"{scalar.name} codes", formats.get(scalar.name).bits
        moved = size * (32 + bits) // 8
        right = equal_to(peers.round(scalar, head))
        ways = quantizing_ways(x, scalar.name) | peers.codes(scalar, x)
        codes.works.append(Work(name, moved, ways, right))
        noisy = f"{name}, stochastic"
        ways = quantizing_ways(x, scalar.name, "stochastic")
        codes.works.append(Work(noisy, moved, ways, neighbours(scalar, head, peers)))
        codes.bars.append(Bar(noisy, (name, OURS), at_most=1.6))
        codes.works.append(Work(f"{scalar.name} codes to values", moved, decoding_ways(x, scalar), right))
    at_least = {
        "mxfp8_e4m3": ("torchao", 5 if size >= 1 << 24 else 3),
        "mxfp8_e5m2": ("torchao", 5 if size >= 1 << 24 else 3),
        "mxfp4": ("torchao", 15),
        "nvfp4": ("torchao", 40),
        "nf4": ("bitsandbytes", 18),
    }
    for block in BLOCKS:
        description = formats.get_block(block)
        moved = int(size * (32 + description.bits)) // 8
        theirs = peers.block_codes(block, x)
        right = like_the_first(theirs, head, isinstance(description.element, formats.Codebook))
        # The tensor's scale is computed first: nvfp4 reads its input twice.
        twice = 4 * size if block == "nvfp4" else 0
        codes.works.append(Work(f"{block} codes", moved + twice, quantizing_ways(x, block) | theirs, right))
        ways = rounding_ways(x, block, torch.empty_like(x))
        if size <= SMALL:  # both ways take the peers seconds on large tensors
            ways |= peers.block_values(block, x)
        codes.works.append(Work(f"{block} values", 8 * size + twice, ways, right))
        if block in at_least:
            who, bar = at_least[block]
            codes.bars.append(Bar(f"{block} codes", (f"{block} codes", who), at_least=bar))
    codes.works += copies(codes.works, x)
    return codes


def bf16_field(x: Tensor, peers: Peers) -> Field:
    """Tasks from float32 or bf16 to values in bf16, the operands of 16-bit tensor cores."""
    carried = Field("bf16")
    for dtype, source in (("float32", x), ("bf16", x.to(torch.bfloat16))):
        moved = x.numel() * (source.element_size() + 2)
        out, head = torch.empty_like(x, dtype=torch.bfloat16), source.flatten()[:CHECKED].float()
        for scalar in FLOATS[:3]:
            name = f"{scalar.name} values, {dtype} to bf16"
            ways = rounding_ways(source, scalar.name, out)
            carried.works.append(Work(name, moved, ways, equal_to(peers.round(scalar, head))))
            carried.bars.append(Bar(name, (f"copy of {moved // x.numel()} bytes", COPY), at_most=1.2))
    carried.works += copies(carried.works, x)
    return carried


def rounding_ways(x: Tensor, format: str, out: Tensor, rounding: str = "nearest_even") -> Ways:
    """Ours, to values: into `out`, and into newly allocated memory."""
    noise, dtype = torch.Generator(), out.dtype
    return {
        OURS: Way(lambda: halfstep.round_to(x, format, rounding, generator=noise, out=out)),
        FRESH: Way(lambda: halfstep.round_to(x, format, rounding, generator=noise, dtype=dtype)),
    }


def quantizing_ways(x: Tensor, format: str, rounding: str = "nearest_even") -> Ways:
    """Ours, to packed codes and scales: into an existing `Quantized`, and into a new one."""
    noise = torch.Generator()
    given = halfstep.quantize(x, format, rounding=rounding, generator=noise)

    def decoded(quantized: halfstep.Quantized) -> Tensor:
        return quantized.dequantize()

    return {
        OURS: Way(lambda: halfstep.quantize(x, format, rounding=rounding, generator=noise, out=given), decoded),
        FRESH: Way(lambda: halfstep.quantize(x, format, rounding=rounding, generator=noise), decoded),
    }


def decoding_ways(x: Tensor, scalar: Scalar) -> Ways:
    """From codes to float32 values: ours and torch's."""
    given, out = halfstep.quantize(x, scalar.name), torch.empty_like(x)
    ways = {OURS: Way(lambda: given.dequantize(out=out)), FRESH: Way(lambda: given.dequantize())}
    if scalar.torch is not None:
        codes = x.to(scalar.torch)
        ways["torch"] = Way(lambda: codes.to(torch.float32))
    return ways


def copies(works: list[Work], x: Tensor) -> list[Work]:
    """A plain copy for every number of bytes that the tasks move: half are read, half are written."""
    found = []
    for moved in sorted({work.moved for work in works}):
        source = torch.zeros(moved // 8)
        source.copy_(x.flatten().repeat(2)[: source.numel()])
        found.append(Work(copy_name(moved, x), moved, copy_ways(source)))
    return found


def copy_ways(source: Tensor) -> Ways:
    """A copy into a given buffer, and into newly allocated memory."""
    out = torch.empty_like(source)
    return {COPY: Way(lambda: out.copy_(source)), CLONE: Way(source.clone)}


def copy_name(moved: int, x: Tensor) -> str:
    """A copy's name, with the bytes read and written per element of x."""
    return f"copy of {moved / x.numel():.4g} bytes"


def equal_to(expected: Tensor | None) -> Callable[[Tensor], Tensor] | None:
    """A check for exactly these values; None without them."""
    return None if expected is None else lambda found: found == expected


def neighbours(scalar: Scalar, head: Tensor, peers: Peers) -> Callable[[Tensor], Tensor] | None:
    """A check that each value is the format's next one below or above."""
    below, above = (peers.round(scalar, head, mode) for mode in ("TowardNegative", "TowardPositive"))
    return None if below is None or above is None else lambda found: (found == below) | (found == above)


def nearest(format: str, head: Tensor) -> Tensor:
    """The nearest values of the format, found by search among its values and boundaries."""
    known = formats.get(format)
    boundaries = torch.tensor(known.boundaries(), dtype=torch.float64)
    return torch.tensor(known.values(), dtype=torch.float64)[torch.searchsorted(boundaries, head.double())].float()


def like_the_first(theirs: Ways, head: Tensor, codebook: bool) -> Callable[[Tensor], Tensor] | None:
    """A check against the first peer's values, up to the last bits of a scale. With a codebook, values nearer to x are
    right too: bitsandbytes searches its 8-bit map through a coarse table, and misses the nearest entry in 0.1% of
    elements."""
    for way in theirs.values():
        expected = way.values(way.run()).flatten()[:CHECKED].clone()
        same = 1e-6 * expected.abs()
        return lambda found: (
            ((found - expected).abs() <= same) | ((found - head).abs() < (expected - head).abs() * codebook)
        )
    return None


def check(work: Work) -> Iterator[tuple[str, float]]:
    """Each way's share of right values, before anything is timed.

    Raises:
        SystemExit: a way's values are wrong.
    """
    if work.right is None:
        return
    for who, way in work.ways.items():
        found = way.values(way.run()).flatten()[:CHECKED].float()
        share = work.right(found).double().mean().item()
        if share < way.agrees:
            raise SystemExit(f"{work.name}: {who} is right in {share:.2%} of {len(found)} elements")
        yield who, share


def measure(entries: Field, x: Tensor, rounds: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows and bars of tasks that are timed together."""
    agreement = {(work.name, who): share for work in entries.works for who, share in check(work)}
    runs = {f"{work.name}: {who}": way.run for work in entries.works for who, way in work.ways.items()}
    seconds = timings(runs, rounds, warmup=1, span=SPAN)
    rows = []
    for work in entries.works:
        for who in work.ways:
            name = f"{work.name}: {who}"
            row: dict[str, Any] = {"work": work.name, "who": who, "median_ms": 1000 * statistics.median(seconds[name])}
            row["melements_per_second"] = x.numel() / row["median_ms"] / 1000
            row["moved_bytes"] = work.moved
            if who in (OURS, FRESH):
                copy = f"{copy_name(work.moved, x)}: {COPY if who == OURS else CLONE}"
                row["roofline_ms"] = 1000 * statistics.median(seconds[copy])
                row["over_roofline"] = ratio(seconds, name, copy)
            if (work.name, who) in agreement:
                row["agreement"] = agreement[work.name, who]
            rows.append(row)
    return rows, [judge(bar, seconds, rows) for bar in entries.bars if x.numel() >= 1 << 24 or not bar.large_only]


def judge(bar: Bar, seconds: dict[str, list[float]], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The bar, the ratio measured and whether it is met; None if the peer is not installed."""
    ours, theirs = f"{bar.work}: {bar.ours}", ": ".join(bar.against)
    against = bar.against[0] if bar.against[1] == COPY else " ".join(bar.against)
    row: dict[str, Any] = {"work": bar.work, "ours": bar.ours, "against": against}
    row |= {"at_least": bar.at_least, "at_most": bar.at_most, "ratio": None, "met": None}
    row["over_roofline"] = next(
        (r["over_roofline"] for r in rows if (r["work"], r["who"]) == (bar.work, bar.ours)), None
    )
    if theirs in seconds:
        found = ratio(seconds, ours, theirs) if bar.at_most is not None else ratio(seconds, theirs, ours)
        row["ratio"] = found
        row["met"] = found <= bar.at_most if bar.at_most is not None else found >= (bar.at_least or 0)
    return row


def at_size(exponent: int, rounds: int, peers: Peers) -> dict[str, Any]:
    """All results for 2^exponent elements."""
    torch.manual_seed(0)
    x = torch.randn((1 << exponent) // COLUMNS, COLUMNS)
    found: dict[str, Any] = {"elements": x.numel(), "rounds": rounds, "rows": [], "bars": []}
    for build in (values_field, codes_field, bf16_field):
        rows, bars = measure(build(x, peers), x, rounds)
        found["rows"] += rows
        found["bars"] += bars
    whole = [row for row in found["rows"] if row["work"] == copy_name(8 * x.numel(), x)]
    for key, who in (("copy_gb_per_second", COPY), ("fresh_copy_gb_per_second", CLONE)):
        found[key] = max(row["moved_bytes"] / row["median_ms"] / 1e6 for row in whole if row["who"] == who)
    return found


def main() -> None:
    """Measure, print, and with --keep write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[20, 24], help="elements, as powers of two (>= 15)")
    parser.add_argument("--rounds", type=int, nargs="+", default=[31, 11], help="for each size")
    parser.add_argument("--keep", action="store_true", help=f"write {RESULT} and docs/benchmarks.md")
    options = parser.parse_args()
    peers = Peers()
    for name, reason in peers.missing.items():
        print(f"without {name}: {reason}")
    data = {
        "question": "quantising float32 tensors, to values and to packed codes",
        "machine": environment() | {"cores": os.cpu_count()},
        "peers": peers.versions,
        "missing": peers.missing,
        "sizes": {
            f"2^{exponent}": at_size(exponent, rounds, peers)
            for exponent, rounds in zip(options.sizes, options.rounds, strict=True)
        },
    }
    terminal(data)
    if options.keep:
        keep("quantize", data)
        write_page()


if __name__ == "__main__":
    main()
