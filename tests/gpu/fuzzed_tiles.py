"""Scaled tiles of random shapes, tiles, rules and dtypes in Triton's interpreter: a line of JSON for each quantizer.

    TRITON_INTERPRET=1 PYTHONPATH=src:.triton/3.7.1 python tests/gpu/fuzzed_tiles.py [--seed 0] [--rounds 1]

Every named block format with each of its rules, and random formats and tiles, as far as kernels support them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
from collections.abc import Iterator

import numpy as np
import torch
import triton

from halfstep import formats
from halfstep.kernels.gpu import layouts
from halfstep.kernels.selftest import tiles
from halfstep.kernels.selftest.case import Case, KernelTest, outcome
from halfstep.quant import Quantizer, Scales, Tile, get_quantizer
from halfstep.quant.scaling import get_scaling


ELEMENTS = ("float8_e4m3fn", "float8_e5m2", "e4m3fnuz", "e2m1fn", "e3m2fn", "e2m3fn", "int8", "int4", "e4m3", "e3m4",
            "dynamic8", "nf4")  # fmt: skip
RULES = ("floor", "ceil", "even", "rceil", "below", "absmax", "absmax_bf16", "current", "three_quarters", "two_level",
         "two_level_up", "four_over_six", "double_absmax")  # fmt: skip
SIZES = (0, 1, 2, 4, 16, 32, 64, 128, 256)
OTHERS = 40


def quantizers(chance: random.Random) -> Iterator[Quantizer]:
    """The named ones, with nearest and stochastic rounding, then random ones."""
    for name in formats.block_names():
        for rule, rounding in itertools.product(formats.get_block(name).rules, ("nearest_even", "stochastic")):
            yield get_quantizer(name, scale=rule, rounding=rounding)
    for _ in range(OTHERS):
        format, rule = formats.get(chance.choice(ELEMENTS)), get_scaling(chance.choice(RULES))
        scales = Scales(Tile(chance.choice(SIZES), chance.choice(SIZES)), rule)
        yield Quantizer(format, chance.choice(("nearest_even", "stochastic")), scales=scales)


def cases(quantizer: Quantizer, chance: random.Random, rounds: int) -> Iterator[Case]:
    """Cases of random shapes."""
    device = torch.device("cpu")
    for _ in range(rounds):
        shape = chance.choice((1, 3, 16, 33, 128, 150)), chance.choice((16, 28, 64, 96, 128, 256, 260))
        dtype = chance.choice((torch.float32, torch.bfloat16, torch.float16))
        if quantizer.outliers is None:  # quantizers with outliers have tensors of other sizes
            yield from tiles.quantised(quantizer, device, dtype, shape)
        for into in dict.fromkeys((dtype, torch.bfloat16)):
            yield from tiles.valued(quantizer, device, dtype, shape, into=into)
        yield from tiles.dequantised(quantizer, device, dtype, shape)
        form, outer = chance.choice((("stored", ""), ("stored", "outer"), ("swizzled", ""), ("number", "outer")))
        if layouts.constants(torch.empty(shape, dtype=dtype), quantizer) is not None:
            yield from tiles.both(quantizer, device, dtype, shape, form, outer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args()
    np.seterr(all="ignore")  # the interpreter computes in numpy, which warns of nonfinite numbers
    torch.set_num_threads(1)
    chance = random.Random(asked.seed)
    for quantizer in quantizers(chance):
        named = f"{quantizer.format.name} {quantizer.scales} {quantizer.rounding}"
        found = outcome(KernelTest("tiles", named, lambda device, q=quantizer: cases(q, chance, asked.rounds)))
        print(json.dumps({"triton": triton.__version__} | dataclasses.asdict(found)), flush=True)
