"""`Rule`: which layers, by path, role and depth, round their operands, and how. And recipes as plain data.

Also the rules that exclude output heads, routers and adapters (`KEEP`).
"""

import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from fractions import Fraction
from math import floor
from typing import Any, get_args, get_type_hints

from halfstep import formats
from halfstep.errors import FormatError, QuantizationError, RecipeError, unknown
from halfstep.quant import (
    ROW,
    TENSOR,
    Accumulator,
    Clamp,
    Estimator,
    Hadamard,
    Quantizer,
    Scales,
    Scaling,
    Tile,
    get_accumulator,
    get_quantizer,
    get_scaling,
)
from halfstep.quant.scaling import named
from halfstep.recipe.products import AttentionSpec, LinearSpec, Matmul
from halfstep.recipe.storage import Storage, get_storage


# ---- rules -----------------------------------------------------------------------------------------------------------

_PART = re.compile(r"(first|last) (\d+(?:\.\d+)?)(%?)")


def check_blocks(text: str) -> None:
    """Raise RecipeError unless `chosen` can parse the text."""
    parts = [_PART.fullmatch(part.strip()) for part in text.split(",")]
    known = [part for part in parts if part and (part[3] or part[2].isdigit()) and Fraction(part[2]) > 0]
    ends = {part[1] for part in known}
    if len(known) != len(parts) or len(ends) != len(parts) or any(p[3] and Fraction(p[2]) > 100 for p in known):
        raise RecipeError(
            f"blocks = {text!r} of a rule; expected numbers or shares of blocks from an end: 'first 2', 'last 15%', "
            "'first 1, last 2'"
        )


def chosen(text: str, count: int) -> frozenset[int]:
    """The indices, from 0, of the blocks that the text selects in a model with `count` blocks.

    A share is rounded to the nearest number of blocks, halves up, and is at least one block.

    Raises:
        RecipeError: there are fewer blocks than the text asks for.

    >>> sorted(chosen("first 1, last 15%", 12))
    [0, 10, 11]
    """
    found: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        assert match is not None, text
        size = Fraction(match[2])
        number = max(1, floor(size * count / 100 + Fraction(1, 2))) if match[3] else int(size)
        if number > count:
            raise RecipeError(f"blocks = {text!r} of a rule, and the model has {count} blocks")
        found |= set(range(number) if match[1] == "first" else range(count - number, count))
    return frozenset(found)


@dataclass(frozen=True)
class Rule:
    """Layers whose module path matches the glob `path` round their operands as `linear` says; the first match decides.
    Several globs are separated by `|`: `*.q_proj|*.k_proj`.

    It applies to linear, convolutional and recurrent layers, and attention's projections (`nn.layers.KINDS`). With a
    `role`, only to those whose weight has it (`halfstep.unit`): `readout`, `input` ..., or `branch_end`, the last layer
    of a residual branch. With `blocks`, only to those in some of the model's repeated blocks, by depth (`nn.paths`):
    `first 2`, `last 15%`, `first 1, last 2`.

    A rule that matches no layer is an error, unless it is `optional`. Layers of a rule whose spec rounds nothing stay
    in the recipe's compute dtype, for the reason `why`.
    """

    path: str
    linear: LinearSpec
    optional: bool = False
    why: str = ""
    role: str | None = None
    blocks: str | None = None

    def __post_init__(self) -> None:
        if self.blocks is not None:
            check_blocks(self.blocks)

    @property
    def where(self) -> str:
        """The layers that the rule selects, by path, role and blocks, in words."""
        role = "" if self.role is None else f" with role {self.role}"
        return self.path.replace("|", ", ") + role + ("" if self.blocks is None else f" in blocks {self.blocks}")


