"""Adapters: detected by name or by their layer's declaration; and layer names without them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import OptimizerError, RecipeError
from halfstep.nn.paths import adapters_of, plain_name
from halfstep.recipe import LinearSpec, Matmul, Rule, get_recipe
from tiny import adamw, assert_same, mlp, prepared, train


class Lora(nn.Module):
    """LoRA around a layer, as in its paper."""

    def __init__(self, base_layer, rank=2):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Parameter(torch.zeros(base_layer.out_features, rank))

    def forward(self, x):
        return self.base_layer(x) + self.lora_A(x) @ self.lora_B.t().to(x.dtype)


class Declaring(nn.Module):
    """A layer of another method, which declares its adapter's names."""

    adapter_layer_names = ("down",)

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Linear(base_layer.in_features, base_layer.out_features)

    def forward(self, x):
        return self.base_layer(x) + self.down(x)


def with_adapter(kind, model=None):
    model = mlp() if model is None else model
    model[0] = kind(model[0])
    model[0].base_layer.requires_grad_(False)
    return model


OF_ADAPTERS = {Lora: {"0.lora_A.weight", "0.lora_B"}, Declaring: {"0.down.weight", "0.down.bias"}}
every_kind = pytest.mark.parametrize("kind", OF_ADAPTERS)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("base_model.model.model.layers.0.q_proj.base_layer.weight", "model.layers.0.q_proj.weight"),
        ("base_model.model.lm_head.modules_to_save.default.weight", "lm_head.weight"),
        ("base_model.model.lm_head.original_module.weight", "lm_head.weight"),
        ("base_model.encoder.0", "encoder.0"),
        ("layers.0.lora_A.default", "layers.0.lora_A.default"),
        ("my_base_layer.weight", "my_base_layer.weight"),
        ("", ""),
    ],
)
def test_plain_name_removes_the_names_of_wrappers(name, plain):
    assert plain_name(name) == plain


@every_kind
def test_adapters_of_finds_the_parameters_of_adapters(kind):
    model = with_adapter(kind)
    found = adapters_of(model)
    assert {name for name, _ in model.named_parameters() if found(name)} == OF_ADAPTERS[kind]
    assert not found("0.download.weight")


@every_kind
@pytest.mark.parametrize("name", ["bf16-stochastic", "fp16-pure", "fp8-amax"])
def test_adapters_are_stored_in_float32(kind, name):
    model = with_adapter(kind)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.half()
    report = halfstep.apply(model, name)
    dtypes = {n: p.dtype for n, p in model.named_parameters()}
    assert {n for n, dtype in dtypes.items() if dtype == torch.float32} == OF_ADAPTERS[kind]
    assert OF_ADAPTERS[kind] <= report.kept.keys()
    halfstep.revert(model)
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    for n in OF_ADAPTERS[kind]:
        assert_same(model.get_parameter(n).detach(), before[n].half())


@every_kind
def test_adapters_are_rounded_only_with_float32_adapters_false(kind):
    own = get_recipe("bf16-truncate")  # its rules match all layers
    report = halfstep.apply(with_adapter(kind), own)
    assert report.quantized == ("0.base_layer", "3")
    assert any("float32_adapters = false" in why for why in report.kept.values())
    model = with_adapter(kind)
    report = halfstep.apply(model, replace(own, name="mine", weights="bf16", float32_adapters=False))
    assert len(report.quantized) == 3
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_adapters_train_without_masters():
    model, optimizer, scaler = prepared("bf16-master", with_adapter(Lora))
    losses = train(model, optimizer, scaler, 4)
    assert losses[-1] < losses[0]
    assert "master" not in optimizer.state[model[0].lora_B]
    assert "master" in optimizer.state[model[3].weight]
    assert optimizer.state[model[0].lora_B]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("through", ["old", "new"])
def test_an_adapter_added_in_16_bits_is_refused_until_cast_to_float32(through):
    """As PEFT 0.18's `add_adapter` makes them. The param groups are shared with the optimizer passed to `prepare`."""
    model = mlp()
    old = adamw(model)
    model, new, scaler = prepared("bf16-stochastic", model, old)
    train(model, new, scaler, 1)
    with_adapter(Lora, model)
    adapter = [model[0].lora_A.weight, model[0].lora_B]
    for parameter in adapter:
        parameter.data = parameter.data.bfloat16()
    refused = pytest.raises(OptimizerError, match=r"0\.lora_.* is an adapter's and is stored in torch.bfloat16")
    before = [p.detach().clone() for p in model.parameters()]
    with refused:
        {"old": old, "new": new}[through].add_param_group({"params": adapter})
        train(model, new, scaler, 1)
    for parameter, kept in zip(model.parameters(), before, strict=True):
        assert_same(parameter.detach(), kept)
    for parameter in adapter:
        parameter.data = parameter.data.float()
        parameter.grad = None
    if through == "new":  # add_param_group failed
        new.add_param_group({"params": adapter})
    scaler.update()
    train(model, new, scaler, 2)
    assert {p.dtype for p in adapter} == {torch.float32}
    assert model[0].lora_B.any()


def test_rules_match_layer_names_without_adapters():
    product = Matmul(halfstep.get_quantizer("e4m3fn"))
    mine = replace(get_recipe("fp32"), name="mine", rules=(Rule("0", LinearSpec(output=product)),))
    assert halfstep.apply(with_adapter(Lora), mine).quantized == ("0.base_layer",)


@pytest.mark.parametrize("name", ["bf16-stochastic", "fp8lm-o2", "fp8-delayed"])
def test_adapters_may_be_added_and_removed_after_apply(name):
    model = mlp()
    stock = {n: type(m) for n, m in model.named_modules()}
    halfstep.apply(model, name)
    with_adapter(Lora, model)
    optimizer, scaler = halfstep.optimize(model, adamw(model), generator=3)
    train(model, optimizer, scaler, 3)
    assert model[0].lora_B.any()
    if name == "fp8lm-o2":
        assert model[0].base_layer.weight.codes.dtype == torch.float16
    model[0] = model[0].base_layer
    halfstep.revert(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {n: type(m) for n, m in model.named_modules()} == stock
    assert type(model[0].weight) is nn.Parameter


def test_optimize_advance_and_revert_accept_a_wrapper_of_the_model():
    model = mlp()
    halfstep.apply(model, "fp8-delayed")
    wrapped = nn.ModuleDict({"inner": nn.ModuleList([model])})
    optimizer, scaler = halfstep.optimize(wrapped, adamw(model))
    train(model, optimizer, scaler, 1)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    halfstep.advance(wrapped)
    other = mlp()
    halfstep.apply(other, "fp8-delayed")
    with pytest.raises(RecipeError, match=r"2 parts of this ModuleList follow a recipe.*: 0, 1; expected one"):
        halfstep.revert(nn.ModuleList([model, other]))
    halfstep.revert(wrapped)
    assert type(model) is nn.Sequential
    with pytest.raises(RecipeError, match="follows no recipe"):
        halfstep.revert(wrapped)
