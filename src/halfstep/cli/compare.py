"""`halfstep compare` trains one model under several recipes; `halfstep train` under one."""

import dataclasses
import re
import shlex
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live as RichLive
from rich.table import Table

from halfstep.cli.terminal import answer, line_width, number, table_text
from halfstep.errors import RunError
from halfstep.lab.experiment import Experiment, Facts, Metric, RunFolder, list_tasks, read_json
from halfstep.lab.verdict import DIVERGED, MATCHES, UNDECIDED, enough
from halfstep.text import printable


if TYPE_CHECKING:
    from halfstep.lab.train import Progress

Data = Annotated[
    str | None,
    typer.Option(help="lm and mlm: a text file, a folder or a glob; default: the source of Python's standard library."),
]
_OWN = "Left out: the task's own"
Task = Annotated[str | None, typer.Option(help=f"What to train on, lm if left out: {', '.join(list_tasks())}.")]
Steps = Annotated[int | None, typer.Option(help=f"Updates a run makes. {_OWN} (lm: {Experiment.steps}).")]
Seeds = Annotated[
    int | None,
    typer.Option(
        help=f"Seeds each recipe is trained with. Left out: {Experiment.seeds}, and 1 for train. "
        "With --resume there may be more than before."
    ),
]
Margin = Annotated[
    float | None,
    typer.Option(help=f"What a recipe may lose before it degrades, relative to fp32. Left out: {Experiment.margin}."),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="A model of the task (lm: gpt-tiny, gpt-small, llama-tiny, llama-small, moe-tiny, unit-gpt-tiny, "
        f"munit-gpt-tiny), or your own as module:function or file.py:function. {_OWN} first."
    ),
]
Batch = Annotated[int | None, typer.Option(help=f"Examples in a batch. {_OWN} (lm: {Experiment.batch}).")]
Context = Annotated[int | None, typer.Option(help=f"lm and mlm: bytes in a sequence. Left out: {Experiment.context}.")]
Rate = Annotated[
    float | None,
    typer.Option("--lr", help=f"Peak learning rate: a warm-up, then a cosine to zero. {_OWN} (lm: {Experiment.lr})."),
]
RecipeRates = Annotated[
    list[str] | None,
    typer.Option(
        "--recipe-lr",
        help="Peak learning rates of recipes with another one than --lr, comma-separated or by repeating the option: "
        "unit-fp16=0.02,unit-fp8=0.02.",
    ),
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        help="An update rule: adamw (default), adam, nadam, rmsprop, adagrad, sgd, lion, lamb, muon (and AdamW). "
        "Each wants an --lr of its own. Adam, NAdam, RMSprop and SGD train without weight decay."
    ),
]
Out = Annotated[Path | None, typer.Option(help="The run folder; default: a new one under runs/.")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume the run in --out.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]


def compare(
    ctx: typer.Context,
    recipes: Annotated[
        str,
        typer.Option(
            help="Recipes, separated by commas: names (see `halfstep recipes`), my.toml, module:name, or "
            "one after another: fp8-current until 90% then bf16-mixed.",
        ),
    ] = "fp32,bf16-mixed,fp16-mixed,bf16-master,bf16-stochastic,bf16-nomaster,fp16-pure",
    task: Task = None,
    data: Data = None,
    steps: Steps = None,
    seeds: Seeds = None,
    baseline_seeds: Annotated[
        int | None,
        typer.Option(help=f"Seeds fp32 is trained with, where that is more. Left out: {Experiment.baseline_seeds}."),
    ] = None,
    margin: Margin = None,
    model: Model = None,
    batch: Batch = None,
    context: Context = None,
    lr: Rate = None,
    recipe_lr: RecipeRates = None,
    optimizer: Optimizer = None,
    out: Out = None,
    resume: Resume = False,
    jobs: Annotated[int, typer.Option(min=1, help="Runs trained at once, in processes that share the threads.")] = 1,
    as_json: Json = False,
) -> None:
    """Train one model under several recipes from the same weights on the same batches, and report what each breaks."""
    train_all(ctx, "compare", out, resume, as_json, jobs)


