"""Emulated accumulators: matmuls whose sums are not float32's. The reference for every kernel."""

from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep import formats
from halfstep.errors import QuantizationError
from halfstep.formats import Float, Format
from halfstep.quant.cast import round_to


@dataclass(frozen=True)
class Accumulator:
    """How the running sum of a dot product is kept: its format, and how many products are added at a time.

    The products of a block, in the order of the shared dimension, are summed in float32 and added to the running sum in
    one addition, which is rounded once, to nearest even, to `format`; beyond its range it is infinite. With a block of
    1 that is a chain of fused multiply-adds in the format. Operands of at most 12 significant bits have exact products.

    `aligned` sums as NVIDIA's FP8 tensor cores do: the running sum and the products of a block are aligned to the
    largest of their exponents (of a product, the sum of its operands'); each is truncated after as many bits as the
    format's fraction has, and so is their exact sum. Exponents below -100 count as -100. A subnormal operand is aligned
    by its magnitude, where the tensor cores take its format's smallest exponent.

    Source of `aligned`: Khattak and Mikaitis 2026, arXiv 2512.07004, as the package mmaemu has it; DeepSeek-V3, arXiv
    2412.19437, for 14 bits and for promoting partial sums to float32 every 128 terms.

    Raises:
        QuantizationError: a block or an interval that is no positive number of terms; an aligned sum of more bits than
            float32 has.
    """

    format: Format
    block: int = 1
    """The number of products that are summed in float32 before they are added to the running sum."""
    aligned: bool = False
    promote: int | None = None
    """The number of terms after which the running sum is added to a float32 total and starts again at zero; None:
    never."""

    def __post_init__(self) -> None:
        for name, terms in {
            "block": self.block,
            "promote": self.block if self.promote is None else self.promote,
        }.items():
            if type(terms) is not int or terms < 1 or terms % self.block:
                raise QuantizationError(
                    f"accumulator in {self.format.name}: {name} = {terms!r} with blocks of {self.block}; expected a "
                    "positive number of terms, and for promote a multiple of the block"
                )
        if not isinstance(self.format, Float) or self.format.specials != "ieee":
            raise QuantizationError(
                f"accumulator in {self.format.name}: a running sum needs a float format with infinities, such as fp16, "
                "bf16 or e8m13"
            )
        bits = self.fraction_bits + 2 + self.block.bit_length()
        if self.aligned and (bits > 24 or self.format.exponent_bits != 8):
            raise QuantizationError(
                f"an aligned accumulator in {self.format.name}, blocks of {self.block}: its sums have {bits} bits and "
                f"{self.format.exponent_bits} exponent bits; expected at most 24, and float32's 8 (e8m13, blocks of 32)"
            )

    @property
    def fraction_bits(self) -> int:
        """Fraction bits of the running sum."""
        return self.format.significant_bits - 1

    def __str__(self) -> str:
        kind = " aligned" if self.aligned else ""
        promoted = f", into float32 every {self.promote}" if self.promote else ""
        return f"sums in {self.format.name}, {self.block}{kind} at a time{promoted}"


def get_accumulator(accumulator: str | Format | Accumulator) -> Accumulator:
    """An accumulator by name, or in a format, a product at a time.

    `hopper` is that of H100's FP8 tensor cores as cuBLAS asks them for accurate sums, `hopper-fast` for fast ones.

    >>> str(get_accumulator("fp16"))
    'sums in fp16, 1 at a time'
    >>> str(get_accumulator("hopper"))
    'sums in e8m13, 32 aligned at a time, into float32 every 128'

    Raises:
        QuantizationError, FormatError: no accumulator and no format has that name.
    """
    if isinstance(accumulator, Accumulator):
        return accumulator
    return NAMED[str(accumulator)] if accumulator in NAMED else Accumulator(formats.get(accumulator))


_HOPPER = formats.get("e8m13")
NAMED = {
    "hopper": Accumulator(_HOPPER, block=32, aligned=True, promote=128),
    "hopper-fast": Accumulator(_HOPPER, block=32, aligned=True),
}
"""The accumulators that have names."""


def name_of(accumulator: Accumulator) -> str | None:
    """The name by which `get_accumulator` finds it; None where it has none."""
    return next((name for name, known in NAMED.items() if known == accumulator), None)


def accumulate(lhs: Tensor, rhs: Tensor, accumulator: Accumulator) -> Tensor:
    """lhs (rows, shared) @ rhs (shared, columns), both float32, summed by the accumulator: in float32.

    A row or column with an infinity or NaN gives float32's result.
    """
    total = lhs.new_zeros(lhs.shape[0], rhs.shape[1])
    running = torch.zeros_like(total)
    add = _add_aligned if accumulator.aligned else _add
    for start in range(0, lhs.shape[1], accumulator.block):
        piece = slice(start, start + accumulator.block)
        running = add(running, lhs[:, piece], rhs[piece], accumulator)
        if accumulator.promote and piece.stop % accumulator.promote == 0:
            total = total + running
            running = torch.zeros_like(total)
    total = total + running
    return unless_finite(total, lhs, rhs) if accumulator.aligned else total


def unless_finite(result: Tensor, lhs: Tensor, rhs: Tensor) -> Tensor:
    """The result, except where lhs's row or rhs's column has an infinity or NaN: there float32's result."""
    rows, columns = lhs.isfinite().all(1, keepdim=True), rhs.isfinite().all(0)
    return result if bool(rows.all() & columns.all()) else torch.where(rows & columns, result, lhs @ rhs)


def _add(running: Tensor, lhs: Tensor, rhs: Tensor, accumulator: Accumulator) -> Tensor:
    block = torch.zeros_like(running)
    for k in range(lhs.shape[1]):
        block += lhs[:, k, None] * rhs[k]
    return round_to(to_odd(running, block), accumulator.format, overflow="ieee")


def to_odd(a: Tensor, b: Tensor) -> Tensor:
    """a + b in float32, rounded to odd: rounding that to nearest in a format of at most 22 bits gives a single
    rounding.

    Source: Boldo and Melquiond 2008, IEEE Trans. Computers 57(4), for the rounding; Knuth's two-sum for its error.
    """
    total = a + b
    of_b = total - a
    error = (a - (total - of_b)) + (b - of_b)
    inexact = (error != 0) & error.isfinite()
    bits = total.view(torch.int32)
    odd = torch.where(error.signbit() == total.signbit(), bits | 1, (bits - 1) | 1)
    return torch.where(inexact, odd, bits).view(torch.float32)


LEAST = -100  # no product of 16-bit operands needs a smaller exponent, and float32 can scale by it


def _add_aligned(running: Tensor, lhs: Tensor, rhs: Tensor, accumulator: Accumulator) -> Tensor:
    fraction = accumulator.fraction_bits
    exponents = exponent(lhs)[:, :, None] + exponent(rhs)[None]
    largest = torch.maximum(exponents.amax(1), exponent(running)).clamp(min=LEAST)
    step = torch.ldexp(torch.ones_like(running), largest - fraction)
    terms = (lhs[:, :, None] * rhs[None] / step[:, None]).trunc().sum(1)
    total = (terms + (running / step).trunc()) * step
    cut = total.view(torch.int32) & (-1 << 23 - fraction)
    return cut.view(torch.float32) + 0.0  # a sum of zero has no sign


def exponent(x: Tensor) -> Tensor:
    """floor(log2 |x|) of float32 values, as int32; far below all others for zero."""
    return torch.where(x == 0, -10_000, torch.frexp(x).exponent - 1)
