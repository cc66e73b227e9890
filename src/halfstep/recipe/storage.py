"""How a tensor is kept between two uses, and what autograd saves: what rounds it, and what stands beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod
from typing import Any

import torch

from halfstep import formats
from halfstep.errors import HalfstepError, RecipeError
from halfstep.quant import TENSOR, Quantizer, Scales, Tile, get_quantizer, get_scaling, layout


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Formats in which whole tensors (weights, gradients, moments) are stored as they are, with torch's dtypes."""

_DTYPES = {formats.get(name).key: dtype for name, dtype in DTYPES.items()}
_SCALED = {
    formats.get(dtype).key: dtype
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
}  # fmt: skip
_ONE_SCALE = Quantizer(formats.get("fp16"), scales=Scales(TENSOR, get_scaling("rceil")))
_RESIDUAL = "_residual"

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Name, dtype and shape of stored tensors."""


@dataclass(frozen=True)
class Storage:
    """How a tensor is kept: rounded by a quantizer; with a `residual`, as the sum of two numbers, of which the second
    is what the first left over, rounded in the same way.

    A format in `DTYPES` without scales is stored as torch's dtype, and converted as torch does; others as codes and
    scales (`quant.Quantized`).

    Raises:
        RecipeError: the quantizer depends on earlier steps or on noise, or keeps outliers apart; `flat` without tiles
            that lie along a row.
    """

    quantizer: Quantizer
    residual: bool = False
    flat: bool = False
    """Tiles lie along the whole tensor, laid out flat, and not along its last dimension."""
    smallest: int = 0
    """Tensors of fewer elements are kept in fp32."""

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
        if quantizer.clamp is not None or quantizer.estimator is not None:
            raise RecipeError(
                f"stored with a {quantizer.clamp or quantizer.estimator}: clamps and estimators are for operands of "
                "products; what is stored is rounded as it is"
            )
        tile = quantizer.scales.tile if quantizer.scales else None
        if self.flat and (tile is None or tile.rows != 1 or not tile.columns):
            raise RecipeError(f"stored flat with tile = {tile or 'none'}; expected pieces of a row, such as 1x256")
        if type(self.smallest) is not int or self.smallest < 0:
            raise RecipeError(f"stored with smallest = {self.smallest!r}; expected a number of elements, or 0")
        _ = self.dtype, self._kinds  # asked in traced graphs too, where nothing is found for the first time

    def matrix(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that a tensor of that shape is quantised in."""
        return (1, prod(shape)) if self.flat else shape

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """torch's dtype of values that are stored as they are; None where they are codes."""
        quantizer = self.quantizer
        plain = quantizer.scales is None and quantizer.rounding == "nearest_even"
        return _DTYPES.get(quantizer.format.key) if plain else None

    @property
    def scaled_dtype(self) -> torch.dtype | None:
        """torch's dtype of codes that lie as their values do, under one scale; None where they do not."""
        return scaled_dtype(self.quantizer)

    def names(self, name: str) -> dict[str, str]:
        """What the number called `name` is kept in: for each part of the quantised tensor, what it is called."""
        if self.dtype is not None:
            return {"codes": name}
        return {part: name if part == "codes" else f"{name}_{part}" for part in self._kinds}

    @cached_property
    def _kinds(self) -> tuple[str, ...]:
        """The parts of a number that is codes."""
        return () if self.dtype is not None else tuple(self._layout((1, 1)))

    def numbers(self, name: str) -> tuple[str, ...]:
        """The names of the numbers whose sum is kept."""
        return (name, name + _RESIDUAL) if self.residual else (name,)

    def parts(self, name: str) -> tuple[str, ...]:
        """The names of all tensors that the tensor called `name` is kept in."""
        if self.dtype is not None:
            return self.numbers(name)
        return tuple([part for number in self.numbers(name) for part in self.names(number).values()])

    def layout(self, name: str, shape: tuple[int, ...]) -> Layout:
        """Name, dtype and shape of every tensor that one of that shape is kept in."""
        if self.dtype is not None:
            return dict.fromkeys(self.numbers(name), (self.dtype, shape))
        parts, found = self._layout(shape), {}
        for number in self.numbers(name):
            names = self.names(number)
            for part, kind in parts.items():
                found[names[part]] = kind
        return found

    def _layout(self, shape: tuple[int, ...]) -> Layout:
        """As `layout`, of one number, by the names of its parts."""
        if self.scaled_dtype is not None:
            return {"codes": (self.scaled_dtype, shape), "scale": (torch.float32, ())}
        parts: Any = layout(self.quantizer, self.matrix(shape), torch.float32)  # no outliers: every size is known
        return parts  # type: ignore[no-any-return]

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
        flat = ", laid out flat" if self.flat else ""
        smallest = f", from {self.smallest} elements on" if self.smallest else ""
        residual = " with a residual" if self.residual else ""
        return f"{quantizer.format.name}{scales}{rounding}{flat}{smallest}{residual}"


