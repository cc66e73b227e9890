"""Adapters train on frozen weights stored as codes, as they would under the recipe on weights of those values."""

import copy

import pytest
import torch
from test_paths import Lora
from torch import nn
from transformers.pytorch_utils import Conv1D

import halfstep
from families import slow_unless
from halfstep.errors import ModelError, RecipeError
from halfstep.nn.product import weight_of
from halfstep.ops.part import ATTRIBUTE
from halfstep.quant import Hadamard, get_quantizer
from halfstep.recipe import LinearSpec, Matmul, Recipe, Rule, get_recipe
from tiny import EVERY, adamw, assert_same, batch, mlp


def trainable(name):
    rules = [rule.linear for rule in get_recipe(name).rules if rule.linear.rounds]
    turned = any(spec.output.hadamard or spec.grad_input.hadamard for spec in rules)
    clamped = any(spec.output.rhs is not None and spec.output.rhs.clamp for spec in rules)
    plain = not (get_recipe(name).smooth_glu or turned or clamped)
    return plain and any(spec.output.rhs is not None for spec in rules)


ABLE = [name for name in EVERY if trainable(name)]
QUICK = {"nf4", "nf4-double", "fp8-current", "mxfp4", "fp8-block", "fp8-delayed"}
every_able = pytest.mark.parametrize("name", slow_unless(QUICK.__contains__, ABLE))


def with_lora(model):
    """The model with LoRA around each linear layer; only LoRA's factors train."""
    for index in (0, 3):
        torch.manual_seed(index)
        model[index] = Lora(model[index])
        nn.init.normal_(model[index].lora_B, std=0.1)
    for path, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in path)
    return model


def quantized_with_lora(name, model=None):
    model = mlp() if model is None else model
    halfstep.quantize_model(model, name, adapters=True)
    return with_lora(model).train()


def gradients(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


@every_able
def test_gradients_equal_those_of_the_recipe_on_the_decoded_weights(name):
    """Rounding decoded weights again changes nothing, unless a format clips or a scale is chosen from clipped
    values."""
    model = quantized_with_lora(name)
    values = copy.deepcopy(model)
    halfstep.dequantize_model(values)
    halfstep.apply(values, {"fp8-delayed": "fp8-current", "fp8-delayed-megatron": "fp8-current"}.get(name, name))
    expected = gradients(values.train(), batch()[0])
    found = gradients(model, batch()[0])
    assert all(grad.abs().sum() > 0 for grad in found)
    exact = name in ("nf4", "fp8-current", "fp8-block", "mxfp8", "fp8-delayed")
    for one, other in zip(found, expected, strict=True):
        if exact:
            assert_same(one, other)
        else:  # nvfp4's gradients are rounded stochastically
            assert ((one - other).norm() / other.norm()) < 0.4


@pytest.mark.quick("fp8-block", "fp8-current")
@every_able
def test_codes_stay_unchanged_while_adapters_train(name):
    model = quantized_with_lora(name)
    codes = {n: b.clone() for n, b in model.named_buffers() if not n.endswith(ATTRIBUTE)}
    optimizer, scaler = halfstep.optimize(model, adamw(model), generator=3)
    x, y = batch()
    losses = []
    for _ in range(8):
        loss = (model(x) - y).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    buffers = dict(model.named_buffers())
    assert_same({n: buffers[n] for n in codes}, codes)


def test_decoded_weights_are_not_saved_for_backward():
    model, kept = quantized_with_lora("nf4"), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(batch()[0])
    assert not any(
        t.shape in ((16, 8), (4, 16)) for t in kept
    )  # the shapes of the two weights; LoRA's factors are narrower


def rotating():
    four = get_quantizer("mxfp4")
    products = LinearSpec(output=Matmul(rhs=four), grad_input=Matmul(four, four, hadamard=Hadamard()))
    return Recipe("rotating", "", "", rules=(Rule("*", products),))


def test_gradients_through_codes_need_adapters_true():
    model = mlp()
    halfstep.quantize_model(model, "nf4")
    model = with_lora(model)
    with pytest.raises(ModelError, match=r"adapters=True"):
        model.train()(batch()[0])
    with pytest.raises(ModelError, match=r"adapters=True"):
        model.eval()(batch()[0].requires_grad_())
    with pytest.raises(RecipeError, match=r"adapters=True"):
        halfstep.optimize(model, adamw(model))
    with pytest.raises(RecipeError, match=r"it is quantised under 'nf4'.*quantise with adapters=True"):
        halfstep.prepare(model, adamw(model), recipe="nf4")
    with pytest.raises(RecipeError, match="rotates the matmul of the input's gradient"):
        halfstep.quantize_model(mlp(), rotating(), adapters=True)


def test_existing_adapters_stay_trainable():
    model = with_lora(mlp())
    report = halfstep.quantize_model(model, "nf4", adapters=True)
    assert report.quantized == ("0.base_layer", "3.base_layer")
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        f"{index}.{name}" for index in (0, 3) for name in ("lora_A.weight", "lora_B")
    }
    assert all(grad.abs().sum() > 0 for grad in gradients(model.train(), batch()[0]))


