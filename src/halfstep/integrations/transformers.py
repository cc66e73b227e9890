"""transformers' Trainer, and TRL's trainers, under a recipe: two changed lines.

    from halfstep.integrations.transformers import HalfstepTrainer

    trainer = HalfstepTrainer(model=model, args=args, train_dataset=data, recipe="fp8-delayed")
    trainer.train()

For any other trainer, put the mixin first: `class Tuner(HalfstepMixin, trl.SFTTrainer): ...`.
"""

import json
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.auditing import Audit, Running, Watch, audit, running
from halfstep.errors import MissingLibraryError, OptimizerError, RecipeError
from halfstep.nn.following import following, root_of
from halfstep.nn.layers import ModuleFilter
from halfstep.nn.paths import adapters_of
from halfstep.nn.quantized import quantize_model
from halfstep.nn.stages import schedule_of
from halfstep.ops.part import part_of
from halfstep.optim import LossScaler, LowBit
from halfstep.preparation import prepare
from halfstep.recipe import Origin, Recipe, check_change, get_recipe
from halfstep.text import some


with MissingLibraryError.of("trainer"):
    import transformers
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments


__all__ = ["AuditCallback", "HalfstepCallback", "HalfstepMixin", "HalfstepTrainer"]

_ORIGIN, _SCALER, _TORCHS = "halfstep.json", "halfstep.pt", "scaler.pt"
_OPTIMIZER, _CODES = "optimizer.pt", "halfstep_optimizer.pt"
_LOG = logging.getLogger(__name__)
if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object  # a mixin: the trainer follows it in the bases

if not hasattr(Trainer, "_clip_grad_norm"):
    raise MissingLibraryError(
        f"transformers {transformers.__version__} clips gradients where no subclass of Trainer can divide them by the "
        "loss scale first. Install a later one: pip install -U transformers"
    )


