"""`halfstep inspect`: which types a checkpoint's values went through, read from their bits."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from halfstep.cli.terminal import answer, reading
from halfstep.errors import CheckpointError, KnowledgeBaseError
from halfstep.printable import printable


if TYPE_CHECKING:
    from halfstep.inspection.report import Known


def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint: a file, or a folder such as Hugging Face's.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Only look for the last bit in use, at the speed of memory; count nothing.")
    ] = False,
    what_if: Annotated[
        str | None,
        typer.Option(
            "--what-if", metavar="FORMATS", help="Also try casts of all matrices: all, or some as in fp16,mxfp8,nf4."
        ),
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="FORMAT", help="Write the checkpoint cast: with --out.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The safetensors file that --to writes; a new one.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write the report as an HTML page, too.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write histograms of exponents, too: a PNG file.")] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="Print a line for every tensor, too.")] = False,
    overlay: Annotated[
        Path | None,
        typer.Option("--overlay", help="A folder with your own knowledge base.", show_default="~/.config/halfstep/kb"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Which precision is this checkpoint, really? Reads the bits of every value, once, in bounded memory."""
    from halfstep.bits.what_if import candidates
    from halfstep.cli.inspect_text import text_of
    from halfstep.inspection import inspect as look, open_checkpoint
    from halfstep.inspection.write import check_target, write

    if (to is None) != (out is None):
        raise CheckpointError("--to FORMAT and --out FILE belong together; one of them is missing")
    if quick and (what_if or to or html or plot):
        raise CheckpointError("--quick counts nothing, so it has no --what-if, --to, --html or --plot; leave it out")
    if to is not None and out is not None:
        check_target(to, out)
    casts = [name.strip() for name in what_if.split(",") if name.strip()] if what_if is not None else []
    if what_if is not None and not casts:
        raise CheckpointError("--what-if names no format; give some, as in --what-if fp16,mxfp8, or all")
    candidates(casts)
    for given, endings in ((html, (".html", ".htm")), (plot, (".png",))):
        if given is not None:
            _check(given, endings)
    checkpoint, result = open_checkpoint(path), None
    try:
        total = sum({tensor.storage: tensor.nbytes for tensor in checkpoint.tensors}.values())
        with reading(total * (1 + bool(casts) + (to is not None))) as progress:
            report = look(checkpoint, quick=quick, casts=casts, known=_known(path, overlay), progress=progress)
            if to is not None and out is not None:
                result = write(checkpoint, report.tensors, to, out, progress)
        if html is not None:
            from halfstep.inspection.page import to_html

            _save(html, to_html(report).encode())
        if plot is not None:
            from halfstep.inspection.page import png

            _save(plot, png(report))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    more = {"written": {**asdict(result), "path": str(result.path)}} if result else {}
    answer(as_json, lambda: report.to_dict() | more, lambda: text_of(report, tensors, result))


def _check(path: Path, endings: tuple[str, ...]) -> None:
    """Refuse, before anything is read, what `_save` could not write, or a file to replace that may not be a report."""
    if path.suffix.lower() not in endings:
        raise CheckpointError(f"{str(path)!r} given for a report; expected a name that ends in {endings[0]}")
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        found = "is a folder" if path.is_dir() else "lies in no folder that can be written to"
        raise CheckpointError(f"{str(path)!r} {found}; name a file in a folder that exists")


def _save(path: Path, data: bytes) -> None:
    """Write a file that appears whole or not at all; one of that name is replaced."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be written: {error.strerror}; name a file that can be") from None
    finally:
        partial.unlink(missing_ok=True)


def _known(path: Path, overlay: Path | None) -> Known | None:
    """What the knowledge base says of the model that the folder names as its base; None where it says nothing."""
    from halfstep.inspection.report import Known
    from halfstep.kb import DEFAULT_OVERLAY, load
    from halfstep.kb.resolve import in_folder

    folder = path if path.is_dir() else path.parent
    known = load(overlay or DEFAULT_OVERLAY)
    try:
        answer = in_folder(known, str(folder))
    except KnowledgeBaseError as error:
        if path.is_dir():
            raise
        Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(
            printable(f"what the folder says of its model was not read: {error}")
        )
        return None
    if not answer.known:
        return None
    ids = ", ".join(entry.id for entry in answer.entries)
    words = "; ".join(entry.train_precision for entry in answer.entries)
    computes = dict.fromkeys(kind for entry in answer.entries for kind in entry.computes)
    source = f"the knowledge base ({answer.tier}, {answer.how}: {ids})"
    return Known(source, tuple(computes), f"trained in {words}")
