"""Save a run and go on from it, bit for bit: safetensors and JSON, no pickle.

A checkpoint is a folder that appears whole or not at all:

    model.safetensors       parameters and buffers
    optimizer.safetensors   NUMBER.NAME: the optimizer's states; random: torch's generator
    scaler.safetensors      the scaling states of the recipe, by layer and operand
    state.json              step, optimizer groups, scaler, and the sha256 of the other files
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model

from halfstep.errors import CheckpointError, HalfstepError
from halfstep.optim import LossScaler, LowBit
from halfstep.optim.loss_scale import EXTRA


_KEPT = 2  # the last one and the one before it


@dataclass(frozen=True)
class Training:
    """What a checkpoint holds the state of."""

    model: torch.nn.Module
    optimizer: LowBit
    scaler: LossScaler


def save(folder: Path, step: int, training: Training) -> None:
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
    """The step of the last checkpoint in `folder`; 0 where there is none."""
    return max((int(path.name.removeprefix("step-")) for path in _all(folder)), default=0)


def load(folder: Path, step: int, training: Training) -> None:
    """Put model, optimizer, scaler and torch's random generator into the state of a step's checkpoint.

    Raises:
        CheckpointError: a file is missing, truncated or edited, or belongs to another model. What was in memory
            may be partly overwritten; what is on disk is untouched.
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
