"""model.to(bfloat16) or autocast? Both loops and every bf16 recipe with three seeds each, compared with fp32.

    python benchmarks/which_bf16.py [--keep | --pages] [--steps N] [--out FOLDER]

--keep writes results/which_bf16.json, docs/which_bf16.md and docs/zeroed.md; --pages writes the pages from the
results, without training. `ledger.py betas` measures the table of both betas, `which_bf16_finetune.py` fine-tuning. An
interrupted run resumes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from halfstep import formats, prepare
from halfstep.lab.environment import environment
from halfstep.lab.experiment import Experiment
from halfstep.lab.look import FORMATS
from halfstep.lab.models import build_model
from halfstep.lab.report.results import Results, load
from halfstep.lab.tasks import get_task
from halfstep.lab.verdict import difference
from halfstep.tracking import ExponentHistogram
from harness import RESULTS, keep, ratio, timings
from two_loops import LOOPS
from which_bf16_finetune import plot
from which_bf16_page import which_bf16, zeroed
from which_bf16_runs import SEEDS, experiments as experiments_of, one_thread, opened, pair, read_loop, set_up, train_all


DOCS = RESULTS.parent.parent / "docs"
ROUNDS = 15
Rows = list[dict[str, Any]]


def statistics_rows(results: Results, recipe: str) -> list[Rows]:
    """The statistics rows of a recipe: for each step recorded, the rows of all seeds."""
    runs = results.runs[recipe].values()
    return [list(rows) for rows in zip(*([r for r in run if r["kind"] == "statistics"] for run in runs), strict=True)]


def descent(at: list[Rows]) -> Rows:
    """Descent quality and lost share at each step recorded, means over seeds."""
    return [
        {"step": rows[0]["step"]}
        | {name: statistics.fmean(row[name] for row in rows) for name in ("quality", "lost_share")}
        for rows in at
    ]


def recipe_figures(results: Results) -> dict[str, Any]:
    """Every recipe's verdict and descent."""
    found = {}
    for v in results.verdicts:
        rows = [[{"step": r["step"], **r["descent"]} for r in step] for step in statistics_rows(results, v.recipe)]
        found[v.recipe] = v.to_dict() | {"descent": descent(rows)}
    return found


def loop_figures(out: Path, task: str, fp32: dict[int, float]) -> dict[str, Any]:
    """The plain loops' verdicts and descent."""
    found = {}
    for loop in LOOPS:
        runs = read_loop(out, task, loop)
        first = next(iter(runs.values()))
        finals = {seed: run["loss"] for seed, run in runs.items()}
        found_difference = difference(finals, fp32)
        found[loop] = {
            "seeds": len(runs),
            "finals": {str(seed): loss for seed, loss in finals.items()},
            "final_loss": statistics.fmean(finals.values()),
            "paired_gap": found_difference.gap,
            "interval": found_difference.interval and asdict(found_difference.interval),
            "status": found_difference.status,
            "bytes_per_parameter": first["bytes"],
            "descent": descent([list(rows) for rows in zip(*(run["descent"] for run in runs.values()), strict=True)]),
        }
    return found


def zeroed_figures(results: Results) -> dict[str, Any]:
    """The shares that a cast rounds to zero in fp32's runs, by tensor kind and format, one figure per step recorded."""
    at = statistics_rows(results, "fp32")

    def mean(of: Callable[[dict[str, Any]], float]) -> list[float]:
        return [statistics.fmean(map(of, rows)) for rows in at]

    def flushed(row: dict[str, Any], name: str) -> float:
        counts = {int(e): n for e, n in row["activation_gradients"]["counts"].items()}
        return ExponentHistogram(counts).share_zeroed(formats.get(name, formats.Float))

    shares = {
        "weights": {n: mean(lambda row, n=n: row["zeroed"]["weights"][n]) for n in FORMATS},
        "gradients": {n: mean(lambda row, n=n: row["zeroed"]["gradients"][n]) for n in FORMATS},
        "activation gradients": {n: mean(lambda row, n=n: flushed(row, n)) for n in FORMATS},
        "updates": {n: mean(lambda row, n=n: row["lost"][n]) for n in FORMATS},
    }  # fmt: skip
    smallest = min(int(e) for rows in at for row in rows for e in row["weights"]["counts"])
    parameters = next(row["parameters"] for row in results.runs["fp32"][0] if row["kind"] == "memory")
    return {"steps": [r[0]["step"] for r in at], "shares": shares, "smallest": smallest, "parameters": parameters}


