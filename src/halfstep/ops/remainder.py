"""The sparse, unrounded part of an operand that clamping removed, which is multiplied separately."""

from dataclasses import dataclass

from torch import Tensor

from halfstep.kernels.cpu import clamp_operators as operators
from halfstep.quant import Clamp


@dataclass(frozen=True, eq=False)
class Remainder:
    """A float32 matrix (rows, columns) in CSR layout: nonzeros, their columns, and where each row starts.

    In a traced graph, whose shapes may not depend on values, and where no kernel reads sparse rows, `values` is the
    dense matrix; `columns` and `starts` are None.
    """

    values: Tensor
    columns: Tensor | None
    starts: Tensor | None
    """The index of each row's first nonzero, and the end of the last row."""
    width: int
    """The number of columns."""
    down: bool = False
    """Whether this is the transposed matrix of those rows."""

    def t(self) -> "Remainder":
        """The transposed matrix."""
        return Remainder(self.values, self.columns, self.starts, self.width, not self.down)

    @property
    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The tensors from which, with the width, the matrix can be rebuilt."""
        return self.values, self.columns, self.starts

    def over(self, scale: Tensor) -> "Remainder":
        """The matrix with each row divided by its scale, (rows, 1)."""
        if self.columns is None or self.starts is None:
            return Remainder(self.values / scale, None, None, self.width)
        each = scale.flatten().repeat_interleave(self.starts.diff(), output_size=len(self.values))
        return Remainder(self.values / each, self.columns, self.starts, self.width)

    def dense(self) -> Tensor:
        """The dense matrix."""
        whole = self.values
        if self.columns is not None and self.starts is not None:
            whole = operators.whole(self.values, self.columns, self.starts, self.width)
        return whole.t() if self.down else whole

    def times(self, other: Tensor, scale: Tensor | None) -> Tensor:
        """This (rows, shared) times other (shared, n), times a scalar `scale` or one a column: float32."""
        return operators.sparse_product(*self.parts, self.width, self.down, other, scale)


def remainder(x: Tensor, clamp: Clamp, bounds: Tensor) -> Remainder:
    """x minus x clamped to `bounds`."""
    return Remainder(*operators.beyond(x, clamp, bounds), x.shape[1])


def bounds_of(x: Tensor, clamp: Clamp) -> Tensor:
    """`Clamp.bounds` of a matrix, by a kernel if one applies."""
    return operators.bounds(x.detach(), clamp)
