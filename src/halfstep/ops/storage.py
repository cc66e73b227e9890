"""Quantised tensors in safetensors files: plain tensors, and JSON metadata that says how to read them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from halfstep import formats
from halfstep.errors import CheckpointError, HalfstepError
from halfstep.formats import Format
from halfstep.ops.quantized import Quantized
from halfstep.quant import Quantizer, Tile
from halfstep.quant.quantizer import layout
from halfstep.quant.scaling import get_scaling


_KEY = "halfstep.quantized"
_KINDS: dict[str, Any] = {k.__name__: k for k in (formats.Float, formats.Integer, formats.Posit, formats.Codebook)}
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
_LARGEST = 2**48  # elements; what a file may claim before anything is allocated for it


def save_quantized(tensors: Mapping[str, Quantized], path: str | Path) -> None:
    """Write quantised tensors to a safetensors file: `NAME.codes`, `NAME.scale` ... and the quantizers as metadata."""
    plain = {f"{name}.{part}": t.detach().contiguous() for name, q in tensors.items() for part, t in q.tensors.items()}
    save_file(plain, str(path), metadata=metadata({n: (q.quantizer, q.shape, q.dtype) for n, q in tensors.items()}))


def metadata(tensors: Mapping[str, tuple[Quantizer, tuple[int, ...], torch.dtype]]) -> dict[str, str]:
    """What a safetensors file must say so that `load_quantized` reads tensors in it: by name, the quantizer that made
    each, and the shape and dtype of what it was made from."""
    return {_KEY: json.dumps({name: _describe(*described) for name, described in tensors.items()})}


def load_quantized(path: str | Path) -> dict[str, Quantized]:
    """The quantised tensors of a file that `save_quantized` wrote, by name.

    Raises:
        CheckpointError: no such file; not a safetensors file, or none of quantised tensors; an unknown format, scale
            rule or dtype; shapes that contradict each other. Nothing is executed, and the tensors' sizes are checked
            first.
    """
    try:
        with safe_open(str(path), "pt") as file:
            text = (file.metadata() or {}).get(_KEY)
            if text is None:
                raise CheckpointError(f"{path} has no {_KEY!r} metadata: it was not written by save_quantized")
            described, keys = json.loads(text), set(file.keys())
            result = {}
            for name, description in described.items():
                parts = description.pop("tensors")
                missing = [f"{name}.{p}" for p in parts if f"{name}.{p}" not in keys]
                if missing:
                    raise CheckpointError(f"{path}: {name!r} lacks {', '.join(missing)}")
                result[name] = _restore({**description, "tensors": {p: file.get_tensor(f"{name}.{p}") for p in parts}})
            return result
    except CheckpointError:
        raise
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}") from error
    except (HalfstepError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: {error or type(error).__name__}. The file was edited, or is of a newer version"
        ) from error


def _describe(q: Quantizer, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    return {
        "format": _describe_format(q.format),
        "rounding": q.rounding,
        "overflow": q.overflow,
        "tile": None if q.tile is None else [q.tile.rows, q.tile.columns],
        "scaling": None if q.scaling is None else q.scaling.name,
        "outliers": q.outliers,
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "tensors": sorted(layout(q, shape, dtype)),
    }


def _describe_format(format: Format) -> Any:
    """A name where that is enough, else every field."""
    try:
        if formats.get(format.name) == format:
            return format.name
    except HalfstepError:
        pass
    return {"kind": type(format).__name__, **dataclasses.asdict(format)}


def _restore(data: dict[str, Any]) -> Quantized:
    shape = tuple(data["shape"])
    if not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) > _LARGEST:
        raise ValueError(f"shape {shape} found; expected whole numbers, at most 2^48 elements")
    if data["dtype"] not in _DTYPES:
        raise ValueError(f"dtype {data['dtype']!r} found; expected one of {', '.join(_DTYPES)}")
    quantizer = Quantizer(
        _restore_format(data["format"]),
        data["rounding"],
        data["overflow"],
        None if data["tile"] is None else Tile(*data["tile"]),
        None if data["scaling"] is None else get_scaling(data["scaling"]),
        data["outliers"],
    )
    return Quantized(quantizer, shape, _DTYPES[data["dtype"]], data["tensors"])


def _restore_format(data: Any) -> Format:
    if isinstance(data, str):
        return formats.get(data)
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items() if key != "kind"}
    if data["kind"] not in _KINDS:
        raise ValueError(f"format kind {data['kind']!r} found; expected one of {', '.join(_KINDS)}")
    return _KINDS[data["kind"]](**fields)  # type: ignore[no-any-return]
