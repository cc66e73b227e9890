"""Early signs of divergence, and the learning rates at which recipes diverge: docs/stability.md.

    halfstep sweep --recipes fp32 --grid lr=0.5,1.5 --grid sharpness=5e-4 --grid clip=1e9 --grid warmup=150 \
        --grid statistics=1 --grid validations=5 --seeds 40 --steps 200 --model gpt-nano --jobs 1 --out LEADS
    halfstep sweep --recipes RECIPES --grid lr=1.2 --grid clip=1e9 --grid warmup=120 --grid statistics=1 \
        --grid validations=2 --seeds 40 --steps 120 --model gpt-nano --jobs 1 --out RAMP
    python benchmarks/divergence.py [--leads LEADS] [--ramp RAMP [RAMP]] [--keep]

--keep writes results/divergence.json, in which parts that were not measured now stay. `page` makes the tables of the
page.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from halfstep.lab.environment import environment
from halfstep.lab.interval import ENOUGH, paired, paired_power
from halfstep.lab.sweep.folder import SweepFolder
from halfstep.lab.sweep.leads import NAMES, Series, leads, runs_of
from halfstep.lab.sweep.report import outcomes
from harness import RESULTS


KEPT = RESULTS / "divergence.json"
VARIANTS = {
    f"{'logarithms, ' if logs else ''}mean of {width}": (logs, width)
    for logs in (False, True)
    for width in (1, 3, 5, 10)
}
"""How series are smoothed before alarm thresholds are set, by name: (whether logarithms are averaged, window in steps).
The first variant is unsmoothed."""


EFFECT = 0.1
"""The relative difference between two learning rates for whose detection the power is computed."""


def lead_times(path: Path) -> dict[str, Any]:
    """How many steps ahead the loss, gradient norm and sharpness announce divergence, for each smoothing variant."""
    stable, lost = runs_of(path, NAMES)
    found: dict[str, Any] = {"seconds": seconds(path), "stable": len(stable), "lost": len(lost), "variants": {}}
    for name, (logs, width) in VARIANTS.items():
        found_leads = leads(
            [smoothed(run, logs, width) for run in stable],
            [(smoothed(run, logs, width), onset) for run, onset in lost],
            NAMES,
        )
        found["variants"][name] = {
            one: {
                **asdict(lead),
                "mean_steps": statistics.fmean(lead.steps),
                "ahead_of": {other: {"mean": mean, **asdict(ends)} for other, (mean, ends) in lead.ahead_of.items()},
            }
            for one, lead in found_leads.items()
        }
    return found


def ramp(paths: Sequence[Path], risen: Path) -> dict[str, Any]:
    """By recipe, the learning rate at which runs diverge while it rises, compared with fp32's with the same seeds.

    A run that does not diverge counts with the highest rate it reached, so positive differences are underestimated.

    Args:
        risen: the sweep that `lead_times` reads, whose fp32 runs follow the same ramp: the negative control.
    """
    table: dict[str, dict[int, float]] = {}
    survived: dict[str, int] = {}
    spiked: dict[str, dict[int, int]] = {}
    for path in paths:
        for recipe, seed, rate, stayed, count in rates_lost(path):
            table.setdefault(recipe, {})[seed] = rate
            survived[recipe] = survived.get(recipe, 0) + stayed
            spiked.setdefault(recipe, {})[seed] = count
    base = table["fp32"]
    highest = max(rate for rates in table.values() for rate in rates.values())
    again = {seed: min(rate, highest) for _, seed, rate, _, _ in rates_lost(risen, "lr-1.5")}
    return {
        "seconds": sum(map(seconds, paths)),
        "highest": highest,
        "recipes": {
            recipe: {
                "runs": len(rates),
                "survived": survived[recipe],
                "mean": statistics.fmean(rates.values()),
                "sd": statistics.stdev(rates.values()),
                "spikes": statistics.fmean(spiked[recipe].values()),
                "spikes_to_bf16": None
                if recipe == "bf16-mixed"
                else spike_difference(spiked[recipe], spiked["bf16-mixed"]),
                "to_fp32": None if recipe == "fp32" else rate_differences(rates, base),
                "to_bf16": None if recipe in ("fp32", "bf16-mixed") else rate_differences(rates, table["bf16-mixed"]),
            }
            for recipe, rates in table.items()
        },
        "nearest_to_masked": {
            name: rate_differences(table[f"{name}-nearest"], table[name])
            for name in table
            if f"{name}-nearest" in table
        },
        "control": {
            "odd seeds beside even ones": rate_differences(
                {seed // 2: rate for seed, rate in again.items() if seed % 2},
                {seed // 2: rate for seed, rate in again.items() if not seed % 2},
            ),
        },
    }


def rates_lost(path: Path, point: str = "lr") -> Iterator[tuple[str, int, float, bool, int]]:
    """For each run of a sweep: recipe, seed, its last learning rate (at divergence or at the end), whether it never
    diverged, and its number of spikes."""
    folder = SweepFolder(path)
    sweep = folder.sweep()
    for found in outcomes(folder, sweep):
        if found.ended and found.point.startswith(point):
            step = found.onset or found.step
            rate = sweep.points()[found.point].learning_rate(step)
            yield found.recipe, found.seed, rate, found.onset is None, len(found.spikes)


def rate_differences(rates: Mapping[int, float], base: Mapping[int, float]) -> dict[str, Any]:
    """The paired differences between two recipes' rates over common seeds: mean, interval and verdict, with the power
    to detect a tenth of the base's mean."""
    seeds = sorted(rates.keys() & base.keys())
    differences, mean = [rates[seed] - base[seed] for seed in seeds], statistics.fmean(base[seed] for seed in seeds)
    ends, spread = paired(differences), statistics.stdev(differences)
    power = paired_power(spread, len(seeds), EFFECT * mean)
    verdict = (
        "higher"
        if ends.low > 0
        else "lower"
        if ends.high < 0
        else "no difference"
        if power >= ENOUGH
        else "cannot tell"
    )
    needed = next((n for n in range(2, 1000) if paired_power(spread, n, EFFECT * mean) >= ENOUGH), None)
    return {
        "seeds": len(seeds),
        "mean": statistics.fmean(differences),
        **asdict(ends),
        "power": power,
        "verdict": verdict,
        "seeds_to_tell": needed,
    }


