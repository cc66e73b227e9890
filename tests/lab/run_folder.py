"""Write run folders as `halfstep compare` would, without training: realistic rows in the schema of lab.folder."""

import json
import math
import random
from dataclasses import dataclass, replace
from pathlib import Path

from halfstep.lab.experiment import Experiment, Facts, Metric, MetricsFile, RunFolder


FORMATS = ("fp16", "bf16", "float8_e4m3fn", "float8_e5m2")
BYTES = {
    "fp32": (4, 4, 0, 8, 0),
    "bf16-mixed": (4, 4, 0, 8, 2),
    "fp16-mixed": (4, 4, 0, 8, 2),
    "fp16-mixed-unscaled": (4, 4, 0, 8, 2),
    "bf16-master": (2, 2, 4, 8, 0),
    "fp16-master": (2, 2, 4, 8, 0),
    "bf16-stochastic": (2, 2, 0, 8, 0),
    "bf16-nomaster": (2, 2, 0, 8, 0),
    "bf16-pure": (2, 2, 0, 4, 0),
    "fp16-pure": (2, 2, 0, 4, 0),
}
FACTS = Facts(metric=Metric("bits/byte", False, 0.0))
ENVIRONMENT = {"halfstep": "0.1.0", "torch": "2.13.0+cpu", "cpu": "Some Processor", "threads": 2, "gpu": None}


@dataclass(frozen=True)
class Run:
    """One recipe's run: its final loss relative to fp32's, step time, loss scale, overflows and how it ends."""

    excess: float = 0.0
    milliseconds: float = 100.0
    scale: float = 1.0
    overflows: tuple[int, ...] = ()
    diverges: int | None = None
    killed: int | None = None
    statistics: bool = True
    sees_updates: bool = True
    first_bad: str | None = "transformer.blocks.3.mlp.up (gradient)"


USUAL = {
    "fp32": Run(),
    "bf16-mixed": Run(0.0005, 61),
    "fp16-mixed": Run(-0.0008, 64, 2.0**20, overflows=(1, 2, 3, 260, 430)),
    "bf16-master": Run(0.0011, 55),
    "bf16-stochastic": Run(0.004, 58),
    "bf16-nomaster": Run(0.031, 48),
    "fp16-pure": Run(milliseconds=47, diverges=2),
}


def usual_experiment(recipes=tuple(USUAL), steps=500, **fields):
    return Experiment(recipes=tuple(recipes), steps=steps, **fields)


def write(path: Path, runs=USUAL, experiment=None, environment=ENVIRONMENT, facts=FACTS) -> RunFolder:
    """A run folder; `runs` gives the Run of each recipe, or of each (recipe, seed)."""
    experiment = experiment or usual_experiment(dict.fromkeys(k if isinstance(k, str) else k[0] for k in runs))
    folder = RunFolder.create(path, experiment, "0" * 64, environment, facts)
    for recipe, seed in experiment.runs():
        run = runs.get((recipe, seed), runs.get(recipe))
        if run is not None:
            write_run(folder, recipe, seed, rows(experiment, recipe, seed, run))
    return folder


def write_run(folder: RunFolder, recipe: str, seed: int, content) -> None:
    metrics = MetricsFile(folder.run(recipe, seed) / "metrics.jsonl", keep_to=-1)
    for row in content:
        metrics.write(row)
    metrics.close()


