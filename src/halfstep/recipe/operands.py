"""Operands and storages of a recipe as plain data, and back."""

import re
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

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
from halfstep.recipe.storage import Storage, get_storage


Data = dict[str, Any]
_TILES = {"tensor": TENSOR, "row": ROW}
_KEPT: Data = {"residual": False, "flat": False, "smallest": 0}  # of a storage, beside its quantizer's
_RECORDS: dict[str, Any] = {"clamp": Clamp, "estimator": Estimator}  # tables within an operand's
_OWN = (
    "format",
    "tile",
    "scale",
    "rounding",
    "overflow",
    "outliers",
    *_RECORDS,
)  # the rest of an operand is its scaling's


class At(RecipeError):
    """A mistake in the data, and the keys that lead to it."""

    def __init__(self, message: str, *path: str | int) -> None:
        super().__init__(message)
        self.path = path


# ---- data to records ------------------------------------------------------------------------------------------------


def check_keys(data: Mapping[str, Any], known: tuple[str, ...], kind: str, *path: str | int) -> None:
    for key in data:
        if key not in known:
            raise At(unknown(kind, key, known), *path, key)


def typed(value: Any, expected: Any, *path: str | int) -> Any:
    """The value, if it is what a field of that type takes: lists become tuples, "none" None."""
    optional = isinstance(expected, types.UnionType)
    if optional and value == "none":
        return None
    kinds = [kind for kind in typing.get_args(expected) if kind is not type(None)] if optional else [expected]
    if kinds[0] == tuple[str, ...]:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise At(f"{path[-1]} = {value!r} found; expected a list of strings", *path)
    if type(value) is int and float in kinds:
        return float(value)
    if type(value) not in kinds:
        words = {str: "a string", bool: "true or false", float: "a number", int: "a whole number"}
        wanted = words.get(kinds[0], "an array of tables" if kinds[0] is list else "a table")
        raise At(f"{path[-1]} = {value!r} found; expected {wanted}" + (" or 'none'" if optional else ""), *path)
    return value


def table_of(data: Any, *path: str | int) -> Data:
    """A table, where a name stands for a table of a format."""
    if isinstance(data, str):
        return {"format": data}
    if not isinstance(data, dict):
        raise At(f"{path[-1]} = {data!r} found; expected a name or a table", *path)
    return data


def operand(data: Any, *path: str | int) -> Quantizer:
    """A format's name, or a table with at least its `format`; a block format brings its tile and its scale rule."""
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
    """A table of the record's fields, all of which may be left out; "none" is none."""
    if data == "none":
        return None
    table = typed(data, dict, *path)
    hints = typing.get_type_hints(kind)
    check_keys(table, tuple(hints), f"key of {path[-1]}", *path)
    given = {key: typed(value, hints[key], *path, key) for key, value in table.items()}
    try:
        return kind(**given)
    except QuantizationError as error:
        raise At(str(error), *path, *[key for key in given if re.search(rf"\b{key}\b", str(error))][:1]) from error


def _options(rule: Scaling | None, table: Mapping[str, Any], *path: str | int) -> Scaling | None:
    """The scale rule with the options that the operand gives it: history, algorithm, margin, bias."""
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
    """A format's name, or a table as of an operand that also says how else the tensor is kept."""
    table = table_of(data, *path)
    options = {key: typed(table[key], type(usual), *path, key) for key, usual in _KEPT.items() if key in table}
    quantizer = operand({key: value for key, value in table.items() if key not in _KEPT}, *path)
    try:
        return get_storage(quantizer, **options)
    except RecipeError as error:
        raise At(str(error), *path) from error


def hadamard(data: Any, *path: str | int) -> Hadamard | None:
    """A size, of a transform with NVFP4's signs; or a table of the size and a seed, an integer or "random"."""
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
    """A format's or an accumulator's name, or a table of an accumulator's fields; "none" is float32."""
    if data == "none":
        return None
    table = table_of(data, *path)
    hints = {name: kind for name, kind in typing.get_type_hints(Accumulator).items() if name != "format"}
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
    """One operand as data.

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
    """Whether the name of its format, read again, is its format: a block format of that name brings its element's."""
    name = quantizer.format.name
    try:
        if not formats.is_block(name):
            return formats.get(name) == quantizer.format
    except FormatError:
        return False
    block = formats.get_block(name)
    return (block.element, block.outliers) == (quantizer.format, quantizer.outliers) and quantizer.scales is not None
