"""Planning happens in `prepare` only: training steps call none of the planning functions."""

import importlib
import types

import pytest

from tiny import EVERY, model_for, prepared, train


PLANNING = (
    "preparation", "nn.apply", "nn.arrangement", "nn.codes", "nn.layers", "nn.plan", "nn.paths", "optim.conversion",
    "recipe", "recipe.data", "recipe.operands",
)  # fmt: skip


def planning_called(*args, **kwargs):
    raise AssertionError("a planning function was called after prepare")


def functions():
    """The functions and methods of the planning modules that have no closure."""
    for name in PLANNING:
        module = importlib.import_module(f"halfstep.{name}")
        kinds = [kind for kind in vars(module).values() if isinstance(kind, type)]
        for member in [*vars(module).values(), *(member for kind in kinds for member in vars(kind).values())]:
            function = getattr(member, "fget", getattr(member, "func", member))
            own = isinstance(function, types.FunctionType) and function.__module__ == module.__name__
            if own and not function.__code__.co_freevars:
                yield function


@pytest.mark.quick("fp32", "coat", "nvfp4", "fp8-delayed")
@pytest.mark.parametrize("name", EVERY)
def test_training_steps_call_no_planning_function(name, monkeypatch):
    run = prepared(name, model_for(name))
    for function in functions():
        monkeypatch.setattr(function, "__code__", planning_called.__code__)
    losses = train(*run, steps=3)
    monkeypatch.undo()
    assert losses == train(*prepared(name, model_for(name)), steps=3)
