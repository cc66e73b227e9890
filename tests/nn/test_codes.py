"""Weights and gradients stored as codes times one power-of-two scale: what is stored, and that models see the
values."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep import formats, ops
from halfstep.errors import OptimizerError
from halfstep.ops.code_tensor import round_gradient
from halfstep.optim.rules import no_fused_update
from halfstep.quant import Quantizer, Scales
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import TENSOR
from halfstep.recipe import MASTER, get_recipe
from oracles.numbers import same_bits
from tiny import FOUR, SCALED, adamw, assert_same, batch, copied, grads, mlp, prepared, train


every_scaled = pytest.mark.parametrize("name", SCALED)
WEIGHTS = ("0.weight", "3.weight")
DTYPES = {"fp16": torch.float16, "e4m3fn": torch.float8_e4m3fn}
INPUTS = {
    "normal": torch.randn(7, 5, generator=torch.Generator().manual_seed(1)),
    "wide": torch.randn(40, 3, generator=torch.Generator().manual_seed(2)) * torch.logspace(-30, 20, 40)[:, None],
    "just above half": torch.tensor([224.0001, 1e-3, 32753.0, 3.0]),
    "the largest": torch.tensor([448.0, 65504.0, -65504.0]),
    "tiny": torch.tensor([1e-42, -3e-45, 0.0]),
    "zeros": torch.zeros(2, 3),
    "infinite": torch.tensor([1.0, float("inf")]),
    "not a number": torch.tensor([1.0, float("nan")]),
    "empty": torch.zeros(0, 3),
    "bf16": torch.randn(4, 4, generator=torch.Generator().manual_seed(3)).bfloat16(),
    "transposed": torch.randn(4, 6, generator=torch.Generator().manual_seed(4)).t(),
}


@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS)
def test_decoded_values_equal_the_quantizers(x, format):
    """Bit for bit; and the largest code lies in the upper half of the format's range."""
    codes, scale = ops.encode_scaled(x, DTYPES[format])
    assert codes.dtype == DTYPES[format]
    reference = Quantizer(formats.get(format), scales=Scales(TENSOR, get_scaling("rceil")))
    if x.numel():
        expected = reference.quantize(x.float()).dequantize()
        torch.testing.assert_close(ops.decode_scaled(codes, scale), expected, rtol=0, atol=0, equal_nan=True)
    amax, limit = x.float().abs().amax() if x.numel() else torch.zeros(()), formats.get(format).max
    if 0 < amax < torch.inf and amax > 1e-30:
        assert float(torch.frexp(scale)[0]) == 0.5
        assert limit / 2 < amax.double() / scale.double() <= limit


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_all_fp8_codes_decode_to_torchs_values(dtype):
    codes, scale = torch.arange(256, dtype=torch.uint8).view(dtype), torch.tensor(0.25)
    same_bits(ops.decode_scaled(codes, scale), codes.float() * scale)
    same_bits(ops.decode_scaled(codes[::3], scale), codes[::3].float() * scale)


@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS)
def test_encoding_decoded_values_is_exact(x, format):
    values = ops.decode_scaled(*ops.encode_scaled(x, DTYPES[format]))
    again = ops.decode_scaled(*ops.encode_scaled(values, DTYPES[format]))
    torch.testing.assert_close(again, values, rtol=0, atol=0, equal_nan=True)


def test_fp16_codes_round_as_numpy_does():
    """They keep 11 bits from 2^-30 of the largest value on, where a plain cast would flush values below 2^-24."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(5)) * 2.0**-20
    codes, scale = ops.encode_scaled(x, torch.float16)
    expected = (x.double().numpy() / float(scale)).astype("float16")
    assert_same(codes, torch.from_numpy(expected))
    assert ((ops.decode_scaled(codes, scale) - x).abs() <= x.abs() * 2.0**-11).all()
    assert (x.half() == 0).float().mean() > 0.01


@every_scaled
def test_weights_gradients_and_masters_are_stored_in_the_recipes_formats(name):
    """A recipe that did nothing, or rounded in place, would fail here."""
    model, optimizer, _ = prepared(name)
    kept = get_recipe(name).codes
    F.mse_loss(model(batch()[0]), batch()[1]).backward()
    for path, parameter in model.named_parameters():
        codes = path in WEIGHTS
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert stored_dtype(parameter) == (kept.weights.scaled_dtype if codes else torch.float32)
        assert stored_dtype(parameter.grad) == (torch.float8_e4m3fn if codes else torch.float32)
        master = optimizer.state[parameter].get(MASTER)
        assert (master is not None) == (codes and kept.master is not None)
        assert master is None or (master.dtype, master.shape) == (torch.float16, parameter.shape)
        largest = {torch.float16: 65504, torch.float8_e4m3fn: 448}[kept.weights.scaled_dtype]
        assert not codes or largest / 2 <= parameter.codes.float().abs().amax() <= largest


def stored_dtype(tensor):
    """The dtype of a tensor's codes, or of the tensor."""
    return tensor.codes.dtype if isinstance(tensor, ops.CodeTensor) else tensor.dtype


