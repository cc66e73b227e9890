"""Recipes from plain data (as of TOML and JSON), from TOML files, Python modules, chains and names with a number."""

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

from halfstep import formats
from halfstep.errors import HalfstepError, RecipeError, unknown
from halfstep.formats import Integer
from halfstep.quant import ROW, Accumulator, Hadamard, Quantizer, Scales, get_scaling
from halfstep.recipe.operands import (
    KEEP,
    At,
    Data,
    Rule,
    accumulator,
    check_keys,
    hadamard,
    operand,
    storage,
    table_of,
    to_data,
    typed,
)
from halfstep.recipe.products import AttentionSpec, LinearSpec, Matmul, Multiplier
from halfstep.recipe.projection import Projection
from halfstep.recipe.spec import LossScale, Recipe
from halfstep.recipe.stages import Stage
from halfstep.recipe.storage import OPERANDS, Codes, Communication, Saved, Storage
from halfstep.registry import load_module


_USES = {
    "input": (("output", "lhs"), ("grad_weight", "rhs")),
    "weight": (("output", "rhs"), ("grad_input", "rhs")),
    "grad_output": (("grad_input", "lhs"), ("grad_weight", "lhs")),
}
_SIDES = ("lhs", "rhs")
_PRODUCTS = tuple(field.name for field in fields(LinearSpec))
_TYPES: dict[str, Any] = get_type_hints(Recipe)


# ---- data to a recipe -----------------------------------------------------------------------------------------------


def from_data(data: Mapping[str, Any], named: Callable[[str], Recipe]) -> Recipe:
    """The recipe described by the data; missing keys are as in its `base`, or as `Recipe`'s defaults.

    Rules replace the base's. Unless `keep_heads` is false, the rules that exclude output heads and routers
    (`operands.KEEP`) come before them.

    Args:
        named: a function that finds the base and stages by name.

    Raises:
        At: an unknown key, a wrong type, or an invalid value.
    """
    check_keys(data, (*_TYPES, "base", "keep_heads"), "key")
    plain = _TYPES.keys() & data.keys() - _TABLES.keys() - {"rules", "stages"}
    given: Data = {key: typed(data[key], _TYPES[key], key) for key in plain}
    if "stages" in data:
        stages = typed(data["stages"], list, "stages")
        given["stages"] = tuple(_stage(stage, i, named) for i, stage in enumerate(stages))
    given |= {key: _TABLES[key](data[key]) for key in _TABLES.keys() & data.keys()}
    keep = typed(data.get("keep_heads", True), bool, "keep_heads")
    if "rules" in data:
        rules = typed(data["rules"], list, "rules")
        given["rules"] = (KEEP if keep else ()) + tuple(_rule(rule, i) for i, rule in enumerate(rules))
    elif "keep_heads" in data:
        raise At("keep_heads found without [[rules]], which it goes before; give both", "keep_heads")
    if "name" not in given:
        raise At('no name found; expected at least a line such as name = "mine"', "name")
    if not is_name(given["name"]):
        raise At(f"name = {given['name']!r} found; expected a name of letters, digits and - _ . +", "name")
    try:
        if "base" not in data:
            return Recipe(**{"summary": "", "source": "", **given})
        base = named(typed(data["base"], str, "base"))
        changed = ", ".join(sorted(given.keys() - {"name"})) or "nothing"
        said = {"summary": f"{base.name}, except for {changed}.", "source": f"one's own, from {base.name}"}
        return replace(base, **{**said, "aliases": (), "notes": (), **given})
    except HalfstepError as error:
        named_in = [key for key in data if key != "name" and re.search(rf"\b{key}( =|s? ')", str(error))]
        raise At(str(error), *named_in[:1] or ["base" if "base" in data else "name"]) from error


def is_name(name: object) -> bool:
    """Whether a recipe may have that name, which is also the name of folders."""
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name, re.ASCII) is not None


