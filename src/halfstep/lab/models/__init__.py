"""The models that halfstep trains: its own by name, anybody's as `module:function`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch
from torch import nn

from halfstep.errors import HalfstepError, ModelError, unknown
from halfstep.lab.data import VOCABULARY
from halfstep.lab.models.gpt import GPT


_SIZES = {"gpt-tiny": (2, 128, 4), "gpt-small": (6, 384, 6)}  # layers, width, heads


def build_model(name: str, context: int, seed: int) -> nn.Module:
    """The model of that name, or what `module:function` returns, with the first weights that `seed` gives.

    A user's function takes no argument and returns a module from tokens (batch, time) int64 to logits
    (batch, time, 256), bare or as `.logits`. The module is looked for in the working folder too.

    Raises:
        ModelError: unknown name; a module or function that is not there, fails, or returns something else.
    """
    if name in _SIZES:
        layers, width, heads = _SIZES[name]
        return _seeded(lambda: GPT(VOCABULARY, context, layers, width, heads), seed)
    module_name, separator, function_name = name.partition(":")
    if not separator:
        raise ModelError(unknown("model", name, _SIZES) + "; for your own give module:function")
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
