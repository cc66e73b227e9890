"""Build models: those of a task by name, anybody's as `module:function`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

import torch
from torch import nn

from halfstep.errors import HalfstepError, ModelError, unknown


def build_model(name: str, known: Mapping[str, Callable[[], nn.Module]], seed: int) -> nn.Module:
    """The model of that name, or what `module:function` returns, with the first weights that `seed` gives.

    A user's function takes no argument and returns a module that takes and returns what the task's models do. The
    module is looked for in the working folder too.

    Args:
        known: the task's own models, `Task.models()`.

    Raises:
        ModelError: unknown name; a module or function that is not there, fails, or returns something else.
    """
    if name in known:
        return _seeded(known[name], seed)
    module_name, separator, function_name = name.partition(":")
    if not separator:
        raise ModelError(unknown("model", name, known) + "; for your own give module:function")
    make = _function(module_name, function_name)
    try:
        model = _seeded(make, seed)
    except HalfstepError:
        raise
    except Exception as error:
        raise ModelError(f"{name}: the function raised {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name}: the function returned {type(model).__name__}; expected a torch.nn.Module")
    if not any(True for _ in model.parameters()):
        raise ModelError(f"{name}: the model has no parameters; there is nothing to train")
    return model


def _seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def _function(module_name: str, function_name: str) -> Callable[[], nn.Module]:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = import_module(module_name)
    except Exception as error:
        raise ModelError(f"{module_name}: cannot be imported ({type(error).__name__}: {error})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ModelError(unknown(f"function of {module_name}", function_name, functions))
    return function  # type: ignore[no-any-return]
