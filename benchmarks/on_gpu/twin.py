"""A Llama of 10.8M parameters, trained for the same 50 steps on a CPU and on a GPU, to compare its losses.

The text is the repository's LICENSE, which is the same everywhere, unlike the sources of a Python version.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from halfstep.lab.environment import environment
from halfstep.lab.task import Corpus, load_corpus
from on_gpu.bench import Bench
from on_gpu.llamas import RATE, RECIPES, Model, stepping


ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "benchmarks" / "results" / "gpu_twin_cpu.json"
TWIN, STEPS = Model("10.8M", 6, 384, 6, 2, 64), 50


def text() -> Corpus:
    """The twin's training text."""
    return load_corpus(str(ROOT / "LICENSE"), TWIN.context)


def losses(recipe: str, device: torch.device, steps: int = STEPS) -> list[float]:
    """The losses of all steps."""
    step = stepping(device, TWIN, recipe, text(), torch.device("cpu"))
    return torch.stack([step() for _ in range(steps)]).tolist()  # type: ignore[no-any-return]


def settings() -> dict[str, Any]:
    """What both runs must have in common: the model, the learning rate and the text."""
    return {**asdict(TWIN), "learning rate": RATE, "text": text().digest}


def kept() -> dict[str, Any]:
    """The stored results of the CPU's run; without a file, no results."""
    return json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {"asked": settings(), "recipes": {}}


def compared_with_cpu(bench: Bench, recipe: str, cpu: dict[str, Any]) -> dict[str, Any]:
    """The losses on this device compared with the CPU's stored ones."""
    theirs, again = cpu["recipes"].get(recipe), f"`python benchmarks/gpu.py --twin-cpu` writes {KEPT.name}"
    if cpu["asked"] != settings():
        return {"failed": f"{KEPT.name} is of another text or model; {again} anew"}
    if theirs is None:
        return {"failed": f"no losses of a CPU are kept; {again}"}
    ours = losses(recipe, bench.device, len(theirs) if bench.on_gpu else 1)
    gaps = [abs(a - b) / b for a, b in zip(ours, theirs, strict=False)]
    measures = {"first loss's gap": gaps[0], "largest gap": max(gaps), "last loss's gap": gaps[-1]}
    last = f"last loss {ours[-1]:.4f}, the CPU's {theirs[len(ours) - 1]:.4f}; largest gap {max(gaps):.2%}"
    return {"measures": measures, "result": last, "losses": ours}


def keep(recipes: tuple[str, ...], machine: dict[str, Any]) -> None:
    """Train the twin on this CPU under each recipe that the file lacks, and store its losses."""
    found = kept()
    done: dict[str, Any] = found["recipes"] if found["asked"] == settings() else {}
    for recipe in recipes:
        if recipe not in done:
            done[recipe] = losses(recipe, torch.device("cpu"))
            print(f"{recipe}: last loss {done[recipe][-1]:.4f}", flush=True)
            data = {"machine": machine, "asked": settings(), "recipes": done}
            KEPT.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    keep(RECIPES, environment())
