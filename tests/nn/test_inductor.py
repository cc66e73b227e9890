"""torch.compile with Inductor: as near eager as docs/using.md says, and on CPUs without AVX-512 too."""

import copy
import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import halfstep


RECIPES = ["bf16-mixed", "bf16-master", "fp8-delayed", "mxfp8", "nvfp4", "fp4-wang-msamp", "coat", "fp8lm-o1"]
SCALES = """
import torch
from halfstep import formats
from halfstep.quant import Tile
from halfstep.quant.scaling import get_scaling
def scaled(x):
    return get_scaling("rceil").scale(x, Tile(1, 16), formats.get("e4m3fn"))[1]
x = torch.randn(64, 64)
assert torch.equal(torch.compile(scaled)(x), scaled(x))
"""


def relative_error(found, expected):
    return float((found - expected).norm() / expected.norm())


def passes(call, model, x):
    model.zero_grad()
    y = call(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.float().clone() for p in model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_inductor_is_nearer_eager_than_eager_is_to_float32(recipe):
    torch.manual_seed(0)
    stock, x = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64)), torch.randn(64, 64)
    model = copy.deepcopy(stock)
    halfstep.apply(model, recipe)
    plain, eager = passes(stock, stock, x), passes(model, model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for options in ({}, {"emulate_precision_casts": True}):
            torch._dynamo.reset()
            found = passes(torch.compile(model, options=options), model, x)
            for one, other, fp32 in zip(found, eager, plain, strict=True):
                assert relative_error(one, other) <= 1.5 * relative_error(other, fp32)
    assert torch.equal(found[0], eager[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_scales_compile_without_avx_512():
    settings = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", SCALES], check=True, env=settings)
