"""AdamW with moments in few bits, under the names of other libraries: optimizers for any loop, without `prepare`."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from halfstep.errors import OptimizerError, RecipeError, unknown
from halfstep.optim.checks import check_moments
from halfstep.optim.lowbit import LowBit
from halfstep.optim.rules import rule_of
from halfstep.optim.shards import is_spread
from halfstep.quant import draw_seed
from halfstep.quant.tile import Tile
from halfstep.recipe import Projection, Storage, get_recipe


Moments = str | Storage | tuple[tuple[str, str | Storage], ...]


class LowBitAdamW(LowBit):
    """AdamW with moments in few bits and parameters in their own dtype; a `torch.optim.AdamW` for any loop.

    Schedulers, clipping, `torch.amp.GradScaler`, `state_dict` and torch.distributed.checkpoint work as with torch's. A
    state of torch's AdamW loads into it, and its `float32_state_dict()` loads into torch's.

    Args:
        params: parameters in fp32, bf16 or fp16, or torch's parameter groups.
        lr, betas, eps, weight_decay, maximize: as torch's.
        amsgrad: not supported; True raises.
        moments: how moments are stored, as `Recipe.moments`; None: as the class says.
        bf16_stochastic_round: round updates of bf16 parameters stochastically. Rounded to nearest, the default, small
            updates are lost, and a warning says so.
        generator: the source of the noise's seed: a generator, or the seed.

    Raises:
        OptimizerError: a parameter has another dtype, an option has no counterpart, or `moments` names a moment that no
            update rule has.
        RecipeError: `moments` names an unknown format.
    """

    recipe_name: ClassVar = "bf16-mixed"
    """The recipe that gives the default for `moments`."""
    _warned: frozenset[torch.dtype] = frozenset()

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        moments: Moments | None = None,
        bf16_stochastic_round: bool = False,
        generator: torch.Generator | int | None = None,
    ) -> None:
        described = torch.optim.AdamW(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)
        rule = rule_of(described)
        kept = get_recipe(self.recipe_name).moments if moments is None else moments
        recipe = replace(get_recipe("fp32"), name=type(self).__name__, moments=kept)
        if bf16_stochastic_round:
            recipe = replace(recipe, weights="bf16", update_rounding="stochastic")
        check_moments(recipe)
        seed = int(draw_seed(generator)) if bf16_stochastic_round else 0
        super().__init__(described.param_groups, rule, recipe, seed)
        self.defaults = {**described.defaults, **self.defaults}
        self._warn_of_lost_updates()

    def check(self) -> None:
        """As `LowBit.check`; also warns of lost updates if parameters became 16-bit since the last step."""
        super().check()
        self._warn_of_lost_updates()

    def _name(self, parameter: Tensor, index: int) -> str:
        named = [name for group in self.param_groups for name in group.get("param_names", ())]
        return f"parameter {index}" + (f" ({named[index]})" if index < len(named) else "")

    def _warn_of_lost_updates(self) -> None:
        dtypes = {p.dtype for group in self.param_groups for p in group["params"]} - {torch.float32}
        if self.recipe.update_rounding == "stochastic":
            dtypes.discard(torch.bfloat16)
        for dtype in sorted(dtypes - self._warned, key=str):
            self._warned = self._warned | {dtype}
            remedy = "pass bf16_stochastic_round=True, or " if dtype == torch.bfloat16 else ""
            warnings.warn(
                f"{type(self).__name__}: parameters in {dtype} take updates rounded to nearest, and those below half a "
                f"unit in the last place are lost: {remedy}train fp32 parameters under torch.autocast",
                stacklevel=4,
            )


class AdamW8bit(LowBitAdamW):
    """AdamW with both moments in 8 bits: dynamic maps in blocks, as the recipe `adamw-8bit`.

    Args:
        block_size: the number of elements that share a scale.
        min_8bit_size: parameters with fewer elements have fp32 moments.
        params, options: as in `LowBitAdamW`.

    Source: Dettmers et al. 2022, arXiv 2110.02861; the names of options are bitsandbytes' and torchao's.
    """

    recipe_name: ClassVar = "adamw-8bit"

    def __init__(
        self, params: ParamsT, *options: Any, block_size: int = 256, min_8bit_size: int = 4096, **named: Any
    ) -> None:
        super().__init__(params, *options, moments=_in_blocks(self, block_size, min_8bit_size), **named)


class AdamWFp8(LowBitAdamW):
    """AdamW with both moments in FP8 in blocks, as the recipe `fp8-adam`.

    Args:
        block_size: the number of elements that share a scale.
        params, options: as in `LowBitAdamW`.

    Source: torchao's AdamWFp8.
    """

    recipe_name: ClassVar = "fp8-adam"

    def __init__(self, params: ParamsT, *options: Any, block_size: int = 256, **named: Any) -> None:
        super().__init__(params, *options, moments=_in_blocks(self, block_size), **named)


class CoatAdamW(LowBitAdamW):
    """AdamW with both moments in E4M3, in groups of 128 expanded to the format's range, as the recipe `coat`.

    Args:
        params, options: as in `LowBitAdamW`.

    Source: Xi et al. 2025, arXiv 2410.19313.
    """

    recipe_name: ClassVar = "coat"


def _in_blocks(optimizer: LowBitAdamW, size: int, smallest: int | None = None) -> Moments:
    """The `moments` of the optimizer's recipe, with blocks of `size` elements."""
    moments = get_recipe(optimizer.recipe_name).moments
    assert isinstance(moments, tuple)
    return tuple((name, _in_block(kind, size, smallest)) for name, kind in moments)


def _in_block(kind: str | Storage, size: int, smallest: int | None) -> Storage:
    assert isinstance(kind, Storage)
    quantizer = replace(kind.quantizer, scales=replace(kind.quantizer.tiling, tile=Tile(1, size)))
    return replace(kind, quantizer=quantizer, smallest=kind.smallest if smallest is None else smallest)


# ---- GaLore with galore-torch's interface: options of parameter groups select what is projected ----------------------


_SIDES = {"std": "short", "reverse_std": "long", "left": "left", "right": "right"}
_USUAL = {"update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}


class GaLoreAdamW(LowBitAdamW):
    """AdamW that updates the matrices of some parameter groups in a subspace of their gradients (`recipe.Projection`).

        groups = [{"params": matrices, "rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"},
                  {"params": others}]
        optimizer = GaLoreAdamW(groups, lr=0.01)

    A group with a `rank` is projected. Unlike in galore-torch, eps is added after bias correction, as in the paper, and
    a rank larger than a matrix's is an error.

    Args:
        params: parameters or groups; without a `rank` in any, this is AdamW.
        lr, betas, eps, weight_decay: as in galore-torch; the decay applies to the whole weight.
        correct_bias: must be True.
        no_deprecation_warning: accepted for compatibility.
        options: as in `LowBitAdamW`.

    Raises:
        OptimizerError: a projected parameter is no matrix, has a smaller rank, or is sharded; an option is invalid.

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
        """As torch's; a group with a `rank` is projected.

        Raises:
            OptimizerError: as for the class. Nothing was added.
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
        """The projection of the group's parameters; None without a `rank`."""
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
