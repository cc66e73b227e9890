"""Every error that halfstep raises on purpose, in one tree; and functions for the text of reports.

These make text from untrusted files safe to print, write numbers and names, and group values by key. The errors:

    HalfstepError
    ├── FormatError         (ValueError)    a number format that is unknown or cannot do what was asked
    ├── QuantizationError   (ValueError)    a tensor that cannot be rounded as asked
    ├── RecipeError         (ValueError)    a recipe that is unknown, inconsistent, or fits no part of the model
    ├── ModelError          (ValueError)    a model that cannot be trained as given
    ├── OptimizerError      (ValueError)    an optimizer class or option that has no exact counterpart here
    ├── LossScaleError      (RuntimeError)  a loss scale used out of order, or driven to its floor
    ├── DataError           (ValueError)    training data that is missing, too short, binary or not finite
    ├── RunError            (ValueError)    a run folder that cannot be used as asked
    ├── CheckpointError     (ValueError)    a checkpoint that is truncated, edited, or of something else
    ├── AccountError        (ValueError)    an account of memory that cannot be made as asked
    ├── KnowledgeBaseError  (ValueError)    a knowledge base entry that breaks a rule, or an unclear question
    ├── LayoutError         (ValueError)    weights that a file's layout does not hold, or a layout that is unknown
    ├── LawError            (ValueError)    a scaling law that cannot be evaluated or fitted as asked
    ├── ClaimError          (ValueError)    a claim or check that is unknown, or a row that cannot be run as asked
    └── MissingLibraryError (ImportError)   a library of an extra that is not installed

Each message says what was found, what was expected, and what to do next.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TypeVar


# ---- error classes ---------------------------------------------------------------------------------------------------


class HalfstepError(Exception):
    """The root: `except HalfstepError` catches whatever halfstep raises on purpose."""


class FormatError(HalfstepError, ValueError):
    """A number format is unknown, or cannot do what was asked of it."""


class QuantizationError(HalfstepError, ValueError):
    """A tensor cannot be rounded as asked."""


class RecipeError(HalfstepError, ValueError):
    """A recipe is unknown, inconsistent, or fits no part of the model."""


class ModelError(HalfstepError, ValueError):
    """A model cannot be trained as given."""


class OptimizerError(HalfstepError, ValueError):
    """An optimizer class or one of its options has no exact counterpart here."""


class LossScaleError(HalfstepError, RuntimeError):
    """A loss scale was used out of order, or was driven to its floor."""


class DataError(HalfstepError, ValueError):
    """Training data is missing, too short, binary, or not finite."""


class RunError(HalfstepError, ValueError):
    """A run folder cannot be used as asked."""


class CheckpointError(HalfstepError, ValueError):
    """A checkpoint is truncated, was edited, or belongs to something else."""


class AccountError(HalfstepError, ValueError):
    """An account of memory, or of the cost of products, cannot be made as asked."""


class KnowledgeBaseError(HalfstepError, ValueError):
    """An entry of the knowledge base breaks a rule, or a question to it cannot be answered as asked."""


class LayoutError(HalfstepError, ValueError):
    """Weights have no place in a file's layout as they are, or the layout is unknown."""


class LawError(HalfstepError, ValueError):
    """A scaling law cannot be evaluated, or fitted, as asked."""


class ClaimError(HalfstepError, ValueError):
    """A claim or its check is unknown, or a row of the ledger cannot be run as asked."""


class MissingLibraryError(HalfstepError, ImportError):
    """A library that an extra brings is not installed."""

    @classmethod
    @contextmanager
    def of(cls, extra: str) -> Iterator[None]:
        """Within it, an import that fails says which extra of halfstep brings what it looked for."""
        try:
            yield
        except ModuleNotFoundError as error:
            brings = f"it comes with: pip install 'halfstep[{extra}]'"
            raise cls(f"{error.name} is not installed; {brings}", name=error.name) from None


# ---- unknown names ---------------------------------------------------------------------------------------------------


def one_of(kind: str, name: str, known: Collection[str], error: type[HalfstepError]) -> str:
    """The name, one of those known.

    Raises:
        error: it is none of them; the nearest are shown.
    """
    if name not in known:
        raise error(unknown(kind, name, known))
    return name


def unknown(kind: str, name: object, known: Iterable[str], meant: str | None = None) -> str:
    """The message for a name that is not in a family: the nearest names first, then all of them.

    Args:
        meant: the name that people who write this one usually mean, which then comes before the nearest.

    >>> unknown("format", "bf61", ["bf16", "fp16"])
    "unknown format 'bf61'; nearest: bf16, fp16. Known: bf16, fp16"
    """
    names = sorted(known)
    near = [near for near in get_close_matches(str(name), names, n=3, cutoff=0.5) if near != meant]
    near = [meant, *near[:2]] if meant else near
    hint = f"; nearest: {', '.join(near)}" if near else ""
    return f"unknown {kind} {name!r}{hint}. Known: {', '.join(names)}"


# ---- text of reports -------------------------------------------------------------------------------------------------

# Control characters move the cursor and change colours; direction marks make text read otherwise than it is.
_HOSTILE = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def printable(text: str) -> str:
    r"""Text with control characters and invisible direction marks written out.

    >>> printable("red \x1b[31m")
    'red \\x1b[31m'
    """
    return _HOSTILE.sub(lambda found: ascii(found[0])[1:-1], text)


def shortened(lines: Sequence[str], most: int = 60) -> str:
    """Lines of a report joined for `print`, at most `most` of them: in the place of the others, before the last, stands
    how many they are.

    >>> shortened(["a", "b", "c", "d"], most=3)
    'a\\n(2 more lines)\\nd'
    """
    lines = "\n".join(lines).split("\n")
    more = len(lines) - most + 1
    return "\n".join(lines if more < 2 else [*lines[: most - 2], f"({more} more lines)", lines[-1]])


def some(names: Sequence[str], shown: int = 3) -> str:
    """The first names of many, and how many more there are.

    >>> some(["a", "b", "c"], 1)
    'a and 2 more'
    """
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def percent(share: float) -> str:
    """A share in percent, never rounded to none or all.

    >>> percent(0.9999999), percent(0.00001), percent(0.5)
    ('>99.99%', '<0.01%', '50%')
    """
    if share in (0, 1):
        return f"{share:.0%}"
    return "<0.01%" if share < 0.0001 else ">99.99%" if share > 0.9999 else f"{100 * share:.3g}%"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown, of cells that are Markdown already.

    >>> markdown_table(["a", "b"], [["1", "2"]])
    ['| a | b |', '| --- | --- |', '| 1 | 2 |']
    """
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def holding(said: Mapping[str, object]) -> list[str]:
    """The lines of a report that hold: those whose value is true, in their order.

    >>> holding({"in codes: 2 layers": 2, "tokenizer: ": ""})
    ['in codes: 2 layers']
    """
    return [line for line, holds in said.items() if holds]


# ---- grouping by keys ------------------------------------------------------------------------------------------------

Key = TypeVar("Key")
Value = TypeVar("Value")


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """The values by their keys, both in the order in which they come.

    >>> grouped((len(word), word) for word in ("a", "bc", "d"))
    {1: ['a', 'd'], 2: ['bc']}
    """
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found
