"""torch's tracers: a traced program rounds like the model for any batch size, or the tracing is refused."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

import halfstep
from families import slow_unless
from halfstep import ops
from halfstep.errors import RecipeError
from halfstep.recipe import get_recipe
from ranks import on_ranks
from tiny import EVERY, RECIPES, assert_same, descend, grads, model_for, prepared


ROUNDING = [name for name in RECIPES if any(rule.linear.rounds for rule in get_recipe(name).rules)]
TRACERS = {
    "torch.jit.trace": lambda model, x: torch.jit.trace(model, x, check_trace=False),
    r"torch\.fx \(symbolic_trace, make_fx\)": lambda model, x: torch.fx.symbolic_trace(model),
    r"torch\.fx": lambda model, x: make_fx(model)(x),
}


class Net(nn.Module):
    """Two layers with a GELU between them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's, as it traces
def test_a_compiled_model_trains_like_eager():
    """Dynamo starts at each of its frames."""
    found, x = [], torch.randn(4, 16)
    for compiled in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, optimizer, scaler = prepared("fp8-delayed", Net())
        called = torch.compile(model, backend="eager") if compiled else model
        losses = descend(lambda called=called: called(x).square().mean(), optimizer, scaler, 2)
        found.append((losses, [parameter.detach() for parameter in model.parameters()]))
    assert_same(*found)


@torch.no_grad()
def test_a_compiled_function_may_call_a_compiled_forward():
    """As Lightning compiles a module: its methods, one of which calls another."""
    model, x = prepared("fp32", Net())[0], torch.randn(4, 16)
    expected = model(x)
    model.forward = torch.compile(model.forward, backend="eager")
    assert_same(torch.compile(lambda x: model(x).square(), backend="eager")(x), expected.square())


def small_net():
    torch.manual_seed(0)
    return Net().eval(), torch.randn(96, 16)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("recipe", slow_unless({"mxfp8"}.__contains__, ROUNDING))
def test_tracers_that_would_not_round_are_refused(recipe):
    model, x = small_net()
    traced = torch.fx.symbolic_trace(copy.deepcopy(model))
    halfstep.apply(model, recipe)
    for name, trace in TRACERS.items():
        with torch.no_grad(), pytest.raises(RecipeError, match=rf"Net follows recipe '{recipe}', but {name}"):
            trace(model, x)
    halfstep.apply(traced, recipe)  # as the error says
    with torch.no_grad():
        assert torch.equal(traced(x), model(x))


@pytest.mark.parametrize("layer", [lambda: nn.Linear(16, 8), lambda: nn.LSTM(16, 8)])
def test_symbolic_trace_of_a_root_layer_under_autocast_is_refused(layer):
    """torch.fx does not trace into layers within a model, but traces into a layer that is the model."""
    halfstep.apply(model := layer(), "fp16-mixed")
    with pytest.raises(RecipeError, match=r"follows recipe 'fp16-mixed', but torch\.fx \(symbolic_trace, make_fx\)"):
        torch.fx.symbolic_trace(model)
    halfstep.apply(inside := nn.Sequential(layer()), "fp16-mixed")
    assert [node.op for node in torch.fx.symbolic_trace(inside).graph.nodes] == ["placeholder", "call_module", "output"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_trace_of_a_recipe_without_rounding_equals_the_model():
    model, x = small_net()
    halfstep.apply(model, "bf16-mixed")
    with torch.no_grad():
        assert torch.equal(torch.jit.trace(model, x, check_trace=False)(x), model(x))


@pytest.mark.parametrize("recipe", slow_unless({"mxfp8"}.__contains__, ROUNDING))
def test_export_with_a_dynamic_batch_equals_the_model(recipe):
    model, x = small_net()
    halfstep.apply(model, recipe)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shapes = ({0: torch.export.Dim("batch", min=2)},)
        program = torch.export.export(model, (x[:40],), dynamic_shapes=shapes).module()
        for rows in (96, 40, 33):
            assert torch.equal(program(x[:rows]), model(x[:rows]))
        few, expected = program(x[:5]), model(x[:5])  # eager matmuls of few rows sum in another order
        assert float((few - expected).norm()) <= 0.05 * float(expected.norm())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, as it traces
@pytest.mark.parametrize("recipe", EVERY)
def test_compiling_with_dynamic_shapes_equals_eager_without_retracing(recipe):
    torch._dynamo.reset()
    halfstep.apply(model := model_for(recipe), recipe)
    twin, graphs = copy.deepcopy(model), CompileCounterWithBackend("aot_eager")
    compiled, traced = torch.compile(twin, backend=graphs, fullgraph=True, dynamic=True), []
    for sizes in ((4, 6), (3, 6), (4, 9)):  # a smaller last batch, then longer sequences
        x = torch.randn(*sizes, 8)
        y, expected = compiled(x), model(x)
        assert torch.equal(y, expected)
        for loss in (y.square().mean(), expected.square().mean()):
            loss.backward()
        assert_same(grads(twin), grads(model))
        for each in (twin, model):
            halfstep.advance(each)
        traced.append(graphs.frame_count)
    assert traced[1:] == traced[:-1]


def under_ddp(rank, recipe, backend="aot_eager"):
    """A rank's trained weights: uncompiled, then compiled in several graphs and in one; by Inductor (slow to compile)
    in one only."""
    ways = [(False, False), (True, True), (True, False)] if backend == "aot_eager" else [(False, False), (True, False)]
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 1024
    found = []
    for compiles, splits in ways:
        torch._dynamo.reset()
        torch._dynamo.config.optimize_ddp = splits
        torch.manual_seed(0)
        model, optimizer, scaler = prepared(recipe, Net())
        graphs = CompileCounterWithBackend(backend)
        wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=2**-10)
        called = torch.compile(wrapped, backend=graphs) if compiles else wrapped
        x = torch.randn(12, 16, generator=torch.Generator().manual_seed(rank))
        descend(lambda called=called, x=x: called(x).square().mean(), optimizer, scaler, 3)
        assert bool(graphs.frame_count) == compiles
        found.append([ops.values_of(p.detach()).clone() for p in model.parameters()])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16-mixed", "fp8-delayed", "coat", "nvfp4", "fp8lm-o2", "galore"])
def test_compiled_ddp_trains_like_uncompiled(recipe, tmp_path):
    for expected, *others in zip(*(run for rank in on_ranks(under_ddp, tmp_path, recipe) for run in rank), strict=True):
        assert all(torch.equal(expected, other) for other in others)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8lm-o2", "nvfp4", "galore"])
def test_ddp_compiled_by_inductor_gives_equal_ranks_near_eager(recipe, tmp_path):
    (eager, first), (_, second) = on_ranks(under_ddp, tmp_path, recipe, "inductor")
    for expected, one, other in zip(eager, first, second, strict=True):
        assert torch.equal(one, other)
        assert float((one - expected).norm()) <= 0.02 * float(expected.norm())
