"""Calls that torch.compile leaves out of its graphs: they run kernels, and change what no graph knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch._disable_dynamo  # type: ignore[attr-defined]
def untraced(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """function(*arguments, **named), which breaks the graph of a function that is traced."""
    return function(*arguments, **named)
