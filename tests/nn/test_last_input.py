"""An input of several layers (attention's q, k and v; an MLP's gate and up) is rounded once and saved once."""

import copy
import gc
import io
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep import ops
from halfstep.nn.product import part_of
from halfstep.ops.function import LastInput
from halfstep.recipe import get_recipe
from tiny import RECIPES, fast_and_every, train


ROUNDS = [name for name in RECIPES if any(rule.linear.rounds for rule in get_recipe(name).rules)]


class Attention(nn.Module):
    """k and v have other sizes than q. `between` is called with their input after q."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.norm, self.q = nn.LayerNorm(32), nn.Linear(32, 32)
        self.k, self.v, self.out = nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(32, 4)
        self.between, self.reentrant = lambda x: None, reentrant

    def _attend(self, x):
        x = self.norm(x)
        q = self.q(x)
        self.between(x)
        k, v = self.k(x).repeat(1, 1, 2), self.v(x).repeat(1, 1, 2)
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float()).to(q.dtype)

    def forward(self, x):
        if self.reentrant is None:
            return self.out(self._attend(x))
        return self.out(checkpoint(self._attend, x, use_reentrant=self.reentrant))


def prepared_model(name, reentrant=None, **options):
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), Attention(reentrant))
    return halfstep.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), name, generator=3, **options)


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 16, 8, generator=generator), torch.randn(2, 16, 4, generator=generator)


def bits(model):
    return [parameter.detach().clone().view(torch.uint8).tolist() for parameter in model.parameters()]


@pytest.fixture
def round_separately(monkeypatch):
    """A function that disables the sharing: every layer rounds its own input."""
    return lambda: monkeypatch.setattr(LastInput, "find", lambda *given: None)


def saved_storages(name):
    """The number of storages of 2 * 16 * 32 elements that a forward saves for backward, the input of q, k and v
    included."""
    model, _, _ = prepared_model(name)
    found = {}

    def pack(x):
        if x.numel() == 2 * 16 * 32:
            found[x.untyped_storage()._cdata] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(data()[0])
    return len(found)


def test_a_shared_input_is_saved_once(round_separately):
    shared = saved_storages("fp8-current")
    round_separately()
    assert saved_storages("fp8-current") == shared + 2


def test_a_shared_input_is_rounded_once(monkeypatch):
    passes = ops.linear.__globals__["Rounded"].forward.__globals__
    rounded, operand = [], passes["operand"]
    monkeypatch.setitem(passes, "operand", lambda x, *given: rounded.append(tuple(x.shape)) or operand(x, *given))
    model, _, _ = prepared_model("fp8-current")
    model(data()[0])
    inputs = [shape for shape in rounded if shape[0] == 32 and shape != (32, 8)]
    weights = [tuple(layer.weight.shape) for layer in (model[2].q, model[2].k, model[2].v, model[2].out)]
    assert sorted(rounded) == sorted([(32, 8), (32, 8), (32, 32), (32, 32), *weights]), inputs


@pytest.mark.parametrize("names", fast_and_every(ROUNDS))
def test_sharing_a_rounded_input_changes_no_bit(names, round_separately):
    ends = {}
    for name in names:
        model, optimizer, scaler = prepared_model(name)
        ends[name] = train(model, optimizer, scaler, 2, data()), bits(model)
    round_separately()
    for name in names:
        model, optimizer, scaler = prepared_model(name)
        assert (train(model, optimizer, scaler, 2, data()), bits(model)) == ends[name], name


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_activation_checkpointing_changes_no_bit(reentrant):
    ends = []
    for how in (None, reentrant):
        model, optimizer, scaler = prepared_model("fp8-current", how)
        ends.append((train(model, optimizer, scaler, 2, data()), bits(model)))
    assert ends[0] == ends[1]


def test_an_input_written_in_place_is_rounded_again(round_separately):
    def write(x):
        with torch.no_grad():
            x.mul_(0.37)

    outputs = []
    for _ in range(2):
        model, _, _ = prepared_model("fp8-current")
        model[2].between = write
        outputs.append(model(data()[0]))
        round_separately()
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("name", "alike"),
    [("fp8-current", True), ("nvfp4", True), ("fp8-delayed", False), ("mxfp4-rht", False), ("bf16-mixed", False)],
)
def test_inputs_with_scaling_states_or_random_signs_are_not_shared(name, alike):
    assert any(rule.linear.rounds_input_alike for rule in get_recipe(name).rules) == alike


def test_a_stochastically_rounded_input_is_not_shared():
    spec = next(rule.linear for rule in get_recipe("fp8-current").rules if rule.linear.rounds)
    noisy = replace(spec.output, lhs=replace(spec.output.lhs, rounding="stochastic"))
    assert spec.rounds_input_alike
    assert not replace(spec, output=noisy).rounds_input_alike


def test_a_rounded_input_is_freed_after_the_call_or_with_its_input():
    model, _, _ = prepared_model("fp8-current")
    following, seen = part_of(model).following, []
    model[2].between = lambda x: seen.append(weakref.ref(following.last_input._last[2][0].values))
    model(data()[0]).sum().backward()
    assert following.last_input._last is None
    gc.collect()
    assert seen[0]() is None
    with halfstep.following(model):
        x = model[2].norm(model[1](model[0](data()[0])))
        model[2].q(x)
        assert following.last_input._last is not None
        del x
        assert following.last_input._last is None


def test_copies_hold_no_rounded_input():
    model, _, _ = prepared_model("fp8-current")
    copies = []

    def copied(x):
        copies.append(copy.deepcopy(part_of(model).following.last_input))
        torch.save(part_of(model).following.last_input, io.BytesIO())

    model[2].between = copied
    model(data()[0])
    assert copies[0]._last is None


def rounding_operators(step):
    """The number of halfstep's operators in the graphs that torch.compile makes of `step`, forward and backward, by
    name."""
    counts = Counter()

    def counted(graph, inputs):
        counts.update(
            str(node.target).rpartition(".")[0] for node in graph.graph.nodes if "halfstep" in str(node.target)
        )
        return make_boxed_func(graph)

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=counted, partition_fn=min_cut_rematerialization_partition)
    torch.compile(step, backend=backend, fullgraph=True)()
    return counts


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_graph_rounds_a_shared_input_once():
    model, _, _ = prepared_model("fp8-current")
    x = data()[0]
    counts = rounding_operators(lambda: model(x))
    inputs, weights = 3, 5  # inputs of the first layer, of q, k and v, and of the last one
    assert counts["halfstep.rounded_scaled"] == inputs + weights, counts


@pytest.mark.parametrize(("rounding", "once"), [("nearest_even", True), ("stochastic", False)])
def test_only_deterministic_quantization_is_shared_in_a_traced_graph(rounding, once):
    x, w = torch.randn(4, 64), torch.ones(4, 64, requires_grad=True)
    quantizer = halfstep.get_quantizer("mxfp8", rounding=rounding)
    ops.quantize(x, quantizer)  # a traced graph cannot take a cached property's lock

    def step():
        one, other = (ops.quantize(x, quantizer).codes.float() for _ in range(2))
        return w * one, w * (one - other)

    counts = rounding_operators(step)
    assert counts["halfstep.quantized"] == once, counts
    assert bool((torch.compile(step, backend="aot_eager")()[1] == 0).all()) == once
