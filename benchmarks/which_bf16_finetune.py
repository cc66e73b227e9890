"""Fine-tuning in 16 bits with and without masters: the share of fp32's improvement that each recipe reaches.

    python benchmarks/which_bf16_finetune.py [--keep] [--out FOLDER]

A small GPT that was pre-trained on Python's standard library is fine-tuned on the READMEs of the packages that are
installed beside halfstep, at rates usual in fine-tuning, where updates are small relative to weights, so that a 16-bit
weight without a master loses them. --keep writes results/which_bf16_finetune.json; `which_bf16.py --pages` writes the
page. An interrupted run resumes.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import torch

from finetune import LEAN, loaded, pretrained, readmes
from halfstep.lab.environment import environment
from halfstep.lab.experiment import read_metrics
from halfstep.lab.interval import paired
from halfstep.lab.report.results import SETTINGS, new_figure, png
from halfstep.lab.task import load_corpus
from halfstep.lab.tasks import experiment_for
from halfstep.recipe import get_recipe
from harness import keep
from losses import train


RATES, STEPS, SEEDS = (1e-5, 1e-4), 150, 3
RECIPES = (
    "fp32", "bf16-mixed", "adamw-8bit", "bf16-master", "bf16-stochastic", "bf16-7byte", "bf16-6byte", "bf16-nomaster",
    "fp16-master", "fp16-nomaster",
)  # fmt: skip


def measured(out: Path) -> dict[str, Any]:
    """By rate and recipe, the share of fp32's improvement that each seed's run reaches."""
    text, start = str(readmes(out / "readmes")), pretrained(out / "pretrained")
    corpus, rates = None, {}
    for rate in RATES:
        settings = experiment_for(
            "lm", recipes=RECIPES, data=text, steps=STEPS, seeds=SEEDS, lr=rate, warmup=10, **LEAN
        )  # fmt: skip
        corpus = corpus or load_corpus(text, settings.context)
        recipes = {name: get_recipe(name) for name in RECIPES}
        losses = train(settings, recipes, out / f"{rate:g}", partial(loaded, settings, start))
        first = read_metrics(out / f"{rate:g}" / "fp32" / "seed-0" / "metrics.jsonl")
        before = next(row["loss"] for row in first if row["kind"] == "validation" and row["step"] == 0)
        rates[f"{rate:g}"] = {"before": before, "losses": losses, "shares": shares(before, losses)}
    assert corpus is not None
    experiment = settings.to_dict() | {"data": "READMEs of installed packages", "lr": list(RATES)}
    return {"machine": environment(), "experiment": experiment, "digest": corpus.digest, "rates": rates}


def shares(before: float, losses: dict[str, list[float | None]]) -> dict[str, dict[str, Any]]:
    """By recipe, the mean share of fp32's improvement with the same seed, and its 95% interval."""
    found = {}
    for name, values in losses.items():
        each = [
            (before - own) / (before - full) for own, full in zip(values, losses["fp32"], strict=True)
            if own is not None and full is not None
        ]  # fmt: skip
        found[name] = {"each": each, "mean": fmean(each), **asdict(paired(each))} if len(each) > 1 else {"each": each}
    return found


TEXT = """## Fine-tuning

A 16-bit weight without a master does most harm in fine-tuning: learning rates are small, and so are updates relative to
weights. transformers 5 loads a checkpoint in the 16 bits of its file, and an optimizer then trains it in that dtype
(`bf16-nomaster`). [One command](audit.md#a-script-that-runs) says what your script loses. A small GPT
({size}), pre-trained on Python's standard library, was fine-tuned for {steps} steps on READMEs of installed packages.
The table shows the share of fp32's improvement with the same seed, with 95% intervals over {seeds} seeds:

| recipe | bytes/param | {rates} |
| --- | --- |{lines}"""


def fine_tuning(data: dict[str, Any]) -> Iterator[str]:
    """The section, line by line."""
    settings, rates = data["experiment"], data["rates"]
    heads = " | ".join(f"at {rate}" for rate in rates)
    yield TEXT.format(
        size=settings["model"],
        steps=settings["steps"],
        seeds=settings["seeds"],
        rates=heads,
        lines=" --- |" * len(rates),
    )
    for name in next(iter(rates.values()))["shares"]:
        if name != "fp32":
            size = get_recipe(name).bytes_per_parameter().total
            yield (
                f"| `{name}` | {size:.4g} | "
                + " | ".join(_cell(found["shares"][name]) for found in rates.values())
                + " |"
            )
    gains = ", ".join(f"{_gain(found):.3f} at {rate}" for rate, found in rates.items())
    machine = data["machine"]
    yield from ["", "![Share of fp32's improvement that each recipe reaches](images/finetune.png)"]
    text = (
        f"fp32 lowers the validation loss of {next(iter(rates.values()))['before']:.3f} by {gains}. Masters "
        "prevent the loss, and so does stochastic rounding, without more bytes; with 8-bit moments too (`bf16-7byte`, "
        "`bf16-6byte`) three seeds show no loss. `python benchmarks/which_bf16_finetune.py`; "
        f"torch {machine['torch']} on {machine['cpu']}, one thread."
    )
    yield from ["", *textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)]


def _cell(share: dict[str, Any]) -> str:
    if "mean" not in share:
        return "diverged"
    return f"{share['mean']:.0%} ({share['low']:.0%} to {share['high']:.0%})"


def _gain(found: dict[str, Any]) -> float:
    return float(found["before"] - fmean(found["losses"]["fp32"]))


COLOURS = ("#0072b2", "#d55e00")


def plot(data: dict[str, Any], file: Path) -> None:
    """Plot each recipe's share of fp32's improvement, one colour per rate: seeds as dots, intervals as lines."""
    rates = data["rates"]
    names = [name for name in next(iter(rates.values()))["shares"] if name != "fp32"]
    with matplotlib.rc_context(SETTINGS):
        title = "Fine-tuning a small GPT: what arrives of fp32's improvement"
        figure = new_figure(1.3 + 0.3 * len(names), title)
        axes = figure.add_subplot()
        for place, (rate, found) in enumerate(rates.items()):
            for row, name in enumerate(names):
                share, height = found["shares"][name], len(names) - row - 0.3 * place
                label = f"at {rate}" if row == 0 else None
                axes.plot(
                    [100 * each for each in share["each"]], [height] * len(share["each"]), "o", color=COLOURS[place],
                    markersize=5, label=label,
                )  # fmt: skip
                if "low" in share:
                    axes.plot([100 * share["low"], 100 * share["high"]], [height] * 2, color=COLOURS[place])
        axes.set_yticks([len(names) - row - 0.15 for row in range(len(names))], names)
        axes.set_xlim(0, 110)
        axes.set_xlabel("percent of fp32's improvement with the same seed")
        axes.grid(visible=True, axis="x")
        axes.legend(loc="lower left", title="learning rate")
        file.write_bytes(png(figure))


def main() -> None:
    """Train the runs that are missing, print, and with --keep write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/which_bf16_finetune"))
    arguments = parser.parse_args()
    data = measured(arguments.out)
    print("\n".join(fine_tuning(data)))
    if arguments.keep:
        keep("which_bf16_finetune", data)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
