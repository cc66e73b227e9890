"""The formats in which each recipe rounds the operands of its matmuls, as its source has them."""

import pytest
from torch import nn

import halfstep
from halfstep.quant import Hadamard
from halfstep.recipe import Matmul, get_recipe


HYBRID = ("float8_e4m3fn", "float8_e4m3fn", "float8_e5m2")
E4M3 = ("float8_e4m3fn",) * 3
E2M1 = ("float4_e2m1fn",) * 3
FNUZ = ("float8_e4m3fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz")
FORMATS = {
    "bf16-truncate": ("bf16",) * 3,
    "fp8-delayed": HYBRID,  # Transformer Engine: E4M3 forward, E5M2 for gradients
    "fp8-delayed-megatron": HYBRID,
    "fp8-current": HYBRID,
    "fp8-fishman": ("float8_e4m3", "float8_e4m3", "float8_e5m2"),
    "fp8-smooth-swiglu": ("float8_e4m3", "float8_e4m3", "float8_e5m2"),  # Gaudi's E4M3 has infinities
    "fp8-amax": FNUZ,  # Graphcore's
    "fp8-cscale": FNUZ,
    "fp8-rowwise": E4M3,
    "fp8-rowwise-gw-hp": E4M3,
    "fp8-block": E4M3,
    "umup-fp8": HYBRID,
    "munit-fp8": HYBRID,
    "mxfp8": E4M3,
    "mxfp8-floor": E4M3,
    "mxfp4": E2M1,
    "nvfp4": E2M1,
    "fp8lm-o1": HYBRID,
    "fp8lm-o2": HYBRID,
    "fp8lm-o3": HYBRID,
}
"""Inputs, weights and output gradients."""


def rounding_specs(name):
    return [rule.linear for rule in get_recipe(name).rules if rule.linear.rounds]


@pytest.mark.parametrize("name", FORMATS)
def test_operands_have_the_formats_of_the_source(name):
    (spec,) = rounding_specs(name)
    inputs, weights, grads = FORMATS[name]
    assert (spec.output.lhs.format.name, spec.output.rhs.format.name) == (inputs, weights)
    assert (spec.grad_input.lhs.format.name, spec.grad_input.rhs.format.name) == (grads, weights)
    if name != "fp8-rowwise-gw-hp":  # whose gradients of weights are in high precision
        assert (spec.grad_weight.lhs.format.name, spec.grad_weight.rhs.format.name) == (grads, inputs)


def test_nvfp4_equals_transformer_engines_recipe():
    """Which of the six operands are rotated, rounded stochastically, and scaled in square tiles:
    `NVFP4BlockScaling`."""
    (spec,) = rounding_specs("nvfp4")
    matmuls = spec.output, spec.grad_input, spec.grad_weight
    rounded = [[quantizer.rounding for quantizer in (m.lhs, m.rhs)] for m in matmuls]
    assert rounded == [["nearest_even"] * 2, ["stochastic", "nearest_even"], ["stochastic", "nearest_even"]]
    tiles = [[str(quantizer.scales) for quantizer in (m.lhs, m.rhs)] for m in matmuls]
    row, square = "two_level, 1x16", "two_level, 16x16"
    assert tiles == [[row, square], [row, square], [row, row]]
    assert [m.hadamard for m in matmuls] == [None, None, Hadamard(16)]
    assert spec.rerounded == {"input", "grad_output"}  # the weight is rounded once for both of its matmuls


def test_mxfp4_rht_equals_its_authors_recipe():
    """Backward matmuls in MXFP4, all operands rotated by 64 with new signs, and rounded stochastically."""
    (spec,) = rounding_specs("mxfp4-rht")
    assert spec.output == Matmul()
    assert spec.grad_input == spec.grad_weight
    assert spec.grad_input.hadamard == Hadamard(64, "random")
    for quantizer in (spec.grad_input.lhs, spec.grad_input.rhs):
        assert (quantizer.format.name, quantizer.rounding) == ("float4_e2m1fn", "stochastic")
        assert str(quantizer.scales) == "three_quarters, 1x32"


def test_nvfp4_keeps_the_last_blocks():
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(12))
    model = nn.ModuleDict({"first": nn.Linear(16, 16), "layers": blocks, "lm_head": nn.Linear(16, 8)})
    report = halfstep.apply(model, "nvfp4")
    assert report.kept == {"layers.10.0": "last blocks", "layers.11.0": "last blocks", "lm_head": "output head"}
    assert len(report.quantized) == 11
