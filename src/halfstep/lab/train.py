"""Train one model under one recipe with one seed: the loop, its records, its end, and its checkpoints.

A run is saved, and resumes bit for bit, in safetensors and JSON, without pickle. A checkpoint is a folder that is
written atomically:

    model.safetensors       parameters and buffers
    optimizer.safetensors   NUMBER.NAME: the optimizer's states; random: torch's generator
    scaler.safetensors      the scaling states of the recipe, by layer and operand
    state.json              step, optimizer groups, scaler, and the sha256 of the other files
"""

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
from torch.utils.tensorboard.writer import SummaryWriter

from halfstep import prepare
from halfstep.errors import CheckpointError, HalfstepError, LossScaleError
from halfstep.lab.experiment import Experiment, MetricsFile, Row, read_metrics
from halfstep.lab.look import Look, counted
from halfstep.lab.optimizer import build_optimizer, unit_scale_on
from halfstep.lab.task import Batch, Task, check_finite
from halfstep.memory import measure
from halfstep.nn.adopt import applied_to
from halfstep.optim import LossScaler, LowBit
from halfstep.optim.loss_scale import EXTRA
from halfstep.recipe import Recipe
from halfstep.tracking import activation_gradients_by_module, amaxes, first_nonfinite, logit_sharpness, magnitude
from halfstep.unit import multipliers_of


_KEPT = 2  # the last two checkpoints


@dataclass(frozen=True)
class Training:
    """The objects whose state a checkpoint saves."""

    model: nn.Module
    optimizer: LowBit
    scaler: LossScaler


def save_checkpoint(folder: Path, step: int, training: Training) -> None:
    """Write the checkpoint of `step` into `folder`, then remove all but the last two."""
    folder.mkdir(parents=True, exist_ok=True)
    target, partial = folder / f"step-{step:08d}", folder / f".partial-{step:08d}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    save_model(training.model, str(partial / "model.safetensors"))
    state = training.optimizer.state_dict()
    tensors = {f"{n}.{name}": t.contiguous() for n, entry in state["state"].items() for name, t in entry.items()}
    save_file({**tensors, "random": torch.get_rng_state()}, str(partial / "optimizer.safetensors"))
    scaler = training.scaler.state_dict()
    extra = scaler.pop(EXTRA, {})
    save_file(extra.pop("scaling", {}), str(partial / "scaler.safetensors"))
    content = {
        "step": step,
        "groups": state["param_groups"],
        "scaler": scaler | ({EXTRA: extra} if extra else {}),
        "skipped_steps": training.scaler.skipped_steps,
        "sha256": {name: _sha((partial / name).read_bytes()) for name in _FILES},
    }
    (partial / "state.json").write_text(json.dumps({"content": content, "sha256": _sha(json.dumps(content).encode())}))
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)
    for old in _all(folder)[:-_KEPT]:
        shutil.rmtree(old)


def last_step(folder: Path) -> int:
    """The step of the last checkpoint in `folder`; 0 if there is none."""
    return max((int(path.name.removeprefix("step-")) for path in _all(folder)), default=0)


