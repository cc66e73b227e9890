"""The section "Measured" of docs/memory.md, from the results of memory.py and finetune.py."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any


NAMES = {"gpt-small": "GPT", "llama-small": "Llama"}
BASELINE = "bf16-mixed"
SHOWN = ("8", "32", "64")
HEADING = "## Measured"
OPENING = """`python benchmarks/memory.py` trains two models of {gpt:.1f} (a GPT) and {llama:.1f} million parameters (a
Llama), {layers} layers of width {width}, on sequences of {context} tokens, on one thread of a CPU ({cpu}, torch
{torch}). Each figure comes from a separate process. *Counted* are the bytes of live tensors at the end of a forward
pass: weights, gradients, masters, optimizer states and tensors saved for backward. *Resident* is the process's
largest resident set during a step, minus that of a process that trains a model of a few kilobytes under the
same recipe. A ratio is the memory of `bf16-mixed` (fp32 weights, gradients and moments, autocast in bf16) over
that of the recipe, at the same batch; for `bf16-mixed` itself the table has MiB."""


def section(memory: dict[str, Any], finetune: dict[str, Any]) -> str:
    """The whole section."""
    return "\n".join([*sizes(memory), *losses(finetune)]) + "\n"


def write(page: Path, text: str) -> None:
    """Replace the section in the page."""
    whole = page.read_text()
    start = whole.index(HEADING)
    page.write_text(whole[:start] + text + whole[whole.index("\n## ", start) :])


def sizes(data: dict[str, Any]) -> Iterator[str]:
    """The part on the memory of both models."""
    layers, width, _ = data["layers_width_heads"]
    counts = {model: found[BASELINE]["batches"]["64"]["parameters"] / 1e6 for model, found in data["memory"].items()}
    yield HEADING + "\n"
    yield from _wrapped(OPENING.format(
        gpt=counts["gpt-small"], llama=counts["llama-small"], layers=layers, width=width,
        context=data["context"], cpu=data["machine"]["cpu"], torch=data["machine"]["torch"],
    ))  # fmt: skip
    yield ""
    batches = " | ".join(f"{kind}, batch {batch}" for kind in ("counted", "resident") for batch in SHOWN)
    yield f"| model | recipe | {batches} |"
    yield "| --- | --- |" + " --- |" * 2 * len(SHOWN)
    for model, found in data["memory"].items():
        rows = {recipe: row["batches"] for recipe, row in found.items() if recipe != "largest_batch"}
        for recipe, row in rows.items():
            bare = recipe == BASELINE
            cells = [
                f"{row[batch][f'{kind}_bytes'] / 2**20:.0f}" if bare else f"{row[batch][f'{kind}_ratio']:.2f}"
                for kind in ("counted", "above_idle")
                for batch in SHOWN
            ]
            yield f"| {NAMES[model]} | `{recipe}` | {' | '.join(cells)} |"
    yield ""
    for model, found in data["memory"].items():
        crossing = {recipe: found[recipe]["tokens_where_activations_exceed_states"] for recipe in (BASELINE, "coat")}
        largest = found["largest_batch"]
        yield from _wrapped(
            f"The {NAMES[model]}'s activations exceed its optimizer states from {crossing[BASELINE]} tokens a "
            f"batch on under `{BASELINE}`, and from {crossing['coat']} under `coat`, whose states are smaller too. In "
            f"the memory that `{BASELINE}` takes for a batch of {largest[BASELINE]}, `coat` trains a batch of "
            f"{largest['coat']}."
        )
    yield ""
    ratios = [
        found["fp8lm-o2"]["batches"][batch]["counted_ratio"] for found in data["memory"].values() for batch in SHOWN
    ]
    yield from _wrapped(
        f"`fp8lm-o2` takes {1 - 1 / min(ratios):.0%} to {1 - 1 / max(ratios):.0%} less memory, as counted. FP8-LM's "
        "authors say 39 to 42%. The larger the batch, the smaller the saving, since activations are stored as in bf16 "
        "training."
    )
    yield ""
    steps = {NAMES[model]: {row["name"]: row for row in rows}["coat"]["ratio"] for model, rows in data["speed"].items()}
    yield from _wrapped(
        "A step under `coat` takes "
        + ", ".join(f"{ratio:.2f} (the {model})" for model, ratio in steps.items())
        + " of the time of one under `fp8-current`, on an idle machine with two threads. The target is at most 1.3."
    )
    yield ""


def losses(data: dict[str, Any]) -> Iterator[str]:
    """The part on losses of fine-tuning and of the vision-language model."""
    tuned, captions = data["fine-tuning"], data["captions"]
    setup = tuned["experiment"]
    yield from _wrapped(
        "Losses: `python benchmarks/finetune.py` pre-trains a GPT of half a million parameters in "
        f"bf16 on Python's sources, and fine-tunes it for {setup['steps']} steps on {tuned['bytes'] / 1e6:.1f} MB of "
        f"READMEs, with {setup['seeds']} seeds a recipe. Its loss there starts at {tuned['before']:.3f}. A small "
        f"vision-language model is trained for {captions['experiment']['steps']} steps: a decoder reads 16 "
        "patches of a digit's image and spells its name. Differences are relative to fp32 with the same seed, "
        "with 95% intervals; the margin of a verdict is 1%."
    )
    yield ""
    yield "| task | recipe | final loss | to fp32, same seed | verdict |"
    yield "| --- | --- | --- | --- | --- |"
    for name, found in (("fine-tuning", tuned), ("vision-language", captions)):
        for recipe, values in found["losses"].items():
            yield f"| {name} | `{recipe}` | {_mean(values)} | {_against(found['to_fp32'].get(recipe))} |"
    yield ""
    shown = ", ".join(f"{sum(v) / len(v):.1%} (`{recipe}`)" for recipe, v in captions["accuracy"].items())
    worse = "; ".join(
        f"`{recipe}` {_against(row).replace(' | ', ', ')}" for recipe, row in captions["accuracy_to_fp32"].items()
    )
    yield from _wrapped(
        f"Held-out images whose name is spelled right: {shown}. Relative to fp32's accuracy, where plus is "
        f"worse: {worse}."
    )


def _mean(values: list[float | None]) -> str:
    finished = [value for value in values if value is not None]
    return f"{sum(finished) / len(finished):.4f}" if len(finished) == len(values) else "diverged"


def _against(row: dict[str, Any] | None) -> str:
    """The difference with its interval, and the verdict, as table cells."""
    if row is None:
        return "the baseline |"
    if row.get("gap") is None:
        return f"| {row['status']}"
    ends = f" ({row['interval']['low']:+.2%} to {row['interval']['high']:+.2%})" if row["interval"] else ""
    return f"{row['gap']:+.2%}{ends} | {row['status']}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 128, break_long_words=False, break_on_hyphens=False)
