"""The text and the plot of docs/which_optimizer.md, generated from the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.ticker import FuncFormatter

from halfstep.lab.report.results import FAINT, INK, SETTINGS, new_figure, png
from halfstep.recipe import Recipe, get_recipe


Figures = dict[str, Any]
Row = dict[str, Any]

SIZES = {"1B": 1.0e9, "7B": 6.74e9, "13B": 13.0e9}
"""Parameters; 7B and 13B are Llama's."""
DEVICES = (16, 24, 40, 80)
"""GiB."""
GIB = 2**30
MARKS = {"matches": "o", "cannot tell": "s", "degrades": "X", "diverged": "v"}
MOST = 10
"""Names shown of one column of the picture."""
HEIGHT = 24.0
"""Of a line of them, in pixels."""

PAGE = """# Which optimizer fits my memory?

Pick the recipe with the fewest bytes a parameter that still matches fp32.

{answer}

For your own model, `halfstep memory` adds activations and everything else ([memory.md](memory.md)):

```
halfstep memory path/to/config.json --recipe adamw-8bit --device-memory 24GB
```

`python benchmarks/which_optimizer.py --keep` trains every recipe and writes this page.

![Bytes a parameter against loss](images/which_optimizer.png)

## Every recipe

Bytes are those that persist from step to step: weights, gradients, master and optimizer states of Adam, as tests
measure them on live tensors. The loss is the validation loss of a small Llama on the text of Python's own library after
{steps} steps, relative to fp32's with the same seed, with its 95% interval over {seeds} seeds. A recipe matches if all
of the interval lies below a loss of 1%. So few steps of so small a model show what breaks early, not what breaks late.
Time is that of a step of this model relative to fp32's on a CPU: it shows the cost of emulation, not a GPU's speed.

| recipe | bytes/param | weights, grads, master, states | 1B | 7B | 13B | to fp32 | verdict | time |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
{rows}

GiB for models of 1, 6.74 and 13 billion parameters, all of them stored as a layer's weight is. Embeddings, norms and
small tensors, which some recipes store in fp32, take more. The bytes of `fp8lm-o1`, `-o2` and `-o3` are those of one
rank: with several, gradients are in fp32 ([recipes.md](recipes.md)).

GaLore's rows have a rank of half the model's width and a scale of 1, since the learning rate is that of the
others. With a tuned rate it does better: [claims.md](claims.md) has that comparison, with LoRA.

## Without a recipe

The same moments are available as optimizers for any loop, with torch's schedulers, clipping and scalers. They do not
change the parameters' dtype:

| optimizer | moments of | bytes of states |
| --- | --- | --- |
{classes}

```python
import torch
from halfstep.optim import AdamW8bit

model = torch.nn.Linear(512, 512)
optimizer = AdamW8bit(model.parameters(), lr=1e-3)
model(torch.randn(8, 512)).square().mean().backward()
optimizer.step()
torch.optim.AdamW(model.parameters()).load_state_dict(optimizer.float32_state_dict())
```

`GaLoreAdamW` and `GaLoreAdamW8bit` take galore-torch's groups ([recipes.md](recipes.md)) and store mr + 2nr values for
an m x n matrix, m <= n, at rank r.

States of torch's AdamW load into the first three, and so do those of bitsandbytes' and torchao's 8-bit AdamW, code for
code if the formats are the same. States saved in one format load in another: a warning says what is rounded again.
States of another update rule (Adamax, SGD) raise. Under `fully_shard` a rank stores codes if its shards are whole
tiles, and otherwise fp32, with a warning.

{machine}
"""
CLASSES = {"AdamW8bit": "adamw-8bit", "AdamWFp8": "fp8-adam", "CoatAdamW": "coat"}


def page(data: Figures) -> str:
    """docs/which_optimizer.md."""
    rows = sorted(data["rows"].items(), key=lambda item: (-total(item[1]), item[0]))
    machine, told = data["machine"], data["experiment"]
    return PAGE.format(
        answer="\n".join(answer(data)),
        steps=told["steps"],
        seeds=told["seeds"],
        rows="\n".join(line(name, row, data["times"]) for name, row in rows),
        classes="\n".join(
            f"| `{name}` | `{recipe}` | {states(get_recipe(recipe)):g} |" for name, recipe in CLASSES.items()
        ),
        machine=f"Machine: {machine['cpu']}, torch {machine['torch']}, one thread. Not measured on a GPU.",
    )


def states(recipe: Recipe) -> float:
    """Bytes per parameter of optimizer states."""
    return recipe.bytes_per_parameter().states


def total(row: Row) -> float:
    """Bytes per parameter."""
    return float(sum(row["bytes"].values()))


