"""Accelerate: `accelerator.prepare`, for a model that follows a recipe."""

import warnings
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import LossScaleError, MissingLibraryError, ModelError, OptimizerError, RecipeError
from halfstep.nn import revert
from halfstep.nn.layers import ModuleFilter
from halfstep.ops.part import part_of
from halfstep.optim import LossScaler, LowBit
from halfstep.preparation import full_weights, prepare as prepare_by_itself
from halfstep.recipe import Recipe, get_recipe


with MissingLibraryError.of("accelerate"):
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType, release_memory

_FREED = "_halfstep_freed"  # the accelerator's attribute for the model that it freed


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    recipe: str | Recipe,
    module_filter: ModuleFilter | None = None,
    generator: torch.Generator | int | None = None,
    total_steps: int | None = None,
    recipe_change: str = "refuse",
    device_placement: list[bool] | None = None,
) -> tuple[Any, ...]:
    """`accelerator.prepare(*objects)`, with a model and an optimizer that follow a recipe. The loop stays Accelerate's:

        accelerator = Accelerator()  # mixed_precision stays "no": the recipe sets the precision
        model, optimizer, loader = prepare(accelerator, model, optimizer, loader, recipe="fp16-mixed")
        with accelerator.accumulate(model):
            accelerator.backward(loss_fn(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step(); optimizer.zero_grad()

    The loss scaler becomes `accelerator.scaler`, so that `backward`, `optimizer_step_was_skipped`, `save_state` and
    `load_state` take it into account. `clip_grad_norm_`, `clip_grad_value_` and `unscale_gradients` of this accelerator
    divide by the loss scale first: Accelerate's own do that only under its own fp16. The optimizer's masters exist
    twice for a moment, since Accelerate loads its state into itself.

    After `accelerator.free_memory()` this may be called again, as in a loop of `find_executable_batch_size`: with a new
    model, or with the same one under the same recipe, which is reverted first. Its masters start again from the weights
    as they were stored, and scaling states and stages from the beginning.

    Args:
        accelerator: an Accelerator with mixed_precision="no" on one device or under DDP.
        objects: as for `accelerator.prepare`, in any order: an optimizer, as `halfstep.prepare` takes it, and the model
            that holds its parameters; loaders, schedulers and models that are not trained, if you like.
        recipe, module_filter, generator, total_steps, recipe_change: as in `halfstep.prepare`. `total_steps` are
            optimizer steps.
        device_placement: as in `accelerator.prepare`.

    Returns:
        What `accelerator.prepare` returns: the objects in the same order.

    Raises:
        RecipeError: the accelerator computes in another precision, is prepared already, or distributes the model in a
            way that no recipe follows.
        ModelError, OptimizerError: not one optimizer and the one model that it trains; as `halfstep.prepare`. Nothing
            was changed, but that a model prepared before `free_memory()` is reverted.
    """
    _check(accelerator)
    optimizer = _only_optimizer(objects)
    model = _model_of(optimizer, objects)
    _revert_freed(accelerator, model, get_recipe(recipe))
    _, low_bit, scaler = prepare_by_itself(
        model,
        optimizer,
        recipe,
        module_filter=module_filter,
        generator=generator,
        total_steps=total_steps,
        recipe_change=recipe_change,
    )
    accelerator.scaler = scaler  # before accelerator.prepare, whose optimizer keeps this scaler
    clipping = _Clipping(accelerator, low_bit, scaler)
    accelerator.unscale_gradients = clipping.unscale  # called first by its clip_grad_value_
    accelerator.clip_grad_norm_ = clipping.clip_norm
    accelerator.free_memory = partial(_free, accelerator, weakref.ref(model))
    return accelerator.prepare(
        *(low_bit if one is optimizer else one for one in objects), device_placement=device_placement
    )


def _free(accelerator: Accelerator, model: weakref.ref[nn.Module], *objects: Any) -> tuple[Any, ...]:
    """`accelerator.free_memory`, which also releases what `prepare` added to this accelerator, so `prepare` can be
    called again."""
    for name in ("unscale_gradients", "clip_grad_norm_", "free_memory"):
        delattr(accelerator, name)
    accelerator.scaler = None
    vars(accelerator)[_FREED] = model
    objects = accelerator.free_memory(*objects)
    release_memory()  # Accelerate collects garbage before it drops its references, and has optimizers in cycles
    return objects


def _revert_freed(accelerator: Accelerator, model: nn.Module, recipe: Recipe) -> None:
    """Revert a model whose preparation this accelerator freed, so that it can be prepared again under the same
    recipe."""
    freed = vars(accelerator).pop(_FREED, lambda: None)()
    applied = part_of(model).applied
    if freed is not model or applied is None or applied.quantized or applied.recipe != recipe:
        return
    revert(model)
    if full_weights(model, recipe):
        warnings.warn(
            f"this {type(model).__name__} is prepared again after free_memory(), which dropped the old optimizer's "
            f"masters: under {recipe.name!r} they start again from the rounded weights. To keep all bits, build the "
            "model together with the optimizer, in the function that is retried",
            stacklevel=3,
        )


