"""The scaling law of Kumar et al. fitted to our own runs: constants, residuals, held-out cells: docs/stability.md.

    halfstep sweep --recipes fp32 --grid model=gpt-nano,gpt-micro,gpt-tiny --grid steps=50,100,200,400 \
        --grid lr=3e-3 --grid warmup=20 --grid statistics=1 --grid validations=2 --seeds 3 --out SIZES
    halfstep sweep --recipes weights-int2,weights-int3,weights-int4 --grid model=gpt-nano,gpt-micro,gpt-tiny \
        --grid steps=50,100,200 --grid lr=3e-3 --grid warmup=20 --grid statistics=1 --grid validations=2 --seeds 1 \
        --out BITS
    python benchmarks/law.py SIZES BITS [MORE ...] [--keep]

MORE are sweeps like BITS with other steps. --keep writes results/law.json. `page` makes the tables of the page.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from halfstep.errors import LawError
from halfstep.lab.environment import environment
from halfstep.lab.interval import paired
from halfstep.lab.sweep.folder import SweepFolder
from halfstep.lab.sweep.run import damages, finished, law_cells, recipe_of, weight_bits
from halfstep.law import KUMAR, Cell, Law, PostTraining, fit_damage, fit_loss
from harness import RESULTS


KEPT = RESULTS / "law.json"
PUBLISHED = {"a": KUMAR.a, "b": KUMAR.b, "floor": KUMAR.floor, "gamma": KUMAR.widths["weights"].gamma}
PUBLISHED |= {"offset": KUMAR.widths["weights"].offset}


def measured(paths: Sequence[Path]) -> dict[str, Any]:
    """The fit on all cells (on those with float32 weights, if bits make no difference to the loss), and how well fits
    on parts of the cells predict the others."""
    every = law_cells(paths)
    bits: dict[str, Any] = {"paired": pairs(paths)}
    try:
        cells = every
        fit_loss(cells, 0)
    except LawError as error:
        bits["refused"], cells = str(error), [cell for cell in every if cell.bits is None]
    most, least = max(cell.tokens for cell in cells), min(cell.tokens for cell in cells)
    largest = max(cell.parameters for cell in cells)
    groups = sorted({(cell.parameters, cell.tokens, cell.bits or math.inf) for cell in cells})
    parts: dict[str, list[Callable[[Cell], bool]]] = {
        "one cell at a time": [partial(is_in, at) for at in groups],
        "the most tokens": [lambda cell: cell.tokens == most],
        "the largest model's fewest tokens": [lambda cell: cell.parameters == largest and cell.tokens == least],
    }
    return {
        "cells": [
            {"parameters": n, "tokens": d, "bits": None if math.isinf(p) else p, "losses": losses(cells, (n, d, p))}
            for n, d, p in groups
        ],
        "noise": noise(cells, groups),
        "bits": bits,
        "damage": rounded(paths),
        "fit": fit_loss(cells, 200).to_dict(),
        "held_out": {name: predicted(cells, outs) for name, outs in parts.items()},
    }


def rounded(paths: Sequence[Path]) -> dict[str, Any]:
    """The fit of the damage of rounding after training, on positive damages; and the damage at the most tokens,
    measured and predicted from fewer tokens."""
    every = damages(paths)
    harm = [cell for cell in every if cell.damage > 0]
    most = max(cell.tokens for cell in every)
    less = fit_damage([cell for cell in harm if cell.tokens < most], 0).constants
    law = PostTraining(less["scale"], less["tokens"], less["parameters"], less["gamma"])
    rows = []
    for bits, parameters in sorted({(cell.bits, cell.parameters) for cell in every}):
        found = [c.damage for c in every if (c.bits, c.parameters, c.tokens) == (bits, parameters, most)]
        mean, guess = statistics.fmean(found), law.damage(parameters, most, bits)
        rows.append(
            {"bits": bits, "parameters": parameters, "measured": mean, "predicted": guess, "ratio": guess / mean}
        )
    fit = fit_damage(harm)
    ends = {name: {"low": low, "high": high} for name, (low, high) in fit.intervals.items()}
    return {"left_out": len(every) - len(harm), "fit": fit.to_dict(), "ends": ends, "held_out": rows}


def pairs(paths: Sequence[Path]) -> dict[str, Any]:
    """By bits, the losses of runs with rounded weights less those of runs with float32 weights, with the same model,
    tokens and seed: mean and interval."""
    found: dict[tuple[int, int, int, float], float] = {}
    for path in paths:
        folder = SweepFolder(path)
        for cell in finished(folder):
            bits = weight_bits(recipe_of(folder, cell)) or math.inf
            found[cell.parameters or 0, cell.tokens, cell.seed, bits] = cell.loss or math.nan
    widths = sorted({bits for *_, bits in found if math.isfinite(bits)})
    increases = {
        width: [loss - found[n, d, seed, math.inf] for (n, d, seed, bits), loss in found.items() if bits == width]
        for width in widths
    }
    return {
        f"{width:g}": {"runs": len(rises), "mean": statistics.fmean(rises), **asdict(paired(rises))}
        for width, rises in increases.items()
    }


def is_in(at: tuple[float, float, float], cell: Cell) -> bool:
    """Whether a run belongs to that cell."""
    return coordinates(cell) == at


def coordinates(cell: Cell) -> tuple[float, float, float]:
    """A run's parameters, tokens and bits; infinite bits for float32 weights."""
    return cell.parameters, cell.tokens, cell.bits or math.inf


