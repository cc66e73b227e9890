"""Whether FP4 training reaches fp32's loss, and which parts of FP4 recipes matter: a small Llama, docs/fp4.md.

    python benchmarks/fp4.py [--cases A,B] [--seeds 0,1,2] [--out FOLDER] [--keep]
    python benchmarks/fp4.py --collect [--out FOLDER]
    python benchmarks/fp4.py --page

A run whose result is in results/fp4.json is not trained again, one that has ended in --out is read, and an interrupted
one resumes. --keep adds every run that has ended in --out to results/fp4.json, and writes the page and
the plots; --collect does that without training; --page writes the page and the plots from results/fp4.json. A stored
result counts as long as its case's experiment, model and recipe are those that it was trained with.
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
"""Recipes whose theoretical cost is computed, for ARCHITECTURE and sequences of TOKENS."""
WORDS = ("name", "summary", "source", "aliases", "notes", "float32_adapters")
"""Fields of a recipe's data that change no value of a model without adapters."""


class Constant(Experiment):
    """An experiment whose learning rate is constant after the warm-up."""

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""
        return self.lr * min(1.0, step / self.warmup)


def experiment(case: Case) -> Experiment:
    """The experiment of a case."""
    settings = experiment_for(
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
    return Constant(**vars(settings)) if case.constant else settings


def model() -> Llama:
    """The Llama of every run: 1.9 million parameters."""
    return Llama(VOCABULARY, 64, layers=LAYERS, width=WIDTH, heads=HEADS)


def identity(case: Case, recipe: Recipe) -> str:
    """A hash of what determines a run's values besides its seed: the experiment's, the model's and the recipe's data.

    Empty fields of a recipe are left out, so that a new field of recipes does not change the hash.
    """
    content = [experiment(case).key(LAYERS, WIDTH, HEADS), case.constant, _nonempty(_without_words(to_data(recipe)))]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def _without_words(data: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's data, and that of its stages, without WORDS."""
    stages = [stage | {"recipe": _without_words(stage["recipe"])} for stage in data.get("stages", [])]
    return {key: value for key, value in data.items() if key not in WORDS} | {"stages": stages}


def _nonempty(data: Any) -> Any:
    if isinstance(data, Mapping):
        kept = {key: _nonempty(value) for key, value in data.items()}
        return {key: value for key, value in kept.items() if value is not False and value not in ("none", "", [], {})}
    return [_nonempty(value) for value in data] if isinstance(data, list) else data


@dataclass(frozen=True)
class Run:
    """One run: a case, a seed, and the folder of its metrics."""

    case: Case
    seed: int
    folder: Path

    @classmethod
    def of(cls, case: Case, seed: int, out: Path) -> Run:
        """The run of a case with its current recipe."""
        words = re.sub(r"[^a-z0-9]+", "-", case.name.lower()).strip("-")
        return cls(case, seed, out / f"{words}-{identity(case, case.make())}" / f"seed-{seed}")

    def train(self) -> None:
        """Train to the end, resuming where an earlier call stopped."""
        settings = experiment(self.case)
        task = get_task(settings.task).open(settings)

        def build(seed: int) -> torch.nn.Module:
            return build_model("llama", {"llama": model}, seed)

        Trainer(settings, self.case.make(), self.seed, task, build, self.folder).run()

    def rows(self) -> list[Row]:
        """The rows of its metrics if it has ended, else none."""
        rows = read_metrics(self.folder / "metrics.jsonl")
        return rows if rows and rows[-1]["kind"] == "end" else []


def figures(rows: list[Row]) -> dict[str, Any]:
    """What the results store of a run: the final loss, or the step at which it diverged; the validation curve; the
    seconds."""
    curve = [(row["step"], row["loss"]) for row in rows if row["kind"] == "validation"]
    diverged = next((row["step"] for row in rows if row["kind"] == "diverged"), None)
    seconds = sum(row["seconds"] for row in rows if row["kind"] == "step")
    return {"loss": final(rows), "diverged_at": diverged, "seconds": round(seconds), "curve": curve}


def kept(case: Case) -> dict[str, Any]:
    """The stored results of a case by seed; none if the case's identity has changed."""
    path = RESULTS / "fp4.json"
    found = json.loads(path.read_text())["cases"].get(case.name) if path.exists() else None
    return found["runs"] if found and found["identity"] == identity(case, case.make()) else {}


def collected(out: Path, seeds: int = 9) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each case's name with the results of its runs that have ended, by seed."""
    for case in CASES.values():
        runs = [Run.of(case, seed, out) for seed in range(seeds)]
        found = kept(case) | {str(run.seed): figures(rows) for run in runs if (rows := run.rows())}
        entry = {"base": case.base, "baseline": case.baseline, "identity": identity(case, case.make())}
        yield case.name, entry | {"runs": dict(sorted(found.items()))}


def results(out: Path) -> dict[str, Any]:
    """The contents of results/fp4.json: every run that has ended, with verdicts and costs."""
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
    """By recipe, the theoretical cost of its GEMMs for ARCHITECTURE as a share of 16 bits', without the output head."""
    return {name: cost(load_subject(ARCHITECTURE), name, sequence=TOKENS).without(HEAD).share for name in COSTED}


def cases_named(names: str | None) -> list[Case]:
    """The cases with these names; all for None."""
    if names is None:
        return list(CASES.values())
    for name in names.split(","):
        if name not in CASES:
            raise SystemExit(unknown("case", name, CASES))
    return [CASES[name] for name in names.split(",")]


def main() -> None:
    """Train the cases asked for, and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help="some of: " + ", ".join(CASES).replace("%", "%%"))
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/fp4"))
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--collect", action="store_true")
    parser.add_argument("--page", action="store_true")
    arguments = parser.parse_args()
    if not arguments.collect and not arguments.page:
        for seed in arguments.seeds:
            for case in cases_named(arguments.cases):
                if str(seed) in kept(case):
                    continue
                run = Run.of(case, seed, arguments.out)
                run.train()
                print(f"{case.name}, seed {seed}: {final(run.rows())}", flush=True)
    if arguments.keep or arguments.collect:
        keep("fp4", results(arguments.out))
    if arguments.keep or arguments.collect or arguments.page:
        data = json.loads((RESULTS / "fp4.json").read_text())
        (DOCS / "fp4.md").write_text(page(data))
        plot(data, DOCS / "images")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
