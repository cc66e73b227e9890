"""The words and the picture of docs/which_optimizer.md, which follow from the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any


Figures = dict[str, Any]


def page(data: Figures) -> str:
    """docs/which_optimizer.md."""
    return ""


def plot(data: Figures, file: Path) -> None:
    """Bytes a parameter against the loss beside fp32's, with the time of a step as colour."""