def load_checkpoint(folder: Path, step: int, training: Training) -> None:
    """Restore model, optimizer, scaler and torch's random generator from a step's checkpoint.

    Raises:
        CheckpointError: a file is missing, truncated or edited, or belongs to another model. Objects
            may be partly overwritten; files are untouched.
    """
    path = folder / f"step-{step:08d}"
    advice = "remove that folder to go on from the checkpoint before it, or the run's folder to start over"
    try:
        sealed = json.loads((path / "state.json").read_text())
        content: dict[str, Any] = sealed["content"]
        if sealed["sha256"] != _sha(json.dumps(content).encode()):
            raise CheckpointError(f"{path / 'state.json'} was edited: its sha256 has changed; {advice}")
        for name in _FILES:
            if content["sha256"][name] != _sha((path / name).read_bytes()):
                raise CheckpointError(f"{path / name} is truncated or was edited: its sha256 has changed; {advice}")
        load_model(training.model, str(path / "model.safetensors"))
        tensors = load_file(str(path / "optimizer.safetensors"))
        torch.set_rng_state(tensors.pop("random"))
        state: dict[int, dict[str, Any]] = {}
        for key, tensor in tensors.items():
            number, _, name = key.partition(".")
            state.setdefault(int(number), {})[name] = tensor
        training.optimizer.load_state_dict({"state": state, "param_groups": content["groups"]})
        scaling, scaler = load_file(str(path / "scaler.safetensors")), content["scaler"]
        extra = scaler.get(EXTRA, {}) | ({"scaling": scaling} if scaling else {})
        training.scaler.load_state_dict(scaler | ({EXTRA: extra} if extra else {}))
        training.scaler.skipped_steps = content["skipped_steps"]
    except HalfstepError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be loaded ({type(error).__name__}: {error}); {advice}") from error


_FILES = ("model.safetensors", "optimizer.safetensors", "scaler.safetensors")


