"""The text and the plots of docs/fp4.md, generated from results/fp4.json."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from fp4_cases import SWITCHES
from fp4_verdicts import BETTER, ENOUGH, MISSING, WORSE, diverged, finals
from halfstep.lab.experiment import Experiment
from halfstep.lab.interval import Interval
from halfstep.lab.report.results import PERCENT, SETTINGS, looks, new_figure, png, signed
from halfstep.lab.report.rows import Gap, Gaps, draw_gaps
from halfstep.lab.verdict import DEGRADES, DIVERGED, MARGIN, MATCHES, UNDECIDED, band, rule


Data = dict[str, Any]
Row = dict[str, Any]

PAGE = """# FP4 training

Does FP4 training reach fp32's loss? The list under [The runs](#the-runs) answers for each recipe, on a small Llama. To
train in FP4:

```
model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe="fp4-wang")
```

[recipes.md](recipes.md) describes the recipes. `python benchmarks/fp4.py --keep` trains these models and writes this
page; `--page` writes it from [the saved results](../benchmarks/results/fp4.json).

## The runs

A Llama of {layers} layers of width {width}, {parameters:.1f} million parameters, on the text of Python's own library:
{steps:,} steps of AdamW on {batch} x {context} bytes. All cases have a peak learning rate of {lr:g}, the best of
0.0005, 0.001, 0.002 and 0.004 for fp32 after 300 steps of one seed. It is reached after {warmup} steps and then
falls to zero along a cosine. In the cases of "constant lr" it stays constant, also in the fp32 run that they
are compared with. `lr x 2` trains at twice that rate, since the best rate of a recipe may differ from fp32's.

{hours}

{rule}

{band}

{summary}

![The gap to fp32 while models train](images/fp4.png)

| case | seeds | final loss | to fp32, same seeds | verdict |
| --- | --- | --- | --- | --- |
{rows}

![The final gap of every case to fp32](images/fp4_final.png)

## Which parts pay, at this size

Each of these cases removes or changes one part of a recipe. The difference is relative to the whole recipe with the
same seeds; it is positive where the whole recipe is better. A part helps if the whole interval lies above zero, and
hurts if all of it lies below; otherwise these seeds cannot tell. `direct` only rounds, without estimator and
clamp: weights and inputs in FP4, or one of them in E4M3 (W8A4, W4A8). `nvfp4-plain` rounds all operands to
nearest in blocks of 16, and does nothing else. `until 80%` is bf16-mixed from there on. What a last stage can gain
depends on the learning rate that is left, as a share of the peak: {left}.

{parts}

| case | of | to that recipe, same seeds | the case is |
| --- | --- | --- | --- |
{part_rows}

Limits: {steps:,} steps of so small a model show only what breaks early. Clamps and Hadamard transforms are for outliers
that grow over billions of tokens; these runs are too short for them. FP4 is emulated, so no figure is a time on
hardware with FP4.

## What they would save

In theory, if 8 bits are twice and 4 bits four times as fast as 16, the matmuls of {model} at {tokens:,} tokens, without
the output head, take these shares of their time in 16 bits ([cost.md](cost.md)):

| recipe | share of the time in 16 bits |
| --- | --- |
{costs}

A last stage in bf16 reduces the saving: with a tenth of the run in bf16, a share s becomes 0.9 s + 0.1.