def shared_in_a_call(rules: Iterable[Rule], attention: AttentionSpec | None, smooth_glu: str | None) -> tuple[str, ...]:
    """Texts that say why a row's result in a forward pass depends on the other rows of the call; () if it does not.

    Weights are the same in every call, and gradients do not affect outputs.
    """
    found = {f"input of linear {rule.where!r}": rule.linear.output.lhs for rule in rules}
    if attention is not None:
        for name, spec in (("scores", attention.scores), ("mix", attention.mix)):
            found |= {f"first operand of {name}": spec.output.lhs, f"second operand of {name}": spec.output.rhs}
    reasons = [f"{name}: {why}" for name, own in found.items() if own is not None and (why := _over_rows(own))]
    if smooth_glu == "channel":
        reasons.append("products of gated MLPs: a scale of each channel over all rows")
    return tuple(reasons)


def _over_rows(quantizer: Quantizer) -> str | None:
    """A text that says why rounding a row of a matrix depends on other rows; None if it does not."""
    scales = quantizer.scales
    if quantizer.rounding == "stochastic":
        return "noise that is drawn for the call"
    if quantizer.clamp is not None and quantizer.clamp.tile != "row":
        return f"{quantizer.clamp} over all rows"
    if quantizer.outliers is not None:
        return "columns with outliers in any row are kept apart"
    if scales is None or not scales.rule.reads:
        return None
    if scales.rule.two_level:
        return f"{scales.rule.name}, with a scale over all rows"
    return f"{scales.rule.name} scales of {scales.tile}" if scales.tile.rows != 1 else None


# ---- layers that are excluded ----------------------------------------------------------------------------------------

HEADS = (
    "lm_head", "*.lm_head", "lm_head.*", "*.lm_head.*", "head", "*.head", "head.fc", "*.head.fc",
    "embed_out", "*.embed_out", "proj_out", "*model.proj_out", "score", "*.score", "qa_outputs", "*.qa_outputs",
    "classifier", "*.classifier", "classifier.*", "*.classifier.*", "*classification_head.*", "*predictions*",
    "*seq_relationship", "*multiple_choice_head.*", "vocab_transform", "vocab_projector",
)  # fmt: skip
"""Globs of output heads: Hugging Face's names for language models and classifiers, and `head`. Layers inside a head
belong to it: RoBERTa's `lm_head.dense` and `lm_head.decoder`."""

ROUTERS = ("router", "*.router", "*.router.*", "gate", "*.gate", "*.shared_expert_gate")
"""Globs of routers in mixtures of experts. A gated MLP's `gate_proj` is not a router."""

ADAPTERS = tuple(f"{before}lora_{which}{after}" for which in "AB" for before in ("", "*.") for after in ("", ".*"))
"""Globs of LoRA's two factors, by PEFT's names: of low rank, so that rounding saves nothing, and trained alone."""

ADAPTER_NAMES = (
    "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "prompt_encoder",
)  # fmt: skip
"""Names of modules and parameters of adapters: LoRA's, DoRA's and soft prompts. `Recipe.float32_adapters` applies to
them and to what a layer declares as an adapter, as PEFT's do (`nn.paths`)."""

KEEP = tuple(
    Rule("|".join(paths), LinearSpec(), optional=True, why=why)
    for paths, why in ((ROUTERS, "router"), (HEADS, "output head"), (ADAPTERS, "LoRA adapter"))
)
"""Rules to put before a recipe's own. Embeddings and norms have no matmuls, so no rule is needed for them."""


Data = dict[str, Any]
_TILES = {"tensor": TENSOR, "row": ROW}
_KEPT: Data = {"residual": False, "flat": False, "smallest": 0}  # the fields of a storage beside its quantizer
_RECORDS: dict[str, Any] = {"clamp": Clamp, "estimator": Estimator}  # tables within an operand's
_OWN = (
    "format",
    "tile",
    "scale",
    "rounding",
    "overflow",
    "outliers",
    *_RECORDS,
)  # other keys of an operand are options of its scaling


class At(RecipeError):
    """An error in a recipe's data, with the path of keys to the faulty value."""

    def __init__(self, message: str, *path: str | int) -> None:
        super().__init__(message)
        self.path = path


