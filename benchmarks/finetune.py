"""COAT beyond pre-training: a GPT that is fine-tuned on other text, and a small vision-language model.

    python benchmarks/finetune.py [--keep] [--out FOLDER]

The GPT is pre-trained in bf16-mixed on Python's standard library and fine-tuned on the READMEs of the packages that are
installed beside halfstep, none of which is in the standard library; the results store the text's digest. --keep
writes results/finetune.json. An interrupted run resumes.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model
from torch import nn

from halfstep.lab.environment import environment
from halfstep.lab.experiment import Experiment, read_metrics
from halfstep.lab.models import build_model
from halfstep.lab.task import load_corpus
from halfstep.lab.tasks import experiment_for, get_task
from halfstep.lab.verdict import difference, final
from halfstep.recipe import get_recipe
from harness import keep
from losses import Losses, train


RECIPES = ("fp32", "bf16-mixed", "coat", "fp8-current", "adamw-8bit")
LEAN: dict[str, Any] = {"validations": 1, "statistics": 1, "checkpoints": 1}


def readmes(folder: Path) -> Path:
    """Write the READMEs of the installed packages to the folder, one file each; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in distributions():
        name, text = package.metadata["Name"].lower(), package.metadata["Description"]
        if name != "halfstep" and text is not None and len(text) > 1000:
            (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


def pretrained(out: Path) -> Path:
    """The path of the weights of the lab's smallest GPT, pre-trained in bf16-mixed."""
    settings = experiment_for("lm", recipes=("bf16-mixed",), steps=600, seeds=1, **LEAN)
    train(settings, {"bf16-mixed": get_recipe("bf16-mixed")}, out)
    return out / "bf16-mixed" / "seed-0" / "checkpoints" / f"step-{settings.steps:08d}" / "model.safetensors"


def loaded(experiment: Experiment, weights: Path) -> nn.Module:
    """The model of an experiment, with weights loaded from a file."""
    model = build_model(experiment.model, get_task(experiment.task).open(experiment).models(), seed=0)
    load_model(model, str(weights))
    return model


def differences_to_fp32(values: Losses, higher_is_better: bool = False) -> dict[str, dict[str, Any]]:
    """By recipe, the difference to fp32 as `halfstep compare` judges it; or `diverged`."""
    finals = {name: {n: v for n, v in enumerate(each) if v is not None} for name, each in values.items()}
    found = {}
    for name, own in finals.items():
        if name == "fp32":
            continue
        gap = difference(own, finals["fp32"], higher_is_better)
        found[name] = asdict(gap) if len(own) == len(values[name]) else {"status": "diverged"}
    return found


def fine_tuning(out: Path) -> dict[str, Any]:
    """The losses on the new text before and after fine-tuning under each recipe, and their differences to fp32's."""
    text = str(readmes(out / "readmes"))
    settings = experiment_for("lm", recipes=RECIPES, data=text, steps=150, seeds=3, lr=1e-3, warmup=10, **LEAN)
    make = partial(loaded, settings, pretrained(out / "pretrained"))
    losses = train(settings, {name: get_recipe(name) for name in RECIPES}, out / "language", make)
    first = read_metrics(out / "language" / "fp32" / "seed-0" / "metrics.jsonl")
    before = next(row["loss"] for row in first if row["kind"] == "validation" and row["step"] == 0)
    corpus = load_corpus(text, settings.context)
    experiment = settings.to_dict() | {"data": "READMEs of installed packages"}
    return {
        "experiment": experiment, "digest": corpus.digest, "bytes": len(corpus.train) + len(corpus.held_out),
        "before": before, "losses": losses, "to_fp32": differences_to_fp32(losses),
    }  # fmt: skip


def captions(out: Path) -> dict[str, Any]:
    """Losses and accuracies of a vision-language model under each recipe, and their differences to fp32's."""
    settings = experiment_for("captioning", recipes=RECIPES[:3], steps=250, seeds=3, **LEAN)
    losses = train(settings, {name: get_recipe(name) for name in settings.recipes}, out / "captions")
    accuracy = {
        name: [
            final(read_metrics(out / "captions" / name / f"seed-{seed}" / "metrics.jsonl"), "metric")
            for seed in range(settings.seeds)
        ]
        for name in settings.recipes
    }
    return {
        "experiment": settings.to_dict(), "losses": losses, "to_fp32": differences_to_fp32(losses),
        "accuracy": accuracy, "accuracy_to_fp32": differences_to_fp32(accuracy, higher_is_better=True),
    }  # fmt: skip


def main() -> None:
    """Train the runs that are missing, print, and with --keep write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"))
    arguments = parser.parse_args()
    data = {"machine": environment(), "fine-tuning": fine_tuning(arguments.out), "captions": captions(arguments.out)}
    for part in ("fine-tuning", "captions"):
        for name, row in data[part]["to_fp32"].items():
            print(part, name, row)
    if arguments.keep:
        keep("finetune", data)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
