"""What `apply`, `revert` and `prepare` refuse, with advice; a refused call changes nothing."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import halfstep
from families import for_each
from halfstep import formats
from halfstep.errors import ModelError, OptimizerError, RecipeError
from halfstep.quant import Quantizer
from halfstep.recipe import LinearSpec, Matmul, Recipe, Rule
from tiny import RECIPES, adamw, assert_same, copied, mlp


FP8 = Quantizer(formats.get("e4m3fn"))
SPEC = LinearSpec(output=Matmul(FP8, FP8))


def recipe(*rules):
    return Recipe("made", "", "", weights="bf16", master="fp32", compute="bf16", rules=rules)


def snapshot(model):
    """All parts of a model that a refused call could have changed."""
    return (
        [type(m) for m in model.modules()],
        [set(vars(m)) for m in model.modules()],
        [(id(p), p.dtype, p.grad) for p in model.parameters()],
    )


def assert_refused(model, error, words, name="bf16-master", **options):
    before, values = snapshot(model), copied(model.state_dict())
    with pytest.raises(error, match=words):
        halfstep.apply(model, name, **options)
    if list(model.parameters()):
        with pytest.raises(error, match=words):
            halfstep.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe=name, **options)
    assert snapshot(model) == before
    assert_same(dict(model.state_dict()), dict(values))


@pytest.mark.parametrize("name", RECIPES)
def test_a_model_that_already_follows_a_recipe_is_refused(name):
    model = mlp()
    halfstep.apply(model, name)
    assert_refused(model, RecipeError, f"Sequential: it already follows '{name}'; halfstep.revert it first", name)


def test_a_model_with_a_submodule_that_follows_a_recipe_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), mlp())
    halfstep.apply(model[1], "bf16-mixed")
    assert_refused(model, RecipeError, "its part '1' already follows 'bf16-mixed'")


def test_a_model_sharing_a_submodule_with_a_prepared_one_is_refused():
    """As two networks that share an encoder. They can be one model with two heads."""
    shared = mlp()
    halfstep.apply(nn.Sequential(shared, nn.Linear(4, 4)), "bf16-mixed")
    words = r"its part '0' follows the recipe of another model that it belongs to; halfstep.revert that one first"
    assert_refused(nn.Sequential(shared, nn.Linear(4, 2)), RecipeError, words)


def test_a_model_without_parameters_is_refused():
    assert_refused(nn.Sequential(nn.ReLU()), ModelError, "Sequential has no parameters; there is nothing to store")


def test_float64_parameters_are_refused():
    model = mlp()
    model[3].double()
    assert_refused(model, ModelError, r"3.weight is float64, which no recipe stores; call model.float\(\) first")


def test_complex_parameters_are_refused():
    model = mlp()
    model.register_parameter("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    assert_refused(model, ModelError, r"phase is torch.complex64, and recipes store and step on real numbers; keep")


LAZY = {
    "weight of a LazyLinear": partial(nn.LazyLinear, 2),
    "running_mean of a LazyBatchNorm1d": partial(nn.LazyBatchNorm1d, affine=False),
}
VERBS = {
    "apply": lambda model, name: halfstep.apply(model, name),
    "prepare": lambda model, name: halfstep.prepare(model, torch.optim.AdamW(model.parameters()), name),
    "quantize_model": lambda model, name: halfstep.quantize_model(model, "fp8-current"),
    "unit_scale": lambda model, name: halfstep.unit_scale(model, torch.ones(2, 8)),
    "probe_model": lambda model, name: halfstep.probe_model(model, data=[torch.ones(2, 8)]),
    "scales": lambda model, name: halfstep.probe.scales(model, [torch.ones(2, 8)]),
    "audit": lambda model, name: halfstep.audit(model),
}


@for_each("verb", VERBS)
@for_each("name", ["fp32", "fp16-mixed", "bf16-stochastic", "fp8-delayed", "fp8lm-o2", "nvfp4"])
def test_a_lazy_model_before_its_first_forward_is_refused(name, verb):
    for words, layer in LAZY.items():
        model = nn.Sequential(nn.Linear(8, 4), layer())
        before = snapshot(model)
        with pytest.raises(ModelError, match=f"Sequential: 1.{words} has no shape before the first forward"):
            VERBS[verb](model, name)
        assert snapshot(model) == before


def test_a_lazy_model_after_its_first_forward_is_accepted():
    model = nn.Sequential(nn.Linear(8, 4), nn.LazyLinear(2))
    model(torch.ones(2, 8))
    halfstep.apply(model, "fp8-current")
    assert model(torch.ones(2, 8)).isfinite().all()


def test_a_compiled_model_is_refused():
    model = torch.compile(mlp(), backend="eager")
    assert_refused(model, ModelError, "wraps a model; apply the recipe to the model first")


def test_a_model_in_ddp_is_refused(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(mlp())
        assert_refused(model, ModelError, "DistributedDataParallel wraps a model; apply the recipe to the model first")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("path", "words"),
    [("head", r"rule 'head' matched no layer whose .* Nearest: [03], [03]"), ("0.*", r"rule '0.\*' matched no")],
)
def test_a_rule_that_matches_no_layer_is_refused_unless_optional(path, words):
    assert_refused(mlp(), RecipeError, words, recipe(Rule(path, SPEC)))
    halfstep.apply(mlp(), recipe(Rule(path, SPEC, optional=True)))


def test_a_rule_on_a_model_without_matmuls_is_refused():
    assert_refused(nn.LayerNorm(2), RecipeError, "the model has none .linear, conv", recipe(Rule("*", SPEC)))


def test_a_filter_that_selects_no_layer_is_refused():
    words = "module_filter selects none of the 2 layers its rules match"
    assert_refused(mlp(), RecipeError, words, recipe(Rule("*", SPEC)), module_filter=lambda module, path: False)


def test_a_filter_that_is_not_callable_is_refused():
    words = r"module_filter = 'mlp' found; expected a function of a module and its path"
    assert_refused(mlp(), RecipeError, words, "bf16-mixed", module_filter="mlp")


@pytest.mark.parametrize(
    ("name", "words"), [("bf16-mixd", "unknown recipe 'bf16-mixd'; nearest: bf16-mixed"), ("x", "Known: .*fp32")]
)
def test_an_unknown_recipe_is_refused(name, words):
    assert_refused(mlp(), RecipeError, words, name)


def test_an_optimizer_of_another_model_is_refused():
    model, other = mlp(), mlp()
    before = snapshot(model)
    with pytest.raises(OptimizerError, match=r"holds none of the model's parameters; build it over model.parameters"):
        halfstep.prepare(model, adamw(other), recipe="bf16-master")
    assert snapshot(model) == before


@pytest.mark.parametrize("verb", [halfstep.revert, halfstep.advance])
def test_revert_and_advance_of_a_model_without_a_recipe_are_refused(verb):
    with pytest.raises(RecipeError, match=r"this Sequential follows no recipe; call halfstep.apply"):
        verb(mlp())


@pytest.mark.parametrize("verb", [halfstep.revert, halfstep.advance])
def test_revert_and_advance_accept_a_wrapper_of_one_prepared_model(verb):
    wrapped = torch.compile(mlp(), backend="eager")
    halfstep.apply(wrapped._orig_mod, "fp32")
    verb(wrapped)


@pytest.mark.parametrize("verb", [halfstep.revert, halfstep.advance])
def test_revert_and_advance_of_a_wrapper_of_two_models_are_refused(verb):
    pair = torch.nn.ModuleList([mlp(), mlp()])
    for model in pair:
        halfstep.apply(model, "fp32")
    with pytest.raises(RecipeError, match="2 parts of this ModuleList follow a recipe, each its own: 0, 1; expected"):
        verb(pair)


@for_each("name", ["fp8-delayed", "fp8-block", "nvfp4", "coat", "fp8lm-o2", "fp4-wang"])
def test_batched_gradients_through_rounded_matmuls_are_refused(name):
    model, x = mlp(), torch.ones(2, 8, requires_grad=True)
    halfstep.apply(model, name)
    with pytest.raises(RecipeError, match=r"is_grads_batched=True .* goes over a matmul whose operands are rounded"):
        torch.autograd.grad(model(x), x, torch.ones(3, 2, 4), is_grads_batched=True)