def _record(name: str, kind: type, data: Any) -> Any:
    """A record of class `kind` from the table under the key `name`; None for "none".

    Fields that are storages are a format's name, a table or "none".
    """
    if data == "none":
        return None
    if not isinstance(data, dict):
        raise At(f"{name} = {data!r} found; expected a table or 'none'", name)
    hints = get_type_hints(kind)
    check_keys(data, tuple(hints), f"key of {name}", name)
    for field in fields(kind):
        if field.default is MISSING and field.name not in data:
            wanted = f"expected how they are kept, such as {field.name} = 'mxfp8_e4m3'"
            raise At(f"{name} without {field.name}; {wanted}", name)
    given = {key: _field(value, hints[key], name, key) for key, value in data.items()}
    try:
        return kind(**given)
    except RecipeError as error:
        named = [key for key in given if re.search(rf"{name} {key} =|unknown {key} ", str(error))]
        raise At(str(error), name, *named) from error


def _field(value: Any, expected: Any, *path: str) -> Any:
    kinds = (expected, *get_args(expected))
    if Storage not in kinds:
        return typed(value, expected, *path)
    return value if value == OPERANDS and str in kinds else None if value == "none" else storage(value, *path)


def _moments(data: Any) -> str | tuple[tuple[str, str | Storage], ...]:
    """The field `moments`: one format for all, or a table from globs on names to formats."""
    if isinstance(data, str):
        return data
    table = table_of(data, "moments")
    return tuple(
        (glob, kind if isinstance(kind, str) else storage(kind, "moments", glob)) for glob, kind in table.items()
    )


def _rule(data: Any, number: int) -> Rule:
    path = ("rules", number)
    table = typed(data, dict, *path)
    check_keys(table, (*sorted(_WORDS), "accumulate", *_USES, *_PRODUCTS), "key of a rule", *path)
    if "path" not in table:
        raise At("a rule without a path; expected a glob on module paths, such as '*' or '*.mlp.*'", *path)
    words = {key: typed(table[key], _WORDS[key], *path, key) for key in table.keys() & _WORDS.keys()}
    linear = _linear(table, *path)
    try:
        return Rule(linear=linear, **words)
    except RecipeError as error:
        raise At(str(error), *path, "blocks") from error


_WORDS: dict[str, Any] = {key: kind for key, kind in get_type_hints(Rule).items() if key != "linear"}


def _stage(data: Any, number: int, named: Callable[[str], Recipe]) -> Stage[Recipe]:
    """A stage from a table with a start and a recipe, by name or as a table."""
    path = ("stages", number)
    table = typed(data, dict, *path)
    check_keys(table, ("start", "recipe"), "key of a stage", *path)
    if table.keys() != {"start", "recipe"}:
        raise At("a stage takes a start (0.9, or 900 steps) and a recipe (a name, or a table)", *path)
    start, recipe = table["start"], table["recipe"]
    if type(start) not in (int, float):
        raise At(f"start = {start!r} found; expected steps, such as 900, or a fraction, such as 0.9", *path, "start")
    try:
        found = named(recipe) if isinstance(recipe, str) else from_data(table_of(recipe, "recipe"), named)
    except RecipeError as error:
        raise At(str(error), *path, "recipe") from error
    try:
        return Stage(found, start)
    except RecipeError as error:
        raise At(str(error), *path, "start") from error


def _attention(data: Any) -> AttentionSpec | None:
    if data == "none":
        return None
    table = typed(data, dict, "attention")
    check_keys(table, tuple(field.name for field in fields(AttentionSpec)), "matmul of attention", "attention")
    specs = {}
    for name in table:
        sides = typed(table[name], dict, "attention", name)
        check_keys(sides, ("accumulate", *_USES, *_PRODUCTS), "key of a matmul", "attention", name)
        specs[name] = _linear(sides, "attention", name)
    try:
        return AttentionSpec(**specs)
    except RecipeError as error:
        raise At(str(error), "attention") from error


_TABLES: dict[str, Callable[[Any], Any]] = {
    "loss_scale": partial(_record, "loss_scale", LossScale),
    "codes": partial(_record, "codes", Codes),
    "projection": partial(_record, "projection", Projection),
    "saved": partial(_record, "saved", Saved),
    "communication": partial(_record, "communication", Communication),
    "moments": _moments,
    "attention": _attention,
}


