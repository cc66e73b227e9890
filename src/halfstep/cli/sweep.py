"""`halfstep sweep`: run an experiment at every point of a grid, show its progress, and judge its results."""

import dataclasses
import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from halfstep.cli.compare import (
    Batch,
    Context,
    Data,
    Json,
    Margin,
    Model,
    Optimizer,
    Out,
    Rate,
    Seeds,
    Steps,
    Task,
    asked_fields,
    fresh_folder,
    resumable,
)
from halfstep.cli.terminal import answer, line_width, number, table_text
from halfstep.errors import RunError
from halfstep.lab.experiment import Experiment
from halfstep.lab.sweep.folder import FAILED, Sweep, SweepFolder, counts, read_grid, seconds_left
from halfstep.text import printable


if TYPE_CHECKING:
    from halfstep.lab.sweep.run import Cells

_Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A sweep's folder.")]


class _Group(TyperGroup):
    """A group in which `halfstep sweep --grid ...` means `halfstep sweep run --grid ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = args and args[0].startswith("--") and args[0] not in ctx.help_option_names
        return super().parse_args(ctx, ["run", *args] if own else args)


sweep = typer.Typer(cls=_Group, no_args_is_help=True)


@sweep.command("run")
def run(
    ctx: typer.Context,
    recipes: Annotated[str, typer.Option(help="Recipes, by commas, as in `halfstep compare`.")] = "fp32,bf16-mixed",
    grid: Annotated[
        list[str] | None,
        typer.Option(
            help="An axis and its values: --grid lr=1e-3,3e-3 --grid model=gpt-nano,gpt-tiny --grid steps=100,200"
        ),
    ] = None,
    sample: Annotated[
        int | None, typer.Option(min=1, help="Number of random points of the grid. Default: all.")
    ] = None,
    task: Task = None,
    data: Data = None,
    steps: Steps = None,
    seeds: Seeds = None,
    margin: Margin = None,
    model: Model = None,
    batch: Batch = None,
    context: Context = None,
    lr: Rate = None,
    optimizer: Optimizer = None,
    out: Out = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the sweep in --out; seeds and values may be added.")
    ] = False,
    retry: Annotated[bool, typer.Option("--retry", help="With --resume: run failed runs again.")] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at once. Default: one per thread of this machine.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of a run. Default: 1.")] = None,
    executor: Annotated[
        str, typer.Option(help="Where runs are executed: local, ray[:ADDRESS], submitit[:PARTITION].")
    ] = "local",
    as_json: Json = False,
) -> None:
    """Train every recipe with every seed at every point of the grid; report where each is best, and what diverged.

    A failed run is a result. A killed sweep resumes with --resume, bit for bit.
    """
    console = Console(stderr=True)
    if resume and out is None:
        raise RunError("--resume needs --out: the folder of the sweep to continue")
    if retry and not resume:
        raise RunError("--retry needs --resume: it tries runs of a sweep again that failed")
    path = out or fresh_folder("sweep")
    console.print("loading torch, the data and the recipes ...", style="dim")
    from halfstep.lab.sweep.executors import get_executor
    from halfstep.lab.sweep.run import open_sweep, run_sweep

    wanted = _resumed(ctx, path) if resume else _new(ctx)
    place = get_executor(executor, jobs or max(1, len(os.sched_getaffinity(0)) // wanted.threads))
    cells = open_sweep(wanted, path, resume)
    with resumable(path, ["halfstep", "sweep", "run", "--out", str(path), "--resume", "--executor", executor], console):
        run_sweep(cells, place, _CellPrinter(cells, place.at_once, console), retry)
    report(path, as_json)


@sweep.command("status")
def status(folder: _Folder, as_json: Json = False) -> None:
    """Show how many runs of a sweep have ended, and how; which failed; and the time left."""
    found = SweepFolder(folder)
    cells = found.sweep().cells()
    states = {cell: found.state(cell) for cell in cells}
    running, count = found.is_worked_on(), counts(list(states.values()))
    failed = {" ".join(map(str, cell)): state.reason for cell, state in states.items() if state.status == FAILED}
    left = seconds_left(list(states.values()), 1)
    data = {"cells": len(cells), **count, "running": running, "process_seconds_left": left, "failures": failed}
    answer(as_json, lambda: data, lambda: _status({"cells": len(cells), **count}, left, running, failed))


def _status(count: dict[str, int], left: float | None, running: bool, failed: dict[str, Any]) -> str:
    lines = [table_text([*count], [[*map(str, count.values())]], right=count)]
    if left:
        lines.append(f"\n{left / 60:.0f} min of one process left; {'running' if running else 'not running'}")
    return "\n".join([*lines, *(printable(f"failed: {cell}: {reason}") for cell, reason in failed.items())])


@sweep.command("report")
def report(folder: _Folder, as_json: Json = False) -> None:
    """Judge the finished runs of a sweep; write summary.json and rates.png into its folder."""
    from halfstep.lab.sweep.report import write_report

    summary = write_report(folder)
    answer(as_json, lambda: summary, lambda: text_of(summary, folder / "summary.json"))


@sweep.command("leads")
def leads(folder: _Folder, as_json: Json = False) -> None:
    """Compare how early loss, gradient norm and sharpness announce divergence, with alarms set on stable runs.

    For a sweep with --grid sharpness=5e-4 in which some runs diverge and at least 20 do not.
    """
    from halfstep.lab.sweep import leads as room

    found = room.leads(*room.runs_of(folder, room.NAMES), room.NAMES)
    answer(as_json, lambda: {name: dataclasses.asdict(lead) for name, lead in found.items()}, lambda: leads_text(found))


@sweep.command("causes")
def causes(folder: _Folder, as_json: Json = False) -> None:
    """Name the tensor that moved first before each spike: its amax, saturated share or update left its usual range.

    For a sweep with --grid tensors=STEPS, where STEPS is the runs' number of steps.
    """
    from halfstep.lab.sweep import leads as room

    found, quiet = room.causes(folder)
    data = {"spikes": [dataclasses.asdict(spike) for spike in found], "without_a_spike": quiet}
    answer(as_json, lambda: data, lambda: causes_text(found, quiet))


def _new(ctx: typer.Context) -> Sweep:
    from halfstep.lab.tasks import experiment_for

    grid = read_grid(ctx.params["grid"] or ())
    given = asked_fields(ctx)
    for name in grid.keys() & given.keys():
        raise RunError(f"--{name.replace('_', '-')} and --grid {name} both given; give one of them")
    seeds = given.setdefault("seeds", Experiment.seeds)
    first = {name: values[0] for name, values in grid.items()}
    experiment = experiment_for(**{"task": Experiment.task, **given, **first, "baseline_seeds": seeds})
    return Sweep(experiment, grid, ctx.params["sample"], ctx.params["threads"] or 1)


def _resumed(ctx: typer.Context, path: Path) -> Sweep:
    """The sweep in the folder, with this command line's options; a contradiction is refused when the sweep opens."""
    recorded = SweepFolder(path).sweep()
    given = asked_fields(ctx)
    if "seeds" in given:
        given["baseline_seeds"] = given["seeds"]

    return dataclasses.replace(
        recorded,
        experiment=dataclasses.replace(recorded.experiment, **given),
        grid=read_grid(ctx.params["grid"] or ()) or recorded.grid,
        **{name: ctx.params[name] for name in ("sample", "threads") if ctx.params[name] is not None},
    )


