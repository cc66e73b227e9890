"""`halfstep site`: the page of tools for a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfstep.cli.terminal import write_text
from halfstep.errors import KnowledgeBaseError


def site(
    output: Annotated[Path, typer.Argument(help="The file to write: index.html. One that is there is written over.")],
    overlay: Annotated[
        Path | None,
        typer.Option("--overlay", help="A folder with your own entries of the knowledge base, added to the package's."),
    ] = None,
    space: Annotated[
        bool,
        typer.Option("--space", help="Write README.md beside it: with both a static Space of Hugging Face's is made."),
    ] = False,
) -> None:
    """Write one page that needs no network: the knowledge base, number formats, and the memory of training."""
    from halfstep.kb import load
    from halfstep.site.page import space as card, to_html

    readme = output.with_name("README.md")
    if space and readme.exists():
        raise KnowledgeBaseError(f"{str(readme)!r} is there already; --space writes that file: name another folder")
    texts = {output: to_html(load(overlay))}
    if space:
        texts[readme] = card(file=output.name)
    for path, text in texts.items():
        write_text(path, text, KnowledgeBaseError)
        typer.echo(f"wrote {path}: {len(text.encode()) / 1000:.0f} kB")
