"""Lightning: a precision plugin that makes a LightningModule follow a recipe."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import MissingLibraryError, ModelError, RecipeError
from halfstep.nn import apply, following
from halfstep.nn.adopt import Applied, applied_to
from halfstep.nn.codes import store, store_as_codes
from halfstep.nn.layers import ModuleFilter
from halfstep.nn.stages import schedule_of
from halfstep.ops.part import part_of
from halfstep.optim import LossScaler, LowBit
from halfstep.preparation import adapts, full_weights, optimize
from halfstep.recipe import Recipe, check_change, get_recipe


with MissingLibraryError.of("lightning"):
    from lightning.pytorch import LightningModule, Trainer, callbacks
    from lightning.pytorch.callbacks import ModelPruning
    from lightning.pytorch.plugins import Precision
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
    from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.types import LRSchedulerConfig


class HalfstepPrecision(Precision):
    """A precision plugin: a LightningModule, its optimizers and their loss scale follow a recipe.

        trainer = Trainer(plugins=[HalfstepPrecision("fp16-mixed")], gradient_clip_val=1.0)

    Everything that `training_step` calls follows the recipe, parts of the module too. Clipping, accumulation, `no_grad`
    steps, manual optimization with several optimizers, and checkpoints are Lightning's own. A step whose gradients
    overflow is skipped: schedulers that Lightning advances each step do not advance, and `global_step` counts it, as
    under Lightning's own precision.

    Args:
        recipe, module_filter, generator, recipe_change: as in `halfstep.prepare`.
        total_steps: the run's optimizer steps, for recipes that change after a fraction of it. None takes
            `trainer.estimated_stepping_batches`, in automatic optimization.

    Raises:
        RecipeError: unknown recipe. When `fit` begins: a strategy other than one device or DDP; a model that follows
            another recipe, or whose stages are at another step; as `halfstep.apply` and `halfstep.optimize`.
        ModelError, OptimizerError: when `fit` begins, as `halfstep.apply` and `halfstep.optimize`.
    """

    def __init__(
        self,
        recipe: str | Recipe,
        *,
        module_filter: ModuleFilter | None = None,
        generator: torch.Generator | int | None = None,
        total_steps: int | None = None,
        recipe_change: str = "refuse",
    ) -> None:
        self.recipe = get_recipe(recipe)
        check_change(recipe_change)
        self._recipe_change = recipe_change
        self.scaler: LossScaler | None = None
        """The loss scaler of all optimizers, set when `fit` begins: its scale, `skipped_steps` and `overflowed`."""
        self._module_filter = module_filter
        self._generator = generator
        self._total_steps = total_steps
        self._model: nn.Module | None = None
        self._masters: Mapping[nn.Parameter, Tensor] = {}  # the masters at the start of the first fit
        self._mastered: set[nn.Parameter] = set()
        self._optimizers: list[LowBit] = []
        self._stepped: set[torch.optim.Optimizer] = set()
        self._begun = False
        self.step_was_skipped = False
        """Whether the last optimizer step was skipped because gradients overflowed."""

    # ---- before the run -------------------------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Make the module follow the recipe, before the strategy wraps it."""
        trainer = _trainer_of(module)
        _check(trainer)
        self._model = module
        applied: Applied | None = part_of(module).applied
        if applied is not None and applied.recipe != self.recipe:  # equal if the same module is fitted again
            raise RecipeError(
                f"{type(module).__name__} follows {applied.recipe.name!r} already, but this plugin has "
                f"{self.recipe.name!r}: call halfstep.revert(module) first"
            )
        if applied is None:
            self._masters = full_weights(module, self.recipe)
            self._mastered = {*self._masters}
            if adapts(module, self.recipe):
                return module
            apply(module, self.recipe, self._module_filter)
            if self.recipe.codes is not None:  # before DDP reads the parameters
                store_as_codes(module, applied_to(module).rounded, self.recipe.codes)
            _store_copies(trainer)
            _warn_of_swaps(trainer, self.recipe)
        return module

    def connect(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Any], list[Any]]:
        """Make the optimizers follow the recipe too, after the strategy wrapped the module."""
        if all(one in self._optimizers for one in optimizers):  # in evaluation there are none, or those of the last fit
            return model, optimizers, lr_schedulers
        trained = [(one, p) for one in self._optimizers for group in one.param_groups for p in group["params"]]
        masters = {**self._masters, **{p: one.full(p) for one, p in trained if p in self._mastered}}
        if not masters and full_weights(self._module(), self.recipe):
            warnings.warn(
                f"{type(self._module()).__name__} follows {self.recipe.name!r} already, and another "
                "HalfstepPrecision has its masters: they start again from the rounded weights. To keep all bits, give "
                "both Trainers the same plugin, or resume from a checkpoint (trainer.fit(..., ckpt_path=...))",
                stacklevel=1,
            )
        self._optimizers, self._stepped, self.scaler, self._begun = [], set(), None, False
        total_steps = self._run_length()
        for optimizer in optimizers:
            low_bit, scaler = optimize(
                model,
                optimizer,
                generator=self._generator,
                total_steps=total_steps,
                masters=masters,
                recipe_change=self._recipe_change,
            )
            self._optimizers.append(low_bit)
            self.scaler = self.scaler or scaler  # one loss scale for all optimizers
        self._masters = {}
        return model, self._optimizers, [self._waiting(config) for config in lr_schedulers]

    def _run_length(self) -> int | None:
        module = self._module()
        if self._total_steps is not None or not self.recipe.stages:
            return self._total_steps
        if not module.automatic_optimization:
            return None  # halfstep raises if a stage begins after a fraction of the run
        found = module.trainer.estimated_stepping_batches
        return int(found) if 0 < found < float("inf") else None

    def _waiting(self, config: LRSchedulerConfig) -> LRSchedulerConfig:
        if config.interval != "step" or not self._module().automatic_optimization:
            return config
        return replace(config, scheduler=_SkippableScheduler(config.scheduler, self))  # type: ignore[arg-type]

    # ---- the run --------------------------------------------------------------------------------------------------

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """The context of a training or evaluation step."""
        self._end_step()
        with following(self._module()):
            yield

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """The loss times the loss scale."""
        if not self._begun:
            _check_stages(module)
            self._begun = True
        self._end_step()
        return super().pre_backward(self._loss_scaler().scale(tensor), module)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure (forward, backward and hooks); then step, unless gradients overflowed."""
        result, scaler = closure(), self._loss_scaler()
        if _is_looked_at(model) and not scaler.is_unscaled(optimizer):
            scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        if not _has_gradients(optimizer):  # training_step returned None
            return result
        before = scaler.skipped_steps
        scaler.step(optimizer, **kwargs)
        self._stepped.add(optimizer)
        self._end_step()
        self.step_was_skipped = scaler.skipped_steps > before
        return result

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clip the norm of the unscaled gradients."""
        self._loss_scaler().clip_grad_norm_(optimizer, clip_val)

    def clip_grad_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clip the values of the unscaled gradients."""
        if not self._loss_scaler().is_unscaled(optimizer):
            self._loss_scaler().unscale_(optimizer)
        super().clip_grad_by_value(optimizer, clip_val)

    def _end_step(self) -> None:
        """End the optimizer step. Another optimizer's gradients that were not stepped yet contain the present loss
        scale, so it is kept until they are stepped or dropped."""
        if not self._stepped:
            return
        scaler = self._loss_scaler()
        waiting = [one for one in self._optimizers if one not in self._stepped and _has_gradients(one)]
        if not (scaler.is_enabled() and waiting):
            self._stepped.clear()
            scaler.update()

    # ---- saving ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The loss scaler's state, for a checkpoint."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the loss scaler's state from a checkpoint."""
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict)

    def _loss_scaler(self) -> LossScaler:
        assert self.scaler is not None, "connect comes before the first step"
        return self.scaler

    def _module(self) -> LightningModule:
        assert isinstance(self._model, LightningModule), "convert_module comes first"
        return self._model


