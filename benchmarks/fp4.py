"""Does FP4 train as fp32 does, and which of its parts pay? A small Llama on real text; docs/fp4.md.

    python benchmarks/fp4.py [--cases A,B] [--seeds 0,1,2] [--out FOLDER] [--keep]
    python benchmarks/fp4.py --collect [--out FOLDER]
    python benchmarks/fp4.py --page

A run that results/fp4.json keeps is not trained again, one that has ended in --out is read, and one that was killed
goes on. --keep adds what has ended in --out to results/fp4.json, whatever was asked for now, and writes the page and
the pictures; --collect does that and trains nothing; --page writes the page and the pictures of what was kept. A kept
run counts as long as its case has the numbers that it was trained with: experiment, model and recipe.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fp4_cases import CASES, Case
from fp4_page import page, plot
from fp4_verdicts import judged
from halfstep.accounting import HEAD, cost, load_subject
from halfstep.errors import unknown
from halfstep.lab.environment import environment
from halfstep.lab.experiment import Experiment, Row, read_metrics
from halfstep.lab.models import build_model
from halfstep.lab.models.llama import Llama
from halfstep.lab.task import VOCABULARY
from halfstep.lab.tasks import experiment_for, get_task
from halfstep.lab.train import Trainer
from halfstep.lab.verdict import final
from halfstep.recipe import Recipe, to_data
from harness import RESULTS, keep


DOCS = RESULTS.parent.parent / "docs"
LAYERS, WIDTH, HEADS = 4, 192, 6
ARCHITECTURE, TOKENS = "llama2-7b", 4096
COSTED = ("fp8-current", "mxfp4", "nvfp4", "fp4-wang", "fp4-zhou-dgrad-fp8", "fp4-zhou-dgrad-bf16")
"""Recipes whose cost in theory is computed, and on what."""
WORDS = ("name", "summary", "source", "aliases", "notes", "float32_adapters")
"""Of a recipe's data, those that move no number of a model without adapters."""


class Constant(Experiment):
    """An experiment whose learning rate stays where its warm-up ends."""

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, from 1."""
        return self.lr * min(1.0, step / self.warmup)


def experiment(case: Case) -> Experiment:
    """What every case is trained on."""
    told = experiment_for(
        "lm",
        recipes=("fp32",),
        steps=1000,
        warmup=50,
        lr=1e-3 * case.rate,
        batch=16,
        context=64,
        validations=20,
        statistics=1,
        checkpoints=5,
    )
    return Constant(**vars(told)) if case.constant else told


def model() -> Llama:
    """The model of every run: 1.9 million parameters."""
    return Llama(VOCABULARY, 64, layers=LAYERS, width=WIDTH, heads=HEADS)


def identity(case: Case, recipe: Recipe) -> str:
    """A name for what fixes a run's numbers but its seed: the experiment's, the model's and the recipe's data.

    What a recipe does not have is left out, so that a field which recipes get later renames no run.
    """
    told = [experiment(case).key(LAYERS, WIDTH, HEADS), case.constant, _said(_moving(to_data(recipe)))]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]


def _moving(data: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's data without words, its stages' too."""
    stages = [stage | {"recipe": _moving(stage["recipe"])} for stage in data.get("stages", [])]
    return {key: value for key, value in data.items() if key not in WORDS} | {"stages": stages}


def _said(data: Any) -> Any:
    if isinstance(data, Mapping):
        kept = {key: _said(value) for key, value in data.items()}
        return {key: value for key, value in kept.items() if value is not False and value not in ("none", "", [], {})}
    return [_said(value) for value in data] if isinstance(data, list) else data


