"""Layers other than nn.Linear: Conv1D, fused experts, and layers that a rule matches but no adapter rounds."""

import copy

import pytest
import torch
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralTopKRouter
from transformers.pytorch_utils import Conv1D

import halfstep
from halfstep import formats, ops
from halfstep.nn.adapters import experts, linear
from halfstep.nn.adopt import adopt
from halfstep.ops.part import own_part
from halfstep.quant import Quantizer
from halfstep.recipe import LinearSpec, Matmul, Recipe, Rule
from tiny import assert_same, batch, prepared, train


pytestmark = pytest.mark.usefixtures("products")
FP8 = Quantizer(formats.get("e4m3fn"))
SPEC = LinearSpec(Matmul(FP8, FP8), Matmul(FP8, FP8), Matmul(FP8, FP8))
CONFIG = MixtralConfig(hidden_size=8, intermediate_size=12, num_local_experts=4, num_experts_per_tok=2)
CONFIG._experts_implementation = "eager"


def recipe(*rules, **fields):
    return Recipe("made", "", "", rules=rules, **fields)


def with_conv1d():
    torch.manual_seed(0)
    return nn.Sequential(Conv1D(16, 8), nn.GELU(), Conv1D(4, 16))


def gradients(model):
    return [p.grad for p in model.parameters()]


def test_conv1d_without_rounding_equals_the_stock_layer():
    stock, model, x = with_conv1d(), with_conv1d(), torch.randn(3, 5, 8)
    for layer in (model[0], model[2]):
        own_part(layer).linear = LinearSpec()
        adopt(layer, linear.of_transposed)
    assert_same(model(x), stock(x))
    for each in (model, stock):
        each(x).square().sum().backward()
    torch.testing.assert_close(gradients(model), gradients(stock), rtol=1e-5, atol=1e-5)


@pytest.mark.quick("own-fp8-current", "carried-fp8-current", "own-mxfp8", "carried-mxfp8")
@pytest.mark.parametrize("name", ["fp8-current", "fp8-rowwise", "fp8-block", "mxfp8"])
def test_conv1d_equals_a_linear_layer_with_the_transposed_weight(name):
    model = with_conv1d()
    twin = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    for mine, its in ((model[0], twin[0]), (model[2], twin[2])):
        its.weight.data, its.bias.data = mine.weight.detach().t().contiguous(), mine.bias.detach().clone()
    assert halfstep.apply(model, name).quantized == ("0", "2")
    halfstep.apply(twin, name)
    x = batch()[0]
    assert_same(model(x), twin(x))
    for each in (model, twin):
        each(x).square().sum().backward()
    assert_same([g.t() if g.dim() > 1 else g for g in gradients(model)], gradients(twin))
    halfstep.revert(model)
    assert type(model[0]) is Conv1D


@pytest.mark.filterwarnings("ignore:.*does not round")
def test_a_conv1d_subclass_with_its_own_forward_is_kept():
    class Mine(Conv1D):
        def forward(self, x):
            return super().forward(x)

    report = halfstep.apply(nn.Sequential(Mine(8, 8), Conv1D(8, 8)), recipe(Rule("*", SPEC)))
    assert report.quantized == ("1",)
    assert report.kept["0"] == "its own code uses weight, where no adapter sees it"


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.experts, self.head = MixtralTopKRouter(CONFIG), MixtralExperts(CONFIG), nn.Linear(8, 4)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x):
        _, weights, index = self.gate(x)
        return self.head(x + self.experts(x, index, weights))