@dataclass(eq=False)
class _SkippableScheduler:
    """A scheduler that does not advance in a skipped step."""

    _scheduler: Any
    _plugin: HalfstepPrecision

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance, as Lightning's optimizers do
        return type(self._scheduler)

    def step(self, *args: Any, **kwargs: Any) -> None:
        if not self._plugin.step_was_skipped:
            self._scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


def _trainer_of(module: nn.Module) -> Trainer:
    """The Trainer that a module is attached to.

    Raises:
        ModelError: there is none, as under Fabric.
    """
    if isinstance(module, LightningModule):
        with suppress(RuntimeError):  # raised by Lightning if the module has no trainer
            if isinstance(module.trainer, Trainer):
                return module.trainer
    raise ModelError(
        f"HalfstepPrecision got a {type(module).__name__} without a Trainer; it serves a LightningModule in a Trainer. "
        "Under Fabric leave this plugin out, call halfstep.prepare(model, optimizer, recipe) and use its scaler"
    )


def _warn_of_swaps(trainer: Trainer, recipe: Recipe) -> None:
    """Warn if validation swaps Lightning's averages into weights of fewer bits, which rounds them."""
    kind = getattr(callbacks, "WeightAveraging", ())  # from Lightning 2.6 on
    if (recipe.weights == "fp32" and recipe.codes is None) or not trainer.enable_validation:
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, kind):
            warnings.warn(
                f"{type(callback).__name__} averages in float32, and each validation swaps the average into the "
                f"weights and out again, which rounds it to what recipe {recipe.name!r} stores: at a decay near 1 much "
                "of the average is lost. Validate rarely, after training (limit_val_batches=0, then "
                "trainer.validate), or take a recipe of float32 weights (bf16-mixed)",
                stacklevel=2,
            )


