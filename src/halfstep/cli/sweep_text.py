"""A sweep's summary as tables."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from halfstep.cli.terminal import line_width, number, show_table


if TYPE_CHECKING:
    from halfstep.lab.sweep.leads import Caused, Lead


def show(summary: dict[str, Any]) -> None:
    """Print a table a setting, the best rates, and the comparisons of shares."""
    print(", ".join(f"{count} {word}" for word, count in summary["cells"].items() if count))
    for name, setting in summary["settings"].items():
        print(f"\n{name}")
        _curves(setting["recipes"])
        if setting["best"]:
            print()
            _best(setting["best"])
    for what, tests in summary["tests"].items():
        if tests["pairs"]:
            print(f"\n{what}, over all points")
            _pairs(tests)
    print()
    print(textwrap.fill(summary["rule"], line_width(120)))


def show_leads(leads: dict[str, Lead]) -> None:
    """Print a row a series."""
    columns = [
        "series",
        "alarm above",
        "false alarms",
        "diverging runs announced",
        "steps ahead",
        "earlier than loss by",
    ]
    rows = []
    for name, lead in leads.items():
        mean, interval = lead.ahead_of.get("loss", (None, None))
        earlier = "-" if interval is None else f"{mean:+.1f} ({interval.low:+.1f} to {interval.high:+.1f})"
        ahead = f"{sum(lead.steps) / len(lead.steps):.1f}"
        rows.append([name, f"{lead.threshold:.1f}", _share(lead.false_alarms), _share(lead.caught), ahead, earlier])
    show_table(columns, rows, right=columns[1:])


def show_causes(found: list[Caused], quiet: dict[str, dict[str, Any]]) -> None:
    """Print a row a spike, and how often something moves where nothing spikes."""
    columns = ["point", "recipe", "seed", "spike at step", "moved first", "at step", "what", "times its past"]
    rows = []
    for spike in found:
        first = next(iter(spike.moved), None)
        cause = ["nothing", "", "", ""]
        if first is not None:
            cause = [first.tensor, str(first.step), first.measure, f"{first.times:.3g}"]
        rows.append([spike.point, spike.recipe, str(spike.seed), str(spike.step), *cause])
    show_table(columns, rows, right=["seed", "spike at step", "at step", "times its past"])
    for recipe, hits in quiet.items():
        named = sum(bool(spike.moved) for spike in found if spike.recipe == recipe)
        count = sum(spike.recipe == recipe for spike in found)
        print(f"{recipe}: something moved before {named} of {count} spikes, and in {_share(hits)} of windows without")


def _curves(recipes: dict[str, Any]) -> None:
    columns = ["recipe", "lr", "runs", "loss", "95% interval", "diverged", "spiked", "ms/step", "bytes/param"]
    rows = [
        [
            recipe,
            f"{at['lr']:g}",
            str(at["runs"]),
            number(at["mean"], "{:.4f}"),
            _interval(at["interval"], "{:.4f}"),
            _share(at["diverged"]),
            _share(at["spiked"]),
            number(at["ms_per_step"], "{:.3g}"),
            number(at["bytes_per_parameter"], "{:g}"),
        ]
        for recipe, curve in recipes.items()
        for at in curve
    ]
    show_table(columns, rows, right=columns[1:])


def _best(best: dict[str, Any]) -> None:
    columns = [
        "recipe",
        "best lr",
        "loss there",
        "95% interval",
        "to the baseline's best",
        "its interval",
        "another rate",
    ]
    rows = [
        [
            recipe,
            f"{found['lr']:g}",
            f"{found['loss']:.4f}",
            _interval(found["interval"], "{:.4f}"),
            number(found["gap"], "{:+.2%}"),
            _interval(found["gap_interval"], "{:+.2%}"),
            number(found["other_rate"], "{:.0%}"),
        ]
        for recipe, found in best.items()
    ]
    show_table(columns, rows, right=columns[1:])


def _pairs(tests: dict[str, Any]) -> None:
    rows = []
    for pair in tests["pairs"]:
        mine, base = tests["shares"][pair["recipe"]], tests["shares"][pair["baseline"]]
        more = pair["runs_to_tell"]
        would = f": about {more} runs a side would" if pair["verdict"] == "cannot tell" and more else ""
        shares = f"{_share(mine)} against {_share(base)}"
        rows.append(
            [
                f"{pair['recipe']} beside {pair['baseline']}",
                shares,
                f"{pair['p']:.3g}",
                f"{pair['power']:.0%}",
                pair["verdict"] + would,
            ]
        )
    show_table(["recipes", "runs", "p", "power for 10 points", "verdict"], rows, right=["p", "power for 10 points"])


def _share(share: dict[str, Any]) -> str:
    if not share["runs"]:
        return "-"
    ends = share["interval"]
    return f"{share['hits']}/{share['runs']} ({ends['low']:.0%} to {ends['high']:.0%})"


def _interval(interval: dict[str, float] | None, form: str) -> str:
    return "-" if interval is None else f"{form.format(interval['low'])} to {form.format(interval['high'])}"
