"""Recurrent layers under rules: equal to torch's with an identity quantizer, and to a reference with rounded
operands."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import halfstep
from families import for_each, in_turn
from halfstep import formats, ops, recipe
from halfstep.errors import ModelError, RecipeError
from halfstep.nn.adapters import recurrent
from halfstep.quant import Quantizer
from halfstep.recipe import LinearSpec, Matmul, Recipe, Rule, linear_spec
from tiny import EVERY, PROJECTED, SMOOTH, assert_same, batch, fast_and_every, grads, prepared, reverted, train


pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
ROUNDING = [n for n in EVERY if n not in SMOOTH and any(r.linear.rounds for r in recipe.get_recipe(n).rules)]
FP32, E4M3, E5M2, CUT = (
    Quantizer(formats.get(f), r)
    for f, r in [
        ("fp32", "nearest_even"), ("e4m3fn", "nearest_even"), ("e5m2", "nearest_even"), ("bf16", "toward_zero"),
    ]
)  # fmt: skip
LAYERS = {
    "lstm": lambda: nn.LSTM(8, 6, 2, batch_first=True),
    "lstm, both ways": lambda: nn.LSTM(8, 6, 2, bidirectional=True, bias=False),
    "lstm, projected": lambda: nn.LSTM(8, 6, 2, proj_size=4, bidirectional=True, batch_first=True),
    "gru": lambda: nn.GRU(8, 6, 2, bidirectional=True),
    "rnn": lambda: nn.RNN(8, 6, 3, batch_first=True),
    "rnn, relu": lambda: nn.RNN(8, 6, nonlinearity="relu", bidirectional=True),
    "lstm cell": lambda: nn.LSTMCell(8, 6),
    "gru cell": lambda: nn.GRUCell(8, 6, bias=False),
    "rnn cell": lambda: nn.RNNCell(8, 6, nonlinearity="relu"),
}
few_and_every = pytest.mark.parametrize("names", fast_and_every(ROUNDING, {"fp8-delayed", "fp8lm-o3"}))
WAYS = ("plain", "with states", "unbatched", "unbatched with states", "packed", "packed with states", "one step")


def exists(case):
    return "cell" not in case[0] or "packed" not in case[1]


def recipe_with_rule(spec, **fields):
    return Recipe("made", "", "", rules=(Rule("*", spec),), **fields)


def floating_tensors(value):
    """The floating tensors of nested tuples, packed sequences included."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    return [tensor for item in value if item is not None for tensor in floating_tensors(item)]


def inputs(stock, way):
    cell = isinstance(stock, nn.RNNCellBase)
    x = torch.randn(4, 8) if cell else torch.randn(4, 4, 8)
    x = x[:1] if way == "one step" and not cell and not stock.batch_first else x
    x = x[0] if "unbatched" in way else x
    states = None
    if "states" in way:
        found = stock(torch.randn_like(x))
        found = found if cell else found[1]
        states = tuple(s.detach() for s in found) if isinstance(found, tuple) else found.detach()
    if "packed" in way:
        x = pack_padded_sequence(x, [2, 4, 1, 2], batch_first=stock.batch_first, enforce_sorted=False)
    return x, states


@for_each(
    "case, way", [*filter(exists, itertools.product(LAYERS, WAYS))], fast=filter(exists, in_turn([*LAYERS], WAYS))
)
def test_recurrent_layers_of_operands_rounded_to_float32_match_torch(case, way):
    stock = LAYERS[case]()
    model = copy.deepcopy(stock)
    assert halfstep.apply(model, recipe_with_rule(linear_spec(FP32, FP32, FP32))).quantized == ("",)
    x, states = inputs(stock, way)
    outcomes = []
    for each in (stock, model):
        own = PackedSequence(x.data.clone(), *x[1:]) if "packed" in way else x.clone()
        own.data.requires_grad_() if "packed" in way else own.requires_grad_()
        output = each(own, states)
        found = floating_tensors(output)
        sum((t * torch.linspace(-1, 1, t.numel()).view(t.shape)).sum() for t in found).backward()
        leaf = own.data if "packed" in way else own
        outcomes.append([*found, leaf.grad, *(p.grad for p in each.parameters())])
        if "packed" in way:
            found += [pad_packed_sequence(output[0], each.batch_first)[0]]
    for found, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# ---- the matmuls of each step, against a reference -------------------------------------------------------------------


