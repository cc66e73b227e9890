"""An optimizer's state that was saved under another recipe: what of it is taken, and what to tell of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import OptimizerError
from halfstep.optim.checks import check_subspace
from halfstep.optim.plan import Plan
from halfstep.optim.states import labels
from halfstep.quant.masters import Master
from halfstep.recipe import Recipe, Storage, is_master


State = Mapping[str, Any]


class Changed:
    """Takes the states of one recipe's optimizer to another's: moments by value, masters where both keep them alike."""

    def __init__(self, other: str, recipe: Recipe) -> None:
        self._other, self._recipe = other, recipe
        self._dropped = self._begun = self._restarted = 0
        self._rounded: dict[str, str] = {}

    def kept(
        self,
        saved: State,
        plan: Plan,
        master: Master,
        formats: Mapping[str, str] | None,
        coded: Mapping[str, Storage],
        parameter: Tensor,
    ) -> tuple[State, Mapping[str, str]]:
        """What is taken of a parameter's saved state, and its formats. Moments of another subspace are dropped, and so
        is the step count then, by which Adam corrects moments that begin at zero."""
        formats = formats or {}
        masters = {name for name in saved if is_master(name)}
        alike = all(formats.get(name) == own for name, own in labels(coded).items()) and bool(master.keeps)
        alike = alike and all(_fits(saved.get(name), dtype, parameter, coded) for name, dtype in master.keeps.items())
        state = {name: value for name, value in saved.items() if name not in masters or alike}
        self._dropped += bool(masters) and not alike
        self._begun += bool(master.keeps) and not alike
        try:
            check_subspace(state, plan.kinds, plan.shapes, parameter, "?")
        except OptimizerError:
            self._restarted += 1
            state = {name: value for name, value in state.items() if name in masters}
        for name, kind in plan.kinds.items():
            value, now = state.get(name), labels({name: kind}).get(name)
            was = formats.get(name) or (value.dtype if isinstance(value, Tensor) else None)
            narrower = was != (now or kind.dtype) or (f"{name}_residual" in state and not kind.residual)
            if was is not None and narrower and kind.dtype != torch.float32:
                self._rounded[name] = str(kind)
        return state, {name: format for name, format in formats.items() if name in state}

    def __str__(self) -> str:
        told = [f"{name} is rounded to {kind}" for name, kind in self._rounded.items()]
        if self._dropped:
            told.append(f"the masters of {self._dropped} parameters are dropped, and go on as their stored weights")
        if self._begun:
            told.append(f"masters of {self._begun} parameters begin from the present weights")
        if self._restarted:
            told.append(f"moments and step counts of {self._restarted} parameters begin at zero")
        if self._recipe.codes is not None or self._recipe.weights != "fp32":
            kept = self._recipe.weights if self._recipe.codes is None else str(self._recipe.codes.weights)
            told.append(f"weights that were kept in more bits are rounded to {kept}")
        return (
            f"the optimizer's state was saved under {self._other}, and goes on under {self._recipe.name!r}, as "
            f"recipe_change='allow' asks: {'; '.join(told) or 'all of it is taken as it is'}"
        )


def _fits(value: Any, dtype: torch.dtype, parameter: Tensor, coded: Mapping[str, Storage]) -> bool:
    return isinstance(value, Tensor) and value.dtype == dtype and (bool(coded) or value.shape == parameter.shape)
