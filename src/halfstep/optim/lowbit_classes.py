"""AdamW with moments in few bits, by the names that people know: optimizers for any loop, without `prepare`."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from halfstep.optim.checks import check_moments
from halfstep.optim.lowbit import LowBit
from halfstep.optim.rules import rule_of
from halfstep.quant import draw_seed
from halfstep.quant.tile import Tile
from halfstep.recipe import Storage, get_recipe


Moments = str | Storage | tuple[tuple[str, str | Storage], ...]


class LowBitAdamW(LowBit):
    """AdamW over parameters as they are, with moments kept in few bits; `torch.optim.AdamW` for any loop.

    Schedulers, clipping, `torch.amp.GradScaler`, `state_dict` and torch.distributed.checkpoint work as with torch's. A
    state of torch's AdamW loads into it, and `float32_state_dict()` loads into torch's.

    Args:
        params: parameters in fp32, bf16 or fp16, or torch's parameter groups.
        lr, betas, eps, weight_decay, maximize: as torch's.
        amsgrad: is refused.
        moments: how they are kept, as `Recipe.moments`; None is as the class says.
        bf16_stochastic_round: whether updates of bf16 parameters are rounded stochastically. Rounded to nearest, which
            is the default, small ones are lost, and a warning says so.
        generator: where the seed of that noise comes from: a generator, or the seed.

    Raises:
        OptimizerError: a parameter of another dtype, an option that has no counterpart, or moments of a name that no
            update rule has.
        RecipeError: moments in a format that there is not.
    """

    recipe_name: ClassVar = "bf16-mixed"
    """The recipe whose moments these are."""
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
        """As `LowBit.check`; and says what weights lose that became 16-bit ones since the last step."""
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
        block_size: how many elements share a scale.
        min_8bit_size: parameters of fewer elements keep fp32 moments.
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
        block_size: how many elements share a scale.
        params, options: as in `LowBitAdamW`.

    Source: torchao's AdamWFp8.
    """

    recipe_name: ClassVar = "fp8-adam"

    def __init__(self, params: ParamsT, *options: Any, block_size: int = 256, **named: Any) -> None:
        super().__init__(params, *options, moments=_in_blocks(self, block_size), **named)


class CoatAdamW(LowBitAdamW):
    """AdamW with both moments in E4M3, groups of 128 stretched to the format's range, as the recipe `coat`.

    Args:
        params, options: as in `LowBitAdamW`.

    Source: Xi et al. 2025, arXiv 2410.19313.
    """

    recipe_name: ClassVar = "coat"


def _in_blocks(optimizer: LowBitAdamW, size: int, smallest: int | None = None) -> Moments:
    """The moments of the optimizer's recipe, in blocks of that many elements."""
    moments = get_recipe(optimizer.recipe_name).moments
    assert isinstance(moments, tuple)
    return tuple((name, _in_block(kind, size, smallest)) for name, kind in moments)


def _in_block(kind: str | Storage, size: int, smallest: int | None) -> Storage:
    assert isinstance(kind, Storage)
    assert kind.quantizer.scales is not None
    quantizer = replace(kind.quantizer, scales=replace(kind.quantizer.scales, tile=Tile(1, size)))
    return replace(kind, quantizer=quantizer, smallest=kind.smallest if smallest is None else smallest)