def unrounded_grads(name):
    """The gradients of a model whose weights are in float32 with the same values."""
    model = mlp()
    model.load_state_dict(prepared(name)[0].state_dict())
    halfstep.apply(model, name)
    F.mse_loss(model(batch()[0]), batch()[1]).backward()
    return {path: p.grad for path, p in model.named_parameters()}


@every_scaled
def test_gradients_equal_the_float32_ones_rounded_once(name):
    model, _, _ = prepared(name)
    F.mse_loss(model(batch()[0]), batch()[1]).backward()
    for path, expected in unrounded_grads(name).items():
        rounded = ops.decode_scaled(*ops.encode_scaled(expected, torch.float8_e4m3fn))
        assert_same(ops.values_of(model.get_parameter(path).grad), rounded if path in WEIGHTS else expected)
        assert path not in WEIGHTS or not torch.equal(rounded, expected)


@every_scaled
def test_sgd_steps_on_decoded_values_and_rounds_the_result(name):
    """values - lr * decoded gradient, rounded to the master's format, then to the weight's."""
    model = mlp()
    model, optimizer, _ = prepared(name, model, torch.optim.SGD(model.parameters(), lr=0.5))
    before = {path: optimizer.full(p) for path, p in model.named_parameters()}
    F.mse_loss(model(batch()[0]), batch()[1]).backward()
    moved = {path: value - 0.5 * grads(model)[path] for path, value in before.items()}
    optimizer.step()
    kept = get_recipe(name).codes
    for path, value in model.state_dict().items():
        expected = moved[path]
        for storage in [kept.master, kept.weights] if path in WEIGHTS else []:
            expected = ops.decode_scaled(*ops.encode_scaled(expected, storage.scaled_dtype)) if storage else expected
        assert_same(value, expected)


@pytest.mark.quick("AdamW-fp8lm-o1", "Adam-fp8lm-o2")
@every_scaled
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_the_fused_step_equals_the_reference(name, kind):
    found = []
    for fused in (True, False):
        model = mlp()
        model, optimizer, scaler = prepared(name, model, kind(model.parameters(), lr=0.1, weight_decay=0.1))
        optimizer.rule = optimizer.rule if fused else replace(optimizer.rule, fused=no_fused_update)
        train(model, optimizer, scaler, 4)
        found.append(copied((dict(model.state_dict()), optimizer.state_dict()["state"])))
    assert_same(*found)


def test_levels_differ_from_plain_fp8_and_o3_rounds_like_o2():
    """O3's weights, a scaled fp16 master rounded to E4M3, equal O2's fp16 weights rounded for the matmul, bit for
    bit."""
    losses = {name: train(*prepared(name), 8) for name in ("fp8-delayed", *SCALED)}
    assert losses["fp8lm-o2"] == losses["fp8lm-o3"]
    assert len({tuple(of) for of in losses.values()}) == len(losses) - 1
    apply_only = mlp()
    halfstep.apply(apply_only, "fp8lm-o1")
    assert {p.dtype for p in apply_only.parameters()} == {torch.float32}


@every_scaled
def test_zero_grad_works_with_and_without_set_to_none(name):
    found = []
    for to_none in (True, False):
        model, optimizer, _ = prepared(name)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=to_none)
            F.mse_loss(model(batch()[0]), batch()[1]).backward()
        found.append(grads(model))
    assert_same(*found)


@pytest.mark.quick("fp8lm-o1", "fp8lm-o2")
@every_scaled
def test_autograd_grad_leaves_stored_gradients_unchanged(name):
    model, _, _ = prepared(name)
    x, y = batch()
    F.mse_loss(model(x), y).backward()
    kept = grads(model)
    asked = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
    assert_same(grads(model), kept)
    for path, grad in zip(kept, asked, strict=True):
        assert_same(grad, unrounded_grads(name)[path])


