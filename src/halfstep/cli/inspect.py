"""`halfstep inspect`: which types a checkpoint's values went through, read from their bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.cli.terminal import show_json


if TYPE_CHECKING:
    from halfstep.checkpoint import Checkpoint
    from halfstep.checkpoint.verdict import Known


def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint: a file, or a folder such as Hugging Face's.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Only look for the last bit in use, at the speed of memory; count nothing.")
    ] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="Print a line for every tensor, too.")] = False,
    overlay: Annotated[
        Path | None,
        typer.Option("--overlay", help="A folder with your own knowledge base.", show_default="~/.config/halfstep/kb"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Which precision is this checkpoint, really? Reads the bits of every value, once, in bounded memory."""
    from halfstep.checkpoint import inspect as look
    from halfstep.checkpoint import open_checkpoint
    from halfstep.cli.inspect_text import show

    checkpoint = open_checkpoint(path)
    try:
        with _progress(checkpoint) as progress:
            report = look(checkpoint, quick=quick, known=_known(path, overlay), progress=progress)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if as_json:
        show_json(report.as_data())
    else:
        show(report, tensors)


@contextmanager
def _progress(checkpoint: Checkpoint) -> Iterator[Callable[[int], None] | None]:
    """A bar of the bytes read, on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress("reading", *columns, console=console, transient=True) as bar:
        total = sum({tensor.storage: tensor.nbytes for tensor in checkpoint.tensors}.values())
        task = bar.add_task("reading", total=total)
        yield lambda count: bar.advance(task, count)


def _known(path: Path, overlay: Path | None) -> Known | None:
    """What the knowledge base says of the model that the folder names as its base; None where it says nothing."""
    from halfstep.checkpoint.verdict import Known
    from halfstep.kb import DEFAULT_OVERLAY, load
    from halfstep.kb.resolve import find

    folder = path if path.is_dir() else path.parent
    answer = find(load(overlay or DEFAULT_OVERLAY), str(folder))
    if not answer.known:
        return None
    ids = ", ".join(entry.id for entry in answer.entries)
    words = "; ".join(entry.train_precision for entry in answer.entries)
    computes = dict.fromkeys(kind for entry in answer.entries for kind in entry.computes)
    source = f"the knowledge base ({answer.tier}, {answer.how}: {ids})"
    return Known(source, tuple(computes), f"trained in {words}")
