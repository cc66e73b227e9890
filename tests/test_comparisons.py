"""The tests' own comparison functions distinguish what they should, and nothing else."""

import pytest
import torch

from oracles.numbers import identical, same_bits
from tiny import assert_same


ONE = torch.tensor([1.0, -0.0, torch.nan])
OTHERS = {
    "a last bit": torch.tensor([1.0 + 2.0**-23, -0.0, torch.nan]),
    "a sign of zero": torch.tensor([1.0, 0.0, torch.nan]),
    "a NaN": torch.tensor([1.0, -0.0, 2.0]),
    "a dtype": ONE.double(),
    "a shape": ONE[None],
}
PAYLOAD = torch.tensor([0x3F800000, -(2**31), 0x7FC00001], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_different_tensors_fail(other):
    assert not identical(ONE, other)
    with pytest.raises(AssertionError):
        same_bits(ONE, other)


@pytest.mark.parametrize("other", [OTHERS["a last bit"], OTHERS["a NaN"], OTHERS["a dtype"], ONE[:2]])
@pytest.mark.parametrize("nest", [lambda x: x, lambda x: [2, x], lambda x: {"a": (1.0, {"b": x})}])
def test_different_nested_states_fail(other, nest):
    with pytest.raises(AssertionError):
        assert_same(nest(ONE), nest(other))


@pytest.mark.parametrize("other", [{"a": 1}, {"a": 2, "b": 3}, {"b": 2}, {}])
def test_states_with_other_keys_or_numbers_fail(other):
    with pytest.raises(AssertionError):
        assert_same({"a": 2}, other)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
)
def test_equal_tensors_and_states_pass(dtype):
    x = torch.arange(12).view(3, 4).to(dtype)
    for one, other in ((x, x.clone()), (x.t(), x.t().contiguous()), (torch.nn.Parameter(x, False), x[()])):
        same_bits(one, other)
        assert_same({"x": [one, 1.5, None]}, {"x": [other, 1.5, None]})


def test_any_nan_equals_any_nan():
    assert not identical(ONE, PAYLOAD)
    same_bits(ONE, PAYLOAD)
    assert_same([ONE, float("nan")], [PAYLOAD, float("nan")])