@every_scaled
def test_gradient_clipping_uses_the_norm_of_decoded_values(name):
    model, optimizer, scaler = prepared(name)
    F.mse_loss(model(batch()[0]), batch()[1]).backward()
    expected = torch.cat([g.flatten() for g in grads(model).values()]).norm()
    torch.testing.assert_close(scaler.clip_grad_norm_(optimizer, 1e9), expected)


@every_scaled
def test_an_assigned_gradient_is_rounded(name):
    found = []
    for assigned in (False, True):
        model, optimizer, _ = prepared(name)
        if assigned:
            for path, grad in unrounded_grads(name).items():
                model.get_parameter(path).grad = grad
        else:
            F.mse_loss(model(batch()[0]), batch()[1]).backward()
        optimizer.step()
        found.append(copied(model.state_dict()))
    assert_same(*found)


@every_scaled
def test_an_infinite_gradient_skips_the_step(name):
    recipe = replace(get_recipe(name), name="made", loss_scale=get_recipe("fp16-mixed").loss_scale)
    model, optimizer, scaler = prepared(recipe)
    before = copied(model.state_dict())
    scaler.scale(F.mse_loss(model(batch()[0]), batch()[1])).backward()
    grad = torch.ones_like(model[0].weight, dtype=torch.float32)
    grad[0, 0] = torch.inf
    model[0].weight.grad = grad
    round_gradient(model[0].weight)
    scaler.unscale_(optimizer)
    assert ops.values_of(model[0].weight.grad).isnan().all()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.overflowed == ("0.weight",)
    assert_same(dict(model.state_dict()), dict(before))


@every_scaled
def test_state_dicts_load_into_a_stock_model(name):
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler)
    stock, state = mlp(), model.state_dict()
    assert {value.dtype for value in state.values()} == {torch.float32}
    stock.load_state_dict(state)
    halfstep.apply(stock, name)
    for twin in (stock, model):  # drop the scales of three steps
        for module in twin.modules():
            for key, buffer in module._buffers.items():
                if "scaling" in key:
                    buffer.zero_()
    assert_same(stock(batch()[0]), model(batch()[0]))


@pytest.mark.quick("fp8lm-o1", "fp8lm-o3")
@every_scaled
def test_loaded_weights_reach_the_forward_the_step_and_the_master(name):
    """Also after an optimizer's first steps."""
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler)
    stock = mlp(7).state_dict()
    model.load_state_dict(stock)
    for path, value in model.state_dict().items():
        format = get_recipe(name).codes.weights.scaled_dtype
        expected = ops.decode_scaled(*ops.encode_scaled(stock[path], format)) if path in WEIGHTS else stock[path]
        assert_same(value, expected)
        stock[path] = expected
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, scaler, 1)
    assert_same(dict(model.state_dict()), dict(stock))
    with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight"):
        model.load_state_dict({**stock, "0.weight": torch.zeros(3, 3)})


@pytest.mark.quick("fp4-wang", "fp8lm-o1")
@every_scaled
def test_a_resumed_run_is_exact(name):
    plain = prepared(name)
    train(*plain, 4)
    saved = [copied(part.state_dict()) for part in plain]
    losses = train(*plain, 4)
    resumed = prepared(name, mlp(1))
    train(*resumed, 2)
    for part, state in zip(resumed, saved, strict=True):
        part.load_state_dict(state)
    assert train(*resumed, 4) == losses
    assert_same(dict(resumed[0].state_dict()), dict(plain[0].state_dict()))


@pytest.mark.quick("fp8lm-o1", "fp8lm-o3")
@every_scaled
def test_deep_copies_train_identically_and_independently(name):
    parts = prepared(name)
    train(*parts, 2)
    before = copied(parts[0].state_dict())
    twin = copy.deepcopy(parts)
    losses = train(*twin, 3)
    assert {stored_dtype(p) for n, p in twin[0].named_parameters() if n in WEIGHTS} == {
        stored_dtype(parts[0][0].weight)
    }
    assert_same(dict(parts[0].state_dict()), dict(before))
    assert train(*parts, 3) == losses
    with pytest.warns(UserWarning, match=r"Sequential.0 is called outside Sequential's forward"):
        F.mse_loss(twin[0][0](batch()[0]), torch.zeros(12, 16)).backward()
    layer = copy.deepcopy(twin[0][0])
    F.mse_loss(layer(batch()[0]), torch.zeros(12, 16)).backward()
    assert stored_dtype(layer.weight.grad) == torch.float8_e4m3fn


