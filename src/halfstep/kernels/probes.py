"""How a matmul sums: probes of any function that multiplies two matrices, such as tensor cores through `scaled_mm`.

A probe gives the function float32 matrices whose numbers E4M3 holds, lhs (rows, shared) and rhs (shared, columns), and
reads its float32 result. What it finds is a property of the machine: store it beside the machine's name.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""lhs (rows, shared), rhs (shared, columns) -> (rows, columns), all float32."""
_SIDE = 16  # what tensor cores take at least
_GROUP = 32  # products that one instruction of Hopper's FP8 tensor cores adds at a time


class Swamping(NamedTuple):
    """What becomes of small terms beside a large one."""

    terms: int
    """How many small terms there were."""
    lost: int
    """How many were lost."""

    @property
    def promoted(self) -> int | None:
        """After how many terms a sum goes on in float32; None where none was lost, or all were."""
        return None if self.lost in (0, self.terms) else self.lost + 1


def fraction_bits(product: Product, shared: int = 128) -> int:
    """The largest j, of at most 24, for which 2^8 + 2^(8 - j) is more than 2^8: 13 on Hopper's FP8 tensor cores, 23 of
    a sum in float32. Both terms are of one instruction."""
    lhs, rhs = (
        torch.zeros(_SIDE, shared, dtype=torch.float32, device="cpu"),
        torch.zeros(shared, _SIDE, dtype=torch.float32, device="cpu"),
    )
    found = 0
    for j in range(25):
        lhs[:, 0], rhs[0] = 2.0**4, 2.0**4
        lhs[:, 1] = 2.0 ** ((8 - j) // 2)
        rhs[1] = 2.0 ** (8 - j - (8 - j) // 2)
        if float(product(lhs, rhs)[0, 0]) > 2.0**8:
            found = j
    return found


def swamping(product: Product, shared: int = 4096) -> Swamping:
    """One term of 2^8, then 2^-6 in all others, whose exact sum is 2^8 + (shared - 1) 2^-6: in 13 fraction bits each of
    them is lost beside the first, until the sum goes on in float32."""
    lhs, rhs = (
        torch.full((_SIDE, shared), 2.0**-3, dtype=torch.float32, device="cpu"),
        torch.full((shared, _SIDE), 2.0**-3, dtype=torch.float32, device="cpu"),
    )
    lhs[:, 0], rhs[0] = 2.0**4, 2.0**4
    kept = (float(product(lhs, rhs)[0, 0]) - 2.0**8) * 2.0**6
    return Swamping(shared - 1, shared - 1 - round(kept))


def order(product: Product, shared: int = 1024, groups: tuple[int, ...] = (_GROUP, 128, 256)) -> dict[int, int]:
    """For each size of a group of neighbouring terms: how many of 256 results change when whole groups are permuted.

    0 says that groups of that size are added up exactly, or by themselves and in no order.
    """
    generator = torch.Generator().manual_seed(1)
    lhs, rhs = (
        (torch.randn(2, _SIDE, shared, generator=generator, dtype=torch.float32, device="cpu") * 4)
        .to(torch.float8_e4m3fn)
        .float()
    )
    rhs = rhs.t().contiguous()
    before, found = product(lhs, rhs), {}
    for size in groups:
        places = torch.randperm(shared // size, generator=generator, dtype=torch.int64, device="cpu")[
            :, None
        ] * size + torch.arange(size, dtype=torch.int64, device="cpu")
        after = product(lhs[:, places.flatten()].contiguous(), rhs[places.flatten()].contiguous())
        found[size] = int((before != after).sum())
    return found
