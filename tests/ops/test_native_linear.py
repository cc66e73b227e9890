"""When a native linear layer is not prepared: kernels would read out of bounds where torch raises an error."""

import pytest
import torch

from halfstep.errors import RecipeError
from halfstep.ops import native, operand
from halfstep.quant.scaling.delayed import delayed
from halfstep.recipe import get_recipe


SPEC = next(rule.linear for rule in get_recipe("fp8-delayed").rules if rule.linear.rounds)


@pytest.fixture
def dense(monkeypatch):
    """Treat tensors as if they were on a GPU."""
    monkeypatch.setattr(native, "plain", lambda tensor: True)
    monkeypatch.setattr(native, "_decided", lambda *given: given)
    SPEC.known.clear()
    yield
    SPEC.known.clear()


def tensor(*shape, device="meta"):
    return torch.empty(shape, dtype=torch.bfloat16, device=device)


def test_mismatched_sizes_and_devices_take_the_general_path(dense):
    weight = tensor(32, 48)
    assert native.native_layer(SPEC, tensor(16, 48), weight, torch.bfloat16) is not None
    assert native.native_layer(SPEC, tensor(16, 64), weight, torch.bfloat16) is None
    assert native.native_layer(SPEC, tensor(16, 48, device="cpu"), weight, torch.bfloat16) is None


def test_a_scaling_state_on_another_device_is_refused():
    quantizer = SPEC.states["input"]
    with pytest.raises(RecipeError, match=r"is on cpu, its operand is not: move whole modules"):
        operand.factor_or_amax(tensor(4, 4), quantizer.format, delayed, delayed.init("cpu"), True)
