"""Reports of a run folder: summary.json, plots/*.png, and report.html with all of it. No torch."""

import base64
import shlex
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib import rc_context

from halfstep.lab.experiment import Experiment, RunFolder, replace_text, write_json
from halfstep.lab.report import curves, exponents, lost, rows
from halfstep.lab.report.results import BASELINE, SETTINGS, Picture, Results, load, png, signed, times
from halfstep.lab.verdict import DEGRADES, DIVERGED, MATCHES, UNDECIDED, RecipeVerdict, enough, rule


__all__ = ["write_report"]

PICTURES: tuple[Callable[[Results], Picture], ...] = (
    curves.loss_picture,
    curves.metric_picture,
    rows.gap_picture,
    rows.speed_picture,
    rows.memory_picture,
    exponents.scale_picture,
    exponents.exponents_picture,
    lost.zeroed_picture,
    lost.descent_picture,
)
"""The plots in the order of the page."""

_SIGNS = {MATCHES: ("good", "✓"), DEGRADES: ("poor", "▲"), DIVERGED: ("bad", "✕"), UNDECIDED: ("open", "?")}
_OPTIONS = (
    *("task", "data", "steps", "seeds", "baseline_seeds", "margin", "model", "batch", "context"),
    *("lr", "recipe_lr", "optimizer"),
)


def write_report(folder: RunFolder) -> Path:
    """Judge every recipe and write summary.json, plots/*.png and report.html into the run folder; return the page's
    path.

    Runs may be unfinished, diverged or missing: the page says what exists. Writing it twice writes the same bytes.

    Raises:
        RunError: a file of the folder is damaged or was edited.
    """
    results = load(folder)
    write_json(folder.path / "summary.json", results.summary())
    plots = folder.path / "plots"
    plots.mkdir(exist_ok=True)
    with rc_context(SETTINGS):
        shown = [_drawn(make(results), plots) for make in PICTURES]
    page = folder.path / "report.html"
    replace_text(page, _page(results, shown))
    return page


def _drawn(picture: Picture, plots: Path) -> tuple[Picture, str | None]:
    """The picture, written to its file, and its bytes encoded for the page; None if it has no figure."""
    file = plots / f"{picture.name}.png"
    file.unlink(missing_ok=True)
    if picture.figure is None:
        return picture, None
    file.write_bytes(png(picture.figure))
    return picture, base64.b64encode(file.read_bytes()).decode()


def _page(results: Results, pictures: list[tuple[Picture, str | None]]) -> str:
    templates = Environment(
        loader=PackageLoader("halfstep.lab.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    band = results.band
    unit = f" {results.facts.loss_unit}" if results.facts.loss_unit else ""
    data = results.experiment.to_dict()
    data["data"] = data["data"] or "left out: the task's own"
    return templates.get_template("report.html").render(
        name=results.name,
        headline=results.headline(),
        rule=rule(results.facts.metric, results.experiment.margin),
        loss_unit=results.facts.loss_unit,
        metric=results.facts.metric,
        learning_rates=results.learning_rates,
        band=None if band is None else f"{band.mean:#.5g} ± {band.half_width / 2:#.3g}{unit} over {band.seeds} seeds",
        lines=[_line(results, verdict) for verdict in results.verdicts],
        explanations=[(v.recipe, v.explanation) for v in results.verdicts if v.explanation],
        pictures=pictures,
        environment=[(key, _word(value)) for key, value in results.environment.items()],
        experiment=[(key, _word(value)) for key, value in data.items()],
        command=command(results.experiment, results.folder.path, results.facts.defaults),
    )


def _line(results: Results, verdict: RecipeVerdict) -> dict[str, Any]:
    """One recipe's row of the verdict table, as text."""
    kind, sign = _SIGNS.get(verdict.status, ("open", "…"))
    words, details = verdict.status, ""
    if verdict.status == DIVERGED:
        words = f"diverged at step {verdict.diverged_at}"
        first = f"first non-finite tensor: {verdict.first_nonfinite}" if verdict.first_nonfinite else ""
        details = "; ".join(part for part in (first, verdict.reason) if part)
    elif verdict.final_loss is None:
        words = "not finished" if verdict.seeds else "not begun"
    elif verdict.recipe == BASELINE:
        kind, sign, words = "good", "=", "the baseline"
        details = counted(verdict.seeds)
    else:
        details = counted(verdict.seeds) + (
            f"; {enough(verdict.interval, verdict.seeds_to_decide)}" if verdict.status == UNDECIDED else ""
        )
    ratio, size = results.slowdown(verdict), verdict.bytes_per_parameter
    metric, interval, rates = results.facts.metric, verdict.interval, results.learning_rates
    numbers = (
        *((f"{rates[verdict.recipe]:g}",) if rates else ()),
        _number(verdict.final_loss, "{:#.5g}"),
        *(() if metric is None else (metric.show(verdict.final_metric).replace("-", "–"),)),
        "–" if verdict.paired_gap is None or verdict.recipe == BASELINE else signed(verdict.paired_gap),
        "–"
        if interval is None or verdict.recipe == BASELINE
        else f"{signed(interval.low)} to\u00a0{signed(interval.high)}",
        _number(verdict.ms_per_step, "{:.1f}"),
        "–" if ratio is None else f"{times(ratio)}×",
        "–" if size is None else f"{rows.total_bytes(size):.4g}",
        str(verdict.skipped_steps),
    )
    said = {"recipe": verdict.recipe, "sign": sign, "kind": kind, "verdict": words, "details": details}
    return {**said, "numbers": numbers}


def command(experiment: Experiment, path: Path, defaults: Mapping[str, Any] | None = None) -> str | None:
    """The command that resumes this run; None if the command line cannot express the experiment.

    Args:
        defaults: the fields of `Experiment` whose default the task changes.
    """
    usual = {f.name: f.default for f in fields(Experiment)} | {"recipe_lr": {}}
    usual |= {name: tuple(value) if isinstance(value, list) else value for name, value in (defaults or {}).items()}
    changed = {name: value for name in usual if (value := getattr(experiment, name)) != usual[name]}
    recipes = changed.pop("recipes")
    if any(name not in _OPTIONS for name in changed):
        return None
    if "recipe_lr" in changed:
        changed["recipe_lr"] = ",".join(f"{recipe}={rate}" for recipe, rate in experiment.recipe_lr.items())
    words = ["halfstep", "compare", "--recipes", ",".join(recipes)]
    if len(recipes) == 1 and "recipe_lr" not in changed and experiment.baseline_seeds == experiment.seeds:
        words = ["halfstep", "train", "--recipe", recipes[0]]
        changed = {name: value for name, value in changed.items() if name not in ("seeds", "baseline_seeds")}
        changed |= {} if experiment.seeds == 1 else {"seeds": experiment.seeds}
    for name, value in changed.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join([*words, "--out", str(path), "--resume"])


def counted(seeds: int) -> str:
    """A number of seeds in words."""
    return f"{seeds} seed{'s' if seeds != 1 else ''}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _word(value: Any) -> str:
    if value is None:
        return "none"
    return ", ".join(str(item) for item in value) if isinstance(value, list | tuple) else str(value)
