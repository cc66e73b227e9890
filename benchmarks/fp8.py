"""FP8 recipes compared with fp32 on real text, the rounding errors of each operand, and losses when an amax jumps.

    python benchmarks/fp8.py [--keep | --page] [--steps N] [--out FOLDER]

--keep writes results/fp8.json and docs/fp8.md; --page writes the page from the results, without training. An
interrupted run resumes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import halfstep
from fp8_sections import sections
from halfstep.lab.compare import open_experiment
from halfstep.lab.environment import environment
from halfstep.lab.experiment import Experiment
from halfstep.lab.models import build_model
from halfstep.lab.report import write_report
from halfstep.lab.report.results import load
from halfstep.lab.tasks import experiment_for, get_task
from halfstep.tracking import OperandError, operand_errors
from harness import RESULTS


RECIPES = ("fp32", "bf16-mixed", "fp8-delayed", "fp8-delayed-megatron", "fp8-current", "mxfp8", "fp8-block", "fp8lm-o1")
GATED = ("fp32", "bf16-mixed", "fp8-delayed", "fp8-smooth-swiglu")
WATCHED = ("fp8-delayed", "fp8-current", "mxfp8", "fp8-block")
HISTORIES = ("bf16-mixed", "fp8-delayed", "fp8-delayed-megatron")
WATCH_AT, JUMP, JUMPS_FROM, JUMPS_EVERY, WINDOW, MADS = 100, 64.0, 60, 12, 50, 5.0
OLDER = (
    " These verdicts follow the rule from before 22 November 2026 (a loss inside that band or below it matches): these "
    "runs have one seed a recipe, and their final losses by seed were not saved."
)
PAGE = RESULTS.parent.parent / "docs" / "fp8.md"

PAGE_TEXT = """# FP8 training on any machine

Does FP8 training reach fp32's loss? On a small GPT and a small Llama, every FP8 recipe below does. To train in FP8:

```
model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe="fp8-current")
```

An FP8 recipe rounds the operands of a layer's three matmuls (linear, convolutional or recurrent) to 8 bits, with the
scales of its source (Transformer Engine, torchao, Graphcore, FP8-LM, Smooth-SwiGLU). Without FP8 tensor cores the
matmul is emulated exactly, in bf16 or float32, with one rounding at the end.

The state of delayed scales is not in the model's state dict. It is updated once an optimizer step, agrees over
ranks, and is saved in `scaler.state_dict()`. Heads, routers, embeddings and norms stay in high precision by rule:
[recipes.md](recipes.md) names them. `halfstep.quantize_model(model, "mxfp8")` stores one byte a weight for
[inference](inference.md). `make bench-fp8` writes this page.

## On real text

{runs}

Smooth-SwiGLU needs a gated MLP. The GPT above has none, so these runs train a small Llama:

{gated}

## What each operand loses

The table measures one step of the same model, after {watch_at} steps under each recipe: the relative error of the
quantized operand (Euclidean norms), the share of elements beyond the format's largest value, and the share of
non-zero elements that became zero. Each figure is the mean over all layers, with the worst layer in brackets.
`halfstep.tracking.operand_errors` gives every row.

| recipe | matmul | operand | format | relative error | saturated | flushed to zero |
| --- | --- | --- | --- | --- | --- | --- |
{operands}

## A history, and jumps

Fujii et al. 2024 (arXiv 2411.08719) see loss spikes in FP8 that bf16 does not have; their scripts use Megatron-LM's
amax history of 1 as well as Transformer Engine's of 1024. Here the input of each MLP's second layer is multiplied by
{jump:g}, and its output divided by {jump:g}, in one step of {every} from step {start} on. The function does not change,
but the amax jumps. A spike is a loss above the median of the {window} steps before it plus {mads:g} median
absolute deviations.

| recipe | spikes, {jumps} steps that jump | spikes, {others} others | mean rise in steps that jump | final loss |
| --- | --- | --- | --- | --- |
{spikes}

{verdict}

{sections}

