"""What a native layer is not decided for: kernels would read beyond a tensor where torch has an error to give."""

import pytest
import torch

from halfstep.errors import RecipeError
from halfstep.ops import native, operand
from halfstep.quant.scaling.delayed import delayed
from halfstep.recipe import get_recipe


SPEC = next(rule.linear for rule in get_recipe("fp8-delayed").rules if rule.linear.rounds)


@pytest.fixture
def dense(monkeypatch):
    """Tensors here as a GPU's."""
    monkeypatch.setattr(native, "plain", lambda tensor: True)
    monkeypatch.setattr(native, "_decided", lambda *given: given)
    SPEC.known.clear()
    yield
    SPEC.known.clear()


def tensor(*shape, device="meta"):
    return torch.empty(shape, dtype=torch.bfloat16, device=device)


def test_sizes_and_devices_that_do_not_fit_take_the_usual_path(dense):
    weight = tensor(32, 48)
    assert native.native_layer(SPEC, tensor(16, 48), weight, torch.bfloat16) is not None
    assert native.native_layer(SPEC, tensor(16, 64), weight, torch.bfloat16) is None
    assert native.native_layer(SPEC, tensor(16, 48, device="cpu"), weight, torch.bfloat16) is None


def test_a_state_that_did_not_move_with_its_layer_is_an_error():
    quantizer = SPEC.states["input"]
    with pytest.raises(RecipeError, match=r"is on cpu, its operand is not: move whole modules"):
        operand.factor_or_amax(tensor(4, 4), quantizer.format, delayed, delayed.init("cpu"), True)
