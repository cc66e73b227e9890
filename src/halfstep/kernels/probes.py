"""Probes of how a matmul accumulates, for any function that multiplies two matrices, such as `scaled_mm`.

A probe calls the function with float32 matrices of values exact in E4M3, lhs (rows, shared) and rhs (shared, columns),
and reads its float32 result. The outcome depends on the machine: store it beside the machine's name.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""lhs (rows, shared), rhs (shared, columns) -> (rows, columns), all float32."""
_SIDE = 16  # the smallest matrix that tensor cores take
_GROUP = 32  # products that one instruction of Hopper's FP8 tensor cores adds at a time


class Swamping(NamedTuple):
    """How many of many small terms vanish when they are added to a large one."""

    terms: int
    """The number of small terms."""
    lost: int
    """The number of small terms missing from the sum."""

    @property
    def promoted(self) -> int | None:
        """The number of terms after which the sum goes on in float32; None where no term or every term was lost."""
        return None if self.lost in (0, self.terms) else self.lost + 1


def fraction_bits(product: Product, shared: int = 128) -> int:
    """The largest j up to 24 for which the matmul sums 2^8 + 2^(8 - j) to more than 2^8: 13 on Hopper's FP8 tensor
    cores, 23 for float32 accumulation. One instruction adds both terms."""
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
    """How many small terms are lost when 2^-6 is added `shared - 1` times to 2^8, whose exact sum is 2^8 + (shared - 1)
    2^-6: with 13 fraction bits each one is lost, until the sum goes on in float32."""
    lhs, rhs = (
        torch.full((_SIDE, shared), 2.0**-3, dtype=torch.float32, device="cpu"),
        torch.full((shared, _SIDE), 2.0**-3, dtype=torch.float32, device="cpu"),
    )
    lhs[:, 0], rhs[0] = 2.0**4, 2.0**4
    kept = (float(product(lhs, rhs)[0, 0]) - 2.0**8) * 2.0**6
    return Swamping(shared - 1, shared - 1 - round(kept))


def order(product: Product, shared: int = 1024, groups: tuple[int, ...] = (_GROUP, 128, 256)) -> dict[int, int]:
    """For each group size: how many of 256 results change when whole groups of neighbouring terms are permuted.

    0 means that groups of that size are summed exactly, or separately and in no order.
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
