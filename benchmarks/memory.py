"""The memory of training, counted on tensors and as resident memory: one fresh process for each recipe and batch.

Counted, as papers count: weights, gradients, masters and optimizer states, measured on live tensors, and tensors saved
for backward at the end of a forward, every storage once (`tracking.saving`). Resident: the largest resident set
during a whole step after the first, above that of a process that trains a model of a few kilobytes in the same way, so
that code, libraries and compiled kernels do not count. Children run with MALLOC_MMAP_THRESHOLD_=65536, with which glibc
returns freed tensors to the system at once: resident memory is then that of live tensors.

    python benchmarks/memory.py                 # the memory
    python benchmarks/memory.py --recipes bf16-mixed,coat    # of some recipes; other results stay
    python benchmarks/memory.py --speed         # the time of a step
    python benchmarks/memory.py --page          # docs/memory.md's section "Measured", from the results
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import halfstep
import memory_page
from halfstep.lab.environment import environment
from halfstep.lab.models.gpt import GPT
from halfstep.lab.models.llama import Llama
from halfstep.memory import measure
from halfstep.recipe import COAT, Recipe, get_recipe
from halfstep.tracking import saving
from harness import RESULTS, Contender, race


MODELS: dict[str, type[nn.Module]] = {"gpt-small": GPT, "llama-small": Llama}
SIZE, CONTEXT, VOCABULARY = (6, 384, 6), 64, 256  # layers, width, heads: 10.9 million parameters
BATCHES = (8, 16, 32, 64)
BASELINE = "bf16-mixed"
RECIPES = (
    BASELINE,
    "coat",
    "fp8lm-o2",
    "bf16-pure",
    "adamw-8bit",
    "fp8-adam",
    "fp8-current",
    "fp8-current saved as coat",
)


def recipe_of(name: str) -> Recipe:
    """The named recipe; `NAME saved as coat` is the recipe NAME with COAT's storage of saved tensors only."""
    base, _, saved = name.partition(" saved as ")
    return replace(get_recipe(base), name=name, saved=COAT) if saved else get_recipe(base)


class Training:
    """A model prepared with a recipe, and its training step."""

    def __init__(self, model: str, recipe: str, batch: int, size: tuple[int, ...] = SIZE) -> None:
        torch.manual_seed(0)
        built: nn.Module = MODELS[model](VOCABULARY, CONTEXT, *size)  # type: ignore[call-arg]
        optimizer = torch.optim.AdamW(built.parameters(), lr=1e-4)
        self.model, self.optimizer, self.scaler = halfstep.prepare(built, optimizer, recipe_of(recipe))
        self.tokens = torch.randint(0, VOCABULARY, (batch, CONTEXT + 1))

    def loss(self, rows: int | None = None) -> torch.Tensor:
        tokens = self.tokens[:rows]
        return F.cross_entropy(self.model(tokens[:, :-1]).reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))

    def backward(self, rows: int | None = None) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(rows)).backward()

    def step(self, rows: int | None = None) -> None:
        """One step on the first `rows` rows of the batch, or on all."""
        self.backward(rows)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def child(model: str, recipe: str, batch: int, idle: bool) -> dict[str, Any]:
    """The measurements of one configuration, made in a process of their own."""
    training = Training(model, recipe, batch, (1, 32, 2) if idle else SIZE)
    training.step(rows=1)  # compiles kernels and creates the optimizer's states
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak resident set
    training.step()
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    training.backward(rows=1)
    persistent, count = measure(training.model, training.optimizer), _count(training.model)
    training.optimizer.zero_grad()
    with saving(training.model) as saved:
        loss = training.loss()
    kept = saved.now()
    del loss
    parts = {role: round(getattr(persistent, role) * count) for role in ("weights", "grads", "master", "states")}
    forms: Counter[str] = Counter()
    for row in kept.rows:
        forms[row.form] += row.bytes
    return {
        "peak_bytes": peak, "parameters": count, **parts, "activations": kept.total, "activations_by_form": dict(forms),
        "dtypes": _dtypes(training),
    }  # fmt: skip


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _dtypes(training: Training) -> dict[str, dict[str, int]]:
    """Number of elements by dtype, of the parameters and of the optimizer's states."""
    weights: Counter[str] = Counter()
    states: Counter[str] = Counter()
    for parameter in training.model.parameters():
        weights[str(parameter.dtype)] += parameter.numel()
        for name, value in training.optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                states[f"{name} {value.dtype}"] += value.numel()
    return {"weights": dict(weights), "states": dict(states)}


def measured(model: str, recipe: str, batch: int, idle: bool = False) -> dict[str, Any]:
    """The result of `child` in a new process."""
    command = [sys.executable, __file__, "--child", model, recipe, str(batch), str(int(idle))]
    variables = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def counted(row: dict[str, Any]) -> int:
    """Bytes of weights, gradients, masters, states and activations."""
    return sum(row[role] for role in ("weights", "grads", "master", "states", "activations"))


