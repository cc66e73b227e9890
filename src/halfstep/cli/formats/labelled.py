"""Lines of labelled text, as wide as the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable


def width() -> int:
    """Columns of the terminal."""
    return shutil.get_terminal_size().columns


def labelled(rows: Iterable[tuple[str, str]], indent: int = 0) -> str:
    """Lines `label  text`; a text that is too long goes on below itself."""
    pairs = list(rows)
    edge = indent + max((len(label) for label, _ in pairs), default=0) + 2
    wrap = textwrap.TextWrapper(max(width(), edge + 24), subsequent_indent=" " * edge, break_long_words=False)
    lines = []
    for label, text in pairs:
        wrap.initial_indent = f"{' ' * indent}{label}".ljust(edge)
        lines.append(wrap.fill(text) if len(text) + edge > wrap.width else wrap.initial_indent + text)
    return "\n".join(line.rstrip().replace("\xa0", " ") for line in lines)
