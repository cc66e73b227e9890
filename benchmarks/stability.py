"""The results of a sweep over learning rates and seeds, and of one over sizes and tokens: docs/stability.md.

    halfstep sweep --recipes RECIPES --grid lr=0.003,0.03,0.3,1,2 --grid clip=1e9 --grid warmup=20 --grid statistics=1 \
        --grid validations=5 --seeds 12 --steps 100 --model gpt-nano --out RATES
    halfstep sweep --recipes fp32 --grid model=gpt-nano,gpt-micro,gpt-tiny --grid steps=50,100,200,400 --grid lr=3e-3 \
        --grid warmup=20 --grid statistics=1 --grid validations=2 --seeds 3 --out SIZES
    halfstep law round SIZES --bits 2,3,4
    python benchmarks/stability.py [--rates RATES] [--sizes SIZES] [--keep]

Of an unfinished sweep those seeds count that every recipe has finished at every rate. --keep writes
results/stability.json, in which a part that was not measured now stays. `page` makes the tables of the page.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.errors import LawError
from halfstep.lab.environment import environment
from halfstep.lab.interval import compared, share
from halfstep.lab.sweep.folder import DIVERGED, SweepFolder
from halfstep.lab.sweep.report import Outcome, outcomes, summarize
from halfstep.lab.sweep.run import damages, law_cells
from halfstep.law import Damage, fit_damage, fit_loss
from harness import RESULTS


KEPT = RESULTS / "stability.json"


def rates(path: Path) -> dict[str, Any]:
    """The verdicts of the sweep over rates, on its complete seeds; and fp32 compared with itself."""
    folder = SweepFolder(path)
    sweep = folder.sweep()
    found = outcomes(folder, sweep)
    missing = {o.seed for o in found if not o.ended}
    seeds = min(missing, default=sweep.experiment.seeds)
    whole = replace(sweep, experiment=replace(sweep.experiment, seeds=seeds, baseline_seeds=seeds))
    kept = [o for o in found if o.seed < seeds]
    summary = summarize(whole, kept)
    (setting,) = summary["settings"].values()
    took = [folder.state((o.point, o.recipe, o.seed)).seconds for o in kept]
    return {
        "seeds": seeds,
        "hours_of_a_busy_process": sum(second or 0.0 for second in took) / 3600,
        "sweep": {**summary["sweep"], "seeds_trained": seeds},
        **setting,
        "tests": summary["tests"],
        "control": {what: control(kept, what) for what in ("diverged", "spiked")} if seeds > 1 else None,
    }


def control(found: Sequence[Outcome], what: str) -> dict[str, Any]:
    """fp32's even seeds compared with its odd ones: the negative control for comparisons of shares."""
    halves = [[o for o in found if o.recipe == "fp32" and o.seed % 2 == half] for half in (0, 1)]
    hits = [sum(o.status == DIVERGED if what == "diverged" else bool(o.spikes) for o in half) for half in halves]
    even, odd = ((count, len(half)) for count, half in zip(hits, halves, strict=True))
    return {"even": share(*even), "odd": share(*odd), **compared(*even, *odd)}


def sizes(path: Path) -> dict[str, Any]:
    """The sweep over sizes and tokens: losses, damage of rounding, and the fits of both laws."""
    rows: dict[tuple[float, float, float], list[float]] = {}
    for cell in damages([path]):
        rows.setdefault((cell.parameters, cell.tokens, cell.bits), []).append(cell.damage)
    losses: dict[tuple[float, float], list[float]] = {}
    for run in law_cells([path]):
        losses.setdefault((run.parameters, run.tokens), []).append(run.loss)
    result: dict[str, Any] = {
        "losses": [
            {"parameters": n, "tokens": d, "runs": len(v), "loss": statistics.fmean(v)}
            for (n, d), v in sorted(losses.items())
        ],
        "damage": [
            {"parameters": n, "tokens": d, "bits": p, "runs": len(v), "damage": statistics.fmean(v),
             "least": min(v), "most": max(v)}
            for (n, d, p), v in sorted(rows.items())
        ],
    }  # fmt: skip
    result["slopes"] = {f"{bits:g}": slopes([c for c in damages([path]) if c.bits == bits]) for bits in widths(result)}
    fits = {"loss_fit": lambda: fit_loss(law_cells([path])), "damage_fit": lambda: fit_damage(damages([path]))}
    for name, fit in fits.items():
        try:
            result[name] = fit().to_dict()
        except LawError as error:
            result[name] = {"refused": str(error)}
    return result


def widths(found: dict[str, Any]) -> list[float]:
    """The numbers of bits that models were rounded to."""
    return sorted({row["bits"] for row in found["damage"]})