# ---- data to records ------------------------------------------------------------------------------------------------


def check_keys(data: Mapping[str, Any], known: tuple[str, ...], kind: str, *path: str | int) -> None:
    for key in data:
        if key not in known:
            raise At(unknown(kind, key, known), *path, key)


def typed(value: Any, expected: Any, *path: str | int) -> Any:
    """The value, checked against a field's type; lists become tuples, "none" becomes None.

    Raises:
        At: it is of another type.
    """
    optional = isinstance(expected, types.UnionType)
    if optional and value == "none":
        return None
    kinds = [kind for kind in get_args(expected) if kind is not type(None)] if optional else [expected]
    if kinds[0] == tuple[str, ...]:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise At(f"{path[-1]} = {value!r} found; expected a list of strings", *path)
    if type(value) is int and float in kinds:
        return float(value)
    if type(value) not in kinds:
        words = {str: "a string", bool: "true or false", float: "a number", int: "an integer"}
        wanted = words.get(kinds[0], "an array of tables" if kinds[0] is list else "a table")
        raise At(f"{path[-1]} = {value!r} found; expected {wanted}" + (" or 'none'" if optional else ""), *path)
    return value


def table_of(data: Any, *path: str | int) -> Data:
    """The data as a table; a string is a table with that `format`."""
    if isinstance(data, str):
        return {"format": data}
    if not isinstance(data, dict):
        raise At(f"{path[-1]} = {data!r} found; expected a name or a table", *path)
    return data


def operand(data: Any, *path: str | int) -> Quantizer:
    """A quantizer from a format's name, or from a table with at least a `format`; a block format sets tile and scale
    rule."""
    table = table_of(data, *path)
    if "format" not in table:
        raise At("an operand without a format; `halfstep formats` lists them", *path)
    name = typed(table["format"], str, *path, "format")
    texts = {
        key: typed(table[key], str, *path, key) for key in ("tile", "scale", "rounding", "overflow") & table.keys()
    }
    key = "format"
    try:
        quantizer = get_quantizer(formats.from_key(name) if " " in name else name)
        for key in ("rounding", "overflow"):
            quantizer = replace(quantizer, **{key: texts[key]} if key in texts else {})
        key = "scale" if "scale" in texts else "tile" if "tile" in texts else "format"
        usual = quantizer.scales
        rule = get_scaling(texts["scale"]) if "scale" in texts else usual.rule if usual else None
        rule = _options(rule, table, *path)
        tile = _tile(texts["tile"], *path) if "tile" in texts else usual.tile if usual else None
        if (tile is None) != (rule is None):
            raise At(f"{key} = {texts[key]!r} found alone; a tile and a scale stand together", *path, key)
        outliers = typed(table["outliers"], float, *path, "outliers") if "outliers" in table else quantizer.outliers
        scales = Scales(tile, rule) if tile and rule else None
        records = {name: _record(table[name], kind, *path, name) for name, kind in _RECORDS.items() if name in table}
        key = next(iter(records), key)
        return replace(quantizer, scales=scales, outliers=outliers, **records)
    except At:
        raise
    except (FormatError, QuantizationError, ValueError, TypeError) as error:
        raise At(str(error), *path, key) from error


def _record(data: Any, kind: Any, *path: str | int) -> Any:
    """A record from a table of its fields, all optional; None for "none"."""
    if data == "none":
        return None
    table = typed(data, dict, *path)
    hints = get_type_hints(kind)
    check_keys(table, tuple(hints), f"key of {path[-1]}", *path)
    given = {key: typed(value, hints[key], *path, key) for key, value in table.items()}
    try:
        return kind(**given)
    except QuantizationError as error:
        raise At(str(error), *path, *[key for key in given if re.search(rf"\b{key}\b", str(error))][:1]) from error


