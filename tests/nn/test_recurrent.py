"""LSTM, GRU and RNN layers under recipes that round no operand: near stock float32, in every kind of call."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import halfstep
from families import for_each, in_turn, slow_unless
from halfstep import recipe
from halfstep.nn.adapters import recurrent as adapter
from halfstep.tracking import activation_gradients
from tiny import BREAKS, FAST, RECIPES, prepared


LAYERS = {
    "lstm": lambda: nn.LSTM(8, 6, 2, batch_first=True),
    "lstm, both ways": lambda: nn.LSTM(8, 6, bidirectional=True, bias=False),
    "lstm, projected": lambda: nn.LSTM(8, 6, proj_size=4),
    "gru": lambda: nn.GRU(8, 6, 2),
    "rnn": lambda: nn.RNN(8, 6, nonlinearity="relu"),
    "lstm cell": lambda: nn.LSTMCell(8, 6),
    "gru cell": lambda: nn.GRUCell(8, 6),
    "rnn cell": lambda: nn.RNNCell(8, 6),
}
WAYS = ("plain", "with states", "unbatched", "packed", "evaluation", "in 16 bits")
CELLS = [(layer, way, "torch's") for layer in LAYERS for way in WAYS if "cell" not in layer or way != "packed"]
CELLS += [(layer, way, "emulated") for layer in list(LAYERS)[:2] for way in WAYS]


pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]


class Model(nn.Module):
    def __init__(self, layer, linear=False):
        super().__init__()
        torch.manual_seed(0)
        self.layer = LAYERS[layer]()
        self.before, self.linear = nn.Linear(8, 8), linear

    def forward(self, x, states=None):
        x = self.before(x) if self.linear else x
        return self.layer(x, states)


def floating_tensors(value):
    """The floating tensors of nested tuples, packed sequences included."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    return [tensor for item in value if item is not None for tensor in floating_tensors(item)]


def inputs(layer, way, stock):
    torch.manual_seed(1)
    cell = "cell" in layer
    x = torch.randn(4, 8) if cell else torch.randn(4, 4, 8)
    if way == "unbatched":
        return x[0], None
    if way == "packed":
        return pack_padded_sequence(x, [4, 3, 1, 1], batch_first=stock.layer.batch_first), None
    if way != "with states":
        return x, None
    with torch.no_grad():
        states = stock(x)
    return x, states if cell else states[1]


def compare(name, layer, way, kernels, monkeypatch):
    """Compare a layer under a recipe with stock float32: outputs, and in training gradients."""
    if kernels == "emulated":
        monkeypatch.setattr(adapter, "lacks_kernel", lambda *_: True)
    stock, model = Model(layer, way == "in 16 bits"), Model(layer, way == "in 16 bits")
    x, states = inputs(layer, way, stock)
    halfstep.apply(model, name)
    for each in (stock, model):
        each.train(way != "evaluation")
    with torch.set_grad_enabled(way != "evaluation"):
        expected, found = floating_tensors(stock(x, states)), floating_tensors(model(x, states))
    eps = {"fp32": 1e-6, "bf16": 2**-8, "fp16": 2**-11}[recipe.get_recipe(name).compute]
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, wanted, rtol=0, atol=6 * eps)
    if way == "evaluation":
        return
    for each in (expected, found):
        sum(t.sum() for t in each).backward()
    for (key, own), wanted in zip(model.layer.named_parameters(), stock.layer.parameters(), strict=True):
        assert (own.grad.float() - wanted.grad).norm() <= 20 * eps * wanted.grad.norm() + 1e-6, key


every_cell = pytest.mark.parametrize(("layer", "way", "kernels"), CELLS)


@pytest.mark.quick(
    "lstm, both ways-with states-torch's", "lstm, both ways-evaluation-torch's", "lstm, projected-evaluation-torch's"
)
@every_cell
@for_each("name", ["fp32", "fp16-mixed", "bf16-master"])
def test_recurrent_layers_are_near_stock_float32(name, layer, way, kernels, monkeypatch):
    compare(name, layer, way, kernels, monkeypatch)


@pytest.mark.slow
@every_cell
@for_each("name", ["bf16-mixed", "fp16-master", "bf16-stochastic"])
def test_recurrent_layers_are_near_stock_float32_under_other_recipes(name, layer, way, kernels, monkeypatch):
    compare(name, layer, way, kernels, monkeypatch)


def test_an_emulated_lstm_equals_float32_with_rounded_operands_and_outputs(monkeypatch):
    """Rounded weights and inputs, torch's float32 LSTM, rounded outputs and states."""
    monkeypatch.setattr(adapter, "lacks_kernel", lambda *_: True)
    model, twin, x = Model("lstm"), Model("lstm").layer, torch.randn(3, 4, 8)
    halfstep.apply(model, "fp16-mixed")
    for parameter in twin.parameters():
        parameter.data = parameter.data.half().float()
    output, states = model(x)
    expected, its = twin(x.half().float())
    for found, wanted in zip((output, *states), (expected, *its), strict=True):
        assert torch.equal(found, wanted.half().float())
    hooked = []
    model.layer.register_forward_hook(lambda _, __, output: hooked.extend(floating_tensors(output)))
    model(x)
    assert {t.dtype for t in hooked} == {torch.float16}
    halfstep.revert(model)
    assert type(model.layer) is nn.LSTM


def test_dropout_between_layers_draws_the_stock_layers_mask(monkeypatch):
    monkeypatch.setattr(adapter, "lacks_kernel", lambda *_: True)
    model, stock = nn.ModuleDict({"layer": nn.LSTM(8, 6, 2, dropout=0.5)}), nn.LSTM(8, 6, 2, dropout=0.5)
    stock.load_state_dict(model.layer.state_dict())
    halfstep.apply(model, "fp16-mixed")
    outputs = []
    for layer, dtype in ((stock, None), (model.layer, torch.float16)):
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            outputs.append(layer(torch.ones(4, 2, 8))[0].float())
    torch.testing.assert_close(*outputs, rtol=0, atol=4e-3)


class Tagger(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.up, self.head = kind(8, 12, batch_first=True), nn.Linear(12, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.up(self.rnn(x)[0]).relu())


KINDS = [nn.LSTM, nn.GRU]
FIRST = in_turn([name for name in RECIPES if name in FAST], KINDS)


@pytest.mark.quick("fp32-LSTM", "fp8-current-LSTM", "bf16-master-GRU")
@pytest.mark.parametrize(("name", "kind"), slow_unless(FIRST.__contains__, itertools.product(RECIPES, KINDS)))
def test_a_model_with_a_recurrent_layer_trains(name, kind):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(6, 5, 8, generator=generator), torch.randn(6, 5, 4, generator=generator)
    model, optimizer, scaler = prepared(name, Tagger(kind))
    losses = []
    for _ in range(10):
        loss = (model(x) - y).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] or name in BREAKS


def test_activation_gradients_collects_all_outputs_of_a_recurrent_layer():
    model = Model("lstm")
    x = pack_padded_sequence(torch.randn(3, 4, 8), [4, 2, 1], batch_first=True)
    with activation_gradients(model) as found:
        output, (h, _) = model(x)
        assert isinstance(output, PackedSequence)
        (output.data.sum() + 2 * h.sum()).backward()
    assert sorted(tuple(g.shape) for g in found) == sorted([tuple(output.data.shape), tuple(h.shape)])