class _Clipping:
    """Accelerate's clipping functions, for gradients that are multiplied by the loss scale."""

    def __init__(self, accelerator: Accelerator, optimizer: LowBit, scaler: LossScaler) -> None:
        self._accelerator = accelerator
        self._optimizer = optimizer
        self._scaler = scaler

    def unscale(self, optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None) -> None:
        """Divide the gradients by the loss scale, unless that was already done in this step."""
        self._check_accumulated()
        if not self._scaler.is_unscaled(self._optimizer):
            self._scaler.unscale_(self._optimizer)

    def clip_norm(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the norm of these parameters' unscaled gradients; return the norm before clipping."""
        given = {parameters} if isinstance(parameters, Tensor) else {*parameters}
        if not {p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None} - given:
            self._check_accumulated()
            return self._scaler.clip_grad_norm_(self._optimizer, max_norm, norm_type)
        self.unscale()
        return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type)

    def _check_accumulated(self) -> None:
        if self._scaler.is_enabled() and not self._accelerator.sync_gradients:
            raise LossScaleError(
                "gradients were to be clipped while they accumulate: they would be unscaled, and the next batch's "
                "gradients, still multiplied by the loss scale, would be added. Clip only before the step: "
                "if accelerator.sync_gradients: accelerator.clip_grad_norm_(...)"
            )


_SHARDED = (
    "Call halfstep.apply(model, recipe), torch's fully_shard, build the optimizer and call halfstep.optimize(model, "
    "optimizer) in a loop of your own; or train under DDP"
)
_REFUSED = {
    DistributedType.DEEPSPEED: (
        "DeepSpeed, whose engine takes the optimizer apart and scales the loss by itself. Train under DDP "
        "(no deepspeed_plugin)"
    ),
    DistributedType.MEGATRON_LM: (
        "Megatron-LM, which builds models and optimizers of its own. Train under DDP (no megatron_lm_plugin)"
    ),
    DistributedType.FSDP: (
        "FSDP, for which it replaces the parameters after the optimizer has begun, and does not rekey its masters and "
        f"moments: they would be lost. {_SHARDED}"
    ),
    DistributedType.XLA: (
        "XLA, for which it replaces the parameters after the optimizer has begun, and its masters would be lost. Train "
        "on a GPU or a CPU"
    ),
}


def _check(accelerator: Accelerator) -> None:
    """Raise for an accelerator that would change what the recipe computes, before anything is changed."""
    if accelerator.mixed_precision != "no":
        raise RecipeError(
            f"this Accelerator has mixed_precision={accelerator.mixed_precision!r}, but the recipe sets the "
            "precision: both would cast. Build it with mixed_precision='no' (it may come from "
            "`accelerate config` or `accelerate launch`)"
        )
    if accelerator.scaler_handler is not None:
        raise RecipeError(
            "this Accelerator was given GradScalerKwargs, but the recipe sets the loss scale. Leave them out, "
            "and change the recipe's loss_scale instead (dataclasses.replace)"
        )
    if accelerator.scaler is not None:
        raise RecipeError(
            "this Accelerator has a loss scaler already: it serves one model and its optimizer. To begin again, call "
            "accelerator.free_memory() first; for a second model take a second Accelerator()"
        )
    kind = accelerator.distributed_type
    if kind in _REFUSED:
        raise RecipeError(f"this Accelerator distributes the model by {_REFUSED[kind]}")
    config = getattr(accelerator, "parallelism_config", None)
    if config is not None and (config.tp_enabled or config.cp_enabled or config.dp_shard_enabled):
        raise RecipeError(
            f"this Accelerator has a parallelism_config that splits the model or its sequences. {_SHARDED}"
        )


def _only_optimizer(objects: tuple[Any, ...]) -> torch.optim.Optimizer:
    optimizers = [one for one in objects if isinstance(one, torch.optim.Optimizer)]
    if len(optimizers) != 1:
        raise OptimizerError(
            f"prepare got {len(optimizers)} optimizers, expected one: Accelerate updates the loss scale after each "
            "optimizer's step, while the gradients of others are still multiplied by the old one. Put the parameters "
            "of one model into groups of one optimizer; for a second model take a second Accelerator()"
        )
    optimizer = optimizers[0]
    if isinstance(optimizer, AcceleratedOptimizer):
        raise OptimizerError(
            "this optimizer was returned by accelerator.prepare. Pass the model and the optimizer from before it: this "
            "function calls accelerator.prepare itself"
        )
    return optimizer


def _model_of(optimizer: torch.optim.Optimizer, objects: tuple[Any, ...]) -> nn.Module:
    """The one module among the objects whose parameters the optimizer holds."""
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    models = [one for one in objects if isinstance(one, nn.Module) and trained & {*one.parameters()}]
    if len(models) != 1:
        raise ModelError(
            f"prepare got {len(models)} models with parameters of the optimizer, expected one. Build the optimizer "
            "over model.parameters() and pass both; if it trains two models, make them parts of one module"
        )
    return models[0]
