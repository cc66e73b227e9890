"""All 2^32 float32 inputs through round_to (nearest-even, saturating), compared bit for bit with step functions.

Positive float32 values are ordered like their bit patterns, so rounding to a format is a step function of 2^31
patterns. `oracles.formats` (values and boundaries from the definitions, as fractions) gives where each step begins.
Expected results are written by repeating values, without rounding anything, so they share nothing with the
implementation under test. A full run is kept in benchmarks/results/exhaustive.json.

    python tests/exhaustive/float32.py [--every N] [FORMAT ...]
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from halfstep import round_to  # noqa: E402 - after the path to the oracles
from halfstep.lab.compare import environment  # noqa: E402
from oracles import formats as oracle  # noqa: E402


FORMATS = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "bf16", "fp16", "posit8_2")
CHUNK = 1 << 24
INFINITY = 0x7F800000  # float32's bit pattern; higher ones are NaN
SIGN = 0x80000000


class Steps:
    """Rounding to a format as a step function of the bits of a positive float32."""

    def __init__(self, name: str) -> None:
        format = oracle.listed(name)
        self.negative_zero = format.negative_zero
        positive = format.values >= 0
        values = format.values[positive]
        cuts, rises = format.cuts[positive[:-1]], format.tie_rises[positive[:-1]]
        starts = [0] + [self._first(cut, rise) for cut, rise in zip(cuts.tolist(), rises.tolist(), strict=True)]
        if format.infinity_is_nan:
            starts, values = [*starts, INFINITY], np.append(values, math.nan)
        self.starts = np.array(starts, np.int64)
        self.values = values.astype(np.float32)
        assert (np.diff(self.starts) >= 0).all()
        assert (self.values.astype(np.float64) == values)[: len(cuts) + 1].all()

    @staticmethod
    def _first(cut: float, rise: bool) -> int:
        """The bits of the smallest float32 that rounds above the cut."""
        with np.errstate(over="ignore"):
            near = np.float32(cut)
        if float(near) < cut or (float(near) == cut and not rise):
            near = np.nextafter(near, np.float32(math.inf))
        elif float(np.nextafter(near, np.float32(0))) > cut:
            near = np.nextafter(near, np.float32(0))
        return int(near.view(np.uint32))

    def expected(self, start: int, sign: bool) -> np.ndarray:
        """The result bits of CHUNK positive patterns from `start`, or of their negatives; undefined for NaN."""
        inner = np.clip(self.starts, start, start + CHUNK)
        counts = np.diff(np.append(inner, start + CHUNK))
        counts[0] += inner[0] - start
        bits = self.values.view(np.uint32)
        if sign:
            bits = np.where((self.values == 0) & (not self.negative_zero), bits, bits | np.uint32(SIGN))
        return np.repeat(bits, counts)


def check(name: str, every: int) -> dict[str, object]:
    """Compare all float32 inputs (or every `every`-th chunk); returns counts and seconds."""
    steps, inputs, wrong, first, spent = Steps(name), 0, 0, None, 0.0
    source, out = np.empty(CHUNK, np.uint32), torch.empty(CHUNK)
    base, x = np.arange(CHUNK, dtype=np.uint32), torch.from_numpy(source.view(np.float32))
    whole = time.perf_counter()
    for number in range(0, (1 << 32) // CHUNK, every):
        pattern = number * CHUNK
        np.add(base, np.uint32(pattern), out=source)
        began = time.perf_counter()
        round_to(x, name, out=out)
        spent += time.perf_counter() - began
        found = out.numpy().view(np.uint32)
        expected = steps.expected(pattern & ~SIGN, pattern >= SIGN)
        differ = found != expected
        if (pattern & ~SIGN) + CHUNK > INFINITY:  # NaN gives any NaN; a posit's NaR has no float32 bits of its own
            nan = ((source & ~np.uint32(SIGN)) > INFINITY) | ((expected & ~np.uint32(SIGN)) > INFINITY)
            differ = np.where(nan, (found & ~np.uint32(SIGN)) <= INFINITY, differ)
        count = int(np.count_nonzero(differ))
        if count and first is None:
            at = int(np.flatnonzero(differ)[0])
            first = f"{source[at]:#010x} gives {found[at]:#010x}, expected {expected[at]:#010x}"
        inputs, wrong = inputs + CHUNK, wrong + count
        if sys.stdout.isatty():
            print(f"\r{name:14} {inputs / 2**32:6.1%}  {wrong} mismatches", end="", flush=True)
    seconds = time.perf_counter() - whole
    print(
        f"\r{name:14} {wrong} mismatches in {inputs} inputs, {seconds:.0f} s, {spent:.1f} s of them rounding"
        + (f"\n  first: {first}" if first else "")
    )
    row = {"format": name, "inputs": inputs, "mismatches": wrong, "seconds": seconds, "seconds_rounding": spent}
    return row | ({"first": first} if first else {})


def main() -> int:
    """Returns 1 if there is a mismatch, else 0."""
    parser = argparse.ArgumentParser(description="All 2^32 float32 inputs through round_to.")
    parser.add_argument("formats", nargs="*", default=FORMATS)
    parser.add_argument("--every", type=int, default=1, help="only each N-th run of 2^24 inputs")
    arguments = parser.parse_args()
    rows = [check(name, arguments.every) for name in arguments.formats]
    if arguments.every == 1 and list(arguments.formats) == list(FORMATS):
        question = "all 2^32 float32 inputs, nearest-even, saturating, against step functions from the definitions"
        data = {"question": question, "machine": environment(), "rows": rows}
        (ROOT / "benchmarks/results/exhaustive.json").write_text(json.dumps(data, indent=2) + "\n")
    return int(any(row["mismatches"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
