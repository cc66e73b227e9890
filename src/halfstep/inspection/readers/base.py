"""What a reader is."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from halfstep.inspection.stored import Checkpoint


@dataclass(frozen=True)
class Reader:
    """A kind of checkpoint: `recognises` looks at a path's first bytes or files; `open` reads its headers."""

    name: str
    recognises: Callable[[Path], bool]
    open: Callable[[Path], Checkpoint]
