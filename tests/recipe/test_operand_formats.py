"""The formats in which each recipe rounds the operands of its products, as its source has them."""

import pytest

from halfstep.recipe import get_recipe


HYBRID = ("float8_e4m3fn", "float8_e4m3fn", "float8_e5m2")
E4M3 = ("float8_e4m3fn",) * 3
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
    "fp8lm-o1": HYBRID,
    "fp8lm-o2": HYBRID,
    "fp8lm-o3": HYBRID,
}
"""Inputs, weights and output gradients."""


def products(name):
    return [rule.linear for rule in get_recipe(name).rules if rule.linear.rounds]


@pytest.mark.parametrize("name", FORMATS)
def test_operands_are_in_the_formats_of_the_source(name):
    (spec,) = products(name)
    inputs, weights, grads = FORMATS[name]
    assert (spec.output.lhs.format.name, spec.output.rhs.format.name) == (inputs, weights)
    assert (spec.grad_input.lhs.format.name, spec.grad_input.rhs.format.name) == (grads, weights)
    if name != "fp8-rowwise-gw-hp":  # whose gradients of weights are in high precision
        assert (spec.grad_weight.lhs.format.name, spec.grad_weight.rhs.format.name) == (grads, inputs)
