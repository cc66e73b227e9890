"""GaLore by galore-torch's names: optimizers for any loop, whose parameter groups say what is projected."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from halfstep.errors import OptimizerError, RecipeError, unknown
from halfstep.optim.lowbit_classes import LowBitAdamW
from halfstep.optim.shards import is_spread
from halfstep.recipe import Projection


_SIDES = {"std": "short", "reverse_std": "long", "left": "left", "right": "right"}
_USUAL = {"update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}


class GaLoreAdamW(LowBitAdamW):
    """AdamW that updates the matrices of some parameter groups in a subspace of their gradients (`recipe.Projection`).

        groups = [{"params": matrices, "rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"},
                  {"params": others}]
        optimizer = GaLoreAdamW(groups, lr=0.01)

    A group with a `rank` is projected. Unlike galore-torch, eps is added after the bias is corrected, as in the paper,
    and a rank that a matrix does not have is an error.

    Args:
        params: parameters or groups; without a `rank` in any, this is AdamW.
        lr, betas, eps, weight_decay: as galore-torch's; the decay is the whole weight's.
        correct_bias: True; without it, it is refused.
        no_deprecation_warning: accepted for the import's sake.
        options: as in `LowBitAdamW`.

    Raises:
        OptimizerError: a projected parameter is no matrix, has not the rank, or is sharded; an option means nothing.

    Source: Zhao et al. 2024, arXiv 2403.03507; the names of options are galore-torch's.
    """

    recipe_name: ClassVar = "galore"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        no_deprecation_warning: bool = False,
        **options: Any,
    ) -> None:
        if not correct_bias:
            raise OptimizerError("correct_bias=False; expected True: moments are corrected, as in the paper")
        super().__init__(params, lr, betas, eps, weight_decay, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """torch's; a group with a `rank` is projected.

        Raises:
            OptimizerError: as the class. Nothing was added.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if "rank" in group:
            for option, usual in _USUAL.items():
                group.setdefault(option, usual)
        first = sum(len(known["params"]) for known in self.param_groups[:-1])
        try:
            for index, parameter in enumerate(group["params"], first):
                self._check(parameter, index, self.group_projection(group))
        except OptimizerError:
            self.param_groups.pop()
            raise

    def _check(self, parameter: Tensor, index: int, projection: Projection | None) -> None:
        if projection is None:
            return
        name, shape = self._name(parameter, index), tuple(parameter.shape)
        if len(shape) != 2:
            raise OptimizerError(
                f"{name} of shape {shape} is in a group with a rank; expected matrices there. Put it in a group without"
            )
        if is_spread(parameter):
            raise OptimizerError(
                f"{name} is sharded, and its subspace is spanned by vectors of its whole gradient, which no rank has. "
                "Train under DDP, or put it in a group without a rank"
            )
        try:
            projection.subspace(shape)
        except RecipeError as error:
            raise OptimizerError(f"{name}: {error}") from error

    def group_projection(self, group: Mapping[str, Any]) -> Projection | None:
        """How the group's parameters are projected; None without a `rank`."""
        if "rank" not in group:
            return None
        given = {**_USUAL, **group}
        return _projected(given["rank"], given["update_proj_gap"], given["scale"], given["proj_type"])


class GaLoreAdamW8bit(GaLoreAdamW):
    """As `GaLoreAdamW`, with moments in 8 bits: dynamic maps in blocks of 256, as the recipe `galore-8bit`.

    Args:
        params, lr, betas, eps, weight_decay: as galore-torch's.
        options: as in `LowBitAdamW`.
    """

    recipe_name: ClassVar = "galore-8bit"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **options)


@cache
def _projected(rank: int, gap: int, scale: float, kind: str) -> Projection:
    if kind not in _SIDES:
        why = "; a projection from both sides is not offered" if kind == "full" else ""
        raise OptimizerError(unknown("proj_type", kind, _SIDES) + why)
    try:
        return Projection(rank, gap, scale, _SIDES[kind], share=None)
    except RecipeError as error:
        raise OptimizerError(str(error)) from error