def answer(data: Figures) -> list[str]:
    """The lines of the answer: the cheapest recipes that match fp32, and what fits into half of each device."""
    fits = sorted((total(row), name) for name, row in data["rows"].items() if row["status"] == "matches")
    ruined = [name for name, row in data["rows"].items() if row["status"] in ("degrades", "diverged")]
    unclear = [name for name, row in data["rows"].items() if row["status"] == "cannot tell"]
    names = ", ".join(f"`{name}` ({size:.4g})" for size, name in fits[:6])
    lines = [f"**Fewest bytes a parameter of those that match fp32 here:** {names}."]
    lines += [
        "",
        "Parameters that fit into half of a device (the other half is for activations and buffers):",
        "",
    ]
    lines += ["| recipe | bytes/param | " + " | ".join(f"{size} GiB" for size in DEVICES) + " |"]
    lines += ["| --- " * (2 + len(DEVICES)) + "|"]
    shown = ["fp32", *(name for _, name in reversed(fits[:6]))]
    for name in shown:
        size = total(data["rows"][name])
        cells = " | ".join(f"{device / 2 * GIB / size / 1e9:.1f}B" for device in DEVICES)
        lines.append(f"| `{name}` | {size:.5g} | {cells} |")
    if ruined:
        lines += ["", f"Worse than fp32 by more than 1% here: {quoted(ruined)}."]
    if unclear:
        lines += ["", f"These seeds cannot tell: {quoted(unclear)}."]
    return lines


def quoted(names: list[str]) -> str:
    """Recipes' names in quotes, as a list."""
    return ", ".join(f"`{name}`" for name in names)


def line(name: str, row: Row, times: dict[str, float]) -> str:
    """A row of the table."""
    roles = ", ".join(f"{row['bytes'][role]:.5g}" for role in ("weights", "grads", "master", "states"))
    sizes = " | ".join(f"{total(row) * count / GIB:.1f}" for count in SIZES.values())
    if name == "fp32":
        gap = ""
    elif row["gap"] is None:
        gap = "-"
    else:
        ends = row["interval"]
        gap = f"{row['gap']:+.2%}" + (f" ({ends['low']:+.2%} to {ends['high']:+.2%})" if ends else "")
    time = f"{times[name]:.2f}" if name in times else ""
    return f"| `{name}` | {total(row):.6g} | {roles} | {sizes} | {gap} | {row['status']} | {time} |"


def plot(data: Figures, file: Path) -> None:
    """Plot bytes per parameter against the gap to fp32's loss, coloured by step time, with a mark for each verdict."""
    rows = {name: row for name, row in data["rows"].items() if row["gap"] is not None}
    with matplotlib.rc_context(SETTINGS):
        figure = new_figure(5.2, "Bytes a parameter against loss, every recipe on a small Llama")
        figure.set_size_inches(10.5, 5.2)
        axes = figure.add_subplot()
        axes.axhspan(-1, 1, color="#eef1f4", zorder=0)
        axes.set_ylim(-0.4, 1.15 * max(100 * row["gap"] for row in rows.values()))
        points = None
        for status, mark in MARKS.items():
            names = [name for name, row in rows.items() if row["status"] == status]
            if names:
                places = [total(rows[name]) for name in names], [100 * rows[name]["gap"] for name in names]
                colours = [data["times"].get(name, 1.0) for name in names]
                points = axes.scatter(
                    *places, c=colours, cmap="viridis_r", vmin=0.8, vmax=3.0, marker=mark, s=36, label=status, zorder=3
                )
        axes.set_xlim(5.3, 20.8)
        _label(axes, rows)
        axes.set_xlabel("bytes a parameter: weights, gradients, master, optimizer states")
        axes.set_ylabel("loss to fp32's, percent")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}"))
        axes.grid(visible=True)
        axes.legend(loc="upper right")
        lost = [name for name, row in data["rows"].items() if row["status"] == "diverged"]
        axes.text(0.01, 0.97, f"diverged: {', '.join(lost) or 'none'}", transform=axes.transAxes, fontsize=8)
        if points is not None:
            figure.colorbar(points, ax=axes, label="time of a step, to fp32's", extend="max")
        file.write_bytes(png(figure))


def _label(axes: Any, rows: dict[str, Row]) -> None:
    """Label the points to their right, with names of one column above each other; in a crowded column only the
    outermost."""
    columns: dict[int, list[str]] = {}
    for name, row in rows.items():
        columns.setdefault(round(total(row)), []).append(name)
    for names in columns.values():
        names.sort(key=lambda name: rows[name]["gap"])
        crowded = len(names) > MOST
        shown = [*names[: MOST // 2], *names[-MOST // 2 :]] if crowded else names
        ends = [axes.transData.transform((total(rows[name]), 100 * rows[name]["gap"])) for name in shown]
        floor = ends[0][1] - HEIGHT * (len(shown) - 1) / 4
        for number, (name, (x, y)) in enumerate(zip(shown, ends, strict=True)):
            floor = max(floor, y)
            text = axes.transData.inverted().transform((x + 28, floor))
            floor += HEIGHT
            note = f"{name} ... ({len(names) - MOST} between)" if crowded and number == MOST // 2 - 1 else name
            axes.annotate(
                note,
                axes.transData.inverted().transform((x, y)),
                xytext=text,
                fontsize=7,
                color=INK,
                va="center",
                arrowprops={"arrowstyle": "-", "color": FAINT, "linewidth": 0.4, "shrinkB": 2},
            )
