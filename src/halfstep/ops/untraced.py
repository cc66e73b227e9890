"""Functions that torch.compile leaves out of its graphs: they run kernels, and change what no graph knows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame


Function = TypeVar("Function", bound=Callable[..., Any])
_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def untraced(function: Function) -> Function:
    """The function itself, marked: a call of it breaks the graph of a function that is traced.

    What torch.compiler.disable does with a second function around it, which imports the whole compiler at its first
    call: seconds, though nothing is compiled.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    eval_frame.set_code_exec_strategy(inspect.unwrap(function).__code__, _SKIP)  # beneath torch.no_grad
    return function