def _all(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class Progress:
    """The data that a display may need after each step."""

    recipe: str
    seed: int
    step: int
    row: Row
    validation: float | None
    metric: float | None = None


Watcher = Callable[[Progress], None]


@dataclass(eq=False)
class Trainer:
    """One run. Every value it records depends only on (experiment, recipe, seed), so a resumed run repeats them.

    The learning rate is the experiment's: for a recipe with its own, pass `experiment.alone(recipe)`.
    """

    experiment: Experiment
    recipe: Recipe
    seed: int
    task: Task
    build: Callable[[int], nn.Module]
    folder: Path
    watch: Watcher = lambda progress: None
    validation: float | None = field(default=None, init=False)
    metric: float | None = field(default=None, init=False)
    measured: bool = field(default=False, init=False)

    def run(self) -> None:
        """Train from the last checkpoint, or from the start, to the end. A finished run is left unchanged.

        A diverging run ends there: that is a result. An interrupted or killed run resumes from its last checkpoint when
        it is run again.

        Raises:
            CheckpointError, ModelError, OptimizerError, DataError: see their docstrings.
        """
        rows = read_metrics(self.folder / "metrics.jsonl")
        if rows and rows[-1]["kind"] == "end":
            return
        self.training = self._prepare()
        checkpoints = self.folder / "checkpoints"
        start = last_step(checkpoints)
        if start:
            load_checkpoint(checkpoints, start, self.training)
        self.metrics = MetricsFile(self.folder / "metrics.jsonl", keep_to=start if start else -1)
        self.measured = any(row["kind"] == "memory" and row["step"] <= start for row in rows)
        self.board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=start + 1)
        step = start
        try:
            if start == 0:
                self._validate(0)
            for step in range(start + 1, self.experiment.steps + 1):
                if not self._step(step):
                    self._write({"kind": "end", "step": step, "status": "diverged"})
                    return
                if self.experiment.due(step, self.experiment.checkpoints):
                    save_checkpoint(checkpoints, step, self.training)
            self._write({"kind": "end", "step": step, "status": "finished"})
        finally:
            self.metrics.close()
            self.board.close()

    def trained(self) -> nn.Module:
        """The model of the run's last checkpoint, in float32 and without the recipe.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        self.training = self._prepare()
        checkpoints = self.folder / "checkpoints"
        load_checkpoint(checkpoints, last_step(checkpoints), self.training)
        return self._plain()

    def _prepare(self) -> Training:
        model = self._model()
        optimizer = build_optimizer(self.experiment, model)
        torch.manual_seed(self.seed)
        return Training(*prepare(model, optimizer, self.recipe, generator=self.seed, total_steps=self.experiment.steps))

    def _model(self) -> nn.Module:
        """The initial model, unit-scaled if the recipe asks for it."""
        model = self.build(self.seed).train()
        scaled = any(stage.unit_scaled for stage in self.recipe.by_stage)
        if scaled and not any(multipliers_of(module).multiplies for module in model.modules()):
            unit_scale_on(model, self.task, self.task.batch(self.seed, 1))
        return model

    def _step(self, step: int) -> bool:
        """Do one update and record it; False if the run diverged in it."""
        model, optimizer, scaler = self.training.model, self.training.optimizer, self.training.scaler
        for group in optimizer.param_groups:
            group["lr"] = self.experiment.learning_rate(step) * group.get("factor", 1.0)
        batch = self.task.batch(self.seed, step)
        check_finite(batch, step)
        looking = self.experiment.due(step, self.experiment.statistics)
        glancing = step & (step - 1) == 0  # at powers of two: tensors that leave their range do so early
        watching = self.experiment.due(step, self.experiment.tensors)
        scale, skips = scaler.get_scale(), scaler.skipped_steps
        random = torch.get_rng_state()
        started = time.perf_counter()
        with (
            activation_gradients_by_module(model, enabled=looking or glancing) as activations,
            amaxes(model, watching) as tensors,
        ):
            loss, sharpness = self._loss(batch)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        seconds = time.perf_counter() - started
        # Recorded before the clip, which converts 16-bit gradients to float32 and removes the loss scale.
        seen = looking or glancing or watching
        look = (
            Look(model, optimizer, step, scale, activations, looking, tensors if watching else None) if seen else None
        )
        if look is not None and glancing:
            look.beside(self._zeros_in_float32(batch, random))
        stepped = not self.measured and any("step" in state for state in optimizer.state.values())
        memory = self._memory(step) if stepped else None
        started = time.perf_counter()
        norm_value = float(scaler.clip_grad_norm_(optimizer, self.experiment.clip))
        value = float(loss.detach())
        seconds += time.perf_counter() - started
        adapts = self.recipe.loss_scale is not None and self.recipe.loss_scale.dynamic  # it falls if a step overflows
        if not math.isfinite(value) and not adapts:
            return self._diverge(step, batch, random, "the loss is infinite or NaN")
        if not math.isfinite(norm_value) and not scaler.is_enabled():
            return self._diverge(step, batch, random, "a gradient is infinite or NaN")
        if memory is not None:
            self._write(memory)
        started = time.perf_counter()
        try:
            with nullcontext() if look is None else look:
                scaler.step(optimizer)
            scaler.update()
        except LossScaleError as error:
            return self._diverge(step, batch, random, str(error))
        optimizer.zero_grad()
        seconds += time.perf_counter() - started
        row = {
            "kind": "step",
            "step": step,
            "loss": value,
            "lr": self.experiment.learning_rate(step),
            "loss_scale": scale,
            "skipped": scaler.skipped_steps > skips,
            "grad_norm": norm_value,
            "tokens": self.task.count(batch),
            "seconds": seconds,
            **({} if sharpness is None else {"sharpness": sharpness}),
        }
        self._write(row)
        for shown in () if look is None else look.rows:
            self._write(shown)
        if self.experiment.due(step, self.experiment.validations):
            self._validate(step)
        self.watch(Progress(self.recipe.name, self.seed, step, row, self.validation, self.metric))
        return True

    def _loss(self, batch: Batch) -> tuple[torch.Tensor, float | None]:
        """The loss of a training batch; and its sharpness, averaged over positions, if the experiment records it."""
        model, outputs = self.training.model, list[Any]()
        if not self.experiment.sharpness:
            return self.task.loss(model, batch), None
        with model.register_forward_hook(lambda module, inputs, output: outputs.append(output)):
            loss = self.task.loss(model, batch)
        found = self.task.logits(outputs[-1], batch)
        assert found is not None
        return loss, float(logit_sharpness(*found, self.experiment.sharpness).mean())

    def _diverge(self, step: int, batch: Batch, random: torch.Tensor, reason: str) -> bool:
        """Record that the run diverged, and the first non-finite tensor, found by running the passes again."""
        model, scaler = self.training.model, self.training.scaler
        torch.set_rng_state(random)
        tensor = first_nonfinite(model, lambda: scaler.scale(self.task.loss(model, batch)))
        largest = None if tensor is None or tensor.startswith("weight") else self._in_float32(tensor, batch, random)
        row = {"kind": "diverged", "step": step, "reason": reason, "tensor": tensor}
        self._write(
            row if largest is None else {**row, "in_float32": largest, "compute": applied_to(model).stage.compute}
        )
        return False

    def _in_float32(self, tensor: str, batch: Batch, random: torch.Tensor) -> float | None:
        """The largest magnitude of a tensor of the step, recomputed in float32 from the present weights."""
        plain, scaler = self._plain(), self.training.scaler
        torch.set_rng_state(random)
        return magnitude(plain, lambda: scaler.scale(self.task.loss(plain, batch)), tensor)

    def _zeros_in_float32(self, batch: Batch, random: torch.Tensor) -> Row:
        """The zeros among a step's gradients, recomputed in float32 from the present weights."""
        plain, after = self._plain(), torch.get_rng_state()
        torch.set_rng_state(random)
        with activation_gradients_by_module(plain) as activations:
            self.task.loss(plain, batch).backward()  # type: ignore[no-untyped-call]
        torch.set_rng_state(after)
        return counted(activations, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})

    def _plain(self) -> nn.Module:
        """A float32 copy of the model without the recipe, with the present weights and buffers."""
        model, optimizer, after = self.training.model, self.training.optimizer, torch.get_rng_state()
        plain = self._model()
        torch.set_rng_state(after)
        values = {name: optimizer.full(p) for name, p in model.named_parameters() if p.requires_grad}
        own = dict(plain.named_parameters()) | dict(plain.named_buffers())
        with torch.no_grad():
            for name, value in {**dict(model.named_buffers()), **values}.items():
                if name in own:
                    own[name].copy_(value)
        return plain

    @torch.no_grad()
    def _validate(self, step: int) -> None:
        model = self.training.model
        model.eval()
        losses = [float(self.task.loss(model, batch)) for batch in self.task.held_out()]
        self.validation = sum(losses) / len(losses)
        self.metric = self.task.metric(model, losses)
        model.train()
        row = {"kind": "validation", "step": step, "loss": self.validation}
        self._write(row if self.metric is None else {**row, "metric": self.metric})

    def _memory(self, step: int) -> Row:
        """The measured bytes per parameter, recorded once: between a backward and a clip, when the moments exist."""
        self.measured, model, optimizer = True, self.training.model, self.training.optimizer
        size = asdict(measure(model, optimizer)) | {"transient": self.recipe.bytes_per_parameter().transient}
        return {
            "kind": "memory",
            "step": step,
            "parameters": sum(p.numel() for p in model.parameters()),
            "bytes": size,
        }

    def _write(self, row: Row) -> None:
        self.metrics.write(row)
        for name, value in _scalars(row):
            self.board.add_scalar(name, value, row["step"])


def _scalars(row: dict[str, Any]) -> list[tuple[str, float]]:
    """The values of a row that TensorBoard shows."""
    kind = row["kind"]
    if kind == "step":
        shown = ("loss", "lr", "loss_scale", "grad_norm", "skipped", "seconds")
        return [(f"train/{name}", float(row[name])) for name in shown]
    if kind == "validation":
        return [(f"validation/{name}", row[name]) for name in ("loss", "metric") if name in row]
    if kind == "statistics":
        shares = {**row["zeroed"], "lost_updates": row["lost"], "descent": {"model": row["descent"]["quality"]}}
        shares["descent"] |= {name: layer["quality"] for name, layer in row["descent"]["layers"].items()}
        named = [(f"{what}/{name}", share) for what, table in shares.items() for name, share in table.items()]
        return [(name, share) for name, share in named if share is not None]
    return []