@dataclass(frozen=True)
class Run:
    """One run: a case and a seed, and where its numbers are."""

    case: Case
    seed: int
    folder: Path

    @classmethod
    def of(cls, case: Case, seed: int, out: Path) -> Run:
        """The run of a case as its recipe is now."""
        words = re.sub(r"[^a-z0-9]+", "-", case.name.lower()).strip("-")
        return cls(case, seed, out / f"{words}-{identity(case, case.make())}" / f"seed-{seed}")

    def train(self) -> None:
        """Go on to the end, from wherever it is."""
        told = experiment(self.case)
        task = get_task(told.task).open(told)

        def build(seed: int) -> torch.nn.Module:
            return build_model("llama", {"llama": model}, seed)

        Trainer(told, self.case.make(), self.seed, task, build, self.folder).run()

    def rows(self) -> list[Row]:
        """What it has written, if it has ended."""
        rows = read_metrics(self.folder / "metrics.jsonl")
        return rows if rows and rows[-1]["kind"] == "end" else []


def figures(rows: list[Row]) -> dict[str, Any]:
    """What is kept of a run: the loss that it ended with, or the step at which it diverged; its curve; its time."""
    curve = [(row["step"], row["loss"]) for row in rows if row["kind"] == "validation"]
    diverged = next((row["step"] for row in rows if row["kind"] == "diverged"), None)
    seconds = sum(row["seconds"] for row in rows if row["kind"] == "step")
    return {"loss": final(rows), "diverged_at": diverged, "seconds": round(seconds), "curve": curve}


def kept(case: Case) -> dict[str, Any]:
    """The runs of a case that were kept before, by seed: none, where its numbers are others now."""
    path = RESULTS / "fp4.json"
    found = json.loads(path.read_text())["cases"].get(case.name) if path.exists() else None
    return found["runs"] if found and found["identity"] == identity(case, case.make()) else {}


def collected(out: Path, seeds: int = 9) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of every case, the runs that have ended, by seed."""
    for case in CASES.values():
        runs = [Run.of(case, seed, out) for seed in range(seeds)]
        found = kept(case) | {str(run.seed): figures(rows) for run in runs if (rows := run.rows())}
        told = {"base": case.base, "baseline": case.baseline, "identity": identity(case, case.make())}
        yield case.name, told | {"runs": dict(sorted(found.items()))}


def results(out: Path) -> dict[str, Any]:
    """What is kept: every run that has ended, and what they say."""
    cases = dict(collected(out))
    parameters = sum(parameter.numel() for parameter in model().parameters())
    model_data = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "parameters": parameters}
    return {
        "machine": environment(),
        "experiment": experiment(CASES["fp32"]).to_dict() | {"model": model_data},
        "costs": {"model": ARCHITECTURE, "tokens": TOKENS, "share": costs()},
        "verdicts": judged(cases),
        "cases": cases,
    }


def costs() -> dict[str, float]:
    """By recipe: what its products would take on an architecture, as a share of 16 bits', without the output head."""
    return {name: cost(load_subject(ARCHITECTURE), name, sequence=TOKENS).without(HEAD).share for name in COSTED}


def asked_for(names: str | None) -> list[Case]:
    """Cases by name, or all."""
    if names is None:
        return list(CASES.values())
    for name in names.split(","):
        if name not in CASES:
            raise SystemExit(unknown("case", name, CASES))
    return [CASES[name] for name in names.split(",")]


def main() -> None:
    """Train what is asked for; write what is asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help="some of: " + ", ".join(CASES).replace("%", "%%"))
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/fp4"))
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--collect", action="store_true")
    parser.add_argument("--page", action="store_true")
    asked = parser.parse_args()
    if not asked.collect and not asked.page:
        for seed in asked.seeds:
            for case in asked_for(asked.cases):
                if str(seed) in kept(case):
                    continue
                run = Run.of(case, seed, asked.out)
                run.train()
                print(f"{case.name}, seed {seed}: {final(run.rows())}", flush=True)
    if asked.keep or asked.collect:
        keep("fp4", results(asked.out))
    if asked.keep or asked.collect or asked.page:
        data = json.loads((RESULTS / "fp4.json").read_text())
        (DOCS / "fp4.md").write_text(page(data))
        plot(data, DOCS / "images")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
