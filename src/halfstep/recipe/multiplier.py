"""What a product of two matrices is multiplied by: a constant, and powers of its three sizes."""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.errors import RecipeError
from halfstep.recipe.projection import LARGEST


_STEEPEST = 8
_SIZES = ("rows", "shared", "columns")


@dataclass(frozen=True)
class Multiplier:
    """constant * rows^a * shared^b * columns^c for a product (rows, shared) x (shared, columns).

    It enters the product before its one rounding, so that a factor of unit scaling costs no pass over memory and no
    second rounding. Where a layer has a fan-in of m and a fan-out of n, and b rows, its products are (b, m) (m, n)
    forward, (b, n) (n, m) for the gradient of the input and (n, b) (b, m) for the weight's; the bias's is the weight's
    with one column.

    Raises:
        RecipeError: a power or constant that is not finite, or a constant that is not positive.

    >>> Multiplier(shared=-0.5).of(512, 256, 1024)
    0.0625
    """

    rows: float = 0.0
    shared: float = 0.0
    columns: float = 0.0
    constant: float = 1.0

    def __post_init__(self) -> None:
        powers = all(abs(power) <= _STEEPEST for power in (self.rows, self.shared, self.columns))
        if not powers or not 0 < self.constant <= LARGEST:
            raise RecipeError(
                f"{self!r}: found a power or a constant that multiplies nothing sensibly; expected finite powers of "
                "rows, shared and columns, and a positive, finite constant"
            )

    def of(self, rows: float, shared: float, columns: float) -> float:
        """The number for a product of that size. A side without elements counts as one: there is nothing to scale."""
        number = self.constant
        for size, power in ((rows, self.rows), (shared, self.shared), (columns, self.columns)):
            if power:
                number = number * (size if size > 0 else 1) ** power
        return number

    def __str__(self) -> str:
        powers = [f"{name}^{power:g}" for name in _SIZES if (power := getattr(self, name))]
        return " ".join([f"{self.constant:g}"] * (self.constant != 1.0 or not powers) + powers)