class RoundedMatmul(torch.autograd.Function):
    """x w^T in float64 whose six operands are rounded by SPEC."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return E4M3(x.float()).double() @ CUT(weight.float()).double().t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        of_x = E5M2(grad.float()).double() @ E4M3(weight.float()).double()
        return of_x, CUT(grad.float()).double().t() @ E5M2(x.float()).double()


SPEC = LinearSpec(Matmul(E4M3, CUT), Matmul(E5M2, E4M3), Matmul(CUT, E5M2))


def reference(kind, module, x):
    """The outputs of one layer in one direction, computed step by step."""
    w_ih, w_hh = module.weight_ih_l0.double(), module.weight_hh_l0.double()
    b_ih, b_hh = module.bias_ih_l0.double(), module.bias_hh_l0.double()
    h = c = torch.zeros(x.shape[1], 6, dtype=torch.float64)
    outputs = []
    for step in x.double():
        a, b = RoundedMatmul.apply(step, w_ih) + b_ih, RoundedMatmul.apply(h, w_hh) + b_hh
        if kind == "rnn":
            h = torch.tanh(a + b)
        elif kind == "lstm":
            i, f, g, o = (a + b).split(6, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        else:
            (r, z, n), (hr, hz, hn) = a.split(6, 1), b.split(6, 1)
            z = torch.sigmoid(z + hz)
            h = (1 - z) * torch.tanh(n + torch.sigmoid(r + hr) * hn) + z * h
        outputs.append(h)
    return torch.stack(outputs)


@pytest.mark.parametrize(("kind", "make"), [("rnn", nn.RNN), ("lstm", nn.LSTM), ("gru", nn.GRU)])
def test_every_matmul_of_every_step_rounds_its_operands(kind, make):
    """Sums in another precision may round a few near-ties the other way."""
    stock, x = make(8, 6), torch.randn(5, 3, 8)
    model = copy.deepcopy(stock)
    halfstep.apply(model, recipe_with_rule(SPEC))
    output = model(x)[0]
    expected = reference(kind, stock, x)
    plain = copy.deepcopy(stock)
    for y in (output, expected.float(), plain(x)[0]):
        (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)
    for (name, found), wanted in zip(grads(model).items(), grads(stock).values(), strict=True):
        far = (found - grads(plain)[name]).norm()
        assert (found - wanted).norm() < 0.02 * far, (name, (found - wanted).norm(), far)


@for_each("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_cell_equals_one_step_of_its_layer(kind):
    layer, cell = kind(8, 6), getattr(nn, f"{kind.__name__}Cell")(8, 6)
    for name, parameter in cell.named_parameters():
        parameter.data = getattr(layer, f"{name}_l0").detach().clone()
    halfstep.apply(layer, "fp8-current")
    halfstep.apply(cell, "fp8-current")
    x, state = torch.randn(1, 4, 8), torch.randn(1, 4, 6)
    state = (state, torch.randn(1, 4, 6)) if kind is nn.LSTM else state
    stepped = cell(x[0], tuple(s[0] for s in state) if kind is nn.LSTM else state[0])
    output, last = layer(x, state)
    assert_same(floating_tensors([stepped]), [t[0] for t in floating_tensors([last])])
    assert_same(floating_tensors([stepped])[0], output[0])


@few_and_every
def test_a_weight_rounded_beforehand_gives_the_operands_of_ops_linear(names):
    """Compared with `ops.linear` of the weight itself.

    A weight that is rounded stochastically or with random signs draws earlier if it is rounded beforehand, which
    changes all later draws, so rounding is to nearest and signs are fixed."""

    @for_each("name", names)
    def check(name):
        spec = recipe.get_recipe(name).rules[-1].linear
        down = spec.grad_input
        if down.hadamard is not None and down.hadamard.seed == "random":
            down = replace(down, hadamard=replace(down.hadamard, seed=1))
        if down.rhs is not None and down.rhs.rounding == "stochastic":
            down = replace(down, rhs=replace(down.rhs, rounding="nearest_even"))
        spec = replace(spec, grad_input=down)
        weight, x = torch.randn(40, 36).requires_grad_(), torch.randn(5, 36).requires_grad_()
        outcomes = []
        for prepared_weight in (False, True):
            states = {operand: q.stateful.init() for operand, q in spec.states.items()}
            dtype = torch.bfloat16
            used = ops.rounded_weight(weight, spec, dtype, states, True) if prepared_weight else weight
            with torch.autocast("cpu", dtype):
                y = ops.linear(x, used, None, spec, states, True)
            torch.manual_seed(1)  # operands rounded stochastically draw from torch's own generator, as dropout does
            outcomes.append([y, *torch.autograd.grad(y.float().square().sum(), (x, weight)), states])
        assert_same(*outcomes)

    check()


# ---- models with recurrent layers ------------------------------------------------------------------------------------


class Reader(nn.Module):
    def __init__(self, again=False):
        super().__init__()
        torch.manual_seed(0)
        self.read = nn.LSTM(2, 6, 2, bidirectional=True, batch_first=True, proj_size=4)
        self.cell, self.head, self.again = nn.GRUCell(8, 8), nn.Linear(8, 4), again

    def features(self, x):
        return self.cell(self.read(x)[0][:, -1])

    def forward(self, x):
        x = x.view(-1, 4, 2)
        return self.head(checkpoint(self.features, x, use_reentrant=False) if self.again else self.features(x))


@pytest.mark.slow  # nn/test_convolutions.py has the fast one
@for_each("name", ["bf16-kahan", "fp8-delayed", "fp8lm-o3"])
def test_checkpointed_copied_and_reverted_networks_give_the_same_bits(name):
    model, (x, _) = reverted(name, Reader), batch()
    assert_same(model(x), model(x))


@pytest.mark.slow
@for_each("name", [n for n in EVERY if n not in {*SMOOTH, *PROJECTED}])  # there is no linear layer to project
def test_checkpointed_copied_and_reverted_networks_under_every_recipe(name):
    test_checkpointed_copied_and_reverted_networks_give_the_same_bits.__wrapped__(name)


def test_each_layer_direction_and_matmul_has_a_state_over_all_steps():
    model, optimizer, scaler = prepared("fp8-delayed", Reader())
    train(model, optimizer, scaler, 2)
    names = {n.removeprefix("read._halfstep_scaling_") for n, _ in model.named_buffers() if n.startswith("read.")}
    places = [f"l{layer}{way}" for layer in (0, 1) for way in ("", "_reverse")]
    expected = itertools.product(("ih", "hh", "hr"), places, ("input", "weight", "grad_output"))
    assert names == {f"{product}_{place}__{operand}" for product, place, operand in expected}
    x, seen = torch.randn(3, 8), []
    model.read.register_forward_hook(lambda _, args, out: seen.extend([args[0], out]))
    model(x)
    states = dict(model.read.named_buffers())
    assert float(states["_halfstep_scaling_ih_l0__input"][1]) == seen[0].abs().max().item()
    hidden, (last, _) = seen[1]
    inner = torch.cat([hidden[:, :-1, :4], hidden[:, 1:, 4:]])  # each direction's recurrent inputs in the last layer
    recorded = max(float(states[f"_halfstep_scaling_hh_l1{way}__input"][1]) for way in ("", "_reverse"))
    assert recorded == inner.abs().max().item()
    assert last.shape == (4, 3, 4)


def test_gradients_of_bf16_weights_are_accumulated_in_float32():
    """Over hundreds of steps."""
    layer = nn.RNN(1, 1, bias=False, nonlinearity="relu")
    with torch.no_grad():
        layer.weight_ih_l0.fill_(1.0)
        layer.weight_hh_l0.fill_(0.0)
    spec = linear_spec(*[Quantizer(formats.get("bf16"))] * 3)
    halfstep.apply(layer, Recipe("made", "", "", weights="bf16", compute="bf16", rules=(Rule("*", spec),)))
    x = torch.ones(320, 1, 1)
    layer(x)[0].sum().backward()
    assert float(layer.weight_hh_l0.grad) == 320  # 319 terms of 1, rounded to bf16; a sum in bf16 would stop at 256


@few_and_every
def test_quantize_model_equals_evaluation_and_reports_kept_recurrent_layers(names):
    @for_each("name", names)
    def check(name):
        if recipe.get_recipe(name).rules[-1].linear.output.rhs is None:
            return
        model, optimizer, scaler = prepared(name, Reader())
        train(model, optimizer, scaler, 2)
        x = torch.randn(3, 8)
        model.eval()
        with torch.no_grad():
            expected = model(x)
            report = halfstep.quantize_model(model, name)
            assert_same(model(x), expected)
        assert "cell" in report.quantized
        assert report.kept["read"].startswith("torch lists a recurrent layer's weights beside its parameters")
        assert {"weight_ih_codes", "weight_hh_codes"} <= dict(model.cell.named_buffers()).keys()

    check()


@pytest.mark.slow  # what the fast tests trace goes the same way
@pytest.mark.parametrize("name", ["fp8-current", "fp8-delayed"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does, as it traces
def test_a_compiled_cell_equals_eager(name):
    class Cells(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.cell, self.head = nn.LSTMCell(4, 6), nn.Linear(6, 4)

        def forward(self, x):
            state = None
            for step in x.view(-1, 2, 4).unbind(1):
                state = self.cell(step, state)
            return self.head(state[0])

    torch._dynamo.reset()
    plain, compiled = prepared(name, Cells()), prepared(name, Cells())
    graph = torch.compile(compiled[0], backend="aot_eager", fullgraph=True)
    assert train(*plain, 2) == train(graph, *compiled[1:], 2)


@pytest.mark.slow  # what `test_tracing` asks, in a layer
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does, as it traces
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # and that too
def test_a_compiled_layer_with_a_graph_break_draws_the_eager_signs():
    """Its recurrent weight is rounded once for all steps, not in each."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain, x = nn.LSTM(8, 6, batch_first=True), torch.randn(3, 4, 8)
    compiled = copy.deepcopy(plain)
    for model in (plain, compiled):
        torch.manual_seed(3)
        halfstep.apply(model, "mxfp4-rht")
    torch.compile(compiled, backend="aot_eager")(x)[0].square().sum().backward()
    plain(x)[0].square().sum().backward()
    assert_same(grads(compiled), grads(plain))