def recipe_memory(model: str, recipe: str) -> dict[str, Any]:
    """The memory under one recipe for each batch size."""
    measured(model, recipe, 1, idle=True)  # compiles kernels: a compiler's memory would count as idle
    idle, rows = measured(model, recipe, 1, idle=True)["peak_bytes"], {}
    for batch in BATCHES:
        row = measured(model, recipe, batch)
        row |= {"counted_bytes": counted(row), "above_idle_bytes": row["peak_bytes"] - idle}
        rows[str(batch)] = row
        print(f"{model} {recipe} batch {batch}: counted {row['counted_bytes'] / 2**20:.1f} MiB, "
              f"peak above idle {row['above_idle_bytes'] / 2**20:.1f} MiB", flush=True)  # fmt: skip
    return {"idle_bytes": idle, "batches": rows, "tokens_where_activations_exceed_states": _crossing(rows)}


def compared(found: dict[str, Any]) -> None:
    """Add the ratios of the baseline's memory to each recipe's."""
    for recipe in found.keys() & set(RECIPES):
        for batch, row in found[recipe]["batches"].items():
            base = found[BASELINE]["batches"][batch]
            row["counted_ratio"] = base["counted_bytes"] / row["counted_bytes"]
            row["above_idle_ratio"] = base["above_idle_bytes"] / row["above_idle_bytes"]


def _crossing(rows: dict[str, Any]) -> int:
    """The number of tokens per batch from which activations exceed the optimizer's states and masters."""
    first, last = rows[str(BATCHES[0])], rows[str(BATCHES[-1])]
    a_token = (last["activations"] - first["activations"]) / ((BATCHES[-1] - BATCHES[0]) * CONTEXT)
    fixed = first["activations"] - a_token * BATCHES[0] * CONTEXT
    return max(round((first["states"] + first["master"] - fixed) / a_token), 0)


def _largest(model: str, found: dict[str, Any]) -> dict[str, Any]:
    """The largest batch of `coat` whose peak is no more than the baseline's at its second largest batch: extrapolated
    from two measurements, then measured."""
    at = BATCHES[-2]
    budget = found[BASELINE]["batches"][str(at)]["above_idle_bytes"]
    rows, idle = found["coat"]["batches"], found["coat"]["idle_bytes"]
    low, high = (rows[str(batch)]["above_idle_bytes"] for batch in BATCHES[-2:])
    slope = (high - low) / (BATCHES[-1] - BATCHES[-2])
    batch = int(BATCHES[-2] + (budget - low) / slope)
    while (peak := measured(model, "coat", batch)["peak_bytes"] - idle) > budget:
        batch -= 1
    return {"budget_bytes": budget, BASELINE: at, "coat": batch, "coat_above_idle_bytes": peak}


def speed(batch: int = 16, rounds: int = 9) -> dict[str, Any]:
    """The time of a step under each recipe, interleaved, for each model."""
    found = {}
    for model in MODELS:
        names = ("fp8-current", "coat", "fp8-current saved as coat", BASELINE)
        runs: dict[str, Callable[[], Any]] = {name: Training(model, name, batch).step for name in names}
        against = {name: "fp8-current" for name in names if name != "fp8-current"}
        limit = {"coat": 1.3}
        contenders = [Contender(name, run, against.get(name), limit.get(name)) for name, run in runs.items()]
        found[model] = race(contenders, rounds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--recipes", type=lambda names: names.split(","), default=RECIPES)
    parser.add_argument("--models", type=lambda names: names.split(","), default=tuple(MODELS))
    parser.add_argument("--child", nargs=4, help="what a process of its own measures: model, recipe, batch, idle")
    parser.add_argument("--page", action="store_true")
    arguments = parser.parse_args()
    if arguments.page:
        kept = [json.loads((RESULTS / f"{name}.json").read_text()) for name in ("memory", "finetune")]
        memory_page.write(RESULTS.parent.parent / "docs" / "memory.md", memory_page.section(*kept))
        return
    if arguments.child:
        model, recipe, batch, idle = arguments.child
        print(json.dumps(child(model, recipe, int(batch), bool(int(idle)))))
        return
    path = RESULTS / "memory.json"
    result = json.loads(path.read_text()) if path.is_file() else {}
    result |= {"question": "memory of training, counted and resident", "machine": environment()}
    result |= {"context": CONTEXT, "layers_width_heads": SIZE}
    if arguments.speed:
        result["speed"] = speed()
    for recipe, model in () if arguments.speed else product(arguments.recipes, arguments.models):
        found = result.setdefault("memory", {}).setdefault(model, {})
        found[recipe] = recipe_memory(model, recipe)
        compared(found)
        if recipe == "coat":
            found["largest_batch"] = _largest(model, found)
        path.write_text(json.dumps(result, indent=2) + "\n")
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
