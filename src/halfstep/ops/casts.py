"""Rounding, quantizing and decoding, by a kernel if one supports the call, else by the reference in `quant`.

Also the dtypes that hold rounded values exactly, for the GEMMs that emulate matmuls in few bits.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from halfstep import formats, quant
from halfstep.constant import constant
from halfstep.errors import QuantizationError
from halfstep.formats import BlockFormat, Format
from halfstep.kernels import carried, operators
from halfstep.ops.function import SavesNothing, apart
from halfstep.quant import TENSOR, Quantizer, Scaling, draw_seed, layout
from halfstep.quant.cast import CONTAINERS, check_codes, check_input, prepare_out
from halfstep.quant.rounding import Seed


# ---- rounding and quantizing -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Quantized(quant.Quantized):
    """Packed codes and scales: `quant.Quantized`, whose `dequantize` uses a kernel if one supports it.

    `.codes`, `.scale` and `.tensors` are plain tensors; `save_quantized` and `load_quantized` write them to and read
    them from safetensors files.
    """

    def dequantize(self, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        codes = self.codes
        result = prepare_out(self.shape, self.dtype, codes.device, out, dtype)
        # For a traced wrapper subclass, torch 2.10 reports neither that it compiles nor that the tensor has no values.
        traced = isinstance(codes, FunctionalTensor)
        (operators.DEQUANTIZE.traced if traced else operators.DEQUANTIZE)(self, result)
        return result


def round_to(
    x: Tensor,
    format: str | Format | BlockFormat | torch.dtype,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    generator: torch.Generator | Seed | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    scale: str | None = None,
) -> Tensor:
    """The values of `x`, each rounded to a neighbour in `format`, in x's dtype and shape; x is not changed.

    With q = max(floor(log2 |x|), min_exponent) - mantissa_bits, a float format gives ± rounding(|x| / 2^q) * 2^q,
    computed exactly and rounded once from x's own value (float64 included). Overflow is decided after rounding. A
    block format divides each tile by its scale, rounds, and multiplies again (`quantize` and `dequantize` in one).

    Args:
        x: any shape, float32, bfloat16, float16 or float64.
        format: a name or alias (`"bf16"`, `"e4m3fn"`, `"posit16_1"`, `"e5m4"`; blocks: `"mxfp4"`, `"nvfp4"`, `"nf4"`
            ...), a `torch.dtype`, a `Format` or a `BlockFormat`.
        rounding: `nearest_even`, `nearest_away`, `nearest_up` (ties to the upper value), `toward_zero`, `up`, `down`
            or `stochastic`.
        overflow: `saturate` gives ± the largest value that both the format and the result's dtype hold, for infinities
            too; `ieee` gives infinity, or NaN where the format has no infinity (except that `toward_zero` takes finite
            values no further than the largest). A format with neither saturates in both; the fnuz formats and posits
            make infinities NaN in both. NaN stays NaN. Elements of a tile saturate.
        generator: where stochastic rounding draws its seed from, one draw a call (None: torch's default generator),
            or the 64-bit seed itself. The result is the same for a seed on any number of threads.
        out: a tensor of x's shape to write to (x itself is allowed).
        dtype: the dtype of the values, when not x's (or out's); one that does not hold a value gets it rounded once
            more.
        scale: the rule for a block format's scales, where it has a choice: `floor` (default), `ceil`, `even`, `rceil`
            for MX; `two_level`, `two_level_up`, `four_over_six` for nvfp4; `absmax`, `double_absmax` for nf4.

    Raises:
        FormatError: unknown format.
        QuantizationError: x is not floating point, requires grad (rounding has no gradient: detach it, or use
            `ops.fake_quantize`), or `out` does not match; a scale rule that the format does not have.

    Source: IEEE 754-2019 sections 4.3 and 7.4; OCP OFP8 1.0 for saturation; OCP MX 1.0 for blocks.

    >>> round_to(torch.tensor([1.0, 3.3, 1000.0]), "e4m3fn")
    tensor([  1.0000,   3.2500, 448.0000])
    >>> round_to(torch.tensor([1.0, 3.3, 1000.0]), "mxfp4")
    tensor([  0.,   0., 768.])
    """
    if isinstance(format, (str, torch.dtype)):
        named = _named(str(format), scale, rounding, overflow)
        if named.scales is not None:
            return values(x, named, generator, out, dtype)
        target = named.format
    elif isinstance(format, Format) and scale is None:
        target = format
    else:
        quantizer = quant.get_quantizer(format, scale=scale, rounding=rounding, overflow=overflow)
        return values(x, quantizer, generator, out, dtype)
    check_input("round_to", x, rounding, overflow)
    result, x = prepare_out(x.shape, x.dtype, x.device, out, dtype), x.detach()
    operators.ROUND(x.contiguous(), result, target, rounding, overflow, seed_of(rounding, generator, x.device))
    return result


def quantize(
    x: Tensor,
    format: str | Format | BlockFormat | torch.dtype | Quantizer,
    *,
    scale: str | None = None,
    rounding: str | None = None,
    overflow: str | None = None,
    generator: torch.Generator | Seed | None = None,
    out: Quantized | None = None,
) -> Quantized:
    """Codes and scales of `x`: by a quantizer, or by a format's name with its usual tiles.

    Args:
        x: any shape, float32, bfloat16, float16 or float64; tiles lie along the last dimension.
        format: what `round_to` takes, or a `Quantizer`.
        scale, rounding, overflow, generator: as for `round_to`.
        out: a result of the same quantizer and shape to write over.

    Raises:
        QuantizationError: `out` is another quantizer's, or of another shape or dtype; an unscaled NaN has no code in
            the format.
        FormatError: as `round_to`; so is QuantizationError otherwise.

    >>> q = quantize(torch.tensor([7.0, 0.5, -3.0, 0.0]), "mxfp4")
    >>> q.codes, q.scale
    (tensor([[23, 13]], dtype=torch.uint8), tensor([[127]], dtype=torch.uint8))
    >>> q.dequantize()
    tensor([ 6.0000,  0.5000, -3.0000,  0.0000])
    """
    if isinstance(format, Quantizer) and scale is None and rounding is None and overflow is None:
        quantizer = format  # the same object, whose cached properties a traced graph can read
    else:
        quantizer = quant.get_quantizer(format, scale=scale, rounding=rounding, overflow=overflow)
    check_input("quantize", x, quantizer.rounding, quantizer.overflow)
    shape, x = tuple(x.shape), x.detach().contiguous()
    if out is not None and (out.quantizer, out.shape, out.dtype) != (quantizer, shape, x.dtype):
        raise QuantizationError(
            f"out holds {out.shape} {out.dtype} by another quantizer, or of another shape or dtype; expected {shape} "
            f"{x.dtype} by {quantizer}"
        )
    if out is None and (quantizer.outliers is not None or quantizer.clamp is not None):
        reference = quantizer.quantize(x, generator)  # the number of outliers depends on the values of x
        return Quantized(quantizer, shape, x.dtype, reference.tensors)
    tensors = quantize_parts(x, quantizer, generator, None if out is None else out.tensors)
    return Quantized(quantizer, shape, x.dtype, tensors) if out is None else out


def quantize_parts(
    x: Tensor,
    quantizer: Quantizer,
    generator: torch.Generator | Seed | None = None,
    tensors: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The tensors of `quantize(x, quantizer)`, written to `tensors` if given. x must be contiguous, and the quantizer
    have no outliers and no clamp."""
    given, seed = tensors is not None, seed_of(quantizer.rounding, generator, x.device)
    if tensors is None:
        sizes = layout(quantizer, tuple(x.shape), x.dtype).items()
        tensors = {name: torch.empty(size, dtype=dtype, device=x.device) for name, (dtype, size) in sizes}  # type: ignore[arg-type]
    if quantizer.scales is None:
        operators.quantize_into(x, tensors, quantizer, seed)
    elif given or (quantizer.rounding == "stochastic" and seed is None):
        operators.QUANTIZE(x, tensors, quantizer, seed)
    elif (made := operators.QUANTIZED(x, tensors, quantizer, seed)) is not None:
        return dict(zip(tensors, made, strict=True))
    return tensors


