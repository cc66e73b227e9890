"""Decorators for functions that break graphs of torch.compile, or are traced only inside their callers.

And whether code can read a tensor's storage.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch.nn import Parameter


Function = TypeVar("Function", bound=Callable[..., Any])
_NAMES = "_FrameAction", "_FrameExecStrategy", "set_code_exec_strategy"  # private names of torch
_KNOWN = all(hasattr(eval_frame, name) for name in _NAMES)


def untraced(function: Function) -> Function:
    """The function itself, marked so that a call of it breaks the graph of a traced function.

    `torch.compiler.disable` does this with a wrapper, which imports the whole compiler at its first call: seconds, even
    if nothing is compiled. It is used where this torch lacks the private functions needed here.
    """
    if not _KNOWN:
        return torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    _skip(function, "SKIP")
    return function


def inlined(function: Function) -> Function:
    """The function itself, marked so that it is traced inside its caller, but never begins a graph of its own.

    Compiled by itself, for a caller whose own graph broke, it would wrongly answer that it is being traced.
    """
    if _KNOWN:
        _skip(function, "DEFAULT")
    return function


def _skip(function: Callable[..., Any], callees: str) -> None:
    """Let no graph begin with the function; with SKIP, nor with functions that it calls."""
    action, strategy, mark = (getattr(eval_frame, name) for name in _NAMES)
    mark(inspect.unwrap(function).__code__, strategy(action.SKIP, getattr(action, callees)))  # inside torch.no_grad


@inlined
def has_memory(tensor: torch.Tensor, or_fake: bool = False) -> bool:
    """Whether code that runs now can read the tensor's storage. Not while a graph is traced, not within a transform of
    torch.func, and not for a subclass (a DTensor), whose storage has a meaning of its own.

    Args:
        or_fake: True for a FakeTensor too, if no graph is traced: memory accounting runs calls with them.
    """
    if torch.compiler.is_compiling():
        return False
    if type(tensor) in (torch.Tensor, Parameter):
        return torch._C._has_storage(tensor)
    return or_fake and hasattr(tensor, "fake_mode")
