"""Recipes with stages, as records, as text and as TOML."""

import itertools
import pickle
import re
from dataclasses import replace

import pytest

from halfstep import get_recipe, list_recipes
from halfstep.errors import RecipeError
from halfstep.recipe import COAT, FP8, LossScale, Stage, chain, from_data, to_data
from halfstep.recipe.data import is_name, to_toml
from halfstep.recipe.stages import ALIKE, starts


TEXTS = {
    "fp8-current until 90%, then bf16-mixed": ([0.9], ["fp8-current", "bf16-mixed"]),
    "fp8-current until 90% then bf16-mixed": ([0.9], ["fp8-current", "bf16-mixed"]),
    "  mxfp8  until  step  900 ,  then   fp32 ": ([900], ["mxfp8", "fp32"]),
    "mxfp8 until 12.5% then fp8-delayed until 50%, then fp32": ([0.125, 0.5], ["mxfp8", "fp8-delayed", "fp32"]),
}


@pytest.mark.parametrize(("text", "said"), TEXTS.items())
def test_text_is_parsed_into_stages(text, said):
    begins, names = said
    recipe, recipes = get_recipe(text), [get_recipe(name) for name in names]
    assert recipe == chain(recipes[0], *map(Stage, recipes[1:], begins))
    assert [stage.start for stage in recipe.stages] == begins
    assert recipe.by_stage[1:] == tuple(recipes[1:])
    assert replace(recipe, stages=()) == recipe.by_stage[0]
    assert recipe.rules == recipes[0].rules
    assert is_name(recipe.name)
    assert get_recipe(recipe) is recipe
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert from_data(to_data(recipe), get_recipe) == recipe


def test_the_name_of_a_staged_recipe_lists_its_stages():
    assert get_recipe("fp8-current until 90%, then bf16-mixed").name == "fp8-current-until-90pct-then-bf16-mixed"
    names = {get_recipe(text).name for text in TEXTS}
    assert names == {
        "fp8-current-until-90pct-then-bf16-mixed",
        "mxfp8-until-step-900-then-fp32",
        "mxfp8-until-12.5pct-then-fp8-delayed-until-50pct-then-fp32",
    }
    assert all(get_recipe(name).name == name for name in names)
    assert all(get_recipe(get_recipe(text).name) == get_recipe(text) for text in TEXTS)


@pytest.mark.parametrize(
    "text",
    ["fp8-current until 90%", "fp8-current until 90, then fp32", "fp8-current until 90% bf16-mixed",
     "a until -5% then b", "fp8-current until step 9.5 then fp32", "fp8-current then fp32 until 90%",
     "until 90% then fp32 until 95%"],
)  # fmt: skip
def test_malformed_stage_texts_raise(text):
    with pytest.raises(RecipeError, match=r"expected 'NAME until 90%, then NAME'|unknown recipe"):
        get_recipe(text)


@pytest.mark.parametrize("start", [0, 1.0, 0.0, -1, 90.0, True, "0.9", None, float("nan")])
def test_a_start_that_is_neither_steps_nor_a_fraction_raises(start):
    with pytest.raises(RecipeError, match=r"expected a number of steps \(an integer from 1 on\), or a fraction"):
        Stage(get_recipe("fp32"), start)


@pytest.mark.parametrize("percent", [1, 7, 12.5, 28, 29, 57, 58, 90, 99.9])
@pytest.mark.parametrize("total", [1000, 2000, 100_000])
def test_a_percentage_converts_to_steps_exactly(percent, total):
    stage = get_recipe(f"mxfp8 until {percent}% then fp32").stages[0]
    assert stage.steps(total) * 1000 == round(percent * 10) * total
    assert stage.when == f"{percent:g}%"


KEPT_OTHERWISE = {
    "weights": ("fp32", "bf16-nomaster"),
    "grads": ("bf16-nomaster", "bf16-fp32grad"),
    "master": ("bf16-nomaster", "bf16-master"),
    "moments": ("bf16-mixed", "adamw-8bit"),
    "update_rounding": ("bf16-nomaster", "bf16-stochastic"),
    "codes": ("fp8-current", replace(get_recipe("fp8lm-o3"), moments="fp32", loss_scale=None)),
    "projection": ("bf16-mixed", replace(get_recipe("galore"), loss_scale=None)),
    "loss_scale": ("bf16-mixed", replace(get_recipe("bf16-mixed"), loss_scale=LossScale())),
    "float32_modules": ("bf16-mixed", replace(get_recipe("bf16-mixed"), float32_modules=("head",))),
    "float32_adapters": ("bf16-mixed", replace(get_recipe("bf16-mixed"), float32_adapters=False)),
    "communication": ("bf16-mixed", replace(get_recipe("bf16-mixed"), communication=FP8)),
}  # fmt: skip


@pytest.mark.parametrize("field", ALIKE)
def test_stages_that_store_weights_differently_raise(field):
    first, second = map(get_recipe, KEPT_OTHERWISE[field])
    second = replace(second, **{other: getattr(first, other) for other in ALIKE if other != field})
    with pytest.raises(
        RecipeError, match=rf"{field} = .* at first and .* in its stage .*give that stage the same {field}"
    ):
        chain(first, Stage(second, 0.5))