def train(
    ctx: typer.Context,
    recipes: Annotated[
        str,
        typer.Option(
            "--recipe",
            help="A recipe: a name (see `halfstep recipes`), my.toml, module:name, or one after another: 'fp8-current "
            "until 90%, then bf16-mixed'.",
        ),
    ] = "bf16-mixed",
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
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Train a model under one recipe, and compare it with fp32's cached baseline if there is one."""
    train_all(ctx, "train", out, resume, as_json)


def train_all(ctx: typer.Context, name: str, out: Path | None, resume: bool, as_json: bool, jobs: int = 1) -> None:
    """Open the experiment that the options describe, train what is not yet trained, write the report and print it."""
    if resume and out is None:
        raise RunError("--resume needs --out: the folder of the run to continue")
    path = out or fresh_folder(name)
    console = Console(stderr=True)
    console.print("loading torch, the data and the recipes ...", style="dim")
    import torch

    from halfstep.lab.compare import open_experiment
    from halfstep.lab.report import write_report
    from halfstep.lab.tasks import experiment_for

    if resume:  # a difference from the recorded experiment is refused when it opens
        experiment = dataclasses.replace(RunFolder(path).experiment(), **asked_fields(ctx))
    else:
        experiment = experiment_for(**_asked(ctx))
    if jobs > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
    comparison = open_experiment(experiment, path, resume)
    aside = ["--jobs", str(jobs)] if jobs > 1 else []
    with resumable(path, ["halfstep", name, "--out", str(path), "--resume", *aside], console):
        with Live(comparison.experiment, console, comparison.folder.facts()) as live:
            comparison.run(live.update, jobs)
        page = write_report(comparison.folder)
    summary = read_json(comparison.folder.path / "summary.json")
    answer(as_json, lambda: {**summary, "folder": str(path), "report": str(page)}, lambda: _text(summary))
    console.print(f"\nreport: {page}", markup=False, soft_wrap=True)


@contextmanager
def resumable(path: Path, command: Sequence[str], console: Console) -> Iterator[None]:
    """A context: if the run in it is interrupted, or its folder cannot be written, print the command that resumes
    it."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} cannot be written: {error}. Fix that, then resume: {shlex.join(command)}") from error
    except KeyboardInterrupt:
        console.print(
            f"\nstopped; nothing is lost. To continue:\n  {shlex.join(command)}", markup=False, soft_wrap=True
        )
        raise typer.Exit(130) from None


def _asked(ctx: typer.Context) -> dict[str, Any]:
    """The experiment's fields among the command's options. `train` has one number of seeds for all recipes."""
    given = asked_fields(ctx)
    if "baseline_seeds" not in ctx.params:
        given["seeds"] = given["baseline_seeds"] = given.get("seeds", 1)
    return {"task": Experiment.task, **given}


def asked_fields(ctx: typer.Context) -> dict[str, Any]:
    """The experiment's fields given on the command line, plus the default recipes unless a run is resumed."""
    known = {field.name for field in dataclasses.fields(Experiment)}
    given = {name: value for name, value in ctx.params.items() if name in known and value is not None}
    source = ctx.get_parameter_source("recipes")
    given["recipes"] = _parts(given["recipes"])
    if ctx.params["resume"] and (source is None or source.name != "COMMANDLINE"):
        del given["recipes"]
    if rates := given.pop("recipe_lr", None):
        given["recipe_lr"] = _rates(",".join(rates))
    return given


def _parts(text: str) -> tuple[str, ...]:
    """Text split at commas, except the comma inside `fp8-current until 90%, then bf16-mixed`."""
    return tuple(part.strip() for part in re.split(r",(?!\s*then\s)", text) if part.strip())


def _rates(text: str) -> dict[str, float]:
    """Learning rates by recipe, from `unit-fp16=0.02,unit-fp8=0.01`."""
    rates: dict[str, float] = {}
    for part in _parts(text):
        recipe, _, rate = part.rpartition("=")
        try:
            if not recipe or recipe in rates:
                raise ValueError
            rates[recipe] = float(rate)
        except ValueError:
            raise RunError(
                f"--recipe-lr {text}: found {part!r}; expected each recipe once with its learning rate, as in "
                "unit-fp16=0.02"
            ) from None
    return rates


def fresh_folder(name: str) -> Path:
    """A folder that does not exist yet: runs/compare-1, runs/compare-2 ..."""
    number = 1
    while (path := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return path


def _text(summary: dict[str, Any]) -> str:
    """The verdicts as a table: mean losses over a recipe's seeds; mean differences over the seeds shared with fp32."""
    metric = Metric(**summary["metric"]) if summary["metric"] else None
    rates = summary.get("learning_rates")
    rows = []
    for verdict in summary["verdicts"]:
        size = verdict["bytes_per_parameter"]
        rows.append(
            (
                verdict["recipe"],
                _words(verdict),
                str(verdict["seeds"]),
                number(verdict["final_loss"], "{:#.5g}"),
                *([metric.show(verdict["final_metric"])] if metric else []),
                *([f"{rates[verdict['recipe']]:g}"] if rates else []),
                *_differences(verdict),
                number(verdict["ms_per_step"], "{:.0f}"),
                "-" if size is None else f"{sum(size[r] for r in ('weights', 'grads', 'master', 'states')):g}",
                str(verdict["skipped_steps"]),
            )
        )
    interval = "95% interval of that"  # wraps in a narrow terminal
    columns = [
        "seeds",
        "final loss",
        *([metric.name] if metric else []),
        *(["peak lr"] if rates else []),
        "to fp32, same seed",
        interval,
        "ms/step",
        "bytes/param",
        "skipped",
    ]
    table = table_text(["recipe", "verdict", *columns], rows, right=[name for name in columns if name != interval])
    wrap = textwrap.TextWrapper(line_width(120), initial_indent="  ", subsequent_indent="    ")
    explained = [f"{v['recipe']}: {v['explanation']}." for v in summary["verdicts"] if v["explanation"]]
    heading = ["\nWhat was measured of those that did worse, which need not be the cause:"] if explained else []
    return "\n".join([table, *heading, *(wrap.fill(printable(words)) for words in explained)])


def _words(verdict: dict[str, Any]) -> str:
    if verdict["recipe"] == "fp32" and verdict["status"] == MATCHES:
        return "the baseline"
    if verdict["status"] == UNDECIDED:
        return f"{UNDECIDED}: {enough(verdict['interval'], verdict['seeds_to_decide'])}"
    if verdict["status"] != DIVERGED:
        return str(verdict["status"])
    where = f": {verdict['first_nonfinite']}" if verdict["first_nonfinite"] else ""
    return f"diverged at step {verdict['diverged_at']}{where}"


def _differences(verdict: dict[str, Any]) -> tuple[str, str]:
    """The mean difference from fp32 and its interval, as text; empty for fp32 itself."""
    if verdict["recipe"] == "fp32" or verdict["paired_gap"] is None:
        return "-", "-"
    interval = verdict["interval"]
    return f"{verdict['paired_gap']:+.2%}", (
        "-" if interval is None else f"{interval['low']:+.2%} to {interval['high']:+.2%}"
    )


class Live:
    """Redraws a table at most four times a second; without a terminal, prints one line for each validation."""

    def __init__(self, experiment: Experiment, console: Console, facts: Facts) -> None:
        self._experiment, self._facts, self._console = experiment, facts, console
        self._last: dict[tuple[str, int], Progress] = {}
        self._skipped: dict[tuple[str, int], int] = {}
        self._done = 0
        self._seconds = 0.0
        self._started = time.monotonic()
        self._live = RichLive(self._table(), console=console, refresh_per_second=4, auto_refresh=console.is_terminal)

    def __enter__(self) -> "Live":
        if self._console.is_terminal:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.update(self._table())
            self._live.__exit__(kind, error, trace)

    def update(self, progress: "Progress") -> None:
        """Show a step's progress."""
        key = (progress.recipe, progress.seed)
        self._last[key] = progress
        self._skipped[key] = self._skipped.get(key, 0) + bool(progress.row["skipped"])
        self._done += 1
        self._seconds = time.monotonic() - self._started
        if self._console.is_terminal:
            self._live.update(self._table())
        elif self._experiment.due(progress.step, self._experiment.validations):
            self._console.print(
                f"{progress.recipe} seed {progress.seed}: step {progress.step}/{self._experiment.steps}, "
                f"validation loss {progress.validation:#.5g}{self._metric(progress, ', {} {}')}",
                markup=False,
                highlight=False,
            )

    def _metric(self, progress: "Progress", form: str) -> str:
        metric = self._facts.metric
        return (
            "" if metric is None or progress.metric is None else form.format(metric.name, metric.show(progress.metric))
        )

    def _table(self) -> Table:
        metric = self._facts.metric
        named = () if metric is None else (metric.name,)
        numeric = ("step", "loss", "held out", *named, f"{self._facts.unit}/s", "loss scale", "skipped")
        table = Table(box=None, pad_edge=False, caption=self._left(), caption_justify="left")
        table.add_column("run", no_wrap=True)
        for column in numeric:
            table.add_column(column, justify="right", no_wrap=True)
        for recipe, seed in self._experiment.runs():
            progress = self._last.get((recipe, seed))
            name = f"{recipe} · {seed}"
            if progress is None:
                table.add_row(name, "-", style="dim")
                continue
            row = progress.row
            table.add_row(
                name,
                f"{progress.step}/{self._experiment.steps}",
                f"{row['loss']:#.5g}",
                "-" if progress.validation is None else f"{progress.validation:#.5g}",
                *(self._metric(progress, "{1}") for _ in named),
                f"{row['tokens'] / max(row['seconds'], 1e-9):,.0f}",
                f"{row['loss_scale']:g}" if row["loss_scale"] != 1 else "-",
                str(self._skipped[(recipe, seed)]),
            )
        return table

    def _left(self) -> str:
        runs = self._experiment.runs()
        current = next(reversed(self._last), runs[0])
        ahead = len(runs) - 1 - runs.index(current)
        here = self._experiment.steps - (self._last[current].step if self._last else 0)
        left = (here + ahead * self._experiment.steps) * self._seconds / self._done if self._done else None
        return "" if left is None else f"{left // 60:.0f} min {left % 60:02.0f} s left"
