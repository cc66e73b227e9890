"""Build models: a task's by name, a user's as `module:function` or `file.py:function`."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from halfstep.errors import HalfstepError, ModelError, unknown
from halfstep.registry import load_function


def build_model(name: str, known: Mapping[str, Callable[[], nn.Module]], seed: int) -> nn.Module:
    """The model of that name, or the result of `module:function` or `file.py:function`, initialised with that seed.

    A user's function takes no argument and returns a module with the inputs and outputs of the task's models. The
    module is also searched for in the working folder.

    Args:
        known: the task's own models, `Task.models()`.

    Raises:
        ModelError: unknown name; a module or function that does not exist, fails, or returns something else.
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
