"""Mixed precision beyond language: every task of the lab under three recipes, next to the papers' figures.

    python benchmarks/domains.py [--keep] [--tasks vision,gan] [--steps N] [--out FOLDER]

--keep writes results/domains.json and docs/domains.md. An interrupted run resumes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from halfstep import formats
from halfstep.lab.compare import open_experiment
from halfstep.lab.environment import environment
from halfstep.lab.experiment import Metric, list_tasks
from halfstep.lab.report import write_report
from halfstep.lab.report.results import Results, load
from halfstep.lab.tasks import experiment_for, get_task
from halfstep.lab.verdict import UNDECIDED, enough
from halfstep.tracking import ExponentHistogram
from harness import RESULTS


RECIPES = ("fp32", "bf16-mixed", "fp16-mixed")
SCALES = ("fp32", "fp16-mixed-unscaled", "fp16-static", "fp16-mixed")
PAGE = RESULTS.parent.parent / "docs" / "domains.md"
PAPERS = {
    "vision": "ImageNet top-1, ResNet-50: 75.92% fp32, 76.04% mixed",
    "detection": "mAP, Faster R-CNN: 69.1% fp32, 69.7% mixed; Multibox SSD: 76.9% fp32, 77.1% mixed",
    "speech": "CER, DeepSpeech 2: English 2.20% fp32, 1.99% mixed; Mandarin 15.82%, 15.01%",
    "lm": "bigLSTM: mixed precision with a loss scale of 128 matches fp32",
}
"""What Micikevicius et al. 2018 (arXiv 1710.03740) report, where they report figures."""

SEEDS: dict[str, dict[str, Any]] = {
    "vision": {"steps": 100, "seeds": 8},
    "recommender": {"seeds": 16},
    "speech": {"seeds": 12},
    "gan": {"seeds": 8},
    "pronunciation": {"steps": 250},
    "lm": {"steps": 200},
    "mlm": {"steps": 200},
}
"""Overrides of the tasks' settings: more seeds where runs are cheap and their results vary, and only as many steps as
needed. Three seeds elsewhere."""

INTRODUCTION = """# Beyond language

Do 16 bits also match fp32 beyond language models? The second table has a verdict for each task. To run one:

```
halfstep compare --task vision --recipes fp32,bf16-mixed,fp16-mixed
```

Each task is trained with the same hyper-parameters, initial weights and batches in every precision. A verdict compares
the final losses (gan: its metric) with fp32's with the same seed: the 95% interval of the difference is in brackets,
and the margin is 1% ([demo.md](demo.md) has the rule). If a task was run with one seed in 16 bits, the width of the
interval is that of fp32's three seeds, which is an upper bound. `make bench-domains` writes this page.

The models have ten to four hundred thousand parameters and train for seconds. vision, detection and gan use real
digits of 8 by 8 pixels; pronunciation reads the words of a dictionary, lm and mlm the Python standard library;
translation, speech and the recommender use generated data. The papers' models are thousands of times larger, so the
figures cannot be compared with the papers', only whether 16 bits lose something.

| task | seeds | metric | fp32 | bf16-mixed | fp16-mixed | the paper's |
| --- | --- | --- | --- | --- | --- | --- |"""
DIFFERENCES = """
| task | recipe | to fp32, same seed | verdict |
| --- | --- | --- | --- |"""
SCALING = """## A task that needs its loss scale

Micikevicius et al. trained Multibox SSD: 76.9% mAP in fp32, *diverges* in fp16 without a loss scale, 77.1% with one.
`{command}` is our small version of it, with 1701 anchors an image, no batch norm (as in SSD), and a loss that is the
mean over all outputs, `reduction="mean"`. Nothing is contrived: that mean makes the gradients small.

| recipe | verdict | final loss | to fp32, same seed | mAP@0.5 |
| --- | --- | --- | --- | --- |"""


def run(task: str, recipes: tuple[str, ...], folder: Path, **given: Any) -> tuple[Results, float]:
    """Train the runs that are missing; the results, and the seconds that this call took."""
    experiment = experiment_for(task, recipes=recipes, **given)
    started = time.perf_counter()
    comparison = open_experiment(experiment, folder, resume=(folder / "experiment.json").is_file())
    print(f"{task}: {', '.join(recipes)}", flush=True)
    comparison.run()
    write_report(comparison.folder)
    return load(comparison.folder), time.perf_counter() - started


def figures(results: Results, seconds: float) -> dict[str, Any]:
    """The figures of a task's runs that the results file stores."""
    return {
        "summary": get_task(results.experiment.task).summary,
        "experiment": results.experiment.to_dict(),
        "metric": results.summary()["metric"],
        "band": results.summary()["band"],
        "seconds": seconds,
        "verdicts": {v.recipe: v.to_dict() for v in results.verdicts},
    }


