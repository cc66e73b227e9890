"""Functions that torch.compile leaves out of its graphs, and functions that it traces only within their callers.

And whether a tensor's numbers can be read where they are.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch.nn import Parameter


Function = TypeVar("Function", bound=Callable[..., Any])
_NAMES = "_FrameAction", "_FrameExecStrategy", "set_code_exec_strategy"  # torch's own, and private
_KNOWN = all(hasattr(eval_frame, name) for name in _NAMES)


def untraced(function: Function) -> Function:
    """The function itself, marked: a call of it breaks the graph of a function that is traced.

    What torch.compiler.disable does with a second function around it, which imports the whole compiler at its first
    call: seconds, though nothing is compiled. A torch that has it otherwise takes that.
    """
    if not _KNOWN:
        return torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    _skip(function, "SKIP")
    return function


def inlined(function: Function) -> Function:
    """The function itself, marked: it is traced where its caller is, and no graph begins with it.

    Compiled by itself, for a caller that runs because its own graph broke, it would answer that a graph is traced.
    """
    if _KNOWN:
        _skip(function, "DEFAULT")
    return function


def _skip(function: Callable[..., Any], callees: str) -> None:
    """No graph begins with the function; SKIP: nor with one that it calls."""
    action, strategy, mark = (getattr(eval_frame, name) for name in _NAMES)
    mark(inspect.unwrap(function).__code__, strategy(action.SKIP, getattr(action, callees)))  # beneath torch.no_grad


@inlined
def has_memory(tensor: torch.Tensor, or_fake: bool = False) -> bool:
    """Whether code that runs now can read the tensor's numbers from its memory. It cannot while a graph is traced, nor
    within a transform of torch.func; and what a subclass's memory holds (a DTensor's) is its own.

    Args:
        or_fake: a FakeTensor counts too, if no graph is traced: an account of bytes runs calls with them.
    """
    if torch.compiler.is_compiling():
        return False
    if type(tensor) in (torch.Tensor, Parameter):
        return torch._C._has_storage(tensor)
    return or_fake and hasattr(tensor, "fake_mode")