def rows(experiment: Experiment, recipe: str, seed: int, run: Run) -> list[dict]:
    """The rows of one run. The seed's part of the noise is common to all recipes, as the batches are."""
    noise = random.Random(seed)
    own = random.Random(f"{recipe}-{seed}")
    offset = 1 + 0.004 * (noise.random() - 0.5)
    scale = run.scale

    def loss(step):
        progress = step / experiment.steps
        base = 1.62 + 3.93 * (0.25 * math.exp(-5 * progress) + 0.75 * math.exp(-60 * progress))
        return base * (1 + run.excess * min(1, 1.6 * progress)) * (1 + (offset - 1) * min(1, 8 * progress))

    names = ("weights", "grads", "master", "states", "transient")
    table = [validation(0, loss(0))]
    for step in range(1, experiment.steps + 1):
        if step == run.diverges:
            reason = "the loss or its gradient is infinite or NaN"
            table.append({"kind": "diverged", "step": step, "reason": reason, "tensor": run.first_bad})
            table.append({"kind": "end", "step": step, "status": "diverged"})
            return table
        if step == run.killed:
            return table
        if step == 1:
            sizes = dict(zip(names, map(float, BYTES.get(recipe, BYTES["fp32"])), strict=True))
            table.append({"kind": "memory", "step": 1, "parameters": 800_000, "bytes": sizes})
        skipped = step in run.overflows
        table.append(
            {
                "kind": "step",
                "step": step,
                "loss": loss(step) * (1 + 0.02 * noise.gauss(0, 1)),
                "lr": experiment.learning_rate(step),
                "loss_scale": scale,
                "skipped": skipped,
                "grad_norm": math.inf if skipped else 0.6 + 0.1 * noise.random(),
                "tokens": experiment.batch * experiment.context,
                "seconds": run.milliseconds / 1000 * (1 + 0.06 * own.random() + (0.5 if step == 1 else 0)),
            }
        )
        if run.statistics and experiment.due(step, experiment.statistics):
            look = statistics_row(step, scale, step / experiment.steps)
            table.append(look if run.sees_updates else {**look, "lost": {}})
        if experiment.due(step, experiment.validations):
            table.append(validation(step, loss(step)))
        if skipped:
            scale /= 2
        elif run.overflows and step % 200 == 0:
            scale *= 2
    table.append({"kind": "end", "step": experiment.steps, "status": "finished"})
    return table


def validation(step: int, loss: float) -> dict:
    return {"kind": "validation", "step": step, "loss": loss, "metric": loss / math.log(2)}


def statistics_row(step: int, scale: float, progress: float, activations=None) -> dict:
    """Plausible exponents: activation gradients far smaller than weight gradients, both shrinking over training."""
    shift = round(math.log2(scale))
    return {
        "kind": "statistics",
        "step": step,
        "loss_scale": scale,
        "weights": bell(-5.5, 1.6, 800_000, zeros=512),
        "gradients": bell(-17 - 2 * progress + shift, 2.6, 700_000, zeros=94_000),
        "activation_gradients": activations or bell(-23 - 3 * progress + shift, 3.1, 9_000_000, zeros=1_200_000),
        "zeroed": {
            "weights": dict(zip(FORMATS, (0.0, 0.0, 0.018, 1e-5), strict=True)),
            "gradients": dict(zip(FORMATS, (0.01 + 0.06 * progress, 0.0, 0.9 + 0.08 * progress, 0.6), strict=True)),
        },
        "lost": dict(zip(FORMATS, (0.11 + 0.3 * progress, 0.52 + 0.35 * progress, 0.97, 0.99), strict=True)),
        "descent": {
            "quality": 1 - 0.6 * progress,
            "lost_share": 0.4 * progress,
            "layers": {
                "head.weight": {"quality": 0.9, "lost_share": 0.1},
                "token.weight": {"quality": 0.2, "lost_share": 0.7},
                "norm.bias": {"quality": None, "lost_share": None},
            },
        },
    }


def bell(centre: float, width: float, total: int, zeros: int = 0, nonfinite: int = 0) -> dict:
    """A bell-shaped histogram of exponents with a long left tail, as gradients have."""
    weights = {}
    for e in range(math.floor(centre - 9 * width), math.ceil(centre + 4 * width)):
        side = width * (1.7 if e < centre else 1.0)
        weights[e] = math.exp(-0.5 * ((e + 0.5 - centre) / side) ** 2)
    whole = sum(weights.values())
    counts = {str(e): round(total * w / whole) for e, w in sorted(weights.items())}
    return {"counts": {e: n for e, n in counts.items() if n}, "zeros": zeros, "nonfinite": nonfinite}


def uniform(low: int, high: int, each: int = 1000) -> dict:
    """The histogram of 2^U(low, high)."""
    return {"counts": {str(e): each for e in range(low, high)}, "zeros": 7, "nonfinite": 0}


def edited(path: Path, **fields) -> None:
    """Change fields of a JSON file's `experiment`, as tampering would."""
    data = json.loads(path.read_text())
    data["experiment"].update(fields)
    path.write_text(json.dumps(data))


def changed(recipe: str, **fields) -> dict:
    """The usual runs with one of them changed."""
    return {**USUAL, recipe: replace(USUAL[recipe], **fields)}