def step_of(experiment: Experiment, recipe: str) -> Callable[[], None]:
    """A function that runs one training step under a recipe."""
    task = get_task(experiment.task).open(experiment)
    model = build_model(experiment.model, task.models(), 0)
    plain, _ = set_up(experiment, model)
    model, optimizer, scaler = prepare(model, plain, recipe)
    batch = task.batch(0, 1)

    def step() -> None:
        scaler.scale(task.loss(model, batch)).backward()  # type: ignore[no-untyped-call]
        scaler.clip_grad_norm_(optimizer, experiment.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def loop_step(experiment: Experiment, loop: str) -> Callable[[], object]:
    """A function that runs one training step of a plain loop."""
    task = get_task(experiment.task).open(experiment)
    model = build_model(experiment.model, task.models(), 0)
    losses: Iterator[Any] = LOOPS[loop](model, repeat(pair(task.batch(0, 1))), partial(set_up, experiment))
    return lambda: next(losses)


def times(experiment: Experiment) -> dict[str, float]:
    """The time of a training step relative to fp32's, interleaved on one thread: medians over rounds of the ratios."""
    runs: dict[str, Callable[[], Any]] = {recipe: step_of(experiment, recipe) for recipe in experiment.recipes}
    runs |= {loop: loop_step(experiment, loop) for loop in LOOPS}
    seconds = timings(runs, ROUNDS)
    return {name: ratio(seconds, name, "fp32") for name in runs}


def gather(steps: int, out: Path) -> dict[str, Any]:
    """All data that the pages show."""
    data: dict[str, Any] = {"machine": environment(), "steps": steps, "seeds": SEEDS, "tasks": {}}
    for task, experiment in experiments_of(steps).items():
        results = load(opened(experiment, out).folder)
        finals = {
            seed: [r["loss"] for r in rows if r["kind"] == "validation"][-1]
            for seed, rows in results.runs["fp32"].items()
        }
        data["tasks"][task] = {
            "experiment": experiment.to_dict(),
            "rule": results.summary()["rule"],
            "band": results.summary()["band"],
            "recipes": recipe_figures(results),
            "loops": loop_figures(out, task, finals),
            "zeroed": zeroed_figures(results),
        }
    return data


def main() -> None:
    """Train, time, print, and with --keep write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument("--keep", action="store_true")
    wanted.add_argument("--pages", action="store_true")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("runs/which_bf16"))
    arguments = parser.parse_args()
    if arguments.pages:
        write(pages(json.loads((RESULTS / "which_bf16.json").read_text())))
        return
    one_thread()
    train_all(arguments.steps, arguments.out)
    data = gather(arguments.steps, arguments.out)
    data["times"] = times(experiments_of(arguments.steps)["lm"])
    print("\n".join(pages(data).values()))
    if arguments.keep:
        keep("which_bf16", json.loads(json.dumps(data)))
        write(pages(data))


def pages(data: dict[str, Any]) -> dict[str, str]:
    """The pages by file name."""
    betas = json.loads((RESULTS / "ledger_betas.json").read_text())
    tuned = json.loads((RESULTS / "which_bf16_finetune.json").read_text())
    return {"which_bf16.md": which_bf16(data, betas, tuned), "zeroed.md": zeroed(data)}


def write(texts: dict[str, str]) -> None:
    """Write the pages, and draw the plot of fine-tuning."""
    plot(json.loads((RESULTS / "which_bf16_finetune.json").read_text()), DOCS / "images" / "finetune.png")
    for name, text in texts.items():
        (DOCS / name).write_text(text)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
