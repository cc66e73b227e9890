"""The quantised layers of a checkpoint, found by `schemes.SCHEMES`, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

from halfstep.bits.layer import Layer
from halfstep.inspection.schemes import SCHEMES, Scheme, Shape, block_of, tile_of
from halfstep.inspection.stored import StoredTensor


@dataclass(frozen=True)
class Layers:
    """The quantised layers by the name of the tensor of their codes, and what is broken, in words."""

    by_codes: Mapping[str, Layer]
    findings: tuple[str, ...] = ()

    @property
    def parts(self) -> frozenset[str]:
        """The names of all scales, zero points, tables."""
        return frozenset(part for layer in self.by_codes.values() for part in layer.parts)

    def __add__(self, other: Layers) -> Layers:
        return Layers({**self.by_codes, **other.by_codes}, (*self.findings, *other.findings))


def find_layers(tensors: Sequence[StoredTensor]) -> Layers:
    """Every quantised layer, by the names, types and shapes of its tensors. Broken ones are findings, too."""
    names = {tensor.name: tensor for tensor in tensors}
    found: dict[str, Layer] = {}
    findings: list[str] = []
    used: dict[str, Scheme] = {}
    for tensor in tensors:
        fitting = [(scheme, parts) for scheme in _schemes(tensor.dtype) if (parts := _parts(tensor, scheme, names))]
        if not fitting:
            continue
        tried = [(scheme, parts, *_layer(scheme, parts)) for scheme, parts in fitting]
        # Schemes whose names are alike differ in what they need and in how shapes fit.
        scheme, parts, layer, wrong = min(tried, key=lambda one: (one[2] is None, len(one[3])))
        used |= {part.name: scheme for part in parts.values()}
        found |= {tensor.name: layer} if layer is not None else {}
        findings += wrong
    return Layers(found, (*findings, *_left_over(tensors, used, set(found))))


@cache
def _schemes(dtype: str) -> list[Scheme]:
    """Those whose codes are stored so."""
    return [scheme for scheme in SCHEMES if dtype in scheme.dtypes]


def _parts(codes: StoredTensor, scheme: Scheme, names: Mapping[str, StoredTensor]) -> dict[str, StoredTensor] | None:
    """The tensors of the layer by suffix, or None where codes and scales are not called and stored so."""
    if not codes.name.endswith(scheme.codes):
        return None
    stem = codes.name.removesuffix(scheme.codes)
    scale = names.get(stem + scheme.scale)
    if scale is None or scale is codes or scale.dtype not in scheme.scale_dtypes:
        return None
    parts = {suffix: names.get(_name(stem, suffix)) for suffix in (scheme.scale, *scheme.needs, *scheme.may)}
    return {"codes": codes} | {suffix: part for suffix, part in parts.items() if part is not None}


def _name(stem: str, suffix: str) -> str:
    module, dot, _ = stem.rpartition(".")
    return f"{module}{dot}{suffix[1:]}" if suffix.startswith("/") else f"{stem}{suffix}"


def _layer(scheme: Scheme, parts: dict[str, StoredTensor]) -> tuple[Layer | None, list[str]]:
    """The layer, None where its shapes do not fit, and what is wrong with it."""
    codes, scale = parts["codes"], parts[scheme.scale]
    stem = codes.name.removesuffix(scheme.codes)
    missing = [_last(_name(stem, suffix)) for suffix in scheme.needs if suffix not in parts]
    wrong = [f"{codes.name} ({scheme.name}): no {name} beside it" for name in missing]
    shape = scheme.packing.shape(parts)
    values = prod(shape or (0,))
    tile = _tile(scheme, shape, scale.shape) if shape is not None and values else None
    bits = round(8 * codes.nbytes / values) if values else 0
    if tile is None or not 0 < bits <= 8:
        sizes = f"codes of shape {written(codes.shape)}, scales of shape {written(scale.shape)}"
        return None, [f"{codes.name} ({scheme.name}): {sizes} do not fit together"]
    format = f"int{bits}" if scheme.format == "int" else scheme.format or codes.dtype
    held = tuple(part.name for suffix, part in parts.items() if suffix != "codes")
    nbytes = sum(part.nbytes for part in parts.values())
    scale_type = "float8_e8m0fnu" if scale.dtype == "uint8" and not scheme.flat else scale.dtype
    return Layer(codes.name, scheme.name, format, scale_type, tile, values, bits, nbytes, held, scheme.also), wrong


def _tile(scheme: Scheme, shape: Shape, scale: Shape) -> str | None:
    """What shares a scale, in words; None where the shapes do not fit."""
    if scheme.flat:
        size = block_of(prod(shape), prod(scale))
        return f"{size} codes" if size else None
    tile = tile_of(shape, (*scale[:-2], *scale[:-3:-1]) if scheme.turned else scale, scheme.tile)
    if tile is None:
        return None
    return tile_text(tile, shape)


def tile_text(tile: tuple[int, int], shape: Shape) -> str:
    """A tile of rows and columns, 0 for all, in words."""
    rows, columns = tile
    words = {(0, 0): "tensor", (1, 0): "row", (0, 1): "column"}
    return words.get(tile, f"{rows or (1, *shape)[-2]}x{columns or (1, *shape)[-1]} block")


def _left_over(tensors: Sequence[StoredTensor], used: Mapping[str, Scheme], codes: set[str]) -> list[str]:
    """Tensors that are called and stored like the codes or the scales of other layers, and belong to none."""
    alike = {(_last(t.name), t.dtype): used[t.name] for t in tensors if t.name in used}
    found, called = [], {_last(name) for name in codes}
    for tensor in tensors:
        scheme = alike.get((_last(tensor.name), tensor.dtype))
        if tensor.name in used or scheme is None or len(tensor.shape) == 1:
            continue
        stem = tensor.name.removesuffix(scheme.codes)
        if _last(tensor.name) in called:
            found.append(f"{tensor.name} ({scheme.name}): no {_last(stem + scheme.scale)} beside it")
        elif tensor.name.endswith(scheme.scale):
            found.append(f"{tensor.name} ({scheme.name}): a scale without codes")
    return found


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def written(shape: Sequence[int | str]) -> str:
    """A shape in words."""
    return "x".join(str(size) for size in shape) or "scalar"
