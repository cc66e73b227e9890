"""All errors that halfstep raises on purpose, with one base class.

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

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class HalfstepError(Exception):
    """The base class of all errors that halfstep raises on purpose."""


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
    """An account of memory, or of the cost of matmuls, cannot be made as asked."""


class KnowledgeBaseError(HalfstepError, ValueError):
    """An entry of the knowledge base breaks a rule, or a question to it cannot be answered as asked."""


class LayoutError(HalfstepError, ValueError):
    """A file's layout is unknown, or cannot store the weights as they are."""


class LawError(HalfstepError, ValueError):
    """A scaling law cannot be evaluated, or fitted, as asked."""


class ClaimError(HalfstepError, ValueError):
    """A claim or its check is unknown, or a row of the ledger cannot be run as asked."""


class MissingLibraryError(HalfstepError, ImportError):
    """A library that an extra brings is not installed."""

    @classmethod
    @contextmanager
    def of(cls, extra: str) -> Iterator[None]:
        """A context in which a failed import raises an error that names the extra of halfstep to install."""
        try:
            yield
        except ModuleNotFoundError as error:
            brings = f"it comes with: pip install 'halfstep[{extra}]'"
            raise cls(f"{error.name} is not installed; {brings}", name=error.name) from None


def one_of(kind: str, name: str, known: Collection[str], error: type[HalfstepError]) -> str:
    """The name, checked to be one of `known`.

    Raises:
        error: it is not; the message has the nearest ones.
    """
    if name not in known:
        raise error(unknown(kind, name, known))
    return name


def unknown(kind: str, name: object, known: Iterable[str], meant: str | None = None) -> str:
    """The message for a name that is not in a family: the nearest names first, then all of them.

    Args:
        meant: the name that is usually meant by this one, to be shown first.

    >>> unknown("format", "bf61", ["bf16", "fp16"])
    "unknown format 'bf61'; nearest: bf16, fp16. Known: bf16, fp16"
    """
    names = sorted(known)
    near = [near for near in get_close_matches(str(name), names, n=3, cutoff=0.5) if near != meant]
    near = [meant, *near[:2]] if meant else near
    hint = f"; nearest: {', '.join(near)}" if near else ""
    return f"unknown {kind} {name!r}{hint}. Known: {', '.join(names)}"