def _linear(table: Mapping[str, Any], *path: str | int) -> LinearSpec:
    """A `LinearSpec` from a table of operands by tensor (`input`, ...), by matmul (`output`, ...), or both."""
    operands: dict[tuple[str, str], Quantizer] = {}
    every = accumulator(table["accumulate"], *path, "accumulate") if "accumulate" in table else None
    sums: dict[str, Accumulator | None] = dict.fromkeys(_PRODUCTS, every)
    times: dict[str, Multiplier] = {}
    turns: dict[str, Hadamard | None] = {}
    for name, uses in _USES.items():
        if name in table:
            operands |= dict.fromkeys(uses, operand(table[name], *path, name))
    for product in _PRODUCTS:
        sides = typed(table.get(product, {}), dict, *path, product)
        check_keys(sides, (*_SIDES, "accumulate", "multiplier", "hadamard"), f"operand of {product}", *path, product)
        operands |= {(product, side): operand(sides[side], *path, product, side) for side in sides.keys() & _SIDES}
        if "accumulate" in sides:
            sums[product] = accumulator(sides["accumulate"], *path, product, "accumulate")
        if "multiplier" in sides:
            times[product] = _multiplier(sides["multiplier"], *path, product, "multiplier")
        if "hadamard" in sides:
            turns[product] = hadamard(sides["hadamard"], *path, product, "hadamard")
    try:
        products = {
            name: Matmul(
                operands.get((name, "lhs")), operands.get((name, "rhs")), sums[name], times.get(name), turns.get(name)
            )
            for name in _PRODUCTS
        }
        return LinearSpec(**products)
    except RecipeError as error:
        raise At(str(error), *path) from error


def _multiplier(data: Any, *path: str | int) -> Multiplier:
    """A `Multiplier` from a table of its fields."""
    table = typed(data, dict, *path)
    check_keys(table, tuple(get_type_hints(Multiplier)), "key of a multiplier", *path)
    try:
        return Multiplier(**{key: typed(value, float, *path, key) for key, value in table.items()})
    except At:
        raise
    except RecipeError as error:
        raise At(str(error), *path) from error


# ---- recipes in files ------------------------------------------------------------------------------------------------


def is_reference(name: str) -> bool:
    """Whether the name is of a file or module: `my.toml`, `package.module:name`, `path.py:name`."""
    return name.endswith(".toml") or ":" in name


def read(name: str, named: Callable[[str], Recipe]) -> Recipe:
    """The recipe in a file or module; `named` finds the recipes that come with halfstep.

    Raises:
        RecipeError: it does not exist or is not a recipe; with the file and line if known.
    """
    path, _, attribute = name.rpartition(":")
    return read_toml(Path(name), named) if name.endswith(".toml") else _from_python(path, attribute)