{machine}
"""


def batches(steps: int, seed: int = 0) -> Iterator[dict[str, Tensor]]:
    """The first `steps` batches of the lm task."""
    task = get_task("lm").open(experiment_for("lm", recipes=("fp32",)))
    for step in range(1, steps + 1):
        yield task.batch(seed, step)


def prepared(recipe: str) -> tuple[nn.Module, Any, Any]:
    """The lm task's model prepared with a recipe, its optimizer and scaler."""
    experiment = experiment_for("lm", recipes=("fp32",))
    task = get_task("lm").open(experiment)
    model = build_model(experiment.model, task.models(), seed=0)
    return halfstep.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe)


def step(model: nn.Module, optimizer: Any, scaler: Any, batch: dict[str, Tensor]) -> float:
    """Run one training step; the loss."""
    loss = nn.functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())
    scaler.scale(loss).backward()
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss.item()


def watched(recipe: str, steps: int) -> list[OperandError]:
    """The operand errors of the step after `steps` training steps."""
    parts = prepared(recipe)
    *before, last = batches(steps + 1)
    for batch in before:
        step(*parts, batch)
    with operand_errors(parts[0]) as rows:
        step(*parts, last)
    return rows


def jumping(recipe: str, steps: int) -> list[float]:
    """The losses of a run in which the amax of the inputs of each MLP's second layer jumps in some steps, without a
    change of the function that the model computes."""
    parts = prepared(recipe)
    factor = 1.0
    for block in parts[0].blocks:
        block.mlp[2].register_forward_pre_hook(lambda _, args: (args[0] * factor,))
        # The bias is not part of what was multiplied.
        block.mlp[2].register_forward_hook(
            lambda module, _, output: (output - module.bias) / factor + module.bias if factor != 1.0 else output
        )
    losses = []
    for number, batch in enumerate(batches(steps)):
        factor = JUMP if jumps(number) else 1.0
        losses.append(step(*parts, batch))
    return losses


def jumps(number: int) -> bool:
    """Whether a step, counted from 0, has the jump."""
    return number >= JUMPS_FROM and (number - JUMPS_FROM) % JUMPS_EVERY == 0


def spikes(losses: list[float]) -> list[int]:
    """The steps whose loss exceeds the median of the WINDOW steps before by more than MADS median absolute
    deviations."""
    found = []
    for number in range(WINDOW, len(losses)):
        before = losses[number - WINDOW : number]
        middle = statistics.median(before)
        deviation = statistics.median(abs(loss - middle) for loss in before)
        if losses[number] > middle + MADS * deviation:
            found.append(number)
    return found


def rise(losses: list[float]) -> float:
    """The mean increase of the loss over the previous step, in steps with the jump."""
    return statistics.fmean(b - a for n, (a, b) in enumerate(pairwise(losses), 1) if jumps(n))


def page(data: dict[str, Any]) -> str:
    """docs/fp8.md."""
    machine = data["machine"]
    spiked = []
    for name, losses in data["jumps"].items():
        found = spikes(losses)
        inside = sum(jumps(n) for n in found)
        last = statistics.fmean(losses[-WINDOW:])
        spiked.append(f"| `{name}` | {inside} | {len(found) - inside} | {rise(losses):+.3f} | {last:.3f} |")
    steps = len(next(iter(data["jumps"].values())))
    number = sum(jumps(n) for n in range(steps))
    return PAGE_TEXT.format(
        runs=runs(data["runs"]),
        gated=runs(data["gated runs"]),
        watch_at=data["watched after"],
        operands="\n".join(operand_lines(data["operands"])),
        jump=JUMP, every=JUMPS_EVERY, start=JUMPS_FROM, window=WINDOW, mads=MADS,
        jumps=number, others=steps - WINDOW - number,
        spikes="\n".join(spiked),
        verdict=judgement(data["jumps"]),
        sections=sections(),
        machine=f"Measured with torch {machine['torch']} on {machine['cpu']}, {machine['threads']} threads.",
    )  # fmt: skip


