"""Unit-scale a task's model on its first batch, for recipes that ask for it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from halfstep.errors import ModelError
from halfstep.lab.task import Batch, Task
from halfstep.nn import UnitReport, unit_scale


def unit_scale_on(model: nn.Module, task: Task, batch: Batch) -> UnitReport:
    """Unit-scale a model by what the task's loss calls it with; the loss's gradient becomes of unit size too.

    Raises:
        ModelError: the loss does more with a model than to call it once; what `halfstep.unit_scale` refuses.
    """
    asked = _Asked()
    try:
        task.loss(asked, batch)
    except _Called as call:
        args, kwargs = call.args[0], call.args[1]
    except AttributeError as error:
        raise _otherwise(task, error) from error
    else:
        raise _otherwise(task, "it never calls the model")

    def loss(output: Any) -> Tensor:
        try:
            return task.loss(_Returning(output), batch)
        except AttributeError as error:
            raise _otherwise(task, error) from error

    return unit_scale(model, *args, loss=loss, **kwargs)


def _otherwise(task: Task, found: object) -> ModelError:
    return ModelError(
        f"{type(task).__name__}: its loss uses its model otherwise than by one call ({found}), and a recipe for "
        "unit-scaled models needs to know what the model is called with. Compare recipes without unit scaling here, or "
        "call halfstep.unit_scale in your own loop"
    )


class _Called(Exception):
    """With the arguments of a call."""


class _Asked(nn.Module):
    """Stands in for a model, to see what it is called with."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Say so."""
        raise _Called(args, kwargs)


class _Returning(nn.Module):
    """Stands in for a model that returned this."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output
        self._calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What it returned, once."""
        self._calls += 1
        if self._calls > 1:
            raise AttributeError("it calls the model more than once")
        return self._output
