"""The prepared kernels that round a single token for inference equal evaluation, bit for bit."""

import copy
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import nn

import halfstep
from families import for_each
from halfstep import formats
from halfstep.errors import ModelError
from halfstep.ops.operand import decoded, stored
from halfstep.quant import Quantized, Quantizer, Scales, Tile, get_quantizer
from halfstep.quant.scaling import get_scaling
from halfstep.recipe import Recipe, Rule, linear_spec
from tiny import assert_same


COLUMNS, ACROSS = 96, 70
E4M3 = formats.get("e4m3fn")
TENSOR = Quantizer(E4M3, scales=Scales(Tile(0, 0), get_scaling("current")))
KINDS = {
    "tensor": (TENSOR, TENSOR),
    "rows": (Quantizer(E4M3, scales=Scales(Tile(1, 0), get_scaling("rceil"))), TENSOR),
    "tiles": (get_quantizer("mxfp8_e4m3"), get_quantizer("mxfp8_e4m3")),
    "two levels": (get_quantizer("nvfp4"), get_quantizer("nvfp4")),
    "weights alone": (None, get_quantizer("nf4", scale="absmax")),
}
every_kind = for_each("kind", KINDS)


def both(kind, compute="bf16"):
    """A layer that is quantized for inference, and the same layer under the recipe in evaluation."""
    lhs, rhs = KINDS[kind]
    recipe = Recipe("made", "", "", compute=compute, rules=(Rule("*", linear_spec(lhs, rhs, None)),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(COLUMNS, ACROSS))
    twin = copy.deepcopy(model)
    halfstep.quantize_model(model, recipe)
    halfstep.apply(twin, recipe)
    return model, twin.eval()


@pytest.fixture
def general_calls(monkeypatch):
    """The calls of a quantized layer that took the general path instead of the one for tokens."""
    calls, module = [], import_module("halfstep.ops.linear")
    stock = module.forward_product
    monkeypatch.setattr(module, "forward_product", lambda *given: calls.append(len(given[0].shape)) or stock(*given))
    return calls


@every_kind
def test_a_token_is_rounded_like_evaluation(kind, general_calls):
    model, twin = both(kind)
    del general_calls[:]
    for shape in ((COLUMNS,), (1, COLUMNS), (1, 1, COLUMNS), (3, COLUMNS), (2, 4, COLUMNS)):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(shape).to(dtype)
            with torch.inference_mode():
                y = model(x)
            assert y.shape == (*shape[:-1], ACROSS)
            assert_same(y, twin(x))
    assert not general_calls


@every_kind
def test_extreme_inputs_equal_evaluation(kind):
    """The largest bfloat16 and float32 values, which saturate; subnormals, zeros of both signs, infinity and NaN."""
    model, twin = both(kind)
    numbers = (3.3895e38, 3.4028e38, -3.4028e38, 1e-45, -1e-39, 2.0**-126, -0.0, 0.0, 1.0, torch.inf, torch.nan)
    for first in numbers:
        for other in (0.0, 1.0, 1e-40, 3.3e38):
            x = torch.full((1, COLUMNS), other)
            x[0, ::7] = first
            assert_same(model(x), twin(x))
            assert_same(model(x.bfloat16()), twin(x.bfloat16()))


@every_kind
def test_inputs_other_than_plain_tokens_take_the_general_path(kind, general_calls):
    model, twin = both(kind)
    del general_calls[:]
    x = torch.randn(COLUMNS, 2)
    strange = (
        x.t(), torch._neg_view(torch.randn(1, COLUMNS)), torch.randn(9, COLUMNS), torch.randn(1, COLUMNS).double(),
    )  # fmt: skip
    for count, given in enumerate(strange, start=1):
        assert_same(model(given), twin(given))
        assert len(general_calls) == count
    assert model(torch.randn(0, COLUMNS)).shape == (0, ACROSS)
    for wrong in (model, twin):
        with pytest.raises(RuntimeError, match="shapes"):
            wrong(torch.randn(1, 2 * COLUMNS))
    with pytest.raises(ModelError, match="its input requires one"):
        model(torch.randn(1, COLUMNS, requires_grad=True))
    with pytest.raises(ModelError, match="eval"):
        model.train()(torch.randn(1, COLUMNS))


@every_kind
def test_a_changed_spec_prepares_other_kernels(kind):
    model, twin = both(kind)
    x = torch.randn(1, COLUMNS)
    model(x)
    for lhs in (*(lhs for lhs, _ in KINDS.values()), KINDS[kind][0]):
        for layer in (model[0], twin[0]):
            spec = layer._halfstep.linear
            layer._halfstep.linear = replace(spec, output=replace(spec.output, lhs=lhs))
        assert_same(model(x), twin(x))


@pytest.mark.quick("tensor")
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_compute_dtype_prepares_other_kernels(kind):
    model, twin = both(kind, "fp32")
    x = torch.randn(1, COLUMNS)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            assert_same(model(x), twin(x))


def test_scales_written_in_place_are_read():
    model, _ = both("tensor")
    model[0].bias = None
    x = torch.randn(1, COLUMNS)
    y = model(x)
    model[0].weight_scale.mul_(2)
    assert torch.equal(model(x), 2 * y)
    for scale in (3e38, torch.inf, torch.nan):  # too large to be multiplied in one step
        model[0].weight_scale.fill_(scale)
        assert not model(1e3 * x).isfinite().all()


@for_each("shape", [(40, 48), (7, 32), (16, 16)])
@for_each("tile", [Tile(16, 16), Tile(0, 16), Tile(5, 16)], ids=repr)
def test_multi_row_tiles_of_two_levels_decode_like_the_reference(shape, tile, monkeypatch):
    """A prompt's matmuls decode them by a kernel for tiles of one row, not by the reference."""
    weight = torch.randn(shape) * torch.randn(shape[0], 1).exp()
    weight[2:5] = 0.0
    weight[-1, -1] = torch.inf
    made = stored(weight, replace(KINDS["two levels"][1], scales=Scales(tile, get_scaling("two_level"))))
    for dtype in (torch.bfloat16, torch.float32):
        with monkeypatch.context() as patched:
            patched.setattr(Quantized, "dequantize", None)
            matrix = decoded(made, dtype)
        assert matrix.values.dtype == dtype
        apart = replace(made, tensors=made.tensors | {"tensor_scale": torch.ones(())})
        assert_same(matrix.values.float(), Quantized.dequantize(apart, torch.float32))
        assert_same(matrix.scale, made.tensors["tensor_scale"])