def values(
    x: Tensor,
    quantizer: Quantizer,
    generator: torch.Generator | Seed | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x quantized and dequantized."""
    return values_noted(x, quantizer, generator, out, dtype)[0]


def values_noted(
    x: Tensor,
    quantizer: Quantizer,
    generator: torch.Generator | Seed | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tensor_scale: Tensor | None = None,
) -> tuple[Tensor, bool | None]:
    """x quantized and dequantized, and whether values below 2^-126 other than 0 are possible: True if that was not
    checked, None in a traced graph, which cannot check.

    Args:
        tensor_scale: a float32 scalar to which a two-level rule's scale of the whole tensor is written; the values are
            then not multiplied by it.
    """
    if quantizer.scales is None:
        return round_to(x, quantizer.format, quantizer.rounding, quantizer.overflow, generator, out, dtype), True
    check_input("round_to", x, quantizer.rounding, quantizer.overflow)
    result, x = prepare_out(x.shape, x.dtype, x.device, out, dtype), x.detach()
    if quantizer.clamp is not None:
        return result.copy_(quantizer.quantize(x, generator).dequantize(result.dtype)), True
    seed = seed_of(quantizer.rounding, generator, x.device)
    return result, operators.ROUND_TILES(x, result, quantizer, seed, tensor_scale)


@constant
def _named(format: str, scale: str | None, rounding: str, overflow: str) -> Quantizer:
    """The quantizer of a format's name; a traced graph treats it as a constant."""
    return quant.get_quantizer(format, scale=scale, rounding=rounding, overflow=overflow)


def seed_of(rounding: str, generator: torch.Generator | Seed | None, device: torch.device) -> Seed | None:
    """The seed for stochastic rounding of a tensor on `device`; None for other roundings, and in a traced graph without
    a given generator or seed, where the operator draws it from the default generator when it runs."""
    if rounding != "stochastic":
        return None
    if torch.compiler.is_compiling():  # torch 2.15 does not trace isinstance(x, torch.Generator)
        if generator is None or isinstance(generator, Tensor):
            return generator
        if isinstance(generator, int):
            return torch.full((), generator - (generator >> 63 << 64), dtype=torch.int64, device=device)
    return draw_seed(generator, device)


# ---- codes and scaled rounding in scalar formats ---------------------------------------------------------------------


def encode(
    x: Tensor,
    format: str | Format | torch.dtype,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    generator: torch.Generator | int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The codes of `x` rounded to a scalar format: x's shape, one code an element, in uint8, uint16 or uint32.

    Rounding and overflow are those of `round_to`. 4- and 6-bit codes are not packed here; `quantize` packs.

    Raises:
        QuantizationError: as `round_to`; also NaN in x where the format has no code for it.

    >>> encode(torch.tensor([1.0, -448.0]), "e4m3fn")
    tensor([ 56, 254], dtype=torch.uint8)
    """
    target = formats.get(format)
    check_input("encode", x, rounding, overflow)
    result = _new_codes(x, target, out)
    seed = seed_of(rounding, generator, x.device)
    operators.encode_into(x.detach().contiguous(), result, target, rounding, overflow, seed)
    return result


def _new_codes(x: Tensor, format: Format, out: Tensor | None) -> Tensor:
    """`out`, checked, or a new tensor for the codes of x."""
    expected = CONTAINERS[format.storage_bits]
    if out is None:
        return torch.empty(x.shape, dtype=expected, device=x.device)
    if out.shape != x.shape or out.dtype != expected or out.device != x.device:
        raise QuantizationError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}; expected {tuple(x.shape)} {expected} on {x.device}"
        )
    return out


def decode(
    encoded: Tensor,
    format: str | Format | torch.dtype,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """The values of unpacked codes of a scalar format, in `dtype` (rounded once where it does not hold a value).

    Raises:
        QuantizationError: codes in another dtype than the format's container, or beyond its bits.

    >>> decode(torch.tensor([0x7E], dtype=torch.uint8), "e4m3fn")
    tensor([448.])
    """
    target = formats.get(format)
    check_codes(encoded, target, dtype if out is None else out.dtype)
    result = torch.empty(encoded.shape, dtype=dtype, device=encoded.device) if out is None else out
    if result.shape != encoded.shape or result.device != encoded.device:
        raise QuantizationError(
            f"out is {tuple(result.shape)} on {result.device}; expected {tuple(encoded.shape)} on {encoded.device}"
        )
    operators.decode_into(encoded.contiguous(), result, target)
    return result


def round_scaled(
    x: Tensor,
    factor: Tensor,
    format: Format,
    rounding: str,
    dtype: torch.dtype,
    generator: torch.Generator | Seed | None = None,
    amax: Tensor | None = None,
) -> Tensor:
    """x * factor, computed in float32 (float64 for float64), rounded to `format` and saturated, in `dtype`.

    factor is a float32 scalar; if it is NaN, so are all results.

    Args:
        amax: a float32 scalar that the same pass raises to max |x|, or to NaN if x has a NaN.
    """
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    seed = None if rounding != "stochastic" else seed_of(rounding, generator, x.device)
    given = x.detach().contiguous(), factor, out, format, rounding, seed
    if amax is not None or (rounding == "stochastic" and seed is None):
        operators.ROUND_SCALED(*given, amax)
    elif (made := operators.ROUNDED_SCALED(*given)) is not None:
        return made  # type: ignore[no-any-return]
    return out


# ---- straight-through estimator --------------------------------------------------------------------------------------


class _StraightThrough(SavesNothing):
    @staticmethod
    def forward(x: Tensor, quantizer: Quantizer) -> Tensor:
        return apart(values(x, quantizer))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], x: Tensor, quantizer: Quantizer) -> tuple[Tensor, int]:
        if quantizer.scales is not None or quantizer.rounding == "stochastic":
            raise QuantizationError(
                f"torch.func.vmap goes over fake_quantize by {quantizer}: its scales or noise could be the batch's or "
                "each sample's own. Loop over the samples, or round the batch outside of vmap"
            )
        return fake_quantize(x, quantizer), in_dims[0]


def fake_quantize(x: Tensor, quantizer: Quantizer) -> Tensor:
    """x quantized and dequantized; the gradient passes as if nothing had been rounded (straight-through estimator).

    Source: Bengio, Leonard and Courville 2013, arXiv 1308.3432.
    """
    return _StraightThrough.apply(x, quantizer)  # type: ignore[no-any-return,no-untyped-call]


# ---- dtypes that hold rounded values ---------------------------------------------------------------------------------

E4M3_BITS = 4
"""The significant bits of an E4M3 scale, a block's scale under two-level rules."""


def tile_carrier(format: Format, rule: Scaling, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """`dtype` if it is bf16, holds the elements times their tile's power-of-two scale exactly, and the device has
    matrix units for it; else float32, or float64 for float64."""
    fits = dtype == torch.bfloat16 and rule.exact and format.significant_bits <= 8
    return dtype if fits and not carried.supports(dtype, device) else torch.promote_types(dtype, torch.float32)


def has_subnormals(carrier: Tensor) -> bool:
    """Whether some of these values are bf16 subnormals on a CPU, whose bf16 matrix units treat them as zeros."""
    if carrier.device.type != "cpu" or carrier.dtype != torch.bfloat16:
        return False
    magnitude = carrier.abs()
    return bool(((magnitude < torch.finfo(carrier.dtype).smallest_normal) & (magnitude > 0)).any())


@constant
def carrier(key: str, dtype: torch.dtype, scale_bits: int = 0) -> torch.dtype:
    """`dtype` if it holds all values of the format with that key, times scales of `scale_bits` significant bits,
    exactly; else float32. A traced graph treats the result as a constant."""
    if dtype == torch.float64:
        return dtype
    format, info = formats.from_key(key), torch.finfo(dtype)
    bits, room = format.significant_bits + scale_bits, 2.0 ** (15 if scale_bits else 0)
    smallest = info.smallest_normal if dtype == torch.bfloat16 else info.smallest_normal * info.eps
    fits = 2.0 ** (1 - bits) >= info.eps and format.max * room <= info.max and format.smallest / room >= smallest
    return dtype if fits else torch.float32


def operand_dtype(quantizer: Quantizer | None, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of one operand, rounded by `quantizer`, of the GEMM that emulates a matmul in `dtype`: int8 for rows of
    integers with a scale each; `dtype` if it holds the values exactly; else float32."""
    if quantizer is None:
        return dtype
    quantizer = quantizer.plain
    scales = quantizer.scales
    if scales is None:
        return carrier(quantizer.format.key, dtype)
    if quantizer.inner is not None:
        return operand_dtype(quantizer.inner, dtype, device)
    if quantizer.steps is not None:
        return torch.int8
    if scales.tile == TENSOR and (quantizer.stateful is not None or quantizer.factors):
        return carrier(quantizer.format.key, dtype)
    if scales.rule.two_level:
        return carrier(quantizer.format.key, dtype, E4M3_BITS)
    return tile_carrier(quantizer.format, scales.rule, dtype, device)
