"""How the command line speaks: errors on standard error, tables on standard output."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any


def fail(message: str) -> None:
    """Print an error, as text: nothing in it is taken for markup."""
    from rich.console import Console
    from rich.markup import escape

    Console(stderr=True).print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)


def show_json(data: Any) -> None:
    """Print data as JSON, for machines."""
    print(json.dumps(data, indent=2))


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[str] = ()) -> None:
    """Print a table; the columns named in `right` are aligned to the right."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    numeric = set(right)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            column, justify="right" if column in numeric else "left", overflow="fold", no_wrap=column == columns[0]
        )
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    Console().print(table, highlight=False)