def _store_copies(trainer: Trainer) -> None:
    """Store in the recipe's dtypes the copies that ModelPruning restores into `.data` (lottery tickets)."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelPruning):
            for layer in (callback._original_layers or {}).values():
                for index, name in layer["names"]:
                    store(getattr(layer["data"], name), getattr(callback._parameters_to_prune[index][0], name).dtype)


def _check(trainer: Trainer) -> None:
    """Refuse strategies that replace or split parameters after the optimizer was built, or that split the optimizer."""
    strategy = trainer.strategy
    if isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)) and not isinstance(strategy, SingleDeviceXLAStrategy):
        return
    raise RecipeError(
        f"HalfstepPrecision does not serve {type(strategy).__name__}: it serves one device and DDP "
        "(strategy='ddp'). For FSDP2 call halfstep.apply(model, recipe), torch's fully_shard, build the optimizer, and "
        "call halfstep.optimize(model, optimizer) in your own loop"
    )


def _check_stages(module: LightningModule) -> None:
    """Refuse a run that starts at step 0 while the recipe's stages do not, and the other way round."""
    schedule, steps = schedule_of(module), module.trainer.global_step
    if schedule is not None and (schedule.steps == 0) != (steps == 0):
        raise RecipeError(
            f"recipe {schedule.name!r} is after step {schedule.steps} and the Trainer after step {steps}: its "
            "stages would change at the wrong steps. Resume from a checkpoint of this recipe "
            "(trainer.fit(..., ckpt_path=...)), or fit a new module; give Tuner a separate module"
        )


def _is_looked_at(model: LightningModule) -> bool:
    """Whether a user's hook may read gradients before the step."""
    hook, trainer = "on_before_optimizer_step", model.trainer
    own = any(is_overridden(name, model) for name in (hook, "configure_gradient_clipping"))
    return own or any(is_overridden(hook, callback) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
