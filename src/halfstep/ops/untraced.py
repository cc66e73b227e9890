"""Functions that torch.compile leaves out of its graphs: they run kernels, and change what no graph knows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame


Function = TypeVar("Function", bound=Callable[..., Any])
_NAMES = "_FrameAction", "_FrameExecStrategy", "set_code_exec_strategy"  # torch's own, and private


def untraced(function: Function) -> Function:
    """The function itself, marked: a call of it breaks the graph of a function that is traced.

    What torch.compiler.disable does with a second function around it, which imports the whole compiler at its first
    call: seconds, though nothing is compiled. A torch that has it otherwise takes that.
    """
    if not all(hasattr(eval_frame, name) for name in _NAMES):
        return torch.compiler.disable(function)  # type: ignore[no-any-return,no-untyped-call]
    action, strategy, mark = (getattr(eval_frame, name) for name in _NAMES)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    mark(inspect.unwrap(function).__code__, strategy(action.SKIP, action.SKIP))  # beneath torch.no_grad
    return function
