"""What clamping took from an operand: sparse, unrounded, and a product of its own."""

from dataclasses import dataclass

from torch import Tensor

from halfstep.kernels.cpu import clamp_operators as operators
from halfstep.quant import Clamp


@dataclass(frozen=True, eq=False)
class Remainder:
    """A matrix (rows, columns) with few numbers, in float32: those of each row follow each other.

    In a traced graph, whose shapes may not depend on values, and where no kernel reads sparse rows, it is the whole
    matrix: `columns` and `starts` are None.
    """

    values: Tensor
    columns: Tensor | None
    starts: Tensor | None
    """Where each row begins, and the end of the last."""
    width: int
    down: bool = False
    """Whether this is the transposed matrix."""

    def t(self) -> "Remainder":
        """The transposed matrix."""
        return Remainder(self.values, self.columns, self.starts, self.width, not self.down)

    @property
    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The tensors of it, from which and from a width it is made again."""
        return self.values, self.columns, self.starts

    def over(self, scale: Tensor) -> "Remainder":
        """The same with each row divided by its scale, (rows, 1)."""
        if self.columns is None or self.starts is None:
            return Remainder(self.values / scale, None, None, self.width)
        each = scale.flatten().repeat_interleave(self.starts.diff(), output_size=len(self.values))
        return Remainder(self.values / each, self.columns, self.starts, self.width)

    def dense(self) -> Tensor:
        """The whole matrix."""
        whole = self.values
        if self.columns is not None and self.starts is not None:
            whole = operators.whole(self.values, self.columns, self.starts, self.width)
        return whole.t() if self.down else whole

    def times(self, other: Tensor, scale: Tensor | None) -> Tensor:
        """This (rows, shared) times other (shared, n), each column times its scale, or all times one: float32."""
        return operators.sparse_product(*self.parts, self.width, self.down, other, scale)


def remainder(x: Tensor, clamp: Clamp, bounds: Tensor) -> Remainder:
    """What clamping a matrix at its bounds takes away."""
    return Remainder(*operators.beyond(x, clamp, bounds), x.shape[1])


def bounds_of(x: Tensor, clamp: Clamp) -> Tensor:
    """`Clamp.bounds` of a matrix."""
    return operators.bounds(x.detach(), clamp)
