"""What announces that a run diverges, at which rate recipes do, and what moved before a spike: docs/stability.md.

    halfstep sweep --recipes fp32 --grid lr=0.5,1.5 --grid sharpness=5e-4 --grid clip=1e9 --grid warmup=150 \
        --grid statistics=1 --grid validations=5 --seeds 40 --steps 200 --model gpt-nano --jobs 1 --out LEADS
    python benchmarks/divergence.py [--leads LEADS] [--keep]

--keep writes results/divergence.json, the parts measured beside those that are there. `page` makes the tables of the
page.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from halfstep.lab.environment import environment
from halfstep.lab.sweep.folder import SweepFolder
from halfstep.lab.sweep.leads import NAMES, Series, leads, runs_of
from harness import RESULTS


KEPT = RESULTS / "divergence.json"
VARIANTS = {
    f"{'logarithms, ' if logs else ''}mean of {width}": (logs, width)
    for logs in (False, True)
    for width in (1, 3, 5, 10)
}
"""How the series may be taken before an alarm is set on them; the first is as they are."""


def ahead(path: Path) -> dict[str, Any]:
    """How far ahead loss, gradient norm and sharpness announce that a run diverges."""
    stable, lost = runs_of(path, NAMES)
    found: dict[str, Any] = {"seconds": seconds(path), "stable": len(stable), "lost": len(lost), "variants": {}}
    for name, (logs, width) in VARIANTS.items():
        told = leads(
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
            for one, lead in told.items()
        }
    return found


def smoothed(run: Mapping[str, Series], logs: bool, width: int) -> dict[str, list[float]]:
    """The mean of the last `width` steps of each series, or of its logarithms."""
    found = {}
    for name, series in run.items():
        values = [math.inf if one is None else math.log(one) if logs else one for one in series]
        found[name] = [statistics.fmean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]
    return found


def seconds(path: Path) -> float:
    """What the runs of a sweep took, in all."""
    folder = SweepFolder(path)
    return sum(folder.state(cell).seconds or 0.0 for cell in folder.sweep().cells())


def page(kept: dict[str, Any]) -> str:
    """The tables of docs/stability.md."""
    parts = []
    if found := kept.get("leads"):
        parts.append(leads_table(found))
    return "\n\n".join(parts)


def leads_table(found: dict[str, Any]) -> str:
    """A row a series, as it is; and how sharpness compares with the loss in every variant."""
    first, *_ = found["variants"].values()
    lines = ["| series | alarm above | false alarms | runs announced | steps ahead | earlier than the loss by |"]
    lines.append("| --- " * 6 + "|")
    for name, lead in first.items():
        false, caught = lead["false_alarms"], lead["caught"]
        cells = [name, f"{lead['threshold']:.1f}", counted(false), counted(caught), f"{lead['mean_steps']:.1f}"]
        lines.append(f"| {' | '.join([*cells, between(lead['ahead_of'].get('loss'))])} |")
    lines += [
        "",
        "| taken as | sharpness announces | steps ahead | earlier than the loss by | than the gradient norm |",
    ]
    lines.append("| --- " * 5 + "|")
    for variant, told in found["variants"].items():
        lead = told["sharpness"]
        apart = [between(lead["ahead_of"][other]) for other in ("loss", "grad_norm")]
        cells = [variant, f"{lead['caught']['hits']} of {found['lost']}", f"{lead['mean_steps']:.1f}", *apart]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def counted(found: dict[str, Any]) -> str:
    """A share with its interval."""
    ends = found["interval"]
    return f"{found['hits']}/{found['runs']} ({ends['low']:.0%} to {ends['high']:.0%})"


def between(found: Mapping[str, float] | None) -> str:
    """A mean with its interval."""
    return "-" if found is None else f"{found['mean']:+.1f} ({found['low']:+.1f} to {found['high']:+.1f})"


def main() -> None:
    """As the module says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leads", type=Path, help="folder of the sweep with sharpness")
    parser.add_argument("--keep", action="store_true", help=f"write {KEPT.name}")
    given = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if given.leads:
        kept["leads"] = ahead(given.leads)
    kept = json.loads(json.dumps(kept))
    print(page(kept))
    if given.keep:
        KEPT.write_text(json.dumps({**kept, "environment": environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
