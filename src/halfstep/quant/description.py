"""Quantizers in files: as complete data for JSON, and as a line of text that identifies most of them."""

import dataclasses
import json
import math
from functools import cache
from typing import Any

import torch

from halfstep import formats
from halfstep.errors import HalfstepError
from halfstep.formats import Format
from halfstep.quant.estimator import Clamp
from halfstep.quant.quantizer import Quantizer, Scales, layout
from halfstep.quant.scaling import Scaling, get_scaling, named
from halfstep.quant.tile import TENSOR, Tile


KEY = "halfstep.quantized"
"""The metadata key of a safetensors file under which `describe` of each tensor is stored by name, as JSON."""

MALFORMED = (HalfstepError, ValueError, TypeError, KeyError, AttributeError)
"""The exceptions of `restore` and `from_label` for input that they cannot read."""

_KINDS: dict[str, Any] = {k.__name__: k for k in (formats.Float, formats.Integer, formats.Posit, formats.Codebook)}
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
"""The dtypes of tensors before quantization, by torch's names."""
_LARGEST = 2**48  # elements that a file may claim, checked before anything is allocated
_DIMENSIONS = 64


def describe(q: Quantizer, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """The description of a quantized tensor: its quantizer, the original shape and dtype, and the names of its tensors.

    An estimator is left out: it does not affect values.
    """
    return {
        "format": _describe_format(q.format),
        "rounding": q.rounding,
        "overflow": q.overflow,
        "tile": None if q.scales is None else [q.scales.tile.rows, q.scales.tile.columns],
        "scaling": None if q.scales is None else _describe_rule(q.scales.rule),
        "outliers": q.outliers,
        **({} if q.clamp is None else {"clamp": dataclasses.asdict(q.clamp)}),
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "tensors": sorted(layout(q, shape, dtype)),
    }


def restore(data: Any) -> tuple[Quantizer, tuple[int, ...], torch.dtype]:
    """The quantizer, shape and dtype that `describe` was given.

    Raises:
        MALFORMED: an unknown format, scale rule or dtype; a shape that no tensor has; a description of something else.
    """
    shape = tuple(data["shape"])
    whole = len(shape) <= _DIMENSIONS and all(type(n) is int and 0 <= n <= _LARGEST for n in shape)
    if not whole or math.prod(shape) > _LARGEST:
        raise ValueError(f"shape {shape} found; expected integers, at most 2^48 elements")
    if data["dtype"] not in DTYPES:
        raise ValueError(f"dtype {data['dtype']!r} found; expected one of {', '.join(DTYPES)}")
    quantizer = Quantizer(
        _restore_format(data["format"]),
        data["rounding"],
        data["overflow"],
        _restore_scales(data["tile"], data["scaling"]),
        data["outliers"],
        Clamp(**data["clamp"]) if "clamp" in data else None,
    )
    return quantizer, shape, DTYPES[data["dtype"]]


def label(q: Quantizer) -> str:
    """Format, tile and scale rule as one line.

    >>> from halfstep.quant import get_quantizer
    >>> label(get_quantizer("mxfp8"))
    'float 4 3 7 fn, 1x32, floor'
    """
    return f"{q.format.key}, {q.scales.tile if q.scales else 'no tile'}, {q.scales.rule if q.scales else 'no scale'}"


def from_label(text: str) -> Quantizer:
    """The quantizer with this `label`, with defaults for options that a label omits; its format must have a name.

    Raises:
        MALFORMED: it is not a label, or its format, tile or scale rule is unknown.
    """
    key, tile, rule = text.rsplit(", ", 2)
    if rule == "no scale":
        return Quantizer(_by_key()[key])
    sizes = (0 if size == "all" else int(size) for size in tile.split("x"))
    scales = Scales(TENSOR if tile == str(TENSOR) else Tile(*sizes), _restore_rule(rule))
    return Quantizer(_by_key()[key], scales=scales)


@cache
def _by_key() -> dict[str, Format]:
    return {format.key: format for format in map(formats.get, formats.names())}


def _restore_scales(tile: Any, rule: Any) -> Scales | None:
    if (tile is None) != (rule is None):
        raise ValueError(f"tile {tile} and scaling {rule} found; expected both, or neither for a plain cast")
    return None if tile is None else Scales(Tile(*tile), _restore_rule(rule))


def _describe_rule(rule: Scaling) -> Any:
    """The rule's name if that is enough, else a table of the name and all options."""
    name, options = named(rule)
    return name if str(rule) == name else {"name": name, **options}


def _restore_rule(data: Any) -> Scaling:
    """The rule of a description. In labels, and in earlier files, options are words: `rceil margin=3`."""
    if isinstance(data, str):
        name, *words = data.split() or [""]
        data = {"name": name, **{option: _value(text) for option, _, text in (word.partition("=") for word in words)}}
    return get_scaling(**data)


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def _describe_format(format: Format) -> Any:
    """The format's name if that is enough, else all fields."""
    try:
        if formats.get(format.name) == format:
            return format.name
    except HalfstepError:
        pass
    return {"kind": type(format).__name__, **dataclasses.asdict(format)}


def _restore_format(data: Any) -> Format:
    if isinstance(data, str):
        return formats.get(data)
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items() if key != "kind"}
    if data["kind"] not in _KINDS:
        raise ValueError(f"format kind {data['kind']!r} found; expected one of {', '.join(_KINDS)}")
    return _KINDS[data["kind"]](**fields)