def losses(cells: Sequence[Cell], at: tuple[float, float, float]) -> list[float]:
    """The losses of a cell's runs."""
    return [cell.loss for cell in cells if coordinates(cell) == at]


def noise(cells: Sequence[Cell], groups: Sequence[tuple[float, float, float]]) -> float:
    """The standard deviation of one run's loss over seeds, pooled over the cells with more than one."""
    spreads = [statistics.variance(found) for at in groups if len(found := losses(cells, at)) > 1]
    return math.sqrt(statistics.fmean(spreads))


def predicted(cells: Sequence[Cell], outs: Sequence[Callable[[Cell], bool]]) -> dict[str, Any]:
    """The errors of fits that leave out some cells, on those cells' mean losses."""
    rows = []
    for out in outs:
        kept = [cell for cell in cells if not out(cell)]
        try:
            law = fit_loss(kept, 0).law()
        except LawError as error:
            return {"refused": str(error)}
        for at in sorted({coordinates(cell) for cell in cells if out(cell)}):
            rows.append((at, statistics.fmean(losses(cells, at)), predicted_loss(law, at)))
    errors = [guess - loss for _, loss, guess in rows]
    return {
        "cells": len(rows),
        "rms": math.sqrt(statistics.fmean(error**2 for error in errors)),
        "bias": statistics.fmean(errors),
        "worst": max(errors, key=abs),
        "spread": statistics.pstdev([loss for _, loss, _ in rows]),
    }


def predicted_loss(law: Law, at: tuple[float, float, float]) -> float:
    """The loss that the law predicts for a cell."""
    parameters, tokens, bits = at
    return law.loss(parameters, tokens, None if math.isinf(bits) else {"weights": bits})


def page(found: dict[str, Any]) -> str:
    """The tables of docs/stability.md."""
    fit = found["fit"]
    lines = ["| constant | ours (95% interval) | published |", "| --- | --- | --- |"]
    names = {"a": "exponent of the parameters", "b": "exponent of the tokens", "floor": "floor, nats"}
    names |= {"gamma": "gamma of the weights' bits", "offset": "its offset"}
    for name in PUBLISHED:
        words, low_high = names[name], fit["intervals"].get(name)
        if low_high is None:
            lines.append(f"| {words} | not determined | {PUBLISHED[name]:.2f} |")
            continue
        low, high = low_high
        lines.append(f"| {words} | {fit[name]:.2f} ({low:.2f} to {high:.2f}) | {PUBLISHED[name]:.2f} |")
    lines += [
        "",
        "| left out of the fit | cells | rms error | mean error | worst | spread of their losses |",
        "| --- " * 6 + "|",
    ]
    lines.append(f"| nothing: its residuals | {fit['cells']} runs | {fit['residual']:.3f} | - | - | - |")
    for name, part in found["held_out"].items():
        cells = (
            [
                str(part["cells"]),
                f"{part['rms']:.3f}",
                f"{part['bias']:+.3f}",
                f"{part['worst']:+.3f}",
                f"{part['spread']:.3f}",
            ]
            if "rms" in part
            else ["-"] * 5
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "| constant of the damage | ours (95% interval) | published |", "| --- | --- | --- |"]
    damage, post = found["damage"]["fit"], KUMAR.post
    assert post is not None
    for name, words in {
        "tokens": "exponent of the tokens",
        "parameters": "of the parameters",
        "gamma": "gamma",
    }.items():
        low, high = damage["intervals"][name]
        lines.append(f"| {words} | {damage[name]:.2f} ({low:.2f} to {high:.2f}) | {getattr(post, name):.2f} |")
    lines += ["", "| bits | parameters | damage measured | predicted from fewer tokens | ratio |", "| --- " * 5 + "|"]
    for row in found["damage"]["held_out"]:
        cells = [f"{row['bits']:g}", f"{row['parameters']:,.0f}", f"{row['measured']:.4f}", f"{row['predicted']:.4f}"]
        lines.append(f"| {' | '.join(cells)} | {row['ratio']:.2f} |")
    lines += ["", "| bits of the weights in training | pairs | loss less that of whole weights |", "| --- " * 3 + "|"]
    for width, row in found["bits"]["paired"].items():
        lines.append(f"| {width} | {row['runs']} | {row['mean']:+.3f} ({row['low']:+.3f} to {row['high']:+.3f}) |")
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark as the module describes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", type=Path, nargs="+", help="folders of sweeps")
    parser.add_argument("--keep", action="store_true", help=f"write {KEPT.name}")
    given = parser.parse_args()
    found = json.loads(json.dumps(measured(given.sweeps)))
    print(f"noise of one run: {found['noise']:.4f}")
    print(page(found))
    if given.keep:
        KEPT.write_text(json.dumps({**found, "environment": environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
