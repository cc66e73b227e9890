"""Descriptions, bytes per parameter and validation of recipes."""

import copy
import pickle
import re
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace

import pytest

from families import for_each
from halfstep import formats, get_quantizer, get_recipe, list_recipes
from halfstep.errors import HalfstepError, QuantizationError, RecipeError
from halfstep.formats import Format
from halfstep.quant import Quantizer
from halfstep.recipe import Codes, LinearSpec, LossScale, Matmul, Multiplier, Recipe, Rule, get_storage, linear_spec
from tiny import ALL


# weights, gradients, master, states, and the copies of a pass: bytes per parameter with Adam
BYTES = {
    "fp32": (4, 4, 0, 8, 0),
    "bf16-mixed": (4, 4, 0, 8, 2),
    "fp16-mixed": (4, 4, 0, 8, 2),
    "fp16-mixed-unscaled": (4, 4, 0, 8, 2),
    "unit-fp16": (4, 4, 0, 8, 2),
    "unit-fp8": (4, 4, 0, 8, 2),
    "unit-fp8-e4m3": (4, 4, 0, 8, 2),
    "unit-mxfp8": (4, 4, 0, 8, 2),
    "unit-nvfp4": (4, 4, 0, 8, 2),
    "bf16-master": (2, 2, 4, 8, 0),
    "fp16-master": (2, 2, 4, 8, 0),
    "bf16-nomaster": (2, 2, 0, 8, 0),
    "fp16-nomaster": (2, 2, 0, 8, 0),
    "bf16-stochastic": (2, 2, 0, 8, 0),
    "int8-weight-only": (2, 2, 0, 8, 0),
    "nf4": (2, 2, 0, 8, 0),
    "nf4-double": (2, 2, 0, 8, 0),
    "bf16-6byte": (2, 2, 0, 2.03125, 0),
    "bf16-7byte": (2, 2, 1, 2.03125, 0),
    "bf16-pure": (2, 2, 0, 4, 0),
    "bf16-fp32grad": (2, 4, 0, 8, 0),
    "bf16-megatron": (2, 4, 4, 8, 0),
    "bf16-split": (2, 2, 2, 8, 0),
    "bf16-kahan": (2, 2, 2, 8, 0),
    "bf16-collage-light": (2, 2, 2, 4, 0),
    "bf16-collage-plus": (2, 2, 2, 6, 0),
    "bf16-truncate": (4, 4, 0, 8, 2),
    "fp16-accumulate": (4, 4, 0, 8, 2),
    "adamw-8bit": (4, 4, 0, 2.03125, 2),
    "galore": (4, 4, 0, 8, 2),
    "galore-8bit": (4, 4, 0, 2.03125, 2),
    "galore-bf16": (2, 2, 0, 6, 0),
    "fp8-adam": (4, 4, 0, 2.03125, 2),
    "coat": (4, 4, 0, 2.1875, 2),
    "bf16-accumulate": (4, 4, 0, 8, 2),
    "fp16-static": (4, 4, 0, 8, 2),
    "fp16-lists": (4, 4, 0, 8, 2),
    "fp16-pure": (2, 2, 0, 4, 0),
    "fp8-delayed": (4, 4, 0, 8, 2),
    "fp8-delayed-megatron": (4, 4, 0, 8, 2),
    "fp8-smooth-swiglu": (4, 4, 0, 8, 2),
    "fp8-fishman": (4, 4, 0, 2, 2),
    "fp8-current": (4, 4, 0, 8, 2),
    "fp4-zhou-dgrad-fp8": (4, 4, 0, 8, 2),
    "fp4-zhou-dgrad-bf16": (4, 4, 0, 8, 2),
    "fp8-rowwise": (4, 4, 0, 8, 2),
    "fp8-rowwise-gw-hp": (4, 4, 0, 8, 2),
    "mxfp8": (4, 4, 0, 8, 2),
    "mxfp8-floor": (4, 4, 0, 8, 2),
    "mxfp4": (4, 4, 0, 8, 2),
    "mxfp4-rht": (4, 4, 0, 8, 2),
    "nvfp4": (4, 4, 0, 8, 2),
    "fp8-block": (4, 4, 0, 8, 2),
    "umup-fp8": (4, 4, 0, 8, 2),
    "munit-fp8": (4, 4, 0, 8, 2),
    "fp8-amax": (2, 2, 0, 8, 0),
    "fp8-cscale": (2, 2, 0, 8, 0),
    "fp4-wang": (2, 1, 0, 3, 2),
    "fp4-wang-msamp": (4, 4, 0, 8, 2),
    "fp8lm-o1": (2, 1, 0, 8, 2),
    "fp8lm-o2": (2, 1, 0, 3, 2),
    "fp8lm-o3": (1, 1, 2, 3, 2),
}
every_recipe = for_each("name", ALL)


def made(**fields):
    return Recipe("made", "a summary", "a source", **fields)