class _CellPrinter:
    """Prints how each finished cell ended, how many are left, and the estimated time left."""

    def __init__(self, cells: "Cells", at_once: int, console: Console) -> None:
        self._folder, self._at_once, self._console = cells.folder, at_once, console
        self._states = {cell: self._folder.state(cell) for cell in cells.sweep.cells()}

    def __call__(self, said: Any) -> None:
        if not isinstance(said, tuple):  # a step
            return
        state = self._states[said] = self._folder.state(said)
        states = list(self._states.values())
        ended, left = sum(other.ended for other in states), seconds_left(states, self._at_once)
        time = "" if left is None else f"; {left // 60:.0f} min {left % 60:02.0f} s left"
        why = f" ({state.reason})" if state.status == FAILED else ""
        point, recipe, seed = said
        self._console.print(
            printable(
                f"{point}, {recipe}, seed {seed}: {state.status} at step {state.step}{why}. {ended} of {len(states)}"
                f"{time}"
            ),
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


if TYPE_CHECKING:
    from halfstep.lab.sweep.leads import Caused, Lead


def text_of(summary: dict[str, Any], file: Path) -> str:
    """The summary as text: a table for each setting, best rates, comparisons of shares, and the file's path."""
    parts = [", ".join(f"{count} {word}" for word, count in summary["cells"].items() if count)]
    for name, setting in summary["settings"].items():
        parts += [f"{name}\n{_curves(setting['recipes'])}", *([_best(setting["best"])] if setting["best"] else [])]
    tests = {what: tests for what, tests in summary["tests"].items() if tests["pairs"]}
    parts += [f"{what}, over all points\n{_pairs(tests[what])}" for what in tests]
    return "\n\n".join([*parts, textwrap.fill(summary["rule"], line_width(120)), f"summary: {file}"])


def leads_text(leads: "dict[str, Lead]") -> str:
    """A table with one row per series."""
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
    return table_text(columns, rows, right=columns[1:])


def causes_text(found: "list[Caused]", quiet: dict[str, dict[str, Any]]) -> str:
    """A table with one row per spike, and how often a tensor moves without a spike."""
    columns = ["point", "recipe", "seed", "spike at step", "moved first", "at step", "what", "times its past"]
    rows = []
    for spike in found:
        first = next(iter(spike.moved), None)
        told = () if first is None else (first.tensor, str(first.step), first.measure, f"{first.times:.3g}")
        rows.append([spike.point, spike.recipe, str(spike.seed), str(spike.step), *(told or ("nothing", "", "", ""))])
    lines = [table_text(columns, rows, right=["seed", "spike at step", "at step", "times its past"])]
    for recipe, hits in quiet.items():
        named = [bool(spike.moved) for spike in found if spike.recipe == recipe]
        words = f"{recipe}: something moved before {sum(named)} of {len(named)} spikes"
        lines.append(f"{words}, and in {_share(hits)} of windows without")
    return "\n".join(lines)


def _curves(recipes: dict[str, Any]) -> str:
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
    return table_text(columns, rows, right=columns[1:])


def _best(best: dict[str, Any]) -> str:
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
    return table_text(columns, rows, right=columns[1:])


def _pairs(tests: dict[str, Any]) -> str:
    rows = []
    for pair in tests["pairs"]:
        mine, base = tests["shares"][pair["recipe"]], tests["shares"][pair["baseline"]]
        more = pair["runs_to_tell"]
        would = f": about {more} runs a side would" if pair["verdict"] == "cannot tell" and more else ""
        rows.append(
            [
                f"{pair['recipe']} beside {pair['baseline']}",
                f"{_share(mine)} against {_share(base)}",
                f"{pair['p']:.3g}",
                f"{pair['power']:.0%}",
                pair["verdict"] + would,
            ]
        )
    columns = ["recipes", "runs", "p", "power for 10 points", "verdict"]
    return table_text(columns, rows, right=["p", "power for 10 points"])


def _share(share: dict[str, Any]) -> str:
    if not share["runs"]:
        return "-"
    ends = share["interval"]
    return f"{share['hits']}/{share['runs']} ({ends['low']:.0%} to {ends['high']:.0%})"


def _interval(interval: dict[str, float] | None, form: str) -> str:
    return "-" if interval is None else f"{form.format(interval['low'])} to {form.format(interval['high'])}"
