"""Build models: those of a task by name, anybody's as `module:function` or `file.py:function`."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from halfstep.errors import HalfstepError, ModelError, unknown
from halfstep.registry import load_function


def build_model(name: str, known: Mapping[str, Callable[[], nn.Module]], seed: int) -> nn.Module:
    """The model of that name, or what `module:function` or `file.py:function` returns, with the weights of that seed.

    A user's function takes no argument and returns a module that takes and returns what the task's models do. The
    module is looked for in the working folder too.

    Args:
        known: the task's own models, `Task.models()`.

    Raises:
        ModelError: unknown name; a module or function that is not there, fails, or returns something else.
    """
    if name in known:
        return _seeded(known[name], seed)
    if ":" not in name:
        raise ModelError(unknown("model", name, known) + "; for your own give module:function or file.py:function")
    make = load_function(name, ModelError)
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