{machine}
"""


def page(data: Data) -> str:
    """docs/fp4.md."""
    experiment, machine, verdicts = data["experiment"], data["machine"], data["verdicts"]
    named = {name: row for name, row in verdicts.items() if data["cases"][name]["base"] is None}
    parts = {name: row for name, row in verdicts.items() if "to_base" in row}
    return PAGE.format(
        **{name: experiment[name] for name in ("steps", "batch", "context", "lr", "warmup")},
        **{name: experiment["model"][name] for name in ("layers", "width")},
        parameters=experiment["model"]["parameters"] / 1e6,
        hours=_hours(data),
        left=_rates_left(experiment),
        rule=textwrap.fill(f"{rule()} Fewer than {ENOUGH} seeds get no verdict.", 120),
        band=_band(data),
        summary="\n".join(_summary(named)),
        rows="\n".join(_line(name, verdicts[name], data) for name in verdicts),
        parts="\n".join(_parts(parts, data)) or "No such case has ended yet.",
        part_rows="\n".join(_part_line(name, row, data) for name, row in parts.items()),
        model=data["costs"]["model"],
        tokens=data["costs"]["tokens"],
        costs="\n".join(f"| `{name}` | {share:.1%} |" for name, share in data["costs"]["share"].items()),
        machine=f"Machine: {machine['cpu']}, torch {machine['torch']}, one thread. Not measured on a GPU.",
    )


def _rates_left(experiment: Data) -> str:
    """The learning rate after each of SWITCHES as a share of its peak, in words."""
    schedule = Experiment(("fp32",), steps=experiment["steps"], warmup=experiment["warmup"], lr=1.0)
    left = [f"{schedule.learning_rate(experiment['steps'] * share // 100 + 1):.0%}" for share in SWITCHES]
    return ", ".join(f"{rate} after {share}% of the run" for rate, share in zip(left, SWITCHES, strict=True))


def _hours(data: Data) -> str:
    runs = [run for case in data["cases"].values() for run in case["runs"].values()]
    if not runs:
        return "No run has ended yet."
    seconds = [run["seconds"] for run in runs]
    planned = ENOUGH * len(data["cases"])
    return (
        f"Finished runs: {len(runs)} of {planned}, in {sum(seconds) / 3600:.1f} hours in all, "
        f"{max(seconds) / 60:.0f} minutes the longest, on a machine shared with other processes."
    )


def _band(data: Data) -> str:
    found = band(list(finals(data["cases"]["fp32"]).values()))
    if found is None:
        return "fp32 has no band yet: that needs two seeds."
    width = found.half_width / found.mean
    return f"fp32's band, two standard deviations over {found.seeds} seeds: {found.mean:.4f} ± {width:.2%}."


def _summary(verdicts: dict[str, Row]) -> Iterable[str]:
    words = {
        MATCHES: "Match fp32",
        DEGRADES: f"Worse than fp32 by more than {MARGIN:.0%}",
        DIVERGED: "Diverged",
        UNDECIDED: "These seeds cannot tell",
        MISSING: "Not measured yet",
    }
    for status, text in words.items():
        names = [
            f"`{name}`" if (gap := row["to_fp32"]["gap"]) is None else f"`{name}` ({signed(gap)})"
            for name, row in verdicts.items()
            if row["status"] == status and not name.startswith("fp32")
        ]
        if names:
            yield f"- {text}: {', '.join(names)}."


def _gap(ends: Row) -> str:
    if ends["gap"] is None:
        return ""
    return signed(ends["gap"]) + ("" if ends["low"] is None else f" ({signed(ends['low'])} to {signed(ends['high'])})")


def _line(name: str, row: Row, data: Data) -> str:
    loss = "" if row["loss"] is None else f"{row['loss']:.4f}"
    lost = sorted(diverged(data["cases"][name]).values())
    verdict = row["status"] + (f" at step {', '.join(map(str, lost))}" if lost else "")
    if row["seeds_to_decide"] is not None:
        verdict += f": about {row['seeds_to_decide']} would decide"
    gap = "" if name == data["cases"][name]["baseline"] else _gap(row["to_fp32"])
    return f"| `{name}` | {row['seeds'] or ''} | {loss} | {gap} | {verdict} |"


def _parts(parts: dict[str, Row], data: Data) -> Iterable[str]:
    for base in dict.fromkeys(data["cases"][name]["base"] for name in parts):
        mine = {name: row for name, row in parts.items() if data["cases"][name]["base"] == base and row["seeds"]}
        for status, text in (
            (WORSE, "Worse than"),
            (BETTER, "Better than"),
            (UNDECIDED, "No difference can be told from"),
        ):
            names = [f"`{name}` ({_first(row)})" for name, row in mine.items() if row["to_base"]["status"] == status]
            if names:
                yield f"- {text} `{base}`: {', '.join(names)}."


def _first(row: Row) -> str:
    gap = row["to_base"]["gap"]
    return DIVERGED if gap is None else signed(gap)


def _part_line(name: str, row: Row, data: Data) -> str:
    status = row["to_base"]["status"] if row["seeds"] else MISSING
    return f"| `{name}` | `{data['cases'][name]['base']}` | {_gap(row['to_base'])} | {status} |"


def plot(data: Data, folder: Path) -> None:
    """Write both plots: each named recipe's gap to fp32 over steps, and the final gaps of all cases."""
    with matplotlib.rc_context(SETTINGS):
        (folder / "fp4.png").write_bytes(png(_curves(data)))
        (folder / "fp4_final.png").write_bytes(png(_final(data)))


def _curves(data: Data) -> Figure:
    cases = data["cases"]
    shown = [
        name for name, case in cases.items() if case["base"] is None and case["runs"] and case["baseline"] == "fp32"
    ]
    if shown in ([], ["fp32"]):
        return _nothing()
    figure = new_figure(4.6, "Validation loss to fp32's with the same seeds, step by step")
    axes = figure.subplots()
    axes.axhspan(-MARGIN, MARGIN, color="#eef0f2", linewidth=0, zorder=0)
    axes.axhline(0, color="black", linewidth=1.2)
    for name, look in looks(shown).items():
        if name == "fp32":
            continue
        pairs = [
            (run["curve"], cases["fp32"]["runs"][seed]["curve"])
            for seed, run in cases[name]["runs"].items()
            if seed in cases["fp32"]["runs"]
        ]
        points: dict[int, list[float]] = {}
        for own, fp32 in pairs:
            for (step, loss), (_, base) in zip(own, fp32, strict=False):
                if loss is not None:
                    points.setdefault(step, []).append(loss / base - 1)
        steps = [step for step in points if step]
        means = [statistics.fmean(points[step]) for step in steps]
        axes.plot(
            steps, means, look.line, color=look.colour, marker=look.marker, markersize=4, label=name, linewidth=1.5
        )
    axes.yaxis.set_major_formatter(PERCENT)
    axes.set_xlabel("step")
    axes.set_ylabel("to fp32 (%)")
    axes.grid(axis="y")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _nothing() -> Figure:
    figure = new_figure(1.0, "No run but fp32's has ended yet")
    figure.subplots().set_axis_off()
    return figure


def _final(data: Data) -> Figure:
    gaps = []
    for name, row in data["verdicts"].items():
        if row["seeds"] and name != data["cases"][name]["baseline"]:
            ends = row["to_fp32"]
            interval = None if ends["low"] is None else Interval(ends["low"], ends["high"])
            gaps.append(Gap(name, ends["gap"], interval, DIVERGED if row["status"] == DIVERGED else None))
    if not gaps:
        return _nothing()
    return draw_gaps(
        Gaps(tuple(gaps), MARGIN), looks([gap.recipe for gap in gaps]), "The final gap of every case to fp32"
    )
