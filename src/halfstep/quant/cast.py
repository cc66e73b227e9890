"""Rounds tensors onto scalar formats, encodes and decodes them, and packs 4- and 6-bit codes in bytes.

The reference for every faster implementation. Each row of a tensor is packed by itself.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep import formats
from halfstep.errors import QuantizationError, one_of
from halfstep.formats import Format
from halfstep.formats.exact import OVERFLOWS
from halfstep.quant import family
from halfstep.quant.rounding import Seed, check_rounding, draw_seed, noise_at, noise_bits


CONTAINERS = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}
"""The dtype of unpacked codes, by `Format.storage_bits`."""
_CHUNK = 1 << 20  # elements rounded at a time: bounds the float64 temporaries at 8 MB each


# ---- rounding --------------------------------------------------------------------------------------------------------


def round_to(
    x: Tensor,
    format: str | Format | torch.dtype,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    generator: torch.Generator | Seed | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The values of `x`, each rounded to a neighbour in a scalar `format`; `halfstep.round_to` documents it."""
    target = formats.get(format)
    check_input("round_to", x, rounding, overflow)
    result = prepare_out(x.shape, x.dtype, x.device, out, dtype)
    seed = draw_seed(generator, x.device) if rounding == "stochastic" else None
    flat, written = x.detach().contiguous().view(-1), torch.empty(x.numel(), dtype=result.dtype, device=x.device)
    for start in range(0, flat.numel(), _CHUNK):
        piece = flat[start : start + _CHUNK]
        noise = None if seed is None else noise_bits(seed, start, piece.numel(), x.device)
        written[start : start + _CHUNK] = round_values(piece, target, rounding, overflow, noise, result.dtype)
    return result.copy_(written.view(x.shape))


def round_at(x: Tensor, format: torch.dtype, seed: int, index: Tensor) -> Tensor:
    """Part of a tensor rounded stochastically, with infinity for overflow: the same values as when the whole is
    rounded.

    Args:
        index: for each element of x, its index in the flattened whole tensor.
    """
    flat, written = x.contiguous().view(-1), torch.empty(x.numel(), dtype=format, device=x.device)
    for start in range(0, flat.numel(), _CHUNK):
        piece = slice(start, start + _CHUNK)
        noise = noise_at(seed, index.view(-1)[piece])
        written[piece] = round_values(flat[piece], formats.get(format), "stochastic", "ieee", noise, format)
    return written.view(x.shape)


