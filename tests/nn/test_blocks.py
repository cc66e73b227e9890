"""Rules with `blocks = "first 1, last 15%"`: which blocks a model has, and which of them a rule selects."""

import re
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import RecipeError
from halfstep.nn.paths import stacks
from halfstep.quant import get_quantizer
from halfstep.recipe import LinearSpec, Recipe, Rule, from_data, linear_spec, to_data
from halfstep.recipe.operands import chosen


ROUNDS = linear_spec(*[get_quantizer("mxfp8_e4m3", scale="rceil")] * 3)


class Block(nn.Module):
    def __init__(self, experts=0):
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.experts = nn.ModuleList(Block() for _ in range(experts))

    def forward(self, x):
        for expert in self.experts:
            x = x + expert(x)
        return self.norm(self.inner(x))


class Model(nn.Module):
    """A stack of blocks between a first layer and a head."""

    def __init__(self, blocks):
        super().__init__()
        self.first, self.layers, self.head = nn.Linear(8, 8), blocks, nn.Linear(8, 4)

    def forward(self, x):
        x = self.first(x)
        for block in self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers:
            x = block(x)
        return self.head(x)


def blocks(count, **options):
    return [Block(**options) for _ in range(count)]


def keeping(text, path="*", optional=False, **fields):
    rules = Rule(path, LinearSpec(), why="by depth", blocks=text, optional=optional), Rule("*", ROUNDS)
    return Recipe("made", "a summary", "a source", compute="bf16", rules=rules, **fields)


def kept(model, recipe):
    return {path for path, why in halfstep.apply(model, recipe).kept.items() if why == "by depth"}


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        ("first 2", 5, [0, 1]),
        ("last 2", 5, [3, 4]),
        ("first 1, last 2", 5, [0, 3, 4]),
        ("last 1, first 1", 2, [0, 1]),
        ("first 5", 5, [0, 1, 2, 3, 4]),
        ("last 15%", 2, [1]),
        ("last 15%", 10, [8, 9]),
        ("last 15%", 62, range(53, 62)),
        ("last 12.5%", 24, [21, 22, 23]),
        ("first 50%, last 50%", 3, [0, 1, 2]),
        ("last 100%", 3, [0, 1, 2]),
    ],
)
def test_chosen_indices_of_blocks(text, count, expected):
    assert sorted(chosen(text, count)) == list(expected)


def test_a_percentage_is_rounded_to_the_nearest_count():
    for count in range(2, 70):
        for percent in (1, 15, 33, 50, 99):
            exact = Fraction(percent * count, 100)
            assert abs(len(chosen(f"last {percent}%", count)) - max(exact, 1)) <= Fraction(1, 2)


INVALID = (
    "", "2", "last", "last -1", "last 0", "last 1.5", "last 101%", "middle 2", "last 2 3", "last 2,",
    "first 1, first 2", "last 0%",
)  # fmt: skip


@pytest.mark.parametrize("text", INVALID)
def test_invalid_blocks_are_refused(text):
    with pytest.raises(RecipeError, match=r"blocks = .* of a rule; expected numbers or shares"):
        Rule("*", LinearSpec(), blocks=text)


@pytest.mark.parametrize(
    "holder",
    [nn.ModuleList, lambda b: nn.Sequential(*b), lambda b: nn.ModuleDict({str(i): m for i, m in enumerate(b)})],
)
def test_layers_in_the_chosen_blocks_are_kept_and_others_quantized(holder):
    torch.manual_seed(0)
    model = Model(holder(blocks(4)))
    report = halfstep.apply(model, keeping("first 1, last 2"))
    assert {path for path, why in report.kept.items() if why == "by depth"} == {f"layers.{i}.inner" for i in (0, 2, 3)}
    assert report.quantized == ("first", "layers.1.inner", "head")
    assert model(torch.randn(3, 8)).isfinite().all()


def test_experts_count_with_the_block_that_contains_them():
    model = Model(nn.ModuleList(blocks(3, experts=2)))
    assert list(stacks(model, [p for p, m in model.named_modules() if isinstance(m, nn.Linear)])) == ["layers"]
    assert kept(model, keeping("last 1")) == {f"layers.2{inner}.inner" for inner in ("", ".experts.0", ".experts.1")}


