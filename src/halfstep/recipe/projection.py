"""`Projection`: which matrices are updated in a subspace of their gradients (GaLore), and how it is chosen."""

from dataclasses import dataclass

import torch

from halfstep.errors import RecipeError, unknown


PROJECTOR = "projector"
"""The name, in an optimizer's state, of a matrix's projector."""

LARGEST, SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
"""float32's largest value and smallest normal value."""

SIDES = ("short", "long", "left", "right")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Subspace:
    """The span of `rank` singular vectors of a gradient G: left ones P with R = P^T G, or right ones Q with R = G Q."""

    rank: int
    left: bool

    def projector(self, shape: Shape) -> Shape:
        """The shape of P or Q."""
        return (shape[0] if self.left else shape[1], self.rank)

    def moment(self, shape: Shape) -> Shape:
        """The shape of R, and of its moments."""
        return (self.rank, shape[1]) if self.left else (shape[0], self.rank)

    def numbers(self, shape: Shape, moments: int) -> int:
        """The number of stored elements for a matrix of that shape: with Adam, mr + 2nr for m <= n."""
        (rows, columns), (longs, shorts) = self.projector(shape), self.moment(shape)
        return rows * columns + moments * longs * shorts


@dataclass(frozen=True)
class Projection:
    """Weights of linear layers are updated in a subspace of their gradients, which is chosen again every `gap` steps.

    w <- w - lr scale P u, where u is the rule's step (for Adam m' / (sqrt(v') + eps)) on R = P^T G. Moments have R's
    shape, and are not transformed when P changes. Weight decay applies to the whole weight.

    Raises:
        RecipeError: an invalid value.

    Source: Zhao et al. 2024, arXiv 2403.03507, algorithm 2.
    """

    rank: int = 128
    gap: int = 200
    """Steps between two choices of the subspace, counted for each parameter."""
    scale: float = 0.25
    """The factor of the projected step."""
    side: str = "short"
    """Which singular vectors: those of the `short` side (as in the paper; left ones for m <= n), of the `long` side, or
    always the `left` or `right` ones."""
    paths: tuple[str, ...] = ()
    """Globs on the module paths of linear layers. Empty: all except output heads, routers, adapters, and weights tied
    to an embedding. The paper's are `*attn*` and `*mlp*`."""
    share: float | None = 0.5
    """The rank is at most this share of a matrix's short side, so that less is stored than without a projection. None:
    always `rank`, and a smaller matrix is an error."""

    def __post_init__(self) -> None:
        for name in ("rank", "gap"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise RecipeError(f"projection {name} = {value!r}; expected an integer of at least 1")
        if not isinstance(self.scale, int | float) or not 0 < self.scale <= LARGEST:
            raise RecipeError(f"projection scale = {self.scale!r}; expected a number above 0, such as 0.25")
        if self.share is not None and not 0 < self.share <= 1:
            raise RecipeError(f"projection share = {self.share}; expected a share of the short side, such as 0.5")
        if self.side not in SIDES:
            raise RecipeError(f"projection {unknown('side', self.side, SIDES)}")

    def subspace(self, shape: Shape) -> Subspace | None:
        """The subspace for a matrix of that shape; None if the share of its short side is less than 1.

        Raises:
            RecipeError: `share` is None, and the rank exceeds the matrix's.
        """
        short = min(shape)
        rank = self.rank if self.share is None else min(self.rank, int(self.share * short))
        if rank > short:
            raise RecipeError(
                f"rank = {self.rank} of a matrix of shape {tuple(shape)}, which has {short}; lower the rank, leave the "
                "matrix out, or give a share of the short side that is never exceeded (share = 0.5)"
            )
        wide = shape[0] <= shape[1]
        left = {"short": wide, "long": not wide, "left": True, "right": False}[self.side]
        return Subspace(rank, left) if rank else None

    def __str__(self) -> str:
        most = "" if self.share is None else f", at most {self.share:g} of the short side"
        where = ", ".join(self.paths) or "all linear layers but output heads, routers, adapters, ties to embeddings"
        return (
            f"rank {self.rank}{most}; singular vectors of the {self.side} side, every {self.gap} steps; step times "
            f"{self.scale:g}; {where}"
        )