def flushed(results: Results, scale: float) -> list[float]:
    """The share of fp32's nonzero activation gradients that become zero when multiplied by a loss scale and cast to
    fp16, one per statistics row."""
    first = results.first_seed("fp32")
    rows = [row["activation_gradients"] for row in (first[1] if first else []) if row["kind"] == "statistics"]
    histograms = [ExponentHistogram({int(e): n for e, n in row["counts"].items()}) for row in rows]
    return [h.share_zeroed(formats.get("fp16", formats.Float), scale) for h in histograms]


def page(data: dict[str, Any]) -> str:
    """docs/domains.md."""
    machine = data["machine"]
    lines = [INTRODUCTION]
    for task, found in data["tasks"].items():
        metric, verdicts = Metric(**found["metric"]), found["verdicts"]
        arrow = "higher" if metric.higher_is_better else "lower"
        values = " | ".join(metric.show(verdicts[recipe]["final_metric"]) for recipe in RECIPES)
        counts = sorted({verdicts[recipe]["seeds"] for recipe in RECIPES}, reverse=True)
        seeds = " and ".join(map(str, counts))
        paper = PAPERS.get(task, "no figures")
        lines.append(f"| `{task}` | {seeds} | {metric.name}, {arrow} is better | {values} | {paper} |")
    lines.append(DIFFERENCES)
    for task, found in data["tasks"].items():
        for recipe in RECIPES[1:]:
            v = found["verdicts"][recipe]
            lines.append(f"| `{task}` | `{recipe}` | {_difference(v)} | {_status(v)} |")
    lines += [
        "",
        "The papers' figures are from Micikevicius et al. 2018, arXiv 1710.03740. The study of bfloat16 (Kalamkar",
        "et al. 2019, arXiv 1905.12322) has the same kinds of tasks and finds that bf16 needs no change of a",
        "hyper-parameter.",
        "",
    ]
    lines += _scaling(data["loss scaling"])
    lines += [f"Measured with torch {machine['torch']} on {machine['cpu']}, {machine['threads']} thread(s)."]
    older = [task for task, found in data["tasks"].items() if not found["verdicts"]["fp32"]["finals"]]
    if older:
        lines += [f"{', '.join(older)}: from earlier runs, on an Intel Xeon at 2.5 GHz with two threads."]
    lines += [""]
    return "\n".join(lines)


def _difference(verdict: dict[str, Any]) -> str:
    """The mean difference to fp32 and its interval, as text."""
    interval = verdict["interval"]
    ends = f" ({interval['low']:+.2%} to {interval['high']:+.2%})" if interval else ""
    return f"{round(verdict['paired_gap'], 4) + 0.0:+.2%}{ends}" if verdict["paired_gap"] is not None else ""


def _status(verdict: dict[str, Any]) -> str:
    status: str = verdict["status"]
    return f"{status}: {enough(verdict['interval'], verdict['seeds_to_decide'])}" if status == UNDECIDED else status


def _scaling(found: dict[str, Any]) -> list[str]:
    metric, experiment = Metric(**found["metric"]), found["experiment"]
    command = f"halfstep compare --task detection --recipes {','.join(SCALES)} --seeds {experiment['seeds']}"
    lines = [SCALING.format(command=command)]
    for recipe in SCALES:
        v = found["verdicts"][recipe]
        loss = "" if v["final_loss"] is None else f"{v['final_loss']:.3g}"
        other = ("the baseline", "") if recipe == "fp32" else (_status(v), _difference(v))
        lines.append(f"| `{recipe}` | {other[0]} | {loss} | {other[1]} | {metric.show(v['final_metric'])} |")
    lines += [f"\n`{v['recipe']}`: {v['explanation']}." for v in found["verdicts"].values() if v.get("explanation")]
    shares = {scale: max(values) for scale, values in found["flushed"].items()}
    lines += [
        "",
        "The largest share, over the run, of fp32's non-zero activation gradients that a cast to fp16 makes zero:",
        ", ".join(f"{share:.1%} times {scale}" for scale, share in shares.items()) + ".",
        "",
    ]
    return lines


def main() -> None:
    """Run, print, and with --keep write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--tasks", default=",".join(list_tasks()))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, default=3, help="of the recipes of the second table")
    parser.add_argument("--out", type=Path, default=Path("runs/domains"))
    arguments = parser.parse_args()
    given = {} if arguments.steps is None else {"steps": arguments.steps}
    plan = {task: {**SEEDS.get(task, {}), **given} for task in arguments.tasks.split(",")}
    data: dict[str, Any] = {"machine": environment(), "tasks": {}}
    for task, fields in plan.items():
        data["tasks"][task] = figures(*run(task, RECIPES, arguments.out / task, **fields))
    results, seconds = run("detection", SCALES, arguments.out / "loss-scaling", seeds=arguments.seeds, **given)
    shares = {str(scale): flushed(results, float(scale)) for scale in (1, 8, 1024, 65536)}
    data["loss scaling"] = {**figures(results, seconds), "flushed": shares}
    print(page(data))
    if arguments.keep:
        (RESULTS / "domains.json").write_text(json.dumps(data, indent=2) + "\n")
        PAGE.write_text(page(data))


if __name__ == "__main__":
    main()
