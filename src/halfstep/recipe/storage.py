"""`Storage`, `Codes`, `Saved`, `Communication`: the formats of stored, saved and communicated tensors."""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod
from typing import Any

import torch

from halfstep import formats
from halfstep.errors import HalfstepError, RecipeError, unknown
from halfstep.quant import TENSOR, Quantizer, Scales, Tile, get_quantizer, get_scaling, layout


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Formats in which tensors (weights, gradients, moments) can be stored in a torch dtype, without scales."""

_DTYPES = {formats.get(name).key: dtype for name, dtype in DTYPES.items()}
_SCALED = {
    formats.get(dtype).key: dtype
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
}  # fmt: skip
_ONE_SCALE = Quantizer(formats.get("fp16"), scales=Scales(TENSOR, get_scaling("rceil")))
_RESIDUAL = "_residual"

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""The dtype and shape of stored tensors, by name."""


@dataclass(frozen=True)
class Storage:
    """How a tensor is stored: rounded by a quantizer; with `residual`, as the sum of two values, the second being the
    rounding error of the first, rounded alike.

    A format in `DTYPES` without scales is stored in torch's dtype, converted as torch does; others as codes and scales
    (`quant.Quantized`).

    Raises:
        RecipeError: the quantizer has a state, noise, outliers, a clamp or an estimator; `flat` without tiles along
            rows.
    """

    quantizer: Quantizer
    residual: bool = False
    flat: bool = False
    """Tiles are along the flattened tensor, not along its last dimension."""
    smallest: int = 0
    """Tensors with fewer elements are stored in fp32."""

    def __post_init__(self) -> None:
        quantizer = self.quantizer
        if quantizer.stateful:
            raise RecipeError(
                f"stored with scale = {quantizer.stateful.name!r}, which depends on earlier steps; a storage needs a "
                "scaling that depends on the tensor alone: current, rceil, floor, absmax ..."
            )
        if quantizer.rounding == "stochastic":
            raise RecipeError("stored with rounding = 'stochastic'; what an optimizer keeps is rounded to nearest")
        if quantizer.outliers is not None:
            raise RecipeError(f"stored with outliers = {quantizer.outliers:g}; no optimizer keeps columns apart")
        if quantizer.clamp is not None or quantizer.estimator is not None:
            raise RecipeError(
                f"stored with a {quantizer.clamp or quantizer.estimator}: clamps and estimators are for operands of "
                "matmuls; leave them out of storages"
            )
        tile = quantizer.scales.tile if quantizer.scales else None
        if self.flat and (tile is None or tile.rows != 1 or not tile.columns):
            raise RecipeError(f"stored flat with tile = {tile or 'none'}; expected pieces of a row, such as 1x256")
        if type(self.smallest) is not int or self.smallest < 0:
            raise RecipeError(f"stored with smallest = {self.smallest!r}; expected a number of elements, or 0")
        _ = self.dtype, self._kinds  # cached properties, which a traced graph cannot compute

    def matrix(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in which a tensor of that shape is quantized."""
        return (1, prod(shape)) if self.flat else shape

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """The torch dtype of the stored values; None if they are stored as codes."""
        quantizer = self.quantizer
        plain = quantizer.scales is None and quantizer.rounding == "nearest_even"
        return _DTYPES.get(quantizer.format.key) if plain else None

    @property
    def scaled_dtype(self) -> torch.dtype | None:
        """`scaled_dtype` of the quantizer."""
        return scaled_dtype(self.quantizer)

    def names(self, name: str) -> dict[str, str]:
        """The names of the tensors that store one value called `name`, by part (`codes`, `scale` ...)."""
        if self.dtype is not None:
            return {"codes": name}
        return {part: name if part == "codes" else f"{name}_{part}" for part in self._kinds}

    @cached_property
    def _kinds(self) -> tuple[str, ...]:
        """The parts of a value stored as codes."""
        return () if self.dtype is not None else tuple(self._layout((1, 1)))

    def numbers(self, name: str) -> tuple[str, ...]:
        """The names of the one or two values whose sum is stored."""
        return (name, name + _RESIDUAL) if self.residual else (name,)

    def parts(self, name: str) -> tuple[str, ...]:
        """The names of all tensors that store the tensor called `name`."""
        if self.dtype is not None:
            return self.numbers(name)
        return tuple([part for number in self.numbers(name) for part in self.names(number).values()])

    def layout(self, name: str, shape: tuple[int, ...]) -> Layout:
        """The dtype and shape, by name, of every tensor that stores a tensor called `name` of that shape."""
        if self.dtype is not None:
            return dict.fromkeys(self.numbers(name), (self.dtype, shape))
        parts, names = self._layout(shape), [self.names(number) for number in self.numbers(name)]
        return {called[part]: kind for called in names for part, kind in parts.items()}

    def _layout(self, shape: tuple[int, ...]) -> Layout:
        """As `layout`, for one value, by part."""
        if self.scaled_dtype is not None:
            return {"codes": (self.scaled_dtype, shape), "scale": (torch.float32, ())}
        parts: Any = layout(self.quantizer, self.matrix(shape), torch.float32)  # no outliers: every size is known
        return parts  # type: ignore[no-any-return]

    @property
    def bytes(self) -> float:
        """Bytes per element, for full tiles; a scale of the whole tensor is not counted."""
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
    """The torch dtype of codes with one power-of-two scale a tensor (`rceil`), stored with the strides of the values;
    None for other quantizers."""
    scaled = replace(quantizer, format=_ONE_SCALE.format) == _ONE_SCALE
    return _SCALED.get(quantizer.format.key) if scaled else None


@dataclass(frozen=True)
class Codes:
    """How the weights that rules round, their gradients and masters are stored as codes (`ops.CodeTensor`).

    `halfstep.prepare` makes these weights codes, with the optimizer; under `halfstep.apply` alone they are stored as
    others are. With more than one rank, gradients stay fp32 until the optimizer rounds them.

    Raises:
        RecipeError: weights or gradients stored in torch's dtypes, or with a residual; a master equal to the weights.
    """

    weights: Storage
    grads: Storage | None = None
    """Accumulated gradients, rounded once a micro-batch; None: fp32."""
    master: Storage | None = None
    """Masters, in the optimizer's state; None: the weights themselves are updated."""

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
    return sum([dtype.itemsize * torch.Size(shape).numel() for dtype, shape in tensors.values()])


@cache
def get_storage(
    kind: str | Quantizer | Storage, residual: bool = False, flat: bool = False, smallest: int = 0
) -> Storage:
    """The storage by a format's name (with its usual tiles) or a quantizer; a `Storage` is returned as it is.

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
    """How tensors that autograd saves for backward are stored in few bits.

    Only those of modules that `nn.apply` supports: inputs of attention and of rotary positions, the residual stream,
    softmax's statistics and tensors saved by a model's own code are saved as they are, and so are parameters.

    Raises:
        RecipeError: neither field is given; a storage with a residual, or with `smallest`.
    """

    operands: bool = False
    """Save inputs of linear layers as the codes that they were rounded to, once for all layers that read an input;
    weights are rounded again in the backward. Results do not change."""
    nonlinear: Storage | None = None
    """How norms, activation functions and gated products save tensors of their inputs' shape; None: as they are."""

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
"""COAT's mixed granularity: one scale a tensor for inputs of linear layers, one for each 16 elements elsewhere.

Source: Xi et al. 2025, arXiv 2410.19313, and its released code.
"""


OPERANDS = "operands"
"""The value of `Communication.weights` for weights gathered as the codes that matmuls round them to."""

REDUCE = {
    "all_to_all": "each rank sums its share in float32, in rank order",
    "fp8lm": "summed in the format itself, rank by rank, with one scale a tensor whose target follows saturation",
    "ms_amp": "summed in the format itself, rank by rank, with one scale a tensor over the root of the ranks",
}
"""How the mean of the ranks' gradients is computed."""


@dataclass(frozen=True)
class Communication:
    """The formats in which data parallelism sends gradients and gathers sharded weights (`halfstep.distributed`).

    `all_to_all`: each rank encodes its gradient once and sends each other rank its share; ranks decode the shares, sum
    them in float32 in rank order, divide by the number of ranks, encode the mean, and all-gather it. Every element is
    rounded twice, whatever the number of ranks, and 2 (N - 1) / N of an element's bytes are sent.

    `fp8lm`: a reproduction of FP8-LM's reduction. All ranks share one power-of-two scale a tensor, and codes are added
    in E4M3 rank by rank. mu, which lowers the scale's target, is halved if over 0.001% of the sum saturates, and else
    multiplied by 2^(1/1000), up to 2. `ms_amp` has a constant 1 / sqrt(N) instead of mu.

    Raises:
        RecipeError: neither gradients nor weights are given; a storage without tiles along the flattened tensor, or
            whose scales cannot mark an infinity; for `fp8lm` and `ms_amp` other than one power of two a tensor.

    Source: Peng et al. 2023, arXiv 2310.18313, section 2.1, and MS-AMP's code; Wang et al. 2023, arXiv 2306.10209
    (ZeRO++), for the all-to-all.
    """

    gradients: Storage | None = None
    """The format of gradients; None: their own dtype."""
    weights: Storage | str | None = None
    """The format of the weights that `fully_shard` gathers; None: their own dtype. `OPERANDS`: as codes, for weights
    that both matmuls round alike with power-of-two scales or none, else in their dtype; results do not change."""
    reduce: str = "all_to_all"
    error_feedback: bool | None = None
    """Whether a gradient's rounding error is added to the next gradient; None: for formats of fewer than 8 bits."""

    def __post_init__(self) -> None:
        if self.gradients is None and self.weights is None:
            raise RecipeError("communication with neither gradients nor weights: it changes nothing; leave it out")
        if self.reduce not in REDUCE:
            raise RecipeError(f"communication {unknown('reduce', self.reduce, REDUCE)}")
        _check("gradients", self.gradients, self.reduce != "all_to_all")
        if isinstance(self.weights, str):
            if self.weights != OPERANDS:
                raise RecipeError(f"communication weights = {self.weights!r}: expected a storage, or {OPERANDS!r}")
        else:
            _check("weights", self.weights, False)
        if self.error_feedback and (self.gradients is None or self.reduce != "all_to_all"):
            raise RecipeError(
                f"communication with error_feedback, reduce = {self.reduce!r} and gradients = {self.gradients}: it is "
                "for gradients in few bits that are reduced by all_to_all; leave it out"
            )

    @property
    def feeds_back(self) -> bool:
        """Whether rounding errors are added to the next step's gradients (`error_feedback`, or its default)."""
        if self.error_feedback is None:
            few = self.gradients is not None and self.gradients.quantizer.format.bits < 8
            return few and self.reduce == "all_to_all"
        return self.error_feedback

    def __str__(self) -> str:
        gradients = f"gradients {self.gradients}, {REDUCE[self.reduce]}" if self.gradients else ""
        back = "rounding errors are added to the next step's" if self.feeds_back else ""
        weights = (
            f"sharded weights gathered as {'products round them' if self.weights == OPERANDS else self.weights}"
            if self.weights
            else ""
        )
        return "; ".join(part for part in (gradients, back, weights) if part)


def _check(role: str, storage: Storage | None, one_scale: bool) -> None:
    """Raise if a storage cannot be used for communication."""
    if storage is None:
        return
    found, scales = f"communication {role} = {storage}", storage.quantizer.scales
    if storage.residual or storage.smallest:
        raise RecipeError(
            f"{found}: expected one number an element and no limit of size; leave residual and smallest out"
        )
    if one_scale:
        if scales is None or scales.tile != TENSOR or not scales.rule.exact or storage.quantizer.format.bits != 8:
            raise RecipeError(
                f"{found}: FP8-LM's sum takes 8 bits and one power of two a tensor, such as "
                "{format = 'e4m3fn', tile = 'tensor', scale = 'rceil'}"
            )
        return
    if storage.dtype is None and (not storage.flat or scales is None or scales.rule.two_level):
        raise RecipeError(
            f"{found}: expected fp32, bf16, fp16, or tiles laid out flat, each with a scale of its own that marks an "
            "infinity in it, such as {format = 'e4m3fn', tile = '1x128', scale = 'rceil', flat = true}"
        )


def _blocks(format: str, size: int) -> Storage:
    return get_storage(Quantizer(formats.get(format), scales=Scales(Tile(1, size), get_scaling("rceil"))), flat=True)


FP8 = Communication(gradients=_blocks("e4m3fn", 128))
"""E4M3 with a power-of-two scale for each 128 elements: 1.008 bytes an element. A power-of-two loss scale does not
change the codes."""

FP4 = Communication(gradients=_blocks("fp4", 32))
"""E2M1 with a power-of-two scale for each 32 elements, with error feedback: 0.53 bytes an element."""

FP8_LM = Communication(
    gradients=get_storage(Quantizer(formats.get("e4m3fn"), scales=Scales(TENSOR, get_scaling("rceil")))), reduce="fp8lm"
)
"""FP8-LM's reduction."""