def test_the_table_lists_every_recipe():
    assert set(ALL) == set(BYTES)


@every_recipe
def test_bytes_per_parameter(name):
    size = get_recipe(name).bytes_per_parameter()
    assert (size.weights, size.grads, size.master, size.states, size.transient) == BYTES[name]
    assert size.total == sum(BYTES[name][:4])
    assert f"= {size.total:g}" in str(size)
    assert get_recipe(name).bytes_per_parameter(()).states == 0


def test_recipes_are_listed_from_fp32_down_to_the_smallest():
    totals = [get_recipe(name).bytes_per_parameter().total for name in list_recipes()]
    assert list_recipes()[0] == "fp32"
    assert totals[1:] == sorted(totals[1:], reverse=True)


@every_recipe
def test_describe_covers_every_part_of_a_recipe(name):
    recipe = get_recipe(name)
    text = re.sub(r"\n {15}", " ", recipe.describe())  # wrapped lines joined
    for words in (name, recipe.source, "weights", "moments", "bytes/param", "= ", "loss scale"):
        assert words in text
    assert ("autocast to" in text) == (recipe.compute != "fp32")
    assert ("update rounded stochastic" in text) == (recipe.update_rounding == "stochastic")
    assert max(map(len, recipe.describe().splitlines())) < 140


@every_recipe
def test_recipes_are_frozen_picklable_and_accepted_by_get_recipe(name):
    recipe = get_recipe(name)
    assert get_recipe(recipe) is recipe
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert recipe.grad_format == (recipe.grads or recipe.weights)
    with pytest.raises(FrozenInstanceError):
        recipe.weights = "fp16"


@pytest.mark.parametrize("name", ["bf16-mixd", "x" * 300])
def test_an_unknown_name_raises_and_lists_the_recipes(name):
    with pytest.raises(
        RecipeError,
        match=r"unknown recipe .*Known: O0, O1, O2, O3, adamw-8bit, bf16-6byte, bf16-7byte, bf16-accumulate",
    ):
        get_recipe(name)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"weights": "e4m3fn"}, RecipeError, "'made': weights = 'e4m3fn'; tensors are stored as fp32, bf16, fp16"),
        ({"moments": "fp31"}, RecipeError, "'made': moments: 'fp31': unknown format 'fp31'; nearest: "),
        ({"compute": "float16"}, RecipeError, "compute = 'float16'"),
        (
            {"master": "x", "weights": "bf16"},
            RecipeError,
            "unknown master 'x'.*Known: collage, fp32, kahan, residue, split",
        ),
        ({"master": "bf16", "weights": "bf16"}, RecipeError, "unknown master 'bf16'"),
        ({"master": "split", "weights": "fp16"}, RecipeError, "'split' stands beside bf16 weights, not fp16"),
        ({"grads": "bf16", "weights": "bf16"}, RecipeError, "grads = 'bf16' is the weights' format; leave it out"),
        ({"grads": "fp8", "weights": "bf16"}, RecipeError, "grads = 'fp8'; tensors are stored as"),
        ({"master": "fp32"}, RecipeError, "fp32 weights are their own master; set master to None"),
        ({"smooth_glu": "tokens"}, RecipeError, "unknown smooth_glu 'tokens'; nearest: token. Known: channel, token"),
        ({"update_rounding": "stochastic"}, RecipeError, "with fp32 weights.*store the weights in bf16"),
        ({"update_rounding": "upward", "weights": "bf16"}, QuantizationError, "unknown rounding 'upward'; nearest: up"),
    ],
)
def test_invalid_recipes_raise(fields, error, words):
    with pytest.raises(error, match=words):
        made(**fields)
    with pytest.raises(error, match=words):
        replace(get_recipe("fp32"), **fields | {"name": "made"})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"weights": "bf16"}, "codes weights = bf16: expected codes, such as .* is the recipe's own weights"),
        ({"grads": "fp32"}, "codes grads = fp32: expected codes"),
        ({"master": "mxfp8_e4m3"}, "codes master = float8_e4m3fn .* is how the weights are kept; leave it out"),
    ],
)
def test_invalid_codes_raise(fields, words):
    with pytest.raises(RecipeError, match=words):
        Codes(**{"weights": get_storage("mxfp8_e4m3")} | {role: get_storage(kind) for role, kind in fields.items()})


def test_codes_with_a_residual_raise():
    with pytest.raises(RecipeError, match=r"codes weights = .* with a residual: expected codes"):
        Codes(get_storage("mxfp8_e4m3", residual=True))


@pytest.mark.parametrize("fields", [{"rules": ()}, {"weights": "bf16"}])
def test_codes_without_rules_or_fp32_weights_raise(fields):
    with pytest.raises(
        RecipeError, match=r"codes = .* stores the weights that rules round, beside others in fp32; found"
    ):
        replace(get_recipe("fp8lm-o1"), **fields)