def slopes(cells: Sequence[Damage], resamples: int = 1000) -> dict[str, Any]:
    """The exponents of tokens and parameters in the damage at one number of bits, by least squares on logarithms.

    Intervals are from resampled runs (bootstrap). Damages that are not positive have no logarithm: they are left out
    and counted.
    """
    positive = [cell for cell in cells if cell.damage > 0]
    table = np.array([[1.0, math.log(c.tokens), math.log(c.parameters)] for c in positive], dtype=np.float64)
    target = np.log([c.damage for c in positive])
    generator = np.random.default_rng(0)
    picks = [np.arange(len(target)), *(generator.integers(0, len(target), len(target)) for _ in range(resamples))]
    found = np.array([np.linalg.lstsq(table[pick], target[pick], rcond=None)[0] for pick in picks], dtype=np.float64)
    ends = np.quantile(found[1:], [0.025, 0.975], axis=0)
    return {
        "runs": len(cells),
        "not_positive": len(cells) - len(positive),
        **{
            name: {"value": float(found[0, i]), "low": float(ends[0, i]), "high": float(ends[1, i])}
            for i, name in ((1, "tokens"), (2, "parameters"))
        },
    }


def page(kept: dict[str, Any]) -> str:
    """The tables of docs/stability.md."""
    parts = []
    if found := kept.get("rates"):
        parts += [_rates_table(found), _tests_table(found)]
    if found := kept.get("sizes"):
        parts.append(_damage_table(found))
    return "\n\n".join(parts)


def _rates_table(found: dict[str, Any]) -> str:
    recipes = found["recipes"]
    lrs = [at["lr"] for at in next(iter(recipes.values()))]
    lines = [f"| recipe | {' | '.join(f'lr {lr:g}' for lr in lrs)} | best lr | at its best, to fp32's |"]
    lines.append("| --- " * (len(lrs) + 3) + "|")
    for recipe, curve in recipes.items():
        best = found["best"].get(recipe)
        gap = "-" if not best or best["gap"] is None else f"{best['gap']:+.1%} ({_ends(best['gap_interval'])})"
        cells = [f"{at['mean']:.3f}" + _marks(at) if at["mean"] is not None else "-" for at in curve]
        lines.append(f"| `{recipe}` | {' | '.join(cells)} | {best['lr'] if best else '-':g} | {gap} |")
    return "\n".join(lines)


def _marks(at: dict[str, Any]) -> str:
    hits = at["diverged"]["hits"], at["spiked"]["hits"]
    return f" ({hits[0]} d, {hits[1]} s)" if any(hits) else ""


def _tests_table(found: dict[str, Any]) -> str:
    lines = ["| over all rates | diverged | spiked | p, diverged | p, spiked | power for 10 points | verdicts |"]
    lines.append("| --- " * 7 + "|")
    tests = found["tests"]
    for diverged, spiked in zip(tests["diverged"]["pairs"], tests["spiked"]["pairs"], strict=True):
        recipe, base = diverged["recipe"], diverged["baseline"]
        shares = [
            f"{_share(tests[what]['shares'][recipe])}, {_share(tests[what]['shares'][base])}"
            for what in ("diverged", "spiked")
        ]
        powers = f"{diverged['power']:.0%}, {spiked['power']:.0%}"
        verdicts = f"{diverged['verdict']}; {spiked['verdict']}"
        cells = [*shares, f"{diverged['p']:.2g}", f"{spiked['p']:.2g}", powers, verdicts]
        lines.append(f"| `{recipe}` beside `{base}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _damage_table(found: dict[str, Any]) -> str:
    bits = widths(found)
    by = {(row["parameters"], row["tokens"], row["bits"]): row for row in found["damage"]}
    lines = [f"| parameters | tokens | D/N | loss | {' | '.join(f'{b:g} bits' for b in bits)} |"]
    lines.append("| --- " * (4 + len(bits)) + "|")
    for row in found["losses"]:
        n, d = row["parameters"], row["tokens"]
        cells = [f"{by[n, d, b]['damage']:+.4f}" if (n, d, b) in by else "-" for b in bits]
        lines.append(f"| {n:,.0f} | {d:,.0f} | {d / n:.2g} | {row['loss']:.3f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _share(found: dict[str, Any]) -> str:
    ends = found["interval"]
    return f"{found['hits']}/{found['runs']} ({ends['low']:.0%} to {ends['high']:.0%})"


def _ends(interval: dict[str, float]) -> str:
    return f"{interval['low']:+.1%} to {interval['high']:+.1%}"


def main() -> None:
    """Run the benchmark as the module describes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=Path, help="folder of the sweep over rates")
    parser.add_argument("--sizes", type=Path, help="folder of the sweep over sizes")
    parser.add_argument("--keep", action="store_true", help=f"write {KEPT.name}")
    given = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if given.rates:
        kept["rates"] = rates(given.rates)
    if given.sizes:
        kept["sizes"] = sizes(given.sizes)
    print(page(kept))
    if given.keep:
        KEPT.write_text(json.dumps({**kept, "environment": environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
