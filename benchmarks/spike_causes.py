"""The tensors that moved before planted and natural loss spikes, and the effect of amax histories: docs/stability.md.

    S="--grid lr=3e-3 --grid warmup=20 --grid statistics=1 --grid validations=2 --steps 200 --seeds 3 --jobs 1"
    P=benchmarks/planted.py
    halfstep sweep --recipes fp32,fp8-delayed --grid model=$P:none,$P:weight,$P:batch --grid tensors=200 $S \
        --out PLANTED
    halfstep sweep --recipes fp8-delayed-megatron --grid model=$P:one --grid tensors=200 $S --out ONE
    halfstep sweep --recipes bf16-mixed,fp8-delayed,benchmarks/stability_recipes.py:sixteen,fp8-delayed-megatron \
        --grid model=$P:often,$P:seldom $S --out JUMPS
    halfstep sweep --recipes fp32,fp8-delayed --grid lr=0.5,1.2 --grid tensors=120 --grid clip=1e9 --grid warmup=120 \
        --grid statistics=1 --grid validations=2 --seeds 2 --steps 120 --model gpt-nano --out NATURAL
    python benchmarks/spike_causes.py [--planted PLANTED ONE] [--jumps JUMPS] [--natural NATURAL] [--keep]

--keep writes results/spike_causes.json, in which parts that were not measured now stay. `page` makes the tables.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from halfstep.lab.environment import environment
from halfstep.lab.experiment import Row
from halfstep.lab.interval import paired, share
from halfstep.lab.spikes import spikes
from halfstep.lab.sweep.folder import SweepFolder
from halfstep.lab.sweep.leads import causes, moved
from harness import RESULTS
from planted import OFTEN, ONCE, SELDOM


KEPT = RESULTS / "spike_causes.json"
TRUTH: dict[str, tuple[str | None, Sequence[int]]] = {
    "none": (None, ()),
    "batch": (None, ONCE),
    "weight": ("weight of norm", ONCE),
    "one": ("input of blocks.1.mlp.2", SELDOM),
}
"""By model of `planted`: the tensor with the fault, and the steps in which the fault occurs."""


def runs(path: Path) -> Iterator[tuple[str, str, int, list[Row]]]:
    """The runs of a sweep over planted models: model, recipe, seed, rows of metrics."""
    folder = SweepFolder(path)
    sweep = folder.sweep()
    for point, recipe, seed in sweep.cells():
        if folder.state((point, recipe, seed)).ended:
            yield sweep.points()[point].model.rpartition(":")[2], recipe, seed, folder.rows((point, recipe, seed))


def losses(rows: Sequence[Row]) -> list[float]:
    """The training losses."""
    return [row["loss"] for row in rows if row["kind"] == "step"]


def planted(paths: Sequence[Path]) -> dict[str, Any]:
    """By model and recipe: the numbers of spikes, and how often the tensor named first in a step with a fault is the
    right one."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        for kind, recipe, _, rows in runs(path):
            tensor, steps = TRUTH[kind]
            row = found.setdefault(
                f"{kind}, {recipe}", {"runs": 0, "planted": 0, "spikes": 0, "elsewhere": 0, "named": 0}
            )
            started = [spike.start + 1 for spike in spikes(losses(rows))]
            firsts = [next((one.tensor for one in moved(rows, step, before=0)), None) for step in steps]
            row["runs"] += 1
            row["planted"] += len(steps)
            row["spikes"] += len(set(steps) & set(started))
            row["elsewhere"] += len(set(started) - set(steps))
            row["named"] += sum(first == tensor for first in firsts)
    return found


def natural(path: Path) -> dict[str, Any]:
    """By recipe: how often a tensor moved before the spikes of runs at high rates, and in windows without a spike."""
    found, quiet = causes(path)
    named = {recipe: [one for one in found if one.recipe == recipe] for recipe in quiet}
    return {
        recipe: {
            "spikes": share(sum(bool(one.moved) for one in ones), len(ones)),
            "without": quiet[recipe],
            "first": Counter(f"{one.moved[0].measure} of {one.moved[0].tensor}" for one in ones if one.moved),
        }
        for recipe, ones in named.items()
    }