def runs(compared: dict[str, Any]) -> str:
    """A comparison's command, table and fp32 band, as Markdown."""
    experiment, band, lines = compared["experiment"], compared["band"], []
    for name, v in compared["verdicts"].items():
        gap = "" if name == "fp32" or v["paired_gap"] is None else f"{v['paired_gap']:+.2%}"
        lines.append(f"| `{name}` | {v['status']} | {v['final_loss']:.4f} | {gap} |")
    model = "" if experiment["model"] == "gpt-tiny" else f" --model {experiment['model']}"
    command = f"halfstep compare --recipes {','.join(experiment['recipes'])} --steps {experiment['steps']}{model}"
    seeds = experiment["seeds"]
    command += f" --seeds {seeds}" if seeds != Experiment.seeds else ""
    head = f"`{command}`\n\n| recipe | verdict | final loss | to fp32, same seed |\n| --- | --- | --- | --- |"
    foot = f"fp32's band: {band['mean']:.4f} ± {band['half_width']:.4f}, {band['seeds']} seeds." if band else ""
    foot += "" if "interval" in compared["verdicts"]["fp32"] else OLDER
    return "\n".join([head, *lines, "", foot])


def compared(folder: Path, **changes: Any) -> dict[str, Any]:
    """The results of a comparison on the lm task, resumed if `folder` has one."""
    experiment = experiment_for("lm", **changes)
    comparison = open_experiment(experiment, folder, resume=(folder / "experiment.json").is_file())
    comparison.run()
    write_report(comparison.folder)
    results = load(comparison.folder)
    return {
        "experiment": experiment.to_dict(),
        "band": results.summary()["band"],
        "verdicts": {v.recipe: v.to_dict() for v in results.verdicts},
    }


def judgement(losses: dict[str, list[float]]) -> str:
    """A sentence that compares the spikes with amax histories of 1 and of 1024 steps."""
    inside = {name: sum(jumps(n) for n in spikes(found)) for name, found in losses.items()}
    short, long = inside["fp8-delayed-megatron"], inside["fp8-delayed"]
    if short > long:
        return f"A history of 1 step gives {short} spikes, and the maximum of 1024 steps {long}."
    return f"At this size the length of the amax history makes no difference: {short} spikes against {long}."


def operand_lines(operands: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Table rows, one for each operand of each matmul: errors over the layers."""
    for recipe, rows in operands.items():
        groups: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
        for row in rows:
            groups[row["product"], row["operand"], row["format"]].append(row)
        for key, group in groups.items():
            cells = []
            for name in ("relative_error", "saturated", "flushed"):
                values = [row[name] for row in group]
                cells.append(f"{statistics.fmean(values):.2%} ({max(values):.2%})")
            yield f"| `{recipe}` | {' | '.join((*key, *cells))} |"


def main() -> None:
    """Run, print, and with --keep write."""
    parser = argparse.ArgumentParser(description=__doc__)
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument("--keep", action="store_true")
    wanted.add_argument("--page", action="store_true")
    parser.add_argument("--steps", type=int, default=300, help="of the runs on text")
    parser.add_argument("--jump-steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("runs/fp8"))
    arguments = parser.parse_args()
    if arguments.page:
        PAGE.write_text(page(json.loads((RESULTS / "fp8.json").read_text())))
        return
    at = min(WATCH_AT, arguments.steps)
    data: dict[str, Any] = {
        "machine": environment(),
        "runs": compared(arguments.out / "gpt", recipes=RECIPES, steps=arguments.steps),
        "gated runs": compared(arguments.out / "llama", recipes=GATED, steps=arguments.steps, model="llama-tiny"),
        "watched after": at,
        "operands": {recipe: [asdict(row) for row in watched(recipe, at)] for recipe in WATCHED},
        "jumps": {recipe: jumping(recipe, arguments.jump_steps) for recipe in HISTORIES},
    }
    print(page(data))
    if arguments.keep:
        (RESULTS / "fp8.json").write_text(json.dumps(data, indent=2) + "\n")
        PAGE.write_text(page(data))


if __name__ == "__main__":
    main()