def _options(rule: Scaling | None, table: Mapping[str, Any], *path: str | int) -> Scaling | None:
    """The scale rule with the options in the operand's table (history, algorithm, margin, bias ...)."""
    own = {} if rule is None else rule.options
    check_keys(table, (*_OWN, *own), "key of an operand" + (f" with scale {rule.name!r}" if rule else ""), *path)
    given = {key: typed(table[key], type(value), *path, key) for key, value in own.items() if key in table}
    return None if rule is None else get_scaling(rule, **given)


def _tile(text: str, *path: str | int) -> Tile:
    if text in _TILES:
        return _TILES[text]
    if not (sizes := re.fullmatch(r"(\d+|all)x(\d+|all)", text)):
        raise At(f"tile = {text!r} found; expected 'tensor', 'row' or rows x columns, such as '1x32'", *path, "tile")
    rows, columns = (0 if size == "all" else int(size) for size in sizes.groups())
    return Tile(rows, columns)


def storage(data: Any, *path: str | int) -> Storage:
    """A storage from a format's name, or from an operand's table with further keys (`_KEPT`)."""
    table = table_of(data, *path)
    options = {key: typed(table[key], type(usual), *path, key) for key, usual in _KEPT.items() if key in table}
    quantizer = operand({key: value for key, value in table.items() if key not in _KEPT}, *path)
    try:
        return get_storage(quantizer, **options)
    except RecipeError as error:
        raise At(str(error), *path) from error


def hadamard(data: Any, *path: str | int) -> Hadamard | None:
    """A Hadamard transform from a size (with NVFP4's signs), or from a table of size and seed, an integer or
    "random"."""
    if data == "none":
        return None
    table = {"size": data} if type(data) is int else typed(data, dict, *path)
    check_keys(table, ("size", "seed"), "key of a Hadamard transform", *path)
    given: Data = {key: None if value == "none" else value for key, value in table.items()}
    try:
        return Hadamard(**given)
    except QuantizationError as error:
        raise At(str(error), *path, *[key for key in given if f"{key} = " in str(error)][:1]) from error


def accumulator(data: Any, *path: str | int) -> Accumulator | None:
    """An accumulator from the name of a format or an accumulator, or from a table of its fields; None (float32) for
    "none"."""
    if data == "none":
        return None
    table = table_of(data, *path)
    hints = {name: kind for name, kind in get_type_hints(Accumulator).items() if name != "format"}
    check_keys(table, ("format", *hints), "key of an accumulator", *path)
    if "format" not in table:
        raise At("an accumulator without a format; expected one such as 'fp16', or a name: 'hopper'", *path)
    name = typed(table["format"], str, *path, "format")
    given = {key: typed(table[key], kind, *path, key) for key, kind in hints.items() if key in table}
    try:
        return replace(get_accumulator(formats.from_key(name) if " " in name else name), **given)
    except (FormatError, QuantizationError, ValueError, TypeError) as error:
        raise At(str(error), *path) from error


# ---- records to data ------------------------------------------------------------------------------------------------


def storage_data(storage: Storage) -> Data:
    kept = {key: getattr(storage, key) for key in _KEPT}
    return {**quantizer_data(storage.quantizer), **{key: v for key, v in kept.items() if v != _KEPT[key]}}


def quantizer_data(quantizer: Quantizer) -> Data:
    """A quantizer as data.

    Raises:
        RecipeError: as `to_data`.
    """
    format = quantizer.format
    data: Data = {"format": format.name if _is_named(quantizer) else format.key, "rounding": quantizer.rounding}
    data |= {"overflow": quantizer.overflow}
    records = {name: getattr(quantizer, name) for name in _RECORDS}
    data |= {
        name: {key: "none" if value is None else value for key, value in asdict(record).items()}
        for name, record in records.items()
        if record is not None
    }
    if quantizer.scales is None:
        return data
    tile = quantizer.scales.tile
    try:
        name, options = named(quantizer.scales.rule)
    except QuantizationError as error:
        raise RecipeError(str(error)) from error
    data |= {"tile": next((word for word, t in _TILES.items() if t == tile), f"{tile.rows}x{tile.columns}")}
    data |= {"scale": name, **options}
    return data if quantizer.outliers is None else {**data, "outliers": quantizer.outliers}


