"""Random Hadamard transforms, shapes, tiles, rules and dtypes in Triton's interpreter: a line of JSON for each.

TRITON_INTERPRET=1 PYTHONPATH=src:.triton/3.7.1 python tests/gpu/fuzzed_rotated.py [--seed 0] [--rounds 24]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Iterator

import numpy as np
import torch
import triton

from halfstep import formats
from halfstep.kernels.gpu import rotated
from halfstep.kernels.selftest import tiles
from halfstep.kernels.selftest.case import Case, KernelTest, outcome
from halfstep.quant import Hadamard, Quantizer, Scales
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import block


ELEMENTS = ("float8_e4m3fn", "float8_e5m2", "e2m1fn", "e3m2fn", "int8", "int4")
RULES = ("floor", "rceil", "absmax", "absmax_bf16", "current", "three_quarters", "two_level", "two_level_up")


def cases(quantizer: Quantizer, hadamard: Hadamard, chance: random.Random) -> Iterator[Case]:
    """Cases of a random shape and dtype."""
    shape = chance.choice((4, 16, 33, 70)), chance.choice((16, 28, 64, 130))
    dtype = chance.choice((torch.float32, torch.bfloat16, torch.float16))
    spun, x, signs = (quantizer, hadamard), torch.empty(shape, dtype=dtype), hadamard.signs()
    for dim in (0, 1):
        given = spun, x.device, dtype, shape, dim
        yield from tiles.rotations(*given)
        if rotated.constants(x, signs, dim, quantizer if dim else quantizer.down) is not None:
            yield from tiles.rotated_values(*given)
        if rotated.constants(x, signs, dim, quantizer, turned=True) is not None:
            yield from tiles.rotated_codes(*given)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=24)
    asked = parser.parse_args()
    np.seterr(all="ignore")  # the interpreter computes in numpy, which warns of nonfinite numbers
    torch.set_num_threads(1)
    chance = random.Random(asked.seed)
    for _ in range(asked.rounds):
        size = chance.choice((8, 16, 32, 64))
        tile = chance.choice([side for side in (2, 4, 8, 16, 32, 64) if side <= size])
        scales = Scales(block(tile), get_scaling(chance.choice(RULES)))
        format, rounding = formats.get(chance.choice(ELEMENTS)), chance.choice(("nearest_even", "stochastic"))
        quantizer, hadamard = Quantizer(format, rounding, scales=scales), Hadamard(size, chance.randrange(1 << 32))
        named = f"{format.name} {scales} {rounding} after {hadamard}"
        found = outcome(KernelTest("rotated", named, lambda device, q=quantizer, h=hadamard: cases(q, h, chance)))
        print(json.dumps({"triton": triton.__version__} | dataclasses.asdict(found)), flush=True)
