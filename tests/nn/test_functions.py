"""`float32_functions`: listed functions compute in float32 under autocast, on any device, however they are called."""

import warnings
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import halfstep
from halfstep.errors import ModelError, RecipeError
from halfstep.recipe import from_data, get_recipe, to_data
from tiny import assert_same, prepared


LISTS = get_recipe("fp16-lists")
CALLS = {
    "softmax": lambda y: F.softmax(y, -1), "torch.softmax": lambda y: torch.softmax(y, -1),
    "method": lambda y: y.softmax(-1), "log_softmax": lambda y: F.log_softmax(y, -1), "exp": torch.exp,
    "expm1": lambda y: y.expm1(), "pow": lambda y: y**2, "rpow": lambda y: 2**y, "torch.pow": lambda y: torch.pow(y, 3),
    "reciprocal": lambda y: 1 / y, "rsqrt": torch.rsqrt, "log": lambda y: y.log(),
    "sum": lambda y: y.sum(-1), "norm": lambda y: y.norm(dim=-1), "cumsum": lambda y: y.cumsum(-1),
    "var": lambda y: y.var(-1),
    "layer_norm": lambda y: F.layer_norm(y, (8,)), "rms_norm": lambda y: F.rms_norm(y, (8,)),
    "gelu": F.gelu, "softplus": F.softplus, "normalize": lambda y: F.normalize(y, dim=-1),
    "cosine": lambda y: F.cosine_similarity(y, y.flip(0)), "logsumexp": lambda y: y.logsumexp(-1),
    "group_norm": lambda y: F.group_norm(y, 2), "std": lambda y: torch.std(y, -1), "tan": torch.tan,
}  # fmt: skip
OTHERS = {"relu": F.relu, "add": lambda y: y + y, "in place": lambda y: y.clone().exp_(), "mean": lambda y: y.mean(-1)}


class Calls(nn.Module):
    """A layer and a function of its output; both results are kept."""

    def __init__(self, call):
        super().__init__()
        self.inner, self.call, self.kept = nn.Linear(8, 8), call, ()

    def forward(self, x):
        y = self.inner(x)
        z = self.call(y)
        self.kept = (*self.kept, (y.detach(), z.detach()))
        return z


class Checkpointed(nn.Module):
    """A submodule that is recomputed in the backward pass, called as a module or by a method."""

    def __init__(self, options):
        super().__init__()
        self.first, self.part, self.options = nn.Linear(8, 8), Calls(lambda y: F.softmax(y**2, -1)), options

    def method(self, x):
        return self.part(x) + F.softmax(self.first(x), -1)

    def forward(self, x):
        by_method = "context_fn" in self.options or "method" in self.options
        options = {name: option for name, option in self.options.items() if name != "method"}
        run = self.method if by_method else self.part
        return checkpoint(run, self.first(x), **options) if options else run(self.first(x))


def called(call, recipe="fp16-lists"):
    model, _, _ = prepared(recipe, Calls(call))
    model(torch.randn(6, 8))
    return model.kept[0]


@pytest.mark.parametrize("name", CALLS)
def test_a_listed_function_computes_in_float32(name):
    y, z = called(CALLS[name])
    assert (y.dtype, z.dtype) == (torch.float16, torch.float32)
    assert_same(z, CALLS[name](y.float()))


@pytest.mark.parametrize("name", OTHERS)
def test_unlisted_functions_compute_in_their_inputs_dtype(name):
    y, z = called(OTHERS[name])
    assert y.dtype == z.dtype == torch.float16


@pytest.mark.parametrize("name", CALLS)
def test_without_the_list_autocast_on_a_cpu_leaves_functions_in_16_bits(name):
    """The list holds torch's autocast policy for CUDA."""
    _, z = called(CALLS[name], "fp16-mixed")
    if name in ("softmax", "layer_norm", "exp", "sum", "norm", "pow", "gelu"):
        assert z.dtype == torch.float16  # or the test above shows nothing


def test_an_explicit_dtype_is_respected():
    _, z = called(lambda y: F.softmax(y, -1, dtype=torch.float64))
    assert z.dtype == torch.float64
    _, z = called(lambda y: y.sum(-1, dtype=torch.float16))
    assert z.dtype == torch.float16


def gradients(compiled=False, **options):
    torch.manual_seed(0)
    model = Checkpointed(options)
    if "context_fn" in options:
        model.options["context_fn"] = lambda: (nullcontext(), halfstep.following(model))
    model, _, scaler = prepared("fp16-lists", model)
    torch.manual_seed(1)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    scaler.scale(run(torch.randn(6, 8)).square().sum()).backward()
    assert compiled or {z.dtype for _, z in model.part.kept} == {torch.float32}
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_submodule_gives_the_same_gradients(reentrant):
    """The backward pass runs it again, where torch restores autocast only."""
    assert_same(gradients(use_reentrant=reentrant), gradients())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's, as it traces
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_checkpointed_submodule_gives_the_same_gradients():
    """torch traces the code of a checkpoint without the modes around it."""
    torch._dynamo.reset()
    assert_same(gradients(compiled=True, use_reentrant=False), gradients())


def test_a_checkpointed_method_needs_the_following_context():
    with pytest.raises(CheckpointError, match="different metadata"):
        gradients(use_reentrant=False, method=True)
    assert_same(gradients(use_reentrant=False, context_fn=None), gradients(method=True))


def test_a_method_recomputed_by_reentrant_checkpointing_is_refused():
    """torch restores autocast only and compares nothing, so the gradients would silently be fp16's."""
    with pytest.raises(ModelError, match=r"softmax is called under torch\.utils\.checkpoint"):
        gradients(use_reentrant=True, method=True)
    model, _, _ = prepared("fp16-lists", Checkpointed({"use_reentrant": True, "method": True}))
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):  # torch warns that checkpoints keep nothing
        model(torch.randn(6, 8))  # nothing is recomputed


def test_submodules_and_code_in_the_following_context_use_the_list():
    model, _, _ = prepared("fp16-lists", nn.ModuleList([Calls(torch.exp), nn.Linear(8, 8)]))
    x = torch.randn(6, 8)
    model[0](x)
    assert model[0].kept[0][1].dtype == torch.float32
    with halfstep.following(model):
        y = model[1](x)
        assert (y.dtype, y.exp().dtype) == (torch.float16, torch.float32)
    assert y.exp().dtype == torch.float16
    halfstep.revert(model)
    assert model[0](x).dtype == torch.float32


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"float32_functions": ("sofmax",)}, "recipe 'made': unknown function of torch 'sofmax'; nearest: softmax"),
        ({"compute": "fp32", "loss_scale": None}, "float32_functions with compute = 'fp32', where all functions are"),
    ],
)
def test_invalid_lists_are_refused(fields, words):
    with pytest.raises(RecipeError, match=words):
        replace(LISTS, name="made", **fields)


def test_the_list_round_trips_through_data():
    assert from_data(to_data(LISTS), get_recipe).float32_functions == LISTS.float32_functions