@pytest.mark.parametrize("name", ["fp8lm-o1", "fp8lm-o2", "fp8lm-o3"])
def test_fp8lm_describes_its_storage_and_its_all_reduce(name):
    text = re.sub(r"\n {15}", " ", get_recipe(name).describe())
    half, eight = (f"{format} (rceil, whole tensor)" for format in ("fp16", "float8_e4m3fn"))
    kept = f"{eight}; gradients {eight}, master {half}" if name == "fp8lm-o3" else f"{half}; gradients {eight}"
    assert f"weights that rules round: {kept}" in text
    assert "halfstep.distributed.compress(ddp, halfstep.recipe.FP8_LM)" in text
    moments = f"exp_avg_sq {half}, exp_avg {eight}"
    assert f"moments      {'fp32' if name == 'fp8lm-o1' else moments}\n" in text


def test_the_description_shows_rules_and_scales():
    fp8 = Quantizer(formats.get("e4m3fn"))
    rule = Rule("*.mlp", LinearSpec(output=Matmul(fp8, fp8)))
    text = made(rules=(rule,), loss_scale=LossScale(init=128.0, dynamic=False)).describe()
    assert "linear '*.mlp' output float8_e4m3fn x float8_e4m3fn, grad_input - x -, grad_weight - x -" in text
    assert "constant 128" in text
    assert "dynamic from 65536" in made(loss_scale=LossScale()).describe()


MEANT = {"bf16": "bf16-mixed", "bfloat16": "bf16-mixed", "FP16": "fp16-mixed", "half": "fp16-mixed"}
MEANT |= {"fp8": "fp8-current", "float8": "fp8-current", "fp4": "nvfp4", "float32": "fp32"}


@for_each("asked, meant", MEANT.items())
def test_a_format_name_given_as_a_recipe_suggests_a_recipe(asked, meant):
    with pytest.raises(RecipeError, match=f"unknown recipe '{asked}'; nearest: {meant}[,.]"):
        get_recipe(asked)
    assert meant in list_recipes()


def numeric_fields(record, found):
    """The records within a recipe that have a numeric field, by class and field."""
    if isinstance(record, tuple):
        for part in record:
            numeric_fields(part, found)
    elif is_dataclass(record) and not isinstance(record, (Format, type)):
        for field in fields(record):
            value = getattr(record, field.name)
            if type(value) in (int, float) or (value is None and re.search("int|float", str(field.type))):
                found.setdefault((type(record).__name__, field.name), record)
            numeric_fields(value, found)
    return found


MULTIPLIED = Matmul(multiplier=Multiplier())
WITH_NUMBERS = (
    *map(get_recipe, list_recipes()),
    Recipe("scaled", "", "", loss_scale=LossScale()),
    Recipe("multiplied", "", "", rules=(Rule("*", LinearSpec(MULTIPLIED, MULTIPLIED, MULTIPLIED)),)),
)
NUMBERS = numeric_fields(WITH_NUMBERS, {})


@for_each("number", [float("nan"), float("inf"), float("-inf"), 1e300, -1e300])
def test_nan_infinite_and_huge_numbers_raise_in_every_numeric_field(number):
    assert {("LossScale", "init"), ("Delayed", "margin"), ("Storage", "smallest"), ("Multiplier", "rows")} <= set(
        NUMBERS
    )
    for (kind, name), record in NUMBERS.items():
        with pytest.raises(HalfstepError):
            pytest.fail(f"{kind}.{name} = {replace(record, **{name: number})}")


@pytest.mark.parametrize(
    "wrong",
    [{"init": 0}, {"init": -1.0}, {"init": True}, {"growth_interval": 0}, {"growth_interval": 1.5}, {"hysteresis": 0}],
)
def test_invalid_loss_scales_raise(wrong):
    (name,) = wrong
    with pytest.raises(RecipeError, match=f"loss_scale {name} = {next(iter(wrong.values()))}; expected a"):
        LossScale(**wrong)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda spec: pickle.loads(pickle.dumps(spec))], ids=["copy", "pickle"]
)
def test_copies_of_a_spec_do_not_copy_its_cache(copied):
    """The cache holds launches of GPU kernels, which no pickle takes; `torch.save(model)` pickles the spec."""
    spec = next(rule.linear for rule in get_recipe("fp8-current").rules if rule.linear.rounds)
    spec = replace(spec)
    spec.known["sizes"] = lambda: None
    other = copied(spec)
    assert other == spec
    assert other.rounds
    assert not other.known
    assert spec.known


def test_linear_spec_computes_cached_properties_of_equal_quantizers():
    """Dynamo cannot trace a cached property that takes its lock (Python 3.11), and equal quantizers are two objects."""
    one, other = get_quantizer("mxfp8_e4m3"), get_quantizer("mxfp8_e4m3")
    assert one == other
    linear_spec(one, other)
    assert vars(other).keys() == vars(one).keys() > {"plain", "down"}