def read_toml(path: Path, named: Callable[[str], Recipe]) -> Recipe:
    """The recipe of a TOML file (docs/adding_a_recipe.md).

    Raises:
        RecipeError: the file cannot be read, is not TOML, or a key or value in it is not what was expected.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # TOML does not allow the byte order mark of some editors
        return from_data(tomllib.loads(text), named)
    except At as error:
        raise RecipeError(f"{path}, line {line_of(text, error.path)}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path} is not TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not UTF-8 text ({error}); save it as UTF-8, which TOML is in") from error
    except OSError as error:
        raise RecipeError(f"{path} cannot be read ({error}); expected a recipe's TOML file") from error


def to_toml(recipe: Recipe) -> str:
    """The text of a TOML file from which `read_toml` reads this recipe.

    Raises:
        RecipeError: it has a custom scaling, which data cannot describe.
    """
    data = to_data(recipe)
    rules, keeps, stages = data.pop("rules"), data.pop("keep_heads"), data.pop("stages", [])
    lines = [f"{key} = {_toml(value)}" for key, value in data.items()]
    if rules or keeps:
        lines.append(f"keep_heads = {_toml(keeps)}")
    if keeps and not rules:
        lines.append("rules = []")
    for header, tables in (("rules", rules), ("stages", stages)):
        for table in tables:
            lines += ["", f"[[{header}]]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)  # JSON's strings, numbers and booleans are valid TOML


def _key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else json.dumps(key)


def line_of(text: str, path: tuple[str | int, ...]) -> int:
    """The line, from 1, of the deepest of these nested keys that the text has.

    >>> line_of("name = 'a'\\n[[rules]]\\npath = '*'", ("rules", 0, "path"))
    3
    """
    table: tuple[str | int, ...] = ()
    found: tuple[str | int, ...]
    counts: dict[str, int] = {}
    best, depth = 1, 0
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\[\s*([\w.-]+)\s*\]\]", line):
            counts[header[1]] = counts.get(header[1], -1) + 1
            found = table = (header[1], counts[header[1]])
        elif header := re.match(r"\s*\[\s*([\w. -]+?)\s*\]\s*(#.*)?$", line):
            first, *rest = re.split(r"\s*\.\s*", header[1])
            found = table = (first, *([counts[first]] if first in counts else []), *rest)
        elif key := re.match(r"\s*([\w.\" -]+?)\s*=", line):
            found = (*table, *re.split(r"\s*\.\s*", key[1].replace('"', "")))
        else:
            continue
        if found == path[: len(found)] and len(found) > depth:
            best, depth = number, len(found)
    return best


def _from_python(path: str, name: str) -> Recipe:
    module = load_module(path, RecipeError)
    value = getattr(module, name, None)
    if not isinstance(value, Recipe):
        own = [key for key, found in vars(module).items() if isinstance(found, Recipe)]
        kind = "" if value is None else f" ({name} is {type(value).__name__})"
        raise RecipeError(f"{path}: {unknown('recipe', name, own)}{kind}")
    if not is_name(value.name):
        raise RecipeError(f"{path}: {name} is called {value.name!r}; expected letters, digits and - _ . +")
    return value


# ---- chains of recipes -----------------------------------------------------------------------------------------------


def is_chain(text: str) -> bool:
    """Whether the text is a chain of recipes, in words or as a name made by `chain`."""
    return re.search(r"\suntil\s", _in_words(text)) is not None


def _in_words(text: str) -> str:
    """A name made by `chain`, as the text it was read from; any other text unchanged."""
    text = re.sub(r"-until-([\d.]+)pct-then-", r" until \1% then ", text)
    return re.sub(r"-until-step-(\d+)-then-", r" until step \1 then ", text)


def read_chain(text: str, named: Callable[[str], Recipe]) -> Recipe:
    """The recipe with the stages that the text lists, with or without commas; `named` finds each of them.

    Raises:
        RecipeError: the text is not of the form `NAME until 90%, then NAME` (or `until step 900`; more stages after
            another `until`); or as `Recipe` for incompatible stages.
    """
    *before, last = re.split(r"\s*,?\s+then\s+", _in_words(text.strip()))
    found = [re.fullmatch(r"(.*\S)\s+until\s+(?:(\d+(?:\.\d+)?)\s*%|step\s+(\d+))", part) for part in before]
    if not before or not all(found) or is_chain(last):
        raise RecipeError(
            f"recipe {text!r} found; expected 'NAME until 90%, then NAME' or 'NAME until step 900, then NAME', and "
            "more stages after another 'until'"
        )
    matches = [match for match in found if match is not None]
    recipes = [named(name) for name in (*(match[1] for match in matches), last)]
    starts = [int(match[3]) if match[3] else float(match[2]) / 100 for match in matches]
    return chain(recipes[0], *map(Stage, recipes[1:], starts))


def chain(first: Recipe, *stages: Stage[Recipe]) -> Recipe:
    """A recipe followed by others, named `fp8-current-until-90pct-then-bf16-mixed` by their names and starts.

    Raises:
        RecipeError: as `Recipe`; or the first has stages already.
    """
    if first.stages:
        raise RecipeError(f"recipe {first.name!r} has stages already; list them all in one recipe")
    name, summary, notes = first.name, first.name, list(first.notes)
    for stage in stages:
        name += f"-until-{stage.when.replace(' ', '-').replace('%', 'pct')}-then-{stage.recipe.name}"
        summary += f" until {stage.when}, then {stage.recipe.name}"
        notes += [note for note in stage.recipe.notes if note not in notes]
    sources = dict.fromkeys((first.source, *(stage.recipe.source for stage in stages)))
    return replace(
        first, name=name, summary=f"{summary}.", source="; ".join(sources), aliases=(), notes=tuple(notes),
        stages=stages,
    )  # fmt: skip


# ---- recipes with a number in their name -----------------------------------------------------------------------------

_NAME = re.compile(r"bits-e(\d+)m(\d+)(-nearest)?")
_WEIGHTS = re.compile(r"weights-int(\d+)")
_SOURCE = "Lee et al. 2024, arXiv 2405.18710; which operands they mask, and where, is not said in what was read of it"


def is_partial(name: str) -> bool:
    """Whether the name is of the form `bits-eXmY`, `bits-eXmY-nearest` or `weights-intN`, valid or not."""
    return _NAME.fullmatch(name) is not None or _WEIGHTS.fullmatch(name) is not None


def with_a_number(name: str) -> Recipe:
    """The recipe of a name for which `is_partial` is True.

    Raises:
        RecipeError: as `few_bits` and `integer_weights`.
    """
    return integer_weights(int(match[1])) if (match := _WEIGHTS.fullmatch(name)) else few_bits(name)


def integer_weights(bits: int) -> Recipe:
    """The recipe `weights-intN`: fp32 training with all weights except the head's rounded to N bits in matmuls.

    Integers from -(2^(N-1) - 1) on, with one scale a row (an output channel) from its amax; gradients are those at the
    rounded weights, and update the unrounded ones.

    Raises:
        RecipeError: fewer than 2 bits, or more than 12.
    """
    if not 2 <= bits <= 12:
        raise RecipeError(f"recipe 'weights-int{bits}': expected 2 to 12 bits, such as weights-int4")
    most = 2 ** (bits - 1) - 1
    source = "symmetric integers, as the absmax quantizers of Kumar et al. 2024, arXiv 2411.04330"
    row = Quantizer(Integer(f"int{bits}", -most, most, source=source), scales=Scales(ROW, get_scaling("absmax")))
    return Recipe(
        name=f"weights-int{bits}",
        summary=f"fp32 whose matmuls see weights of {bits} bits, a scale an output channel; the head's stay whole.",
        source="Kumar et al. 2024, arXiv 2411.04330, section 4",
        rules=(*KEEP, Rule("*", LinearSpec(output=Matmul(rhs=row), grad_input=Matmul(rhs=row.down)))),
    )


def few_bits(name: str) -> Recipe:
    """The recipe `bits-eXmY` or `bits-eXmY-nearest`: bf16 with X of its 8 exponent and Y of its 7 mantissa bits.

    Weights, activations and gradients are bf16, with fp32 master weights. Every operand of every linear layer's
    matmuls, including the head's, is rounded to the bits: masked (toward zero, as in the paper), or to nearest even, as
    hardware does. Values beyond the range of fewer exponent bits saturate; there are no scales. `bits-e8m7` does not
    change bf16 tensors; a model's float32 inputs are rounded from float32.

    Raises:
        RecipeError: fewer than 2 or more than 8 exponent bits, or more than 7 mantissa bits.
    """
    match = _NAME.fullmatch(name)
    assert match is not None, name
    exponent, mantissa, nearest = int(match[1]), int(match[2]), match[3] is not None
    if not 2 <= exponent <= 8 or mantissa > 7:
        raise RecipeError(
            f"recipe {name!r}: bf16 has 8 exponent and 7 mantissa bits, of which some are taken away; expected e2 to "
            "e8 and m0 to m7, such as bits-e8m3"
        )
    operand = Quantizer(formats.get(f"e{exponent}m{mantissa}"), "nearest_even" if nearest else "toward_zero")
    product = Matmul(operand, operand)
    how = "rounded to nearest" if nearest else "the others masked"
    return Recipe(
        name=name,
        summary=f"bf16-master whose matmuls' operands have {exponent} exponent and {mantissa} mantissa bits, {how}.",
        source=_SOURCE,
        weights="bf16",
        master="fp32",
        compute="bf16",
        rules=(Rule("*", LinearSpec(product, product, product)),),
        notes=() if nearest else ("Masking shrinks every operand; -nearest tells the bits' effect from the bias's.",),
    )