def test_models_without_a_stack_of_blocks_are_refused():
    """Lists of layers, consecutive modules of several classes, modules without matmuls."""
    for model in (
        nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)),
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        Model(nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])),
        Model(nn.ModuleList(blocks(1))),
        Model(nn.Sequential(Block(), nn.Sequential(nn.Linear(8, 8)))),
        Model(nn.ModuleList([nn.Dropout(), Block(), Block()])),
    ):
        with pytest.raises(
            RecipeError, match=r"has none that its path matches .* name layers by globs, such as 'layers\.0\.\*'"
        ):
            halfstep.apply(model, keeping("last 1"))
        assert kept(model, keeping("last 1", optional=True)) == set()


def test_a_sequential_of_blocks_is_a_stack():
    assert kept(nn.Sequential(*blocks(3)), keeping("last 1")) == {"2.inner"}


def test_modules_of_different_classes_in_a_dict_are_no_stack():
    parts = nn.ModuleDict({"encoder": Model(nn.ModuleList(blocks(3))), "pooler": Block()})
    assert kept(parts, keeping("last 1")) == {"encoder.layers.2.inner"}


def test_several_stacks_need_a_path_that_selects_one():
    model = nn.ModuleDict({"encoder": nn.ModuleList(blocks(3)), "decoder": nn.ModuleList(blocks(2))})
    model = nn.ModuleDict({"body": model})
    for optional in (False, True):
        message = "several stacks of them: body.encoder (3), body.decoder (2) (an nn.ModuleList"
        with pytest.raises(RecipeError, match=re.escape(message)) as error:
            halfstep.apply(model, keeping("last 1", optional=optional))
        assert "with the paths 'body.encoder.*' and 'body.decoder.*' (dataclasses" in str(error.value)
        assert "replace(rule, path='body.encoder.*'), of recipe.rules); or leave out blocks" in str(error.value)
    assert kept(model, keeping("last 1", path="*decoder.*")) == {"body.decoder.1.inner"}


def test_one_rule_per_stack_as_the_error_suggests():
    model = nn.Transformer(8, 2, 2, 3, 16, batch_first=True)
    named = halfstep.get_recipe("nvfp4")
    with pytest.raises(RecipeError, match=r"the paths 'encoder\.layers\.\*' and 'decoder\.layers\.\*'"):
        halfstep.apply(model, named)
    [rule] = [rule for rule in named.rules if rule.blocks]
    each = [replace(rule, path=path) for path in ("encoder.layers.*", "decoder.layers.*")]
    at = named.rules.index(rule)
    report = halfstep.apply(model, replace(named, rules=(*named.rules[:at], *each, *named.rules[at + 1 :])))
    last = {path for path, why in report.kept.items() if why == "last blocks"}
    assert {path.split(".layers.")[0] for path in last} == {"encoder", "decoder"}
    assert all(path.startswith(("encoder.layers.1.", "decoder.layers.2.")) for path in last)
    assert {path.rpartition(".layers.")[2][0] for path in report.quantized} == {"0", "1"}


def test_a_model_with_fewer_blocks_than_the_rule_names_is_refused():
    with pytest.raises(
        RecipeError,
        match=re.escape("rule '* in blocks last 4', layers: blocks = 'last 4' of a rule, and the model has 3 blocks"),
    ):
        halfstep.apply(Model(nn.ModuleList(blocks(3))), keeping("last 4"))


def test_a_rule_with_path_and_blocks_needs_both_to_match():
    model = Model(nn.ModuleList(blocks(2, experts=1)))
    assert kept(model, keeping("last 1", path="*experts*")) == {"layers.1.experts.0.inner"}


def test_layers_of_torchs_transformer_encoder_are_blocks():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    assert kept(model, keeping("last 1")) == {
        f"layers.2.{layer}" for layer in ("linear1", "linear2", "self_attn", "self_attn.out_proj")
    }


def test_blocks_round_trip_through_data():
    data = {
        "name": "mine",
        "compute": "bf16",
        "rules": [{"path": "*", "why": "depth", "blocks": "last 15%"}, {"path": "*", "input": "e4m3fn"}],
    }
    made = from_data(data, halfstep.get_recipe)
    assert made.rules[-2].blocks == "last 15%"
    assert from_data(to_data(made), halfstep.get_recipe) == made
    assert "depth: * in blocks last 15%" in made.describe()
    data["rules"][0]["blocks"] = "last few"
    with pytest.raises(RecipeError, match="blocks = 'last few' of a rule; expected numbers") as error:
        from_data(data, halfstep.get_recipe)
    assert error.value.path == ("rules", 0, "blocks")
