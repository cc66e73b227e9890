"""Round a tensor onto a format: the reference that everything faster is tested against."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halfstep import formats
from halfstep.errors import QuantizationError, unknown
from halfstep.formats import Format
from halfstep.quant.rounding import DETERMINISTIC, check_rounding, draw_seed, noise_bits, stochastic


OVERFLOWS = ("saturate", "ieee")
_CHUNK = 1 << 20  # elements rounded at a time: bounds the float64 temporaries at 8 MB each


def round_to(
    x: Tensor,
    format: str | Format | torch.dtype,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    generator: torch.Generator | int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The values of `x`, each rounded to a neighbour in `format`, in x's dtype and shape; x is not changed.

    With q = max(floor(log2 |x|), min_exponent) - mantissa_bits, the result is ± rounding(|x| / 2^q) * 2^q, computed
    exactly and rounded once from x's own value (float64 included). Overflow is decided after rounding.

    Args:
        x: any shape, float32, bfloat16, float16 or float64.
        format: a name or alias (`"bf16"`, `"e4m3fn"`), a `torch.dtype`, or a `Format`.
        rounding: `nearest_even`, `nearest_away`, `toward_zero` or `stochastic`.
        overflow: `saturate` gives ± the largest value that both the format and x's dtype hold, for infinities
            too; `ieee` gives infinity, or NaN where the format has none (but `toward_zero` takes finite values no
            further than the largest). NaN stays NaN in both.
        generator: where stochastic rounding draws its seed from, one draw a call (None: torch's default generator),
            or the 64-bit seed itself. The result is the same for a seed on any number of threads.
        out: a tensor like x to write to (x itself is allowed).

    Raises:
        FormatError: unknown format.
        QuantizationError: x is not floating point, requires grad (rounding has no gradient: detach it), or `out`
            does not match.

    Source: IEEE 754-2019 sections 4.3 and 7.4; OCP OFP8 1.0 for saturation.

    >>> round_to(torch.tensor([1.0, 3.3, 1000.0]), "e4m3fn")
    tensor([  1.0000,   3.2500, 448.0000])
    """
    target = formats.get(format)
    check_rounding(rounding)
    if overflow not in OVERFLOWS:
        raise QuantizationError(unknown("overflow", overflow, OVERFLOWS))
    if not x.dtype.is_floating_point or x.dtype.itemsize < 2:
        raise QuantizationError(
            f"round_to got {x.dtype}; it takes float32, bfloat16, float16 and float64. Convert with x.float()"
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise QuantizationError(
            "round_to got a tensor that requires grad, and rounding has no gradient: pass x.detach(), or use "
            "halfstep.ops.quantize, whose gradient is the identity (straight-through)"
        )
    if out is not None and (out.shape != x.shape or out.dtype != x.dtype or out.device != x.device):
        raise QuantizationError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}; expected {tuple(x.shape)} {x.dtype} on {x.device}"
        )
    seed = draw_seed(generator) if rounding == "stochastic" else None
    flat = x.detach().contiguous().view(-1)
    result = torch.empty_like(flat)
    for start in range(0, flat.numel(), _CHUNK):
        piece = flat[start : start + _CHUNK]
        noise = None if seed is None else noise_bits(seed, start, piece.numel(), x.device)
        result[start : start + _CHUNK] = _round(piece, target, rounding, overflow, noise)
    rounded = result.view(x.shape)
    return rounded if out is None else out.copy_(rounded)


def _round(x: Tensor, format: Format, rounding: str, overflow: str, noise: Tensor | None) -> Tensor:
    """Round a flat piece. float64 holds every intermediate exactly: at most 24 significant bits of a step."""
    wide = x.double()
    magnitude = wide.abs()
    _, exponent = torch.frexp(magnitude)  # magnitude = f * 2^exponent with f in [1/2, 1)
    step_exponent = (exponent.long() - 1).clamp(min=format.min_exponent) - format.mantissa_bits
    steps = magnitude * _power_of_two(-step_exponent)
    whole = stochastic(steps, noise) if noise is not None else DETERMINISTIC[rounding](steps)
    rounded = whole * _power_of_two(step_exponent)
    largest = _largest(format, x.dtype)
    if overflow == "saturate":
        rounded = rounded.clamp(max=largest)
    else:
        if rounding == "toward_zero":  # IEEE 754 section 7.4: it carries finite values no further than the largest
            rounded = torch.where(magnitude.isinf(), rounded, rounded.clamp(max=largest))
        beyond = math.inf if format.has_infinity else math.nan
        rounded = torch.where(rounded > format.max, beyond, rounded)
    rounded = torch.where(magnitude.isnan(), math.nan, rounded)
    return torch.copysign(rounded, wide).to(x.dtype)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float64, from the bits; torch.ldexp goes through float32 and overflows beyond 2^127."""
    return (exponent.clamp(-1022, 1023) + 1023 << 52).view(torch.float64)


def _largest(format: Format, dtype: torch.dtype) -> float:
    """The largest value that is in the format and in the dtype (65280 for fp16 values held in bfloat16)."""
    info = torch.finfo(dtype)
    if format.max <= info.max and float(torch.tensor(format.max, dtype=torch.float64).to(dtype)) == format.max:
        return format.max
    significand = min(format.mantissa_bits, round(-math.log2(info.eps)))
    exponent = min(format.max_exponent, math.frexp(info.max)[1] - 1)
    return (2.0 - 2.0**-significand) * 2.0**exponent
