"""Delayed scaling on a GPU: an amax is computed only if the state has no scale, and all states advance at once."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from fake_cuda import Reads, backward, fake_cuda
from halfstep.kernels import operator, operators
from halfstep.nn.scaling import Scalings
from halfstep.ops import operand
from halfstep.quant.scaling.delayed import Delayed
from tiny import Gated, assert_same, batch, model_for, mostly_slow, prepared


DELAYED = ["fp8-delayed", "fp8-delayed-megatron", "fp8-smooth-swiglu", "fp8lm-o2", "fp8-fishman"]


def trained(recipe, inputs):
    """The scaling states after each step, and the weights after the last."""
    model, optimizer, scaler = prepared(recipe, model_for(recipe))
    states = []
    for x, y in inputs:
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        states += Scalings(model).state_dict().values()
    return [*states, *model.parameters()]


def as_on_a_gpu(patch):
    """Patch delayed scaling to act as on a GPU: a state's scale is unknown to the host, and an amax is 0 if it has
    one."""
    seen, whole = [], operand.amax_of

    def amax_of(x, unless=None):
        asked = unless is None or bool(unless == 0)
        seen.append(asked)
        return whole(x) if asked else torch.zeros(())

    patch.setattr(Delayed, "waits", lambda rule, state: rule.warmup > 0)
    patch.setattr(operand, "has_memory", lambda x: False)
    patch.setattr(operand, "amax_of", amax_of)
    return seen


@pytest.mark.quick("fp8-delayed")
@pytest.mark.parametrize("recipe", mostly_slow(DELAYED))
def test_amaxes_recorded_while_rounding_equal_amaxes_computed_before(monkeypatch, recipe):
    """One step has a NaN input, another an infinity."""
    inputs = [batch(seed) for seed in range(24 if recipe == "fp8lm-o2" else 5)]  # its scales begin after 16 steps
    inputs[2][0][3, 1] = torch.inf
    inputs[3][0][5, 2] = torch.nan
    expected = trained(recipe, inputs)
    with monkeypatch.context() as patch:
        seen = as_on_a_gpu(patch)
        found = trained(recipe, inputs)
    assert_same(found, expected)
    assert True in seen  # computed just in time
    assert False in seen  # left out, since the state has a scale


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-smooth-swiglu"])
def test_a_gpu_computes_an_amax_only_if_the_state_has_no_scale(monkeypatch, recipe):
    """Each amax gets its operand's scale as the condition, and the kernel that rounds records the amax in the state."""
    asked, raised = [], []

    def run(x, unless=None, found=None):
        asked.append(unless)
        return torch.zeros((), device=x.device)

    def round_into(x, factor, out, format, rounding, seed, amax=None):
        raised.append(amax)

    with fake_cuda(), Reads():
        with torch.device("cuda"):
            model = model_for(recipe)
        model, _, _ = prepared(recipe, model)
        states = [buffer for name, buffer in model.named_buffers() if "scaling" in name]
        monkeypatch.setattr(operator, "plain", lambda x: True)
        monkeypatch.setattr(operator.gpu_amax, "run", run)
        monkeypatch.setattr(operators, "ROUND_SCALED", round_into)
        backward(model(torch.empty(12, 8, device="cuda")).sum())
    assert len(asked) == len(raised) == len(states)
    for state in states:
        assert sum(unless._base is state and unless.storage_offset() == 0 for unless in asked) == 1
        assert sum(amax._base is state and amax.storage_offset() == 1 for amax in raised) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_graph_computes_an_amax_only_if_the_state_has_no_scale():
    """Each operator that rounds with a state's scale records the amax, one conditional amax operator precedes it, and
    no other operator computes an operand's amax."""
    graphs = []

    def kept(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    with fake_cuda():
        with torch.device("cuda"):
            model = model_for("fp8-delayed")
        model, _, _ = prepared("fp8-delayed", model)
        states = [buffer for name, buffer in model.named_buffers() if "scaling" in name]
        torch.compile(model, fullgraph=True, backend=kept)(torch.empty(12, 8, device="cuda"))
    nodes = [node for module in graphs[0].modules() if hasattr(module, "graph") for node in module.graph.nodes]
    called = [str(node.target) for node in nodes]
    rounded = [node for node in nodes if "halfstep.round_scaled" in str(node.target)]
    assert sum("halfstep.amax" in name for name in called) == len(rounded) == len(states)
    assert all(node.args[-1] is not None for node in rounded)
    assert not [name for name in called if "aminmax" in name or "maximum" in name]


class Launches(TorchDispatchMode):
    """Counts kernel launches: aten operators that are no views."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view and func.namespace == "aten"
        return func(*args, **(kwargs or {}))


@pytest.mark.quick("fp8lm-o2")
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8lm-o2", "fp8-fishman"])
def test_the_number_of_launches_to_advance_states_does_not_depend_on_layers(recipe):
    counts = []
    for layers in (1, 3):
        with fake_cuda():
            with torch.device("cuda"):
                model = nn.Sequential(*[Gated() for _ in range(layers)])
            halfstep.apply(model, recipe)
            with Launches() as launches:
                Scalings(model).advance(torch.zeros((), device="cuda"))
            counts.append(launches.count)
    assert counts[0] == counts[1]
