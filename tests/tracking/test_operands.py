"""Rounding errors of operands: against worked examples and the layer's own operands."""

import pytest
import torch

from halfstep import formats, get_quantizer
from halfstep.ops.operand import operand
from halfstep.quant import Clamp, Quantizer, Scales
from halfstep.quant.scaling import get_scaling
from halfstep.quant.scaling.delayed import Delayed
from halfstep.quant.scaling.power_of_two import Fixed
from halfstep.quant.tile import ROW, TENSOR
from halfstep.tracking import operand_error, operand_errors
from tiny import batch, prepared, train


E4M3 = formats.get("e4m3fn")


def test_saturated_and_flushed_shares_equal_worked_example():
    unscaled = Quantizer(E4M3, scales=Scales(TENSOR, Fixed("fixed", 0)))
    x = torch.tensor([[1.0, 500.0, 2.0**-11, 0.0], [448.0, -460.0, 2.0**-10, 2.0**-9]])
    _, saturated, flushed = operand_error(x, unscaled)
    assert saturated == 2 / 8  # 500 and -460
    assert flushed == 2 / 7  # 2^-11, and 2^-10, whose tie rounds to zero


def test_values_beyond_the_amax_history_saturate():
    scaling = Delayed("delayed", history=1, algorithm="most_recent")
    state = scaling.init()
    scaling.record(state, torch.tensor(1.0))
    scaling.advance(state, E4M3)
    x = torch.linspace(-8, 8, 160).view(4, 40)
    error, saturated, _ = operand_error(x, Quantizer(E4M3, scales=Scales(TENSOR, scaling)), state)
    assert saturated == (x.abs() > 1).double().mean()
    assert error > 0.5


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_128x128", "nf4"])
def test_error_equals_that_of_the_operand(name):
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    quantizer = get_quantizer(name)
    made = operand(x, quantizer, torch.float32)
    values = made.values * (1.0 if made.scale is None else made.scale)
    assert operand_error(x, quantizer)[0] == pytest.approx(float((values - x).norm() / x.norm()), rel=1e-4)


def test_error_of_a_clamped_operand_includes_its_compensation():
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) ** 3
    row = Scales(ROW, get_scaling("current"))
    for compensation in (True, False):
        quantizer = Quantizer(formats.get("fp4"), scales=row, clamp=Clamp(0.97, compensation=compensation))
        expected = float((quantizer(x) - x).norm() / x.norm())
        assert operand_error(x, quantizer)[0] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["fp4-wang", "fp8-current", "fp8-delayed", "mxfp8", "fp8-rowwise-gw-hp"])
def test_every_operand_of_a_step_is_recorded_without_changing_it(name):
    (one, *rest), (two, *others) = prepared(name), prepared(name)
    with operand_errors(one) as rows:
        seen = train(one, *rest, steps=1)
    assert seen == train(two, *others, steps=1)
    per_layer = 3 if name == "fp8-rowwise-gw-hp" else 5  # the first layer's input needs no gradient but is rounded
    products = {(row.layer, row.product, row.operand) for row in rows}
    assert len(products) == len(rows)
    assert {row.layer for row in rows} == {"0", "3"}
    assert len(rows) >= 2 * per_layer
    assert all(0 < row.relative_error < 0.5 for row in rows)
    with operand_errors(one, enabled=False) as rows:
        one(batch()[0])
    assert not rows