@cache
def scaled_dtype(quantizer: Quantizer) -> torch.dtype | None:
    """torch's dtype of codes that lie as their values do, under the smallest power of two that brings all of them in
    range (`rceil`); None where they do not."""
    scaled = replace(quantizer, format=_ONE_SCALE.format) == _ONE_SCALE
    return _SCALED.get(quantizer.format.key) if scaled else None


@dataclass(frozen=True)
class Codes:
    """How the weights that rules round are kept, with their gradients and masters: as codes (`ops.CodeTensor`).

    The codes come with the optimizer of `halfstep.prepare`: under `halfstep.apply` these weights stay as others do.
    With more than one rank, gradients stay in fp32 until the optimizer rounds them.

    Raises:
        RecipeError: weights or gradients of torch's own dtypes, or with a residual; a master like the weights.
    """

    weights: Storage
    grads: Storage | None = None
    """The gradients as accumulated, rounded once a micro-batch; None is fp32."""
    master: Storage | None = None
    """What takes the update, in the optimizer's state; None where the weights take it themselves."""

    def __post_init__(self) -> None:
        for role in ("weights", "grads", "master"):
            storage = getattr(self, role)
            if storage is not None and storage.smallest:
                raise RecipeError(f"codes {role} with smallest: every weight that rules round is codes; leave it out")
            if role == "master":
                continue
            if storage is not None and (storage.dtype is not None or storage.residual or storage.flat):
                raise RecipeError(
                    f"codes {role} = {storage}: expected codes, such as {{format = 'e4m3fn', tile = 'tensor', scale = "
                    f"'rceil'}}; what torch has a dtype for is the recipe's own {role}; a residual, or tiles laid "
                    "out flat, are a master's"
                )
        if self.master == self.weights:
            raise RecipeError(f"codes master = {self.master} is how the weights are kept; leave it out")

    def __str__(self) -> str:
        master = f", master {self.master}" if self.master else ""
        return f"weights that rules round: {self.weights}; gradients {self.grads or 'fp32'}{master}"


def _bytes(tensors: Layout) -> int:
    sizes = [dtype.itemsize * torch.Size(shape).numel() for dtype, shape in tensors.values()]
    return sum(sizes)


@cache
def get_storage(
    kind: str | Quantizer | Storage, residual: bool = False, flat: bool = False, smallest: int = 0
) -> Storage:
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
        return Storage(get_quantizer(kind), residual, flat, smallest)
    except RecipeError:
        raise
    except HalfstepError as error:
        raise RecipeError(f"{kind!r}: {error}") from error


@dataclass(frozen=True)
class Saved:
    """How tensors are kept between the forward and the backward pass, where they are not kept as they are.

    Only what `nn.apply` knows by the module that saves it: inputs of attention and of rotary positions, the residual
    stream, softmax's statistics and whatever a model's own code saves stay as they are, and so do parameters.

    Raises:
        RecipeError: neither is given; a storage with a residual, or that leaves small tensors in fp32.
    """

    operands: bool = False
    """Inputs of linear products are kept as the codes that the products rounded them to, once for all products that
    take them; weights are rounded again. No number changes."""
    nonlinear: Storage | None = None
    """What norms, activation functions and gated products save of their inputs' shape."""

    def __post_init__(self) -> None:
        if not self.operands and self.nonlinear is None:
            raise RecipeError("saved with operands = false and no nonlinear: it keeps nothing; leave it out")
        if self.nonlinear is not None and (self.nonlinear.residual or self.nonlinear.smallest):
            raise RecipeError(
                f"saved nonlinear = {self.nonlinear}: expected one number an element and no limit of size, such as "
                "{format = 'e4m3fn', tile = '1x16', scale = 'absmax_bf16', flat = true}; a residual and `smallest` are "
                "for what an optimizer keeps"
            )

    def __str__(self) -> str:
        operands = ["inputs of products as the codes that they are rounded to"] * self.operands
        others = [] if self.nonlinear is None else [f"of norms, activations and gated products as {self.nonlinear}"]
        return "; ".join(operands + others)


COAT = Saved(
    operands=True,
    nonlinear=get_storage(
        Quantizer(formats.get("e4m3fn"), scales=Scales(Tile(1, 16), get_scaling("absmax_bf16"))), flat=True
    ),
)
"""COAT's mixed granularity: one scale a tensor for inputs of products, one for each 16 elements elsewhere.

Source: Xi et al. 2025, arXiv 2410.19313, and its released code.
"""