@every_scaled
def test_revert_restores_float32_values_and_removes_all_attributes(name):
    model = mlp()
    attributes = [set(vars(m)) for m in model.modules()]
    buffers = dict(model.named_buffers())
    model, optimizer, scaler = prepared(name, model)
    train(model, optimizer, scaler)
    F.mse_loss(model(batch()[0]), batch()[1]).backward()
    values, kept = copied(model.state_dict()), grads(model)
    halfstep.revert(model)
    assert_same(dict(model.state_dict()), dict(values))
    assert_same({n: p.grad for n, p in model.named_parameters()}, kept)
    assert [set(vars(m)) for m in model.modules()] == attributes
    assert dict(model.named_buffers()) == buffers
    model.zero_grad()
    F.mse_loss(model(batch()[0]), batch()[1]).backward()
    dtypes = {(p.dtype, p.grad.dtype, p.grad_dtype) for p in model.parameters()}
    assert dtypes == {(torch.float32,) * 3}
    torch.optim.AdamW(model.parameters()).step()


def test_a_weight_tied_to_an_embedding_is_stored_as_codes():
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    model, _, _ = prepared("fp8lm-o3", model)
    assert [stored_dtype(p) for p in model.parameters()] == [torch.float8_e4m3fn, torch.float8_e4m3fn]
    model(torch.arange(8)).square().sum().backward()
    assert [stored_dtype(p.grad) for p in model.parameters()] == [torch.float8_e4m3fn, torch.float8_e4m3fn]


class Reader(nn.Module):
    """Reads a weight's dtype, as T5's feed-forward layer does, and passes a weight to F.linear."""

    def __init__(self):
        super().__init__()
        self.wi, self.wo = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return F.linear(self.wi(x).to(self.wo.weight.dtype), self.wo.weight, self.wo.bias)


@every_scaled
def test_a_forward_that_reads_a_weight_sees_its_values(name):
    model = Reader()
    model, _, _ = prepared(name, model)
    assert {stored_dtype(model.wi.weight), stored_dtype(model.wo.weight)} == {
        get_recipe(name).codes.weights.scaled_dtype
    }
    stock = Reader()
    stock.load_state_dict(model.state_dict())
    near = {"rtol": 0.1, "atol": 0.2 if name in FOUR else 0.05}  # 4 bits: twice what ten seeds show
    torch.testing.assert_close(model(batch()[0]), stock(batch()[0]), **near)
    model(batch()[0]).square().sum().backward()
    assert stored_dtype(model.wo.weight.grad) == torch.float8_e4m3fn


@every_scaled
def test_gradients_of_a_layer_called_twice_are_added_before_rounding(name):
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.GELU(), layer)
    stock = copy.deepcopy(model)
    model, _, _ = prepared(name, model)
    stock.load_state_dict(model.state_dict())
    halfstep.apply(stock, name)
    for each in (model, stock):
        each(batch()[0]).square().sum().backward()
    expected = ops.decode_scaled(*ops.encode_scaled(stock[0].weight.grad, torch.float8_e4m3fn))
    assert_same(ops.values_of(model[0].weight.grad), expected)


@every_scaled
def test_a_step_without_any_gradient_is_refused(name):
    _, optimizer, _ = prepared(name)
    with pytest.raises(OptimizerError, match=r"no parameter of this optimizer has a gradient.*under FSDP2 call"):
        optimizer.step()


def test_frozen_weights_are_stored_as_codes_and_unchanged():
    model = mlp()
    model[0].weight.requires_grad_(False)
    model, optimizer, scaler = prepared("fp8lm-o1", model, adamw(model[3]))
    codes = model[0].weight.codes.clone()
    train(model, optimizer, scaler, 2)
    assert codes.dtype == torch.float16
    assert_same(model[0].weight.codes, codes)
    model[0].weight.requires_grad_()
    F.mse_loss(model(batch()[0]), batch()[1]).backward()
    assert stored_dtype(model[0].weight.grad) == torch.float8_e4m3fn
