"""What `halfstep compare` and `halfstep train` share: their options, the live display, and the end."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from halfstep.cli.terminal import show_json, show_table
from halfstep.errors import RunError
from halfstep.lab.experiment import Experiment


Data = Annotated[
    str | None,
    typer.Option(help="A text file, a folder or a glob; left out: the standard library's documentation and source."),
]
Steps = Annotated[int, typer.Option(help="Updates a run makes.")]
Seeds = Annotated[int, typer.Option(help="Seeds each recipe is trained with.")]
Model = Annotated[str, typer.Option(help="gpt-tiny, gpt-small, or your own as module:function.")]
Batch = Annotated[int, typer.Option(help="Sequences in a batch.")]
Context = Annotated[int, typer.Option(help="Bytes in a sequence.")]
Rate = Annotated[float, typer.Option("--lr", help="Peak learning rate: a warm-up, then a cosine to zero.")]
Out = Annotated[Path | None, typer.Option(help="The run folder; left out: a new one under runs/.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]


def train_all(ctx: typer.Context, name: str, out: Path | None, resume: bool, as_json: bool) -> None:
    """Open the experiment that the command's options say, train what is left of it, write the report, print it."""
    from rich.console import Console

    from halfstep.cli.live import Live

    if resume and out is None:
        raise RunError("--resume needs --out: the folder of the run to go on with")
    asked = _asked(ctx)
    experiment = _recorded(ctx, asked, out) if resume and out else Experiment(**asked)
    path = out or _fresh(Path("runs"), name)
    console = Console(stderr=True)
    console.print("loading torch, the data and the recipes ...", style="dim")
    from halfstep.lab.compare import open_experiment
    from halfstep.lab.folder import read_json
    from halfstep.lab.report import write_report

    comparison = open_experiment(experiment, path, resume)
    try:
        with Live(experiment, console) as live:
            comparison.run(live.update)
    except KeyboardInterrupt:
        command = shlex.join(["halfstep", name, "--out", str(path), "--resume"])
        console.print(f"\nstopped; nothing is lost. To go on:\n  {command}", markup=False, soft_wrap=True)
        raise typer.Exit(130) from None
    page = write_report(comparison.folder)
    summary = read_json(comparison.folder.path / "summary.json")
    if as_json:
        show_json({**summary, "folder": str(path), "report": str(page)})
    else:
        _show(summary)
    console.print(f"\nreport: {page}", markup=False, soft_wrap=True)


def _asked(ctx: typer.Context) -> dict[str, Any]:
    """The experiment's fields among the command's options; `train` knows one number of seeds for all."""
    known = {field.name for field in dataclasses.fields(Experiment)}
    asked = {name: value for name, value in ctx.params.items() if name in known}
    asked["recipes"] = tuple(recipe.strip() for recipe in asked["recipes"].split(",") if recipe.strip())
    return {"baseline_seeds": asked["seeds"], **asked}


def _recorded(ctx: typer.Context, asked: dict[str, Any], out: Path) -> Experiment:
    """The experiment in the folder, with what this command line asks for: a difference is refused when it opens."""
    from halfstep.lab.folder import RunFolder

    sources = {name: ctx.get_parameter_source(name) for name in asked}
    given = {name: asked[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    return dataclasses.replace(RunFolder(out).experiment(), **given)


def _fresh(parent: Path, name: str) -> Path:
    """A folder that is not there yet: runs/compare-1, runs/compare-2 ..."""
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return parent / f"{name}-{number}"


def _show(summary: dict[str, Any]) -> None:
    rows = []
    for verdict in summary["verdicts"]:
        size = verdict["bytes_per_parameter"]
        rows.append(
            (
                verdict["recipe"],
                _words(verdict),
                _number(verdict["final_loss"], "{:.4f}"),
                _number(verdict["paired_gap"], "{:+.2%}"),
                _number(verdict["ms_per_step"], "{:.0f}"),
                "-" if size is None else f"{sum(size[r] for r in ('weights', 'grads', 'master', 'states')):g}",
                str(verdict["skipped_steps"]),
            )
        )
    numeric = ["final loss", "to fp32", "ms/step", "bytes/param", "skipped"]
    show_table(["recipe", "verdict", *numeric], rows, right=numeric)


def _words(verdict: dict[str, Any]) -> str:
    if verdict["status"] != "diverged":
        return str(verdict["status"])
    where = f": {verdict['first_nonfinite']}" if verdict["first_nonfinite"] else ""
    return f"diverged at step {verdict['diverged_at']}{where}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