def test_error_messages_of_stages_are_short():
    long = []
    for one, other in itertools.permutations(list_recipes(), 2):
        try:
            chain(get_recipe(one), Stage(get_recipe(other), 0.5))
        except RecipeError as refused:
            text = str(refused).replace("(dataclasses.replace, or base = in a recipe's file)", "")
            long += [(one, other)] * (len(text) > 750 or re.search(r"\w\(\w+=", text) is not None)
    assert not long


def test_stages_may_change_forward_and_backward_options():
    current = get_recipe("fp8-current")
    other = replace(current, compute="fp16", saved=COAT, float32_functions=("softmax",), smooth_glu="channel")
    assert chain(current, Stage(other, 0.5)).by_stage[1] == other


@pytest.mark.parametrize("begins", [(0.5, 0.5), (0.9, 0.5), (10, 10), (10, 5), (10, 0.9, 5)])
def test_stages_out_of_order_raise(begins):
    with pytest.raises(RecipeError, match="expected each later than the one before it"):
        chain(get_recipe("mxfp8"), *(Stage(get_recipe("fp32"), start) for start in begins))


def test_steps_and_fractions_mix_when_the_run_length_is_known():
    stages = [Stage(get_recipe("fp32"), 10), Stage(get_recipe("mxfp8"), 0.5)]
    assert starts("x", stages, 40) == (10, 20)
    assert starts("x", stages, None) is None
    with pytest.raises(RecipeError, match="begin after 10, 5 steps of a run of total_steps = 10"):
        starts("x", stages, 10)


def test_nested_stages_raise():
    two = get_recipe("mxfp8 until 50% then fp32")
    with pytest.raises(RecipeError, match="has stages itself; list them all in one recipe"):
        chain(get_recipe("fp32"), Stage(two, 0.5))
    with pytest.raises(RecipeError, match="has stages already"):
        chain(two, Stage(get_recipe("fp32"), 0.9))


def test_describe_covers_every_stage():
    text = get_recipe("fp8-current until 90%, then bf16-mixed").describe()
    assert "from 90%     bf16-mixed: torch.autocast to bf16; no operand rounded" in text
    assert "bytes/param  weights 4 + grads 4 + master 0 + states 8 = 16 (and up to 2" in text
    size = get_recipe("fp32 until 10%, then bf16-mixed").bytes_per_parameter()
    assert size.transient == 2  # of the stage that takes the most


# ---- files -----------------------------------------------------------------------------------------------------------


MINE = 'name = "mine"\nbase = "fp8-current"\n\n[[stages]]\nstart = 0.9\nrecipe = "bf16-mixed"\n'


def test_a_file_lists_stages(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    mine = get_recipe(str(path))
    assert mine.stages == (Stage(get_recipe("bf16-mixed"), 0.9),)
    assert mine.rules == get_recipe("fp8-current").rules
    path.write_text(to_toml(mine))
    assert get_recipe(str(path)) == mine
    with pytest.raises(RecipeError, match="'mine' has stages already"):
        get_recipe(f"{path} until 50% then fp32")
    path.write_text(MINE.replace('"bf16-mixed"', '{name = "late", base = "bf16-mixed", compute = "fp16"}'))
    assert get_recipe(str(path)).stages[0].recipe.compute == "fp16"


def test_a_file_may_be_a_stage(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nbase = "bf16-mixed"\n')
    assert get_recipe(f"fp8-current until 50% then {path}").name == "fp8-current-until-50pct-then-mine"
    assert get_recipe(f"{path} until 50% then fp8-current").name == "mine-until-50pct-then-fp8-current"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("start = 0.9", "start = 90.0", "line 5: a stage with start = 90.0; expected"),
        ("start = 0.9", 'start = "90%"', "line 5: start = '90%' found; expected steps"),
        ("start = 0.9\n", "", "line 4: a stage takes a start"),
        ("start = 0.9", "start = 0.9\nstrt = 3", "line 6: unknown key of a stage 'strt'"),
        ('"bf16-mixed"', '"bf16-mixd"', "line 6: unknown recipe 'bf16-mixd'; nearest: bf16-mixed"),
        ('"bf16-mixed"', "3", "line 6: recipe = 3 found; expected a name or a table"),
        ('"bf16-mixed"', '{name = "a", compute = "fp17"}', "line 6: .*compute = 'fp17'"),
        ('"bf16-mixed"', '"bf16-master"', "line 2: recipe 'mine': weights = 'fp32' at first and 'bf16'"),
        ("[[stages]]", "[stages]", "line 4: stages = .* expected an array of tables"),
    ],
)
def test_mistakes_in_stages_raise_with_the_line_number(tmp_path, old, new, message):
    path = tmp_path / "mine.toml"
    path.write_text(MINE.replace(old, new))
    with pytest.raises(RecipeError, match=message):
        get_recipe(str(path))
