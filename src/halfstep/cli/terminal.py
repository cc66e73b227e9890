"""How the command line speaks: errors and progress on standard error, tables on standard output."""

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
    """Print an error, as text: nothing in it is taken for markup, or moves the cursor."""
    Console(stderr=True).print(f"[bold red]error:[/] {escape(printable(message))}", highlight=False, soft_wrap=True)


def write_text(path: Path, text: str, failed: type[HalfstepError]) -> None:
    """Write a file that the user named.

    Raises:
        HalfstepError: of the class `failed`, where it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise failed(f"cannot write {str(path)!r}: {error.strerror}; name a file in a folder that exists") from None


def save_figure(figure: Any, path: str, stem: str, failed: type[HalfstepError]) -> None:
    """Write a figure of matplotlib's to a file, as its ending says; `stem` is what such a file is called.

    Raises:
        HalfstepError: of the class `failed`, where matplotlib knows no such ending, or the file cannot be written.
    """
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise failed(f"cannot write {path!r} ({error}); give a file such as {stem}.png or {stem}.svg") from error


def number(value: float | None, form: str) -> str:
    """A number as `form` has it; a dash where there is none."""
    return "-" if value is None else form.format(value)


def answer(as_json: bool, data: Callable[[], Any], text: Callable[[], str]) -> None:
    """Print what a command found: its data as JSON where that was asked for, else its text."""
    typer.echo(json.dumps(data(), indent=2) if as_json else text())


def alarm(text: str) -> str:
    """A line that stands out on a terminal."""
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(text, style="bold yellow", end="")
    return captured.get()


def line_width(most: int) -> int:
    """How long lines of text may be: on a terminal no longer than it is wide, though of 40 characters at least."""
    console = Console()
    return max(40, min(most, console.width)) if console.is_terminal else most


def table_text(columns: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[str] = ()) -> str:
    """A table as text; the columns named in `right` are numbers: aligned to the right, and never broken.

    On a terminal other cells are folded to fit, but the first of a row; elsewhere lines are as long as they need.
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
    """A bar of the bytes read, of `total`, on standard error where that is a terminal; call it with a piece's bytes."""
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
    """Shows what is being done, on a terminal; elsewhere nothing. Call it with what is done next."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage: None
        return
    with console.status(f"{first} ...") as status:
        yield lambda stage: status.update(f"{stage} ...")
