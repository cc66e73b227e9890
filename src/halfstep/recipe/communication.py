"""How gradients, and sharded weights, cross from rank to rank."""

from __future__ import annotations

from dataclasses import dataclass

from halfstep import formats
from halfstep.errors import RecipeError, unknown
from halfstep.quant import TENSOR, Quantizer, Scales, Tile, get_scaling
from halfstep.recipe.storage import Storage, get_storage


OPERANDS = "operands"
"""Weights cross as the codes that products round them to."""

REDUCE = {
    "all_to_all": "each rank sums its share in float32, in rank order",
    "fp8lm": "summed in the format itself, rank by rank, with one scale a tensor whose target follows saturation",
    "ms_amp": "summed in the format itself, rank by rank, with one scale a tensor over the root of the ranks",
}
"""How the mean of the ranks' gradients is formed."""


@dataclass(frozen=True)
class Communication:
    """The formats in which data parallelism sends gradients and gathers sharded weights (`halfstep.distributed`).

    `all_to_all`: each rank encodes its gradient once and sends every other rank that rank's share of it; the shares are
    decoded and summed in float32 in rank order, divided by the number of ranks, encoded, and gathered. Every element is
    rounded twice, whatever the number of ranks, and 2 (N - 1) / N of an element's bytes are sent.

    `fp8lm`: FP8-LM's reduction, as a reproduction: all ranks share one power of two a tensor, codes are added in E4M3
    one rank after another, and mu, by which the scale's target is lowered, is halved where over 0.001% of the sum
    saturates, and else raised by 2^(1/1000), up to 2. `ms_amp` has a constant 1 / sqrt(N) in its place.

    Raises:
        RecipeError: neither gradients nor weights are given; a storage whose scales are not of pieces of a row laid out
            flat, or which does not mark an infinity; for `fp8lm` and `ms_amp` anything but one power of two a tensor.

    Source: Peng et al. 2023, arXiv 2310.18313, section 2.1, and MS-AMP's code; Wang et al. 2023, arXiv 2306.10209
    (ZeRO++), for the all-to-all.
    """

    gradients: Storage | None = None
    """None: in the dtype that they have."""
    weights: Storage | str | None = None
    """What `fully_shard` gathers; None: weights in their dtype. `OPERANDS`: those that both products round alike, to
    powers of two or without scales, as their codes, and others in their dtype: no number changes."""
    reduce: str = "all_to_all"
    error_feedback: bool | None = None
    """Whether what rounding took from a gradient is added to the next one; None: for formats of fewer than 8 bits."""

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
        """Whether rounding errors are added to the next step's gradients."""
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
    """Refuse a storage that no message holds."""
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
"""E4M3 with a power of two for each 128 elements: 1.008 bytes an element. A loss scale that is one changes no code."""

FP4 = Communication(gradients=_blocks("fp4", 32))
"""E2M1 with a power of two for each 32 elements, with error feedback: 0.53 bytes an element."""

FP8_LM = Communication(
    gradients=get_storage(Quantizer(formats.get("e4m3fn"), scales=Scales(TENSOR, get_scaling("rceil")))), reduce="fp8lm"
)
"""FP8-LM's reduction."""
