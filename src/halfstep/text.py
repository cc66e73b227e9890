"""Text of reports: escaped control characters, shortened lists, percentages, Markdown tables; and `grouped`."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar


# ---- text of reports -------------------------------------------------------------------------------------------------

# Control characters move the cursor and change colours; direction marks change the order in which text is shown.
_HOSTILE = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def printable(text: str) -> str:
    r"""The text with control characters and invisible direction marks escaped.

    >>> printable("red \x1b[31m")
    'red \\x1b[31m'
    """
    return _HOSTILE.sub(lambda found: ascii(found[0])[1:-1], text)


def shortened(lines: Sequence[str], most: int = 60) -> str:
    """The lines of a report joined for `print`, at most `most`: if there are more, all but the last of the rest are
    replaced by a line with their number.

    >>> shortened(["a", "b", "c", "d"], most=3)
    'a\\n(2 more lines)\\nd'
    """
    lines = "\n".join(lines).split("\n")
    more = len(lines) - most + 1
    return "\n".join(lines if more < 2 else [*lines[: most - 2], f"({more} more lines)", lines[-1]])


def some(names: Sequence[str], shown: int = 3) -> str:
    """The first names of a list, and the number of further ones.

    >>> some(["a", "b", "c"], 1)
    'a and 2 more'
    """
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def percent(share: float) -> str:
    """A share in percent, not rounded to 0% or 100% unless exact.

    >>> percent(0.9999999), percent(0.00001), percent(0.5)
    ('>99.99%', '<0.01%', '50%')
    """
    if share in (0, 1):
        return f"{share:.0%}"
    return "<0.01%" if share < 0.0001 else ">99.99%" if share > 0.9999 else f"{100 * share:.3g}%"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table from cells in Markdown.

    >>> markdown_table(["a", "b"], [["1", "2"]])
    ['| a | b |', '| --- | --- |', '| 1 | 2 |']
    """
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def holding(said: Mapping[str, object]) -> list[str]:
    """The keys whose value is true, in order: the lines of a report that apply.

    >>> holding({"in codes: 2 layers": 2, "tokenizer: ": ""})
    ['in codes: 2 layers']
    """
    return [line for line, holds in said.items() if holds]


# ---- grouping by keys ------------------------------------------------------------------------------------------------

Key = TypeVar("Key")
Value = TypeVar("Value")


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """The values by their keys, both in the order of the pairs.

    >>> grouped((len(word), word) for word in ("a", "bc", "d"))
    {1: ['a', 'd'], 2: ['bc']}
    """
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found
