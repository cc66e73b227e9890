"""docs/recipes.md has a row for every recipe with its bytes, and names what the recipes keep, glob by glob."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from halfstep.recipe import get_recipe, list_recipes
from halfstep.recipe.high_precision import ADAPTERS, HEADS, KEEP, ROUTERS
from tiny import ALL


PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
TABLE, KEPT = PAGE.split("## What they keep")
ROUNDING = [name for name in ALL if any(rule.linear.rounds for rule in get_recipe(name).rules)]


def reason(path):
    globs = ((rule.why, glob) for rule in KEEP for glob in rule.path.split("|"))
    return next((why for why, glob in globs if fnmatchcase(path, glob)), None)


@pytest.mark.parametrize(("title", "globs"), [("Routers", ROUTERS), ("Heads", HEADS), ("LoRA", ADAPTERS)])
def test_the_page_lists_every_glob(title, globs):
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("`")]
    assert tuple(re.findall(r"`([^`]+)`", "\n".join(lines))) == globs


def test_the_first_table_has_every_recipe_once_with_its_bytes():
    rows = [line.split("|") for line in TABLE.splitlines() if line.startswith("| `")]
    listed = [(name, row[-2].strip()) for row in rows for name in re.findall(r"`([^`]+)`", row[1])]
    assert sorted(name for name, _ in listed) == sorted(list_recipes())
    for name, text in listed:
        size = get_recipe(name).bytes_per_parameter()
        passing = f" + {size.transient:g} while a pass runs" if size.transient else ""
        assert text.removesuffix(", on one rank") == f"{size.total:g}{passing}", name


def test_the_page_lists_every_recipe_that_rounds():
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
def test_what_a_path_is(path, why):
    assert reason(path) == why