def test_a_layer_kept_by_a_rule_equals_bf16_autocasts():
    keep = Rule("read", LinearSpec(), why="the reader")
    made = recipe_with_rule(recipe.get_recipe("fp8-current").rules[-1].linear, compute="bf16")
    kept = Recipe("kept", "", "", compute="bf16", rules=(keep, *made.rules))
    model, mixed, x = Reader(), Reader(), torch.randn(3, 4, 2)
    assert halfstep.apply(model, kept).kept == {"read": "the reader"}
    halfstep.apply(mixed, "bf16-mixed")
    with halfstep.following(model), halfstep.following(mixed):
        assert_same(floating_tensors(model.read(x)), floating_tensors(mixed.read(x)))
    report = halfstep.apply(Reader(), "fp8-current", lambda module, path: path != "cell")
    assert report.quantized == ("read",)


def test_dropout_between_layers_draws_the_stock_layers_mask():
    stock = nn.GRU(8, 6, 3, dropout=0.5)
    model = copy.deepcopy(stock)
    halfstep.apply(model, recipe_with_rule(linear_spec(FP32, FP32, FP32)))
    outputs = []
    for each in (stock, model):
        torch.manual_seed(3)
        outputs.append(each(torch.ones(4, 2, 8))[0])
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)
    model.eval()
    assert_same(model(torch.ones(4, 2, 8))[0], model(torch.ones(4, 2, 8))[0])