def test_experts_without_rounding_match_the_stock_ones():
    stock, model, x = Mixture(), Mixture(), batch()[0]
    own_part(model.experts).linear = LinearSpec()
    adopt(model.experts, experts.forward)
    torch.testing.assert_close(model(x), stock(x), rtol=1e-6, atol=1e-6)  # two threads sum in another order than one
    for each in (model, stock):
        each(x).square().sum().backward()
    torch.testing.assert_close(gradients(model), gradients(stock), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_with_biases_and_transposed_weights_equal_ops_linear(transposed):
    model, x = Mixture().experts, batch()[0]
    index, weights = torch.tensor([[0, 4]] * 12), torch.full((12, 2), 0.5)  # expert 4 is on another rank
    model.has_bias, model.is_transposed = True, transposed
    model.gate_up_proj_bias, model.down_proj_bias = nn.Parameter(torch.randn(4, 24)), nn.Parameter(torch.randn(4, 8))
    up, down = model.gate_up_proj[0].detach(), model.down_proj[0].detach()
    if transposed:
        model.gate_up_proj.data, model.down_proj.data = (
            w.detach().transpose(1, 2).contiguous() for w in (model.gate_up_proj, model.down_proj)
        )
    own_part(model).linear = SPEC
    adopt(model, experts.forward)
    inner = model._apply_gate(ops.linear(x, up, model.gate_up_proj_bias[0], SPEC))
    assert_same(model(x, index, weights), ops.linear(inner, down, model.down_proj_bias[0], SPEC) / 2)


@pytest.mark.quick("carried-fp8-delayed", "carried-mxfp8")
@pytest.mark.parametrize("name", ["fp8-current", "fp8-delayed", "mxfp8", "fp8-block"])
def test_experts_round_and_the_router_does_not(name):
    outputs = []
    for each in (name, "bf16-mixed"):
        model, optimizer, scaler = prepared(each, Mixture())
        losses = train(model, optimizer, scaler, 8)
        assert losses[-1] < losses[0]
        outputs.append(model(batch()[0]))
    assert not torch.equal(*outputs)
    report = halfstep.apply(Mixture(), name)
    assert report.quantized == ("experts",)
    assert (report.kept["gate"], report.kept["head"]) == ("router", "output head")


def test_each_operand_of_the_experts_matmuls_has_a_scaling_state():
    model, optimizer, scaler = prepared("fp8-delayed", Mixture())
    train(model, optimizer, scaler, 2)
    names = {n.removeprefix("experts._halfstep_scaling_") for n, _ in model.named_buffers()}
    assert names == {f"{p}__{o}" for p in ("up", "down") for o in ("input", "weight", "grad_output")}
    assert all(state[0] > 1 for state in model.buffers())


@pytest.mark.filterwarnings("ignore:.*does not round")
def test_the_report_names_unrounded_layers_with_the_reason():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix, self.vector = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8))

        def forward(self, x):
            return x @ self.matrix + self.vector

    class Standardised(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x, weight - weight.mean(), bias)

    patched = nn.LSTM(8, 8)
    patched.forward = lambda x: x
    layers = {"linear": nn.Linear(8, 8), "own": Own(), "conv": Standardised(2, 2, 1), "rnn": patched,
              "embedding": nn.Embedding(8, 8), "norm": nn.LayerNorm((2, 8))}  # fmt: skip
    report = halfstep.apply(nn.ModuleDict(layers), recipe(Rule("*", SPEC)))
    assert report.quantized == ("linear",)
    assert report.kept == {
        "own": "its own code uses matrix, where no adapter sees it",
        "conv": "its forward is not torch's",
        "rnn": "its forward is not torch's",
    }
    assert halfstep.apply(nn.ModuleDict({"linear": nn.Linear(8, 8), "own": Own()}), "bf16-mixed").kept == {}


PER_EXPERT = ("fp8-current", "fp8-rowwise", "fp8-block", "mxfp8")


def routed(*experts):
    """The expert indices of 8 tokens and their equal weights."""
    index = torch.tensor(experts).repeat(8, 1)
    return index, torch.full(index.shape, 1 / len(experts))


@pytest.mark.parametrize("name", PER_EXPERT)
def test_experts_have_separate_scales(name):
    """An expert with weights 2^20 times as large changes no bit of another one in the same call."""
    torch.manual_seed(0)
    model, x, grad = Mixture(), torch.randn(8, 8), torch.randn(8, 8)
    wide = copy.deepcopy(model)
    with torch.no_grad():
        wide.experts.gate_up_proj[1] *= 2.0**20
        wide.experts.down_proj[1] *= 2.0**20
    found = []
    for each in (model, wide):
        halfstep.apply(each, name)
        with halfstep.following(each):
            alone = each.experts(x, *routed(0))
            (each.experts(x, *routed(0, 1)) * grad).sum().backward()
        found.append((alone, each.experts.down_proj.grad[0], each.experts.gate_up_proj.grad[0]))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", [*PER_EXPERT, "fp8-delayed"])
def test_an_expert_without_tokens_may_have_infinite_weights(name):
    """No scale, scaling state or gradient of another expert depends on it."""
    torch.manual_seed(0)
    model, x = Mixture(), torch.randn(8, 8)
    with torch.no_grad():
        model.experts.gate_up_proj[3] = torch.inf
    model, optimizer, scaler = prepared(name, model)
    for _ in range(3):
        with halfstep.following(model):
            loss = model.experts(x, *routed(0, 2)).float().square().mean()
            scaler.scale(loss).backward()
        assert loss.isfinite()
        assert model.experts.gate_up_proj.grad[:3].isfinite().all()
        optimizer.zero_grad()
    states = [buffer for key, buffer in model.named_buffers() if "scaling" in key]
    assert all(state.isfinite().all() for state in states)
