"""How a tensor is kept between two uses: what rounds it, and what stands beside it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from halfstep import formats
from halfstep.errors import HalfstepError, RecipeError
from halfstep.quant import Quantizer, get_quantizer
from halfstep.quant.quantizer import layout


STORABLE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Formats in which whole tensors (weights, gradients, moments) are stored as they are, with torch's dtypes."""

_DTYPES = {formats.get(name).key: dtype for name, dtype in STORABLE.items()}
_RESIDUAL = "_residual"

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Name, dtype and shape of stored tensors."""


@dataclass(frozen=True)
class Storage:
    """How a tensor is kept: rounded by a quantizer; with a `residual`, as the sum of two numbers, of which the second
    is what the first left over, rounded in the same way.

    A format in `STORABLE` without scales is stored as torch's dtype, and converted as torch does; others as codes and
    scales (`quant.Quantized`).

    Raises:
        RecipeError: the quantizer depends on earlier steps or on noise, or keeps outliers apart.
    """

    quantizer: Quantizer
    residual: bool = False

    def __post_init__(self) -> None:
        quantizer = self.quantizer
        if quantizer.stateful:
            raise RecipeError(
                f"stored with scale = {quantizer.stateful.name!r}, which follows earlier steps; what is stored takes a "
                "rule that needs the tensor alone: current, rceil, floor, absmax ..."
            )
        if quantizer.rounding == "stochastic":
            raise RecipeError("stored with rounding = 'stochastic'; what an optimizer keeps is rounded to nearest")
        if quantizer.outliers is not None:
            raise RecipeError(f"stored with outliers = {quantizer.outliers:g}; no optimizer keeps columns apart")

    @property
    def dtype(self) -> torch.dtype | None:
        """torch's dtype of values that are stored as they are; None where they are codes."""
        quantizer = self.quantizer
        plain = quantizer.scales is None and quantizer.rounding == "nearest_even"
        return _DTYPES.get(quantizer.format.key) if plain else None

    def names(self, name: str) -> dict[str, str]:
        """What the number called `name` is kept in: for each part of the quantised tensor, what it is called."""
        if self.dtype is not None:
            return {"codes": name}
        parts = layout(self.quantizer, (1, 1), torch.float32)
        return {part: name if part == "codes" else f"{name}_{part}" for part in parts}

    def numbers(self, name: str) -> tuple[str, ...]:
        """The names of the numbers whose sum is kept."""
        return (name, name + _RESIDUAL) if self.residual else (name,)

    def parts(self, name: str) -> tuple[str, ...]:
        """The names of all tensors that the tensor called `name` is kept in."""
        return tuple(part for number in self.numbers(name) for part in self.names(number).values())

    def layout(self, name: str, shape: tuple[int, ...]) -> Layout:
        """Name, dtype and shape of every tensor that one of that shape is kept in."""
        if self.dtype is not None:
            return dict.fromkeys(self.numbers(name), (self.dtype, shape))
        parts = layout(self.quantizer, shape, torch.float32)
        return {
            self.names(number)[part]: (dtype, tuple(size or 0 for size in sizes))
            for number in self.numbers(name)
            for part, (dtype, sizes) in parts.items()
        }

    @property
    def bytes(self) -> float:
        """Bytes an element, whole tiles taken for granted: a scale of the whole tensor counts nothing."""
        numbers = 2 if self.residual else 1
        if self.dtype is not None:
            return numbers * float(self.dtype.itemsize)
        beside, scales = 0.0, self.quantizer.scales
        if scales is not None and scales.tile.rows and scales.tile.columns:
            one, two = (scales.rule.layout((rows, 1)) for rows in (1, 2))
            beside = (_bytes(two) - _bytes(one)) / (scales.tile.rows * scales.tile.columns)
        return numbers * (self.quantizer.format.bits / 8 + beside)

    def __str__(self) -> str:
        quantizer = self.quantizer
        scales = "" if quantizer.scales is None else f" ({quantizer.scales})"
        rounding = "" if quantizer.rounding == "nearest_even" else f", rounded {quantizer.rounding}"
        return f"{quantizer.format.name}{scales}{rounding}" + (" with a residual" if self.residual else "")


def _bytes(tensors: Layout) -> int:
    sizes = [dtype.itemsize * torch.Size(shape).numel() for dtype, shape in tensors.values()]
    return sum(sizes)


@cache
def get_storage(kind: str | Quantizer | Storage, residual: bool = False) -> Storage:
    """The storage that a format's name (with its usual tiles) or a quantizer stands for; a `Storage` is returned as it
    is.

    Raises:
        RecipeError: no such format; or as `Storage`.

    >>> print(get_storage("mxfp8_e4m3"), get_storage("mxfp8_e4m3").bytes)
    float8_e4m3fn (floor, 1x32) 1.03125
    """
    if isinstance(kind, Storage):
        return kind
    try:
        return Storage(get_quantizer(kind), residual)
    except RecipeError:
        raise
    except HalfstepError as error:
        raise RecipeError(f"{kind!r}: {error}") from error