def spike_difference(counts: Mapping[int, int], base: Mapping[int, int]) -> dict[str, float]:
    """The paired difference in spikes per run between two recipes, over common seeds, with its interval."""
    differences = [counts[seed] - base[seed] for seed in sorted(counts.keys() & base.keys())]
    return {"mean": statistics.fmean(differences), **asdict(paired(differences))}


def smoothed(run: Mapping[str, Series], logs: bool, width: int) -> dict[str, list[float]]:
    """Each series, or its logarithms, averaged over the last `width` steps."""
    found = {}
    for name, series in run.items():
        values = [math.inf if one is None else math.log(one) if logs else one for one in series]
        found[name] = [statistics.fmean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]
    return found


def seconds(path: Path) -> float:
    """The total training time of a sweep's runs."""
    folder = SweepFolder(path)
    return sum(folder.state(cell).seconds or 0.0 for cell in folder.sweep().cells())


def page(kept: dict[str, Any]) -> str:
    """The tables of docs/stability.md."""
    parts = []
    if found := kept.get("leads"):
        parts.append(leads_table(found))
    if found := kept.get("ramp"):
        parts.append(ramp_table(found))
    return "\n\n".join(parts)


def leads_table(found: dict[str, Any]) -> str:
    """The table of unsmoothed series, and that of sharpness compared with the loss and the gradient norm, one row per
    variant."""
    first, *_ = found["variants"].values()
    lines = ["| series | alarm above | false alarms | runs announced | steps ahead | earlier than the loss by |"]
    lines.append("| --- " * 6 + "|")
    for name, lead in first.items():
        false, caught = lead["false_alarms"], lead["caught"]
        cells = [name, f"{lead['threshold']:.1f}", counted(false), counted(caught), f"{lead['mean_steps']:.1f}"]
        lines.append(f"| {' | '.join([*cells, interval_text(lead['ahead_of'].get('loss'))])} |")
    lines += [
        "",
        "| taken as | sharpness announces | steps ahead | earlier than the loss by | than the gradient norm |",
    ]
    lines.append("| --- " * 5 + "|")
    for variant, by_series in found["variants"].items():
        lead = by_series["sharpness"]
        leads_over = [interval_text(lead["ahead_of"][other]) for other in ("loss", "grad_norm")]
        cells = [variant, f"{lead['caught']['hits']} of {found['lost']}", f"{lead['mean_steps']:.1f}", *leads_over]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ramp_table(found: dict[str, Any]) -> str:
    """The table of learning rates at divergence, one row per recipe."""
    lines = [
        "| recipe | runs | diverges at a rate of | less fp32's, same seeds | power for a tenth | verdict | spikes |"
    ]
    lines.append("| --- " * 7 + "|")
    for recipe, row in sorted(found["recipes"].items(), key=lambda item: item[1]["mean"]):
        stayed = f", {row['survived']} not by {found['highest']:g}" if row["survived"] else ""
        gap = row["to_fp32"]
        cells = [f"`{recipe}`", f"{row['runs']}", f"{row['mean']:.2f} (sd {row['sd']:.2f}{stayed})"]
        cells += ["-"] * 3 if gap is None else difference_cells(gap)
        cells.append(f"{row['spikes']:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    for name, gap in found["control"].items():
        lines.append(f"| {' | '.join([f'fp32: {name}', str(gap['seeds']), '', *difference_cells(gap), '-'])} |")
    return "\n".join(lines)


def difference_cells(difference: dict[str, Any]) -> list[str]:
    """The table cells of a difference of rates: mean with interval, power, verdict."""
    ends = f"{difference['mean']:+.2f} ({difference['low']:+.2f} to {difference['high']:+.2f})"
    return [ends, f"{difference['power']:.0%}", difference["verdict"]]


def counted(found: dict[str, Any]) -> str:
    """A count of runs with the interval of its share, as text."""
    ends = found["interval"]
    return f"{found['hits']}/{found['runs']} ({ends['low']:.0%} to {ends['high']:.0%})"


def interval_text(found: Mapping[str, float] | None) -> str:
    """A mean with its interval, as text."""
    return "-" if found is None else f"{found['mean']:+.1f} ({found['low']:+.1f} to {found['high']:+.1f})"


def main() -> None:
    """Run the benchmark as the module describes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leads", type=Path, help="folder of the sweep with sharpness")
    parser.add_argument("--ramp", type=Path, nargs="+", help="folders of sweeps whose rate rises; with --leads")
    parser.add_argument("--keep", action="store_true", help=f"write {KEPT.name}")
    given = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if given.leads:
        kept["leads"] = lead_times(given.leads)
    if given.ramp:
        kept["ramp"] = ramp(given.ramp, given.leads)
    kept = json.loads(json.dumps(kept))
    print(page(kept))
    if given.keep:
        KEPT.write_text(json.dumps({**kept, "environment": environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