def test_adapters_true_does_not_change_evaluation():
    model, plain = mlp(), mlp()
    halfstep.quantize_model(model, "nf4", adapters=True)
    halfstep.quantize_model(plain, "nf4")
    with torch.no_grad():
        assert_same(model(batch()[0]), plain(batch()[0]))


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x, y):
        out = self.attention(x, y, y)[0]
        return self.cell(out.flatten(0, 1), x.flatten(0, 1))


def test_gradients_pass_through_quantized_attention_and_cells():
    x, y = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    stock, model = Attends(), Attends()
    halfstep.quantize_model(model, "fp8-current", adapters=True)
    found = []
    for each in (stock, model.train()):
        inputs = x.clone().requires_grad_(), y.clone().requires_grad_()
        each(*inputs).square().sum().backward()
        found.append([each_.grad for each_ in inputs])
    for one, other in zip(*found, strict=True):
        assert ((one - other).norm() / one.norm()) < 0.2


def test_a_trained_bias_gets_its_gradient():
    model = mlp()
    halfstep.quantize_model(model, "nf4", adapters=True)
    model[0].bias.requires_grad_()
    model.train()(batch()[0]).sum().backward()
    assert model[0].bias.grad.abs().sum() > 0


@pytest.mark.parametrize("dim", ["rows", "columns"])
def test_gradients_of_odd_sizes_are_near_the_stock_layers(dim):
    """A short last block in a row, and a number of rows that fills no block."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(67, 5) if dim == "columns" else nn.Linear(8, 3))
    stock = copy.deepcopy(model)
    halfstep.quantize_model(model, "nf4", adapters=True)
    x = torch.randn(3, model[0].in_features, requires_grad=True)
    model.train()(x).sum().backward()
    other = x.detach().clone().requires_grad_()
    stock(other).sum().backward()
    assert ((x.grad - other.grad).norm() / other.grad.norm()) < 0.2


# ---- dequantize_model ------------------------------------------------------------------------------------------------


WRITES = {
    "add": lambda w: w.add_(1),
    "data +=": lambda w: w.data.__iadd__(1),
    "data =": lambda w: setattr(w, "data", torch.zeros_like(w)),
    "item": lambda w: w.__setitem__(0, 1.0),
    "copy": lambda w: w.copy_(torch.zeros(16, 8)),
    "init": lambda w: nn.init.zeros_(w),
    "out": lambda w: torch.add(w, 1, out=w),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_to_a_weight_stored_as_codes_are_refused(write):
    model = mlp()
    halfstep.quantize_model(model, "mxfp8")
    before = model[0].weight + 0
    assert type(before) is torch.Tensor
    with pytest.raises(ModelError, match=r"halfstep\.dequantize_model"), torch.no_grad():
        WRITES[write](model[0].weight)
    assert_same(model[0].weight + 0, before)


@pytest.mark.parametrize("name", ["nf4", "fp8-delayed", "mxfp4"])
def test_dequantize_model_restores_stock_layers_with_the_decoded_weights(name):
    model, stock = mlp(), mlp()
    keys = [*stock.state_dict()]
    halfstep.quantize_model(model, name)
    weight = model[0].weight + 0
    with pytest.raises(RecipeError, match=r"halfstep\.dequantize_model"):
        halfstep.revert(model)
    halfstep.dequantize_model(model)
    assert [*model.state_dict()] == keys
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]
    assert_same(model[0].weight.detach(), weight)
    model.load_state_dict(stock.state_dict())
    with pytest.raises(RecipeError, match="follows no recipe"):
        halfstep.dequantize_model(model)
    halfstep.apply(model, "bf16-stochastic")
    with pytest.raises(RecipeError, match="is not quantised"):
        halfstep.dequantize_model(model)


def test_a_decoded_weight_has_the_rows_of_its_parameter():
    model = nn.Sequential(Conv1D(24, 8))
    halfstep.quantize_model(model, "fp8-current", adapters=True)
    x = torch.randn(4, 8)
    weight = weight_of(model[0], "weight", x)
    assert weight.rows == len(weight.operand().values) == 8
    assert [part.operand().shape for part in weight.split(3)] == [(3, 24), (3, 24), (2, 24)]