INVALID = {
    "no steps": (lambda: nn.LSTM(8, 6), (torch.ones(0, 2, 8),), ModelError, "at least one step"),
    "one dimension": (lambda: nn.GRU(8, 6), (torch.ones(8),), ModelError, r"found an input of shape \(8,\)"),
    "states with a batch": (
        lambda: nn.GRU(8, 6), (torch.ones(4, 8), torch.ones(1, 1, 6)), ModelError, "The input is not batched"
    ),
    "another width": (lambda: nn.RNN(8, 6), (torch.ones(4, 2, 7),), RuntimeError, "Expected 8, got 7"),
    "another batch": (
        lambda: nn.RNN(8, 6), (torch.ones(4, 2, 8), torch.ones(1, 3, 6)), RuntimeError, r"Expected hidden size \(1, 2"
    ),
    "a cell's other batch": (
        lambda: nn.LSTMCell(8, 6), (torch.ones(4, 8), (torch.ones(1, 6), torch.ones(1, 6))), ModelError,
        r"states of shapes \[\(1, 6\), \(1, 6\)\]; expected",
    ),
}  # fmt: skip


@for_each("case", INVALID)
def test_invalid_inputs_are_refused(case):
    make, arguments, error, words = INVALID[case]
    model = make()
    halfstep.apply(model, "fp8-current")
    with pytest.raises(error, match=words):
        model(*arguments)


def test_second_derivatives_are_refused():
    model = nn.GRU(2, 2)
    halfstep.apply(model, "fp8-current")
    x = torch.randn(3, 1, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(model(x)[0].square().sum(), x, create_graph=True)
    with pytest.raises(RecipeError, match="a second derivative"):
        grad.sum().backward()


def test_a_rounded_layer_does_not_depend_on_onednns_kernels(monkeypatch):
    """Its matmuls are halfstep's own, also on a CPU whose LSTM of torch's computes in float32."""
    outputs = []
    for lacks in (False, True):
        monkeypatch.setattr(recurrent, "lacks_kernel", lambda dtype, device, lacks=lacks: lacks)
        torch.manual_seed(0)
        layer = nn.LSTM(8, 6)
        halfstep.apply(layer, "fp8-current")
        outputs.append(floating_tensors(layer(torch.randn(3, 4, 8))))
    assert_same(*outputs)
