"""The live display of a comparison: one line a run."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live as RichLive
from rich.table import Table

from halfstep.lab.experiment import Experiment
from halfstep.lab.facts import Facts


if TYPE_CHECKING:
    from halfstep.lab.train import Progress


class Live:
    """Redraws a table at most four times a second; where there is no terminal, prints a line for each validation."""

    def __init__(self, experiment: Experiment, console: Console, facts: Facts) -> None:
        self._experiment = experiment
        self._facts = facts
        self._console = console
        self._last: dict[tuple[str, int], Progress] = {}
        self._skipped: dict[tuple[str, int], int] = {}
        self._done = 0
        self._seconds = 0.0
        self._started = time.monotonic()
        self._live = RichLive(self._table(), console=console, refresh_per_second=4, auto_refresh=console.is_terminal)

    def __enter__(self) -> Live:
        if self._console.is_terminal:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.update(self._table())
            self._live.__exit__(kind, error, trace)

    def update(self, progress: Progress) -> None:
        """Show a step."""
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

    def _metric(self, progress: Progress, form: str) -> str:
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
