"""docs/recipes.md lists every recipe with its bytes, and the globs of the layers that recipes keep."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from torch import nn

import halfstep
from halfstep.quant import get_quantizer
from halfstep.recipe import LinearSpec, Matmul, Recipe, Rule, digest, get_recipe, list_recipes
from halfstep.recipe.operands import ADAPTERS, HEADS, KEEP, ROUTERS
from tiny import ALL


PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
TABLE, rest = PAGE.split("## What they keep")
KEPT = rest.split("\n## ")[0]
ROUNDING = [name for name in ALL if any(rule.linear.rounds for rule in get_recipe(name).rules)]


def reason_kept(path):
    globs = ((rule.why, glob) for rule in KEEP for glob in rule.path.split("|"))
    return next((why for why, glob in globs if fnmatchcase(path, glob)), None)


@pytest.mark.parametrize(("title", "globs"), [("Routers", ROUTERS), ("Heads", HEADS), ("LoRA", ADAPTERS)])
def test_the_page_lists_every_glob_of_kept_layers(title, globs):
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("`")]
    assert tuple(re.findall(r"`([^`]+)`", "\n".join(lines))) == globs


def test_the_first_table_lists_every_recipe_once_with_its_bytes():
    rows = [line.split("|") for line in TABLE.splitlines() if line.startswith("| `")]
    listed = [(name, row[-2].strip()) for row in rows for name in re.findall(r"`([^`]+)`", row[1])]
    assert sorted(name for name, _ in listed) == sorted(list_recipes())
    for name, text in listed:
        size = get_recipe(name).bytes_per_parameter()
        passing = f" + {size.transient:g} while a pass runs" if size.transient else ""
        assert text.removesuffix(", on one rank") == f"{size.total:g}{passing}", name


def test_the_page_lists_what_every_rounding_recipe_keeps():
    rows = [line.split("|") for line in KEPT.splitlines() if line.startswith("| `")]
    listed = {name: row[2].strip() for row in rows for name in re.findall(r"`([^`]+)`", row[1])}
    assert {name: listed[name] for name in ROUNDING} == {
        name: "routers, heads, LoRA" if set(KEEP) <= set(get_recipe(name).rules) else "nothing" for name in ROUNDING
    }


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("lm_head", "output head"),
        ("lm_head.dense", "output head"),
        ("model.lm_head", "output head"),
        ("classifier.out_proj", "output head"),
        ("cls.seq_relationship", "output head"),
        ("proj_out", "output head"),
        ("whisper_model.proj_out", "output head"),
        ("model.layers.0.mlp.gate", "router"),
        ("decoder.block.1.layer.2.mlp.router.classifier", "router"),
        ("base_model.model.layers.0.self_attn.q_proj.lora_A.default", "LoRA adapter"),
        ("layers.0.lora_B", "LoRA adapter"),
        ("base_model.model.layers.0.self_attn.q_proj.base_layer", None),
        ("model.layers.0.mlp.gate_proj", None),
        ("model.layers.0.mlp.experts", None),
        ("model.layers.0.self_attn.out_proj", None),
        ("transformer_blocks.0.proj_out", None),
        ("vit.layers.0.attention.o_proj", None),
        ("transformer.h.0.attn.c_proj", None),
        ("bert.pooler.dense", None),
        ("model.decoder.project_out", None),
    ],
)
def test_paths_of_heads_routers_and_adapters_are_recognized(path, why):
    assert reason_kept(path) == why


def test_a_rule_of_several_globs_equals_one_rule_for_each():
    linear = LinearSpec(Matmul(rhs=get_quantizer("e4m3fn")))
    joined, apart = (
        Recipe("mine", "", "", rules=tuple(Rule(path, linear) for path in paths)) for paths in (["0|2"], ["0", "2"])
    )
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2), nn.Linear(2, 2))
    found = [halfstep.plan(model, recipe) for recipe in (joined, apart)]
    assert [*found[0].layers] == [*found[1].layers] == ["0", "2"]
    assert found[0].kept == found[1].kept
    assert digest(joined) == digest(apart)  # checkpoints of either load under the other