def round_values(
    x: Tensor, format: Format, rounding: str, overflow: str, noise: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """A flat tensor rounded, in `dtype`."""
    values = family.of(format).rounded(x.double(), format, rounding, overflow, noise)
    if overflow == "saturate":
        values = values.clamp(*shared_range(format, dtype))
    return values.to(dtype)


# ---- codes -----------------------------------------------------------------------------------------------------------


def encode(
    x: Tensor,
    format: str | Format | torch.dtype,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    generator: torch.Generator | Seed | None = None,
) -> Tensor:
    """The codes of `x` rounded to a scalar `format`; `halfstep.encode` documents it."""
    target = formats.get(format)
    check_input("encode", x, rounding, overflow)
    seed = draw_seed(generator, x.device) if rounding == "stochastic" else None
    flat = x.detach().contiguous().view(-1)
    codes = torch.empty(x.numel(), dtype=CONTAINERS[target.storage_bits], device=x.device)
    for start in range(0, flat.numel(), _CHUNK):
        piece = flat[start : start + _CHUNK]
        noise = None if seed is None else noise_bits(seed, start, piece.numel(), x.device)
        codes[start : start + _CHUNK] = encode_values(piece, target, rounding, overflow, noise)
    return codes.view(x.shape)


def encode_values(x: Tensor, format: Format, rounding: str, overflow: str, noise: Tensor | None) -> Tensor:
    """The codes of a flat tensor, in the format's container.

    Raises:
        QuantizationError: x has a NaN, or rounding gives one, and the format has no code for it.
    """
    values = family.of(format).rounded(x.double(), format, rounding, overflow, noise)
    if not format.has_nan and bool(values.isnan().any()):
        raise no_code_for_nan(x, format)
    return family.of(format).encode(values, format).to(CONTAINERS[format.storage_bits])


def no_code_for_nan(x: Tensor, format: Format) -> QuantizationError:
    """The error for a NaN in x where the format has no code for it."""
    return QuantizationError(
        f"{int(x.isnan().sum())} of {x.numel()} elements are NaN, and {format.name} has no code for NaN: find "
        "where they come from, or replace them (torch.nan_to_num) first"
    )


def decode(codes: Tensor, format: str | Format | torch.dtype, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of codes of a scalar `format`; `halfstep.decode` documents it."""
    target = formats.get(format)
    check_codes(codes, target, dtype)
    flat = codes.contiguous().view(-1).long()
    if target.bits != target.storage_bits and flat.numel() and int(flat.max()) >> target.bits:
        raise no_such_code(codes, target)
    return family.of(target).decode(flat, target).to(dtype).view(codes.shape)


def check_codes(codes: Tensor, format: Format, dtype: torch.dtype) -> None:
    """Raise QuantizationError unless codes have the dtype of the format's container and values can be written in
    `dtype`."""
    expected = CONTAINERS[format.storage_bits]
    if codes.dtype != expected:
        raise QuantizationError(
            f"decode got {codes.dtype} codes; {format.name} has {format.bits} bits, stored as {expected}"
        )
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise QuantizationError(f"decode to {dtype} asked for; values come in float64, float32, bfloat16 or float16")


def no_such_code(codes: Tensor, format: Format) -> QuantizationError:
    """The error for a code with more bits than the format."""
    return QuantizationError(f"code {int(codes.long().max()):#x} found; {format.name} has {format.bits} bits")


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_input(verb: str, x: Tensor, rounding: str, overflow: str) -> None:
    """Raise QuantizationError unless x can be rounded with these options."""
    check_rounding(rounding)
    one_of("overflow", overflow, OVERFLOWS, QuantizationError)
    if not x.dtype.is_floating_point or x.dtype.itemsize < 2:
        raise QuantizationError(
            f"{verb} got {x.dtype}; it takes float32, bfloat16, float16 and float64. Convert with x.float()"
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise QuantizationError(
            f"{verb} got a tensor that requires grad, and rounding has no gradient: pass x.detach(), or use "
            "halfstep.ops.fake_quantize, whose gradient is the identity (straight-through)"
        )


def prepare_out(
    shape: torch.Size | tuple[int, ...],
    own: torch.dtype,
    device: torch.device,
    out: Tensor | None,
    dtype: torch.dtype | None,
) -> Tensor:
    """`out`, checked, or a new tensor for values: in `dtype`, or `own`."""
    if out is None:
        if dtype is not None and (not dtype.is_floating_point or dtype.itemsize < 2):
            raise QuantizationError(
                f"values in {dtype} asked for; expected float64, float32, bfloat16 or float16 (for codes use encode)"
            )
        return torch.empty(shape, dtype=dtype or own, device=device)
    expected = dtype or (out.dtype if out.dtype.is_floating_point and out.dtype.itemsize >= 2 else own)
    if out.shape != shape or out.dtype != expected or out.device != device:
        raise QuantizationError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}; expected {tuple(shape)} {expected} on {device}"
        )
    return out


@cache
def shared_range(format: Format, dtype: torch.dtype) -> tuple[float, float]:
    """The lowest and the largest value that both the format and the dtype hold (± 65280 for fp16 in bfloat16).

    The format's own range where no rounding to either can leave the other (a codebook's ends, which need not be exact
    in the dtype).
    """
    return _held(format, dtype, format.min), _held(format, dtype, format.max)


def _held(format: Format, dtype: torch.dtype, end: float) -> float:
    if format.bits <= 8 and abs(end) <= torch.finfo(dtype).max:
        return end
    value = torch.tensor([end], dtype=torch.float64, device="cpu")
    while True:
        narrow = value.to(dtype)
        if narrow.double().abs() > value.abs():
            narrow = torch.nextafter(narrow, torch.zeros_like(narrow))
        value = family.of(format).rounded(narrow.double(), format, "toward_zero", "saturate", None)
        if value.item() == narrow.double().item():
            return value.item()


# ---- packing of 4- and 6-bit codes -----------------------------------------------------------------------------------


def packed_columns(columns: int, bits: int) -> int:
    """The length of a packed row: bytes for 4 and 6 bits, else one container per code."""
    return -(-columns * bits // 8) if bits in (4, 6) else columns


def pack(codes: Tensor, bits: int, high_nibble_first: bool = False) -> Tensor:
    """(rows, columns) codes to (rows, packed columns).

    4 bits: two per byte, the first in the low half (OCP MX, torch.float4_e2m1fn_x2) or in the high half (bitsandbytes).
    6 bits: four in three bytes, as a little-endian string of bits. Other widths stay one code per container.
    """
    if bits not in (4, 6):
        return codes
    padded = _groups(codes, 2 if bits == 4 else 4)
    if bits == 4:
        first, second = (1, 0) if high_nibble_first else (0, 1)
        whole = (padded[..., first] | padded[..., second] << 4).to(torch.uint8)
    else:
        word = padded[..., 0] | padded[..., 1] << 6 | padded[..., 2] << 12 | padded[..., 3] << 18
        whole = torch.stack([word & 255, word >> 8 & 255, word >> 16], dim=-1).to(torch.uint8).flatten(1)
    return whole[:, : packed_columns(codes.shape[1], bits)].contiguous()


def unpack(packed: Tensor, bits: int, columns: int, high_nibble_first: bool = False) -> Tensor:
    """(rows, packed columns) to (rows, columns) codes: the inverse of `pack`."""
    if bits not in (4, 6):
        return packed
    if bits == 4:
        halves = (packed >> 4, packed & 15) if high_nibble_first else (packed & 15, packed >> 4)
        return torch.stack(halves, dim=-1).flatten(1)[:, :columns].contiguous()
    padded = _groups(packed, 3)
    word = padded[..., 0] | padded[..., 1] << 8 | padded[..., 2] << 16
    codes = torch.stack([word >> shift & 63 for shift in (0, 6, 12, 18)], dim=-1).to(torch.uint8)
    return codes.flatten(1)[:, :columns].contiguous()


def _groups(x: Tensor, size: int) -> Tensor:
    """(rows, columns) to (rows, groups, size) int32, filled with zeros."""
    padded = F.pad(x, (0, -x.shape[1] % size))
    return padded.view(x.shape[0], padded.shape[1] // size, size).int()
