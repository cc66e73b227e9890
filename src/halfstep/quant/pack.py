"""4- and 6-bit codes in bytes and back; each row of a tensor packs on its own."""

import torch
from torch import Tensor

from halfstep.quant.padding import pad


def packed_columns(columns: int, bits: int) -> int:
    """Elements of the packed row: bytes for 4 and 6 bits, else one container a code."""
    return -(-columns * bits // 8) if bits in (4, 6) else columns


def pack(codes: Tensor, bits: int, high_nibble_first: bool = False) -> Tensor:
    """(rows, columns) codes to (rows, packed columns).

    4 bits: two a byte, the first in the low half (OCP MX, torch.float4_e2m1fn_x2) or in the high half (bitsandbytes).
    6 bits: four in three bytes, as a little-endian string of bits. Other widths stay one code a container.
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
    padded = pad(x, (0, -x.shape[1] % size))
    return padded.view(x.shape[0], padded.shape[1] // size, size).int()