def history(path: Path, base: str = "bf16-mixed") -> dict[str, Any]:
    """By model and recipe: the excess of the loss over bf16's (same seed and step) in steps in which amaxes jump and in
    other steps, and the numbers of spikes."""
    table = {(kind, recipe, seed): losses(rows) for kind, recipe, seed, rows in runs(path)}
    found: dict[str, Any] = {}
    for kind, recipe in sorted({(kind, recipe) for kind, recipe, _ in table}):
        steps = {"often": OFTEN, "seldom": SELDOM}[kind]
        rises, others, at, away = list[float](), list[float](), 0, 0
        for seed in sorted({seed for of, name, seed in table if (of, name) == (kind, recipe)}):
            mine, its = table[kind, recipe, seed], table[kind, base, seed]
            differences = {step: mine[step - 1] - its[step - 1] for step in range(SELDOM[0], len(mine) + 1)}
            rises += [differences[step] for step in steps]
            others += [rise for step, rise in differences.items() if step not in steps]
            started = {spike.start + 1 for spike in spikes(mine)}
            at, away = at + len(started & set(steps)), away + len(started - set(steps))
        row: dict[str, Any] = {"jumps": len(rises), "rise": statistics.fmean(rises), "spikes": at, "elsewhere": away}
        row["rise_elsewhere"] = statistics.fmean(others)
        found[f"{kind}, {recipe}"] = row if recipe == base else {**row, **asdict(paired(rises))}
    return found


def page(kept: dict[str, Any]) -> str:
    """The tables of docs/stability.md."""
    parts = []
    if found := kept.get("planted"):
        lines = [
            "| went wrong, recipe | runs | planted | spikes there | spikes elsewhere | named first as planted |",
            "| --- " * 6 + "|",
        ]
        for name, row in found.items():
            named = f"{row['named']} of {row['planted']}" if row["planted"] else "-"
            lines.append(
                f"| {name} | {row['runs']} | {row['planted']} | {row['spikes']} | {row['elsewhere']} | {named} |"
            )
        parts.append("\n".join(lines))
    if found := kept.get("history"):
        lines = [
            "| jumps, recipe | jumps | loss over bf16's in them | in other steps | spikes in them | elsewhere |",
            "| --- " * 6 + "|",
        ]
        for name, row in found.items():
            ends = f" ({row['low']:+.3f} to {row['high']:+.3f})" if "low" in row else ""
            cells = [
                name,
                str(row["jumps"]),
                f"{row['rise']:+.3f}{ends}",
                f"{row['rise_elsewhere']:+.3f}",
                str(row["spikes"]),
            ]
            lines.append(f"| {' | '.join(cells)} | {row['elsewhere']} |")
        parts.append("\n".join(lines))
    if found := kept.get("natural"):
        lines = [
            "| recipe | spikes before which a tensor moved | windows without a spike in which one did |",
            "| --- " * 3 + "|",
        ]
        lines += [f"| `{name}` | {counted(row['spikes'])} | {counted(row['without'])} |" for name, row in found.items()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def counted(found: dict[str, Any]) -> str:
    """A count with the interval of its share, as text."""
    ends = found["interval"]
    return f"{found['hits']}/{found['runs']} ({ends['low']:.0%} to {ends['high']:.0%})" if ends else "none"


def main() -> None:
    """Run the benchmark as the module describes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--planted", type=Path, nargs="+", help="folders of sweeps over planted models")
    parser.add_argument("--jumps", type=Path, help="folder of the sweep over histories")
    parser.add_argument("--natural", type=Path, help="folder of a sweep at high rates, with tensors")
    parser.add_argument("--keep", action="store_true", help=f"write {KEPT.name}")
    given = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept |= {"planted": planted(given.planted)} if given.planted else {}
    kept |= {"history": history(given.jumps)} if given.jumps else {}
    kept |= {"natural": natural(given.natural)} if given.natural else {}
    kept = json.loads(json.dumps(kept))
    print(page(kept))
    if given.keep:
        KEPT.write_text(json.dumps({**kept, "environment": environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
