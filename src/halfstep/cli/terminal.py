"""Output of the command line: errors and progress on standard error, tables on standard output."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from halfstep.errors import HalfstepError
from halfstep.text import printable


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_WIDEST = 10_000


def fail(message: str) -> None:
    """Print an error as plain text: markup and control characters in it have no effect."""
    Console(stderr=True).print(f"[bold red]error:[/] {escape(printable(message))}", highlight=False, soft_wrap=True)


def write_text(path: Path, text: str, failed: type[HalfstepError]) -> None:
    """Write text to a file that the user named.

    Raises:
        HalfstepError: of the class `failed`, if it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise failed(f"cannot write {str(path)!r}: {error.strerror}; name a file in a folder that exists") from None


def save_figure(figure: Any, path: str, stem: str, failed: type[HalfstepError]) -> None:
    """Write a matplotlib figure to a file, in the format of its ending; `stem` is an example of a file's name.

    Raises:
        HalfstepError: of the class `failed`, if matplotlib does not know the ending, or the file cannot be written.
    """
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise failed(f"cannot write {path!r} ({error}); give a file such as {stem}.png or {stem}.svg") from error


def number(value: float | None, form: str) -> str:
    """A value formatted by `form`; a dash for None."""
    return "-" if value is None else form.format(value)


def answer(as_json: bool, data: Callable[[], Any], text: Callable[[], str]) -> None:
    """Print a command's result: its data as JSON if `as_json`, else its text."""
    typer.echo(json.dumps(data(), indent=2) if as_json else text())


def alarm(text: str) -> str:
    """Text highlighted on a terminal."""
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(text, style="bold yellow", end="")
    return captured.get()


def line_width(most: int) -> int:
    """The line length for text: at most `most`, on a terminal at most its width, but at least 40."""
    console = Console()
    return max(40, min(most, console.width)) if console.is_terminal else most


def table_text(columns: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[str] = ()) -> str:
    """A table as text. Columns in `right` are numbers: right-aligned and never wrapped.

    On a terminal other cells except each row's first wrap to fit; elsewhere lines are as long as they need.
    """
    numeric = set(right)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        whole = column in numeric
        table.add_column(
            column.replace(" ", "\n") if whole else column,
            justify="right" if whole else "left",
            overflow="fold",
            no_wrap=whole or column == columns[0],
        )
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    console = Console()
    need = Measurement.get(console, console.options.update(max_width=_WIDEST), table)
    console.width = max(console.width, need.minimum if console.is_terminal else need.maximum)
    with console.capture() as captured:
        console.print(table, highlight=False)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


@contextmanager
def reading(total: int) -> Iterator[Callable[[int], None] | None]:
    """A progress bar of bytes read, of `total`, on standard error if that is a terminal; call the result with a piece's
    bytes."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress("reading", *columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=total)
        yield lambda count: bar.advance(task, count)


@contextmanager
def stages(first: str) -> Iterator[Callable[[str], None]]:
    """Shows the current stage on a terminal, nothing elsewhere. Call the result with the next stage's name."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage: None
        return
    with console.status(f"{first} ...") as status:
        yield lambda stage: status.update(f"{stage} ...")