class HalfstepMixin(_Base):
    """A mixin that makes a trainer train its model by a recipe. Put it first in the bases of a subclass of Trainer.

    The model and the optimizer are passed to `halfstep.prepare` when training begins, after TRL's own changes to the
    model and after a checkpoint's weights have been loaded. Evaluation and generation before that use the unprepared
    model. The loss scaler is the accelerator's scaler. The trainer's checkpoints have two more files: `halfstep.pt` has
    the scaler's state, with scaling states and the number of steps that a recipe's stages count, and `halfstep.json`
    the name and the digest of the recipe. If moments are codes or of a subspace, the optimizer's state is in
    `halfstep_optimizer.pt`, and the part that a stock trainer can use in `optimizer.pt`. A resumed run continues bit
    for bit, and `load_best_model_at_end` restores the scaling states of that model.

    The log also has `raw_loss` (the `loss`, including the NaN and infinite values that `logging_nan_inf_filter` hides),
    `loss_scale` and `skipped_steps` (of this process); `grad_norm` is that of the unscaled gradients.

    Args:
        recipe: a name, "A until 90%, then B", your own file, or a `Recipe`. Fractions are of the trainer's
            `max_steps`.
        module_filter, generator, process_group, amax_group, recipe_change: as in `halfstep.prepare`.
        audit: whether to print `halfstep.audit` when training ends.

    Raises:
        RecipeError: the arguments also set another precision (`bf16`, `fp16`, `bf16_full_eval`), or
            FSDP, DeepSpeed, DataParallel or a parallelism other than DDP; the recipe is unknown, or does not fit
            the model (when training begins); training starts over while a recipe's stages do not; a run is
            resumed from a checkpoint of another recipe without `recipe_change`.
        OptimizerError: an optimizer that has no counterpart in halfstep (when training begins).
    """

    optimizer: Any
    scaler: LossScaler
    """The loss scaler, set when training begins; its `overflowed` names parameters."""

    def __init__(
        self,
        *args: Any,
        recipe: str | Recipe,
        module_filter: ModuleFilter | None = None,
        generator: torch.Generator | int | None = None,
        process_group: Any = None,
        amax_group: Any = None,
        recipe_change: str = "refuse",
        audit: bool = True,
        **kwargs: Any,
    ) -> None:
        self.recipe = get_recipe(recipe)
        check_change(recipe_change)
        self._options: dict[str, Any] = {
            "module_filter": module_filter,
            "generator": generator,
            "process_group": process_group,
            "amax_group": amax_group,
            "recipe_change": recipe_change,
        }
        self._prepared: tuple[nn.Module, LowBit] | None = None
        self._raw_loss: Tensor | None = None
        super().__init__(*args, **kwargs)
        if self.args.n_gpu > 1:
            raise RecipeError(
                f"recipe {self.recipe.name!r}: one process sees {self.args.n_gpu} GPUs, for which Trainer takes "
                "DataParallel, whose copies of the model forget scaling states. Start it with torchrun "
                f"--nproc_per_node={self.args.n_gpu}, or let it see one GPU (CUDA_VISIBLE_DEVICES=0)"
            )
        self.add_callback(HalfstepCallback(audit=audit))

    def create_accelerator_and_postprocess(self) -> None:
        """Trainer's, after checking that the arguments leave precision to the recipe."""
        _check_arguments(self.args, self.recipe)
        super().create_accelerator_and_postprocess()
        _check_accelerator(self, self.recipe)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Trainer's, followed by `halfstep.prepare`, once per model."""
        trained = self.model if model is None else model
        assert trained is not None  # Trainer's annotation allows None
        if self._prepared is not None:
            prepared, low_bit = self._prepared
            if prepared is trained and getattr(self.optimizer, "optimizer", self.optimizer) is low_bit:
                return self.optimizer
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None:
            _check_optim(str(getattr(self.args.optim, "value", self.args.optim)))
        super().create_optimizer(model)
        return self._prepare(trained)

    def _wrap_model(self, model: nn.Module, training: bool = True, *args: Any, **kwargs: Any) -> nn.Module:
        """Trainer's, with the optimizer of a subclass's own `create_optimizer` prepared."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if training and optimizer is not None and (self._prepared is None or self._prepared[1] is not optimizer):
            assert self.model is not None
            self._prepare(self.model)
        return super()._wrap_model(model, training, *args, **kwargs)

    def _prepare(self, trained: nn.Module) -> LowBit:
        total_steps = self.state.max_steps if self.state.max_steps > 0 else None
        if _trains_adapters_alone(trained) and _rounds_weights_alone(self.recipe):
            quantize_model(trained, self.recipe, self._options["module_filter"], adapters=True)
        _, low_bit, self.scaler = prepare(
            trained, self.optimizer, self.recipe, total_steps=total_steps, **self._options
        )
        self.optimizer = low_bit
        self.accelerator.scaler = self.scaler
        self._prepared = trained, low_bit
        return low_bit

    def compute_loss_context_manager(self) -> ExitStack:
        """Trainer's, plus `following` if weights have 16 bits, since a loss may multiply by them itself. Not with a
        reference model, which does not follow the recipe."""
        stack: ExitStack = super().compute_loss_context_manager()
        if self._prepared is not None and self.recipe.weights != "fp32" and getattr(self, "ref_model", None) is None:
            root = root_of(self._prepared[0])
            if part_of(root).applied is not None:  # not reverted
                stack.enter_context(following(root))
        return stack

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Trainer's; also adds up the loss before `logging_nan_inf_filter` changes it."""
        loss: Tensor = super().training_step(*args, **kwargs)
        if self._raw_loss is None:
            self._raw_loss, self._logged = torch.zeros_like(loss), self.state.global_step
        self._raw_loss += loss
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Trainer's, with the raw loss, the loss scale and the number of skipped steps added to the training loss."""
        if "loss" in logs and self._raw_loss is not None:
            steps = max(self.state.global_step - self._logged, 1)
            logs = {**logs, "raw_loss": self.accelerator.gather(self._raw_loss).mean().item() / steps}
            if self.scaler.is_enabled():
                logs |= {"loss_scale": self.scaler.get_scale(), "skipped_steps": self.scaler.skipped_steps}
            self._raw_loss = None
        super().log(logs, *args, **kwargs)

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Trainer's; a checkpoint also gets the recipe's name and the scaler's state."""
        super().save_model(output_dir, _internal_call)
        if _internal_call and output_dir is not None and self.args.should_save and self._prepared is not None:
            name, _, digest = Origin(self.recipe).mark.rpartition(" @")
            Path(output_dir, _ORIGIN).write_text(json.dumps({"recipe": name, "digest": digest}) + "\n")
            torch.save(self.scaler.state_dict(), Path(output_dir, _SCALER))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if not self.args.should_save or self._prepared is None:
            return
        stock = self._prepared[1].torch_state_dict()
        if stock is None:
            Path(output_dir, _CODES).unlink(missing_ok=True)  # from an earlier run in this folder
        else:  # a stock Trainer would read codes as values
            Path(output_dir, _OPTIMIZER).rename(Path(output_dir, _CODES))
            torch.save(stock, Path(output_dir, _OPTIMIZER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and Path(checkpoint, _CODES).exists():
            self.optimizer.load_state_dict(torch.load(Path(checkpoint, _CODES), map_location="cpu", weights_only=True))

    def _save_scaler(self, output_dir: str) -> None:
        if self.scaler.is_enabled():  # a stock Trainer without a scaler fails if the file exists
            super()._save_scaler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        file = Path(resume_from_checkpoint, _ORIGIN)
        if file.exists():
            saved = json.loads(file.read_text())
            origin = Origin(self.recipe, self._options["recipe_change"])
            origin.differs(f"{saved['recipe']} @{saved['digest']}", f"the checkpoint {resume_from_checkpoint}")
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load the scaler's state. Replaces Trainer's method, which suppresses the scaler's warnings."""
        files = [] if checkpoint is None else [Path(checkpoint, name) for name in (_SCALER, _TORCHS)]
        found = next((file for file in files if file.exists()), None)
        if found is not None:
            self.scaler.load_state_dict(torch.load(found, map_location="cpu", weights_only=True))

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._load_scaler(self.state.best_model_checkpoint)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.scaler.clip_grad_norm_(self.optimizer, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return self.scaler.clip_grad_norm_(self.optimizer, float("inf")) if grad_norm is None else grad_norm


class HalfstepTrainer(HalfstepMixin, Trainer):
    """`transformers.Trainer` by a recipe: `HalfstepTrainer(model=..., args=..., recipe="fp8-delayed", ...)`."""


class HalfstepCallback(TrainerCallback):
    """Warns which parameters overflowed when a step is skipped, and prints the audit when training ends.

    `HalfstepMixin` adds it. `report` is the last audit, None before.
    """

    def __init__(self, audit: bool = True) -> None:
        self.report: Audit | None = None
        self._audits = audit
        self._skipped = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse a run whose step differs from that of the recipe's stages.

        Raises:
            RecipeError: the recipe's stages are at another step than the trainer.
        """
        self._skipped = kwargs["optimizer"].scaler.skipped_steps
        schedule = schedule_of(kwargs["model"])
        if schedule is not None and schedule.steps != state.global_step:
            raise RecipeError(
                f"recipe {schedule.name!r} is after step {schedule.steps} and the trainer after step "
                f"{state.global_step}: its stages would change at the wrong steps. Resume from a checkpoint that this "
                "trainer saved (resume_from_checkpoint), or make a new trainer with a new model"
            )

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Name the parameters that caused a step to be skipped."""
        scaler = kwargs["optimizer"].scaler
        if scaler.skipped_steps == self._skipped:
            return
        self._skipped, names = scaler.skipped_steps, scaler.overflowed
        _LOG.warning(
            "step %d was skipped: the gradients of %s are not finite; the loss scale is now %g",
            state.global_step + 1,
            some(names) or "another rank",
            scaler.get_scale(),
        )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Audit the trained model."""
        if self._audits and state.is_world_process_zero:
            optimizer = kwargs["optimizer"]
            self.report = audit(kwargs["model"], optimizer.optimizer, optimizer.scaler)
            print(self.report)


class AuditCallback(TrainerCallback):
    """For any Trainer, stock ones too: after some steps, prints which updates are lost, and a fix.

        Trainer(model=model, args=args, train_dataset=data, callbacks=[AuditCallback()])

    `reports` has the reports (`halfstep.auditing.Running`), none before.
    """

    def __init__(self, steps: int = 10) -> None:
        self.reports: tuple[Running, ...] = ()
        self._steps = steps
        self._watch: Watch | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start watching the steps."""
        self._watch = Watch().__enter__()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report after the chosen number of steps."""
        if self._watch is not None and self._watch.steps >= self._steps:
            self._report(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report at the end, if there were fewer steps."""
        if self._watch is not None:
            self._report(state)

    def _report(self, state: TrainerState) -> None:
        watch, self._watch = self._watch, None
        assert watch is not None
        watch.__exit__(None, None, None)
        if watch.steps and state.is_world_process_zero:
            self.reports = running(watch)
            print(*self.reports, sep="\n\n")


def _trains_adapters_alone(model: nn.Module) -> bool:
    """Whether only adapters are trained, on a base that follows no recipe yet."""
    is_adapter = adapters_of(model)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    return bool(trained) and all(map(is_adapter, trained)) and part_of(root_of(model)).applied is None


def _rounds_weights_alone(recipe: Recipe) -> bool:
    """Whether the recipe rounds only weights, so that untrained ones can be stored as codes."""
    specs = [rule.linear for rule in recipe.rules]
    others = [q for s in specs for q in (s.output.lhs, s.grad_input.lhs, s.grad_weight.lhs, s.grad_weight.rhs)]
    return not recipe.stages and any(s.rounds for s in specs) and not any(others)


def _check_arguments(args: TrainingArguments, recipe: Recipe) -> None:
    """Refuse arguments that set the precision too."""
    named = [name for name in ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval") if getattr(args, name, False)]
    if named:
        raise RecipeError(
            f"the arguments have {named[0]}=True with recipe {recipe.name!r}, which sets the precision of training "
            f"and evaluation: set {named[0]}=False (TRL's arguments have bf16=True by default)"
        )


def _check_accelerator(trainer: Trainer, recipe: Recipe) -> None:
    """Refuse wrappers and sharding that a recipe does not support."""
    shards = "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed" if trainer.is_deepspeed_enabled else None
    if shards is not None:
        raise RecipeError(
            f"{shards} replaces the model's parameters after Trainer has built the optimizer, which has the masters "
            f"and moments of recipe {recipe.name!r}. Use DDP (torchrun, with neither fsdp nor deepspeed in the "
            "arguments or in accelerate's configuration); for FSDP2 write the loop yourself: halfstep.apply(model, "
            "recipe), fully_shard, halfstep.optimize(model, optimizer)"
        )
    if getattr(trainer.accelerator, "parallelism_config", None) is not None or getattr(
        trainer.model, "is_distributed_loading_by_transformers", False
    ):
        raise RecipeError(
            f"the model is split over ranks (parallelism_config, or a distributed_config it was loaded with), but "
            f"Trainer under recipe {recipe.name!r} needs whole models: use DDP (torchrun) without it"
        )
    if trainer.accelerator.mixed_precision != "no":
        raise RecipeError(
            f"accelerate is set to mixed_precision={trainer.accelerator.mixed_precision!r}, with recipe "
            f"{recipe.name!r}: set it to 'no', since the recipe sets the precision"
        )


_REPLACEMENTS = {
    "galore": "the recipe 'galore', 'galore-8bit' or 'galore-bf16'",
    "8bit": "the recipe 'adamw-8bit' (fp32 weights, bf16 matmuls, moments in 8 bits)",
    "4bit": "the recipe 'adamw-8bit' (moments in 8 bits), or 'fp8lm-o2' (6 bytes a parameter in all)",
    "paged": "a recipe with smaller moments, such as 'adamw-8bit'",
}
"""The recipe to use instead of another library's optimizer, by a part of its name; the first match counts."""


def _check_optim(name: str) -> None:
    """Refuse another library's low-bit optimizer: the recipe decides how moments are stored."""
    for part, instead in _REPLACEMENTS.items():
        if part in name:
            raise OptimizerError(
                f"optim={name!r} is another library's optimizer, whose states no recipe of halfstep supports. Set "
                f"optim='adamw_torch' and take {instead}"
            )
