"""The values of one tensor, wherever they lie: what this room reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from numpy.typing import NDArray


class Values(Protocol):
    """A tensor whose values can be read again and again, in pieces of bounded size."""

    @property
    def dtype(self) -> str:
        """torch's name without "torch."; values of a type of another name (GGUF's blocks) come decoded to float32."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its dimensions."""

    @property
    def numel(self) -> int:
        """The number of values."""

    @property
    def nbytes(self) -> int:
        """Their bytes as stored."""

    def chunks(self, nbytes: int) -> Iterator[NDArray[Any]]:
        """The values in row-major order, as 1-D read-only arrays of at most `nbytes` each.

        Floating types come as their bits (bfloat16 and float16 in uint16, float32 in uint32, float64 in uint64, all of
        8 bits in uint8), bool as uint8, integers and complex numbers as they are. What may go wrong is the source's to
        say: a file may be broken, or may have been changed meanwhile.
        """
