"""apply + optimizer + loss scaler, in one line."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from halfstep.errors import OptimizerError
from halfstep.nn import apply
from halfstep.nn.codes import check_torch, hold
from halfstep.nn.layers import ModuleFilter
from halfstep.nn.scaling import Scalings
from halfstep.nn.storage import storable
from halfstep.optim import LossScaler, LowBit, check_optimizer, convert
from halfstep.recipe import Recipe, get_recipe


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: str | Recipe,
    *,
    module_filter: ModuleFilter | None = None,
    generator: torch.Generator | int | None = None,
) -> tuple[nn.Module, LowBit, LossScaler]:
    """Make a model, its optimizer and a loss scaler follow a recipe. The loop is torch.amp's:

        model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe="bf16-stochastic")
        loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()        # the identity unless the recipe scales its loss
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer); scaler.update(); optimizer.zero_grad()

    The model is changed in place and returned (see `halfstep.apply`). The optimizer that comes back continues the one
    given: it shares its parameter groups, so schedulers built before or after work, and takes over its moments and step
    counts. Master copies are taken before the weights are rounded. What each tensor then is, really:
    `print(halfstep.audit(model, optimizer, scaler))`.

    Args:
        model: any module with parameters, before DDP, FSDP or torch.compile.
        optimizer: torch.optim.AdamW, Adam or SGD over parameters of the model.
        recipe: a name or a `Recipe`.
        module_filter: as in `halfstep.apply`.
        generator: where the seed of stochastic rounding comes from (a generator, or the seed itself).

    Raises:
        OptimizerError: the optimizer cannot be expressed, or holds no parameter of the model. Nothing was changed.
        RecipeError, ModelError: as `halfstep.apply`. Nothing was changed.
    """
    recipe = get_recipe(recipe)
    names = {parameter: name for name, parameter in model.named_parameters()}
    check_optimizer(optimizer, names)
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if names and not trained & names.keys():
        raise OptimizerError(
            "the optimizer holds none of the model's parameters; build it over model.parameters() of this model"
        )
    if recipe.scaled is not None:
        check_torch()
    masters = {}
    if recipe.master is not None or (recipe.scaled is not None and recipe.scaled.master is not None):
        stored = storable(model, recipe.float32_modules)[0].values()
        masters = {p: p.detach().float().clone() for p in stored if p in trained and p.requires_grad}
    scale = recipe.loss_scale
    scaler = LossScaler(
        init_scale=scale.init if scale else 1.0,
        growth_interval=scale.growth_interval if scale else 2000,
        enabled=scale is not None,
        dynamic=scale is not None and scale.dynamic,
        hysteresis=scale.hysteresis if scale else 1,
        names=names,
        follower=Scalings(model),
    )
    report = apply(model, recipe, module_filter)
    scales = hold(model, report.quantized, recipe.scaled) if recipe.scaled is not None else {}
    low_bit = convert(optimizer, recipe, masters, generator, scales, _parameters(model))
    return model, low_bit, scaler


def _parameters(model: nn.Module) -> Callable[[], dict[str, nn.Parameter] | None]:
    """The model's parameters as they are when asked for; None once it is gone."""
    reference = weakref.ref(model)

    def present() -> dict[str, nn.Parameter] | None:
        model = reference()
        return None if model is None else dict(model.named_parameters())

    return present


class _Callable(ModuleType):
    """This module, callable: importing it binds `halfstep.prepare` to it, over the function of that name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return prepare(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