def hadamard_data(hadamard: Hadamard) -> Data:
    return {"size": hadamard.size, "seed": "none" if hadamard.seed is None else hadamard.seed}


def accumulator_data(accumulator: Accumulator) -> Data:
    format = accumulator.format
    try:
        name = format.name if formats.get(format.name) == format else format.key
    except FormatError:
        name = format.key
    rest = {"block": accumulator.block, "aligned": accumulator.aligned}
    return {"format": name, **rest, **({"promote": accumulator.promote} if accumulator.promote else {})}


def _is_named(quantizer: Quantizer) -> bool:
    """Whether the quantizer can be described by the name of its format, which for a block format sets its element."""
    name = quantizer.format.name
    try:
        if not formats.is_block(name):
            return formats.get(name) == quantizer.format
    except FormatError:
        return False
    block = formats.get_block(name)
    return (block.element, block.outliers) == (quantizer.format, quantizer.outliers) and quantizer.scales is not None


# ---- a recipe to data ------------------------------------------------------------------------------------------------

_TABLES = ("loss_scale", "attention", "codes", "moments", "projection", "saved", "communication")
"""The fields of a recipe that are records, beside its rules and stages; they come last in the data."""


def to_data(recipe: Any) -> Data:
    """The data from which `from_data` makes this recipe, complete: nothing is left to a base or a default.

    Raises:
        RecipeError: it has a custom scaling, which data cannot describe.
    """
    plain = [field.name for field in fields(recipe) if field.name not in (*_TABLES, "rules", "stages")]
    data: Data = {name: _written(getattr(recipe, name)) for name in (*plain, *_TABLES)}
    data["moments"] = _moments_data(recipe.moments)
    keeps = recipe.rules[: len(KEEP)] == KEEP
    rules = [_rule_data(rule) for rule in recipe.rules[len(KEEP) if keeps else 0 :]]
    stages = [{"start": stage.start, "recipe": to_data(stage.recipe)} for stage in recipe.stages]
    return {**data, "keep_heads": keeps, "rules": rules} | ({"stages": stages} if stages else {})


def _written(value: Any) -> Any:
    """A field's value as data; a record becomes a table of its fields."""
    if isinstance(value, LinearSpec):
        return _linear_data(value)
    if isinstance(value, Storage):
        return storage_data(value)
    if is_dataclass(value):
        return {field.name: _written(getattr(value, field.name)) for field in fields(value)}
    return "none" if value is None else list(value) if isinstance(value, tuple) else value


def _moments_data(moments: str | Storage | tuple[tuple[str, str | Storage], ...]) -> str | Data:
    if isinstance(moments, str):
        return moments
    pairs = moments if isinstance(moments, tuple) else (("*", moments),)
    return {glob: kind if isinstance(kind, str) else storage_data(get_storage(kind)) for glob, kind in pairs}


def _rule_data(rule: Rule) -> Data:
    words = [field.name for field in fields(Rule) if field.name != "linear"]
    return {**{key: _written(getattr(rule, key)) for key in words}, **_linear_data(rule.linear)}


def _linear_data(spec: LinearSpec) -> Data:
    data: Data = {}
    for product in (field.name for field in fields(LinearSpec)):
        matmul: Matmul = getattr(spec, product)
        sides = {side: quantizer_data(q) for side in ("lhs", "rhs") if (q := getattr(matmul, side)) is not None}
        if matmul.accumulate is not None:
            sides["accumulate"] = accumulator_data(matmul.accumulate)
        if matmul.multiplier is not None:
            sides["multiplier"] = _written(matmul.multiplier)
        if matmul.hadamard is not None:
            sides["hadamard"] = hadamard_data(matmul.hadamard)
        data |= {product: sides} if sides else {}
    return data
