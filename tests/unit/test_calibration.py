"""Measured scale factors equal the derived ones within their stated error; calibrate scales an operation that has
none."""

import pytest
import torch
import torch.nn.functional as F

from families import for_each
from halfstep import unit
from halfstep.errors import ModelError
from halfstep.unit import factors


N = (300, 200)
DERIVED = {
    "matmul": (torch.matmul, [(64, 48), (48, 80)], factors.matmul(64, 48, 80)),
    "linear": (F.linear, [(64, 48), (80, 48)], (48**-0.5, 80**-0.5, 64**-0.5)),
    "gelu": (F.gelu, [N], factors.activation("gelu")),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), [N], factors.activation("gelu_tanh")),
    "silu, mult 2": (lambda x: F.silu(2 * x) / 2, [N], factors.activation("silu", 2.0)),
    "relu": (F.relu, [N], factors.activation("relu")),
    "tanh": (torch.tanh, [N], factors.activation("tanh")),
    "sigmoid": (torch.sigmoid, [N], factors.activation("sigmoid")),
    "gated silu": (lambda x, g: x * F.silu(g), [N, N], factors.gated_silu()),
    "softmax": (lambda x: F.softmax(x, -1), [N], factors.softmax(200)),
    "softmax, mult 2": (lambda x: F.softmax(2 * x, -1), [(2000, 16)], factors.softmax(16, 2.0)),
    "add": (torch.add, [N, N], factors.add(N, N)),
    "dropout": (lambda x: F.dropout(x, 0.3), [N], (0.7**0.5, 0.7**0.5)),
    "embedding": (
        lambda i, w: F.embedding(i, w),
        [torch.arange(60000) % 500, (500, 16)],
        (1.0, factors.embedding(500, 60000)),
    ),
}


@for_each("case", list(DERIVED))
def test_measured_factors_equal_derived_ones_within_4_standard_errors(case):
    op, shapes, derived = DERIVED[case]
    measured = unit.calibrate(op, shapes)
    found = [measured.output, *[factor for factor in measured.grad_inputs if factor is not None]]
    assert max(measured.errors) < 0.01
    for factor, expected, error in zip(found, derived, measured.errors, strict=True):
        assert factor == pytest.approx(expected, rel=4 * error + 1e-6)


@for_each("keys, causal", [(16, False), (64, False), (64, True)])
def test_attentions_factor_equals_the_measured_one_of_its_output(keys, causal):
    op = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=1 / 64)  # noqa: E731
    measured = unit.calibrate(op, [(4, 8, keys, 64)] * 3)
    error = 4 * measured.errors[0] + 0.002  # logits are not exactly normal
    assert measured.output == pytest.approx(factors.attention(keys, keys, 64, is_causal=causal), rel=error)


def test_activation_factors_equal_the_published_ones():
    """Blake et al. 2023, from their notebook of measured operations."""
    published = {"relu": (1.713, 1.414), "gelu": (1.701, 1.481), "tanh": (1.593, 1.468), "sigmoid": (4.802, 4.722)}
    for name, expected in published.items():
        assert factors.activation(name) == pytest.approx(expected, rel=1e-3)


def test_a_calibrated_operation_applies_the_measured_factors():
    cube = unit.calibrate(lambda x, power: x**power, [N, torch.tensor(3)])
    assert cube.grad_inputs[1] is None
    x = torch.randn(400, 300, requires_grad=True)
    y = cube(x, torch.tensor(3), constraint="none")
    y.backward(torch.randn_like(y))
    assert float(y.detach().std()) == pytest.approx(1, rel=0.1)
    assert float(x.grad.std()) == pytest.approx(1, rel=0.1)
    tied = cube(x, torch.tensor(3))
    (grad,) = torch.autograd.grad(tied.sum(), x)
    torch.testing.assert_close(grad, cube.output * 3 * x.detach() ** 2)
    with pytest.raises(ModelError, match="1 inputs of an operation that was calibrated with 2"):
        cube(x)


def test_calibration_depends_on_its_seed_and_keeps_torchs_rng_state():
    before = torch.get_rng_state()
    first, second, other = (unit.calibrate(lambda x: F.dropout(x), [N], seed=seed) for seed in (3, 3, 4))
    assert (first.output, first.grad_inputs, first.errors) == (second.output, second.grad_inputs, second.errors)
    assert first.output != other.output
    assert torch.equal(before, torch.get_rng_state())
    with torch.no_grad():
        assert unit.calibrate(lambda x: F.dropout(x), [N], seed=3).output == first.output
    assert unit.calibrate(torch.tanh, [N], runs=1).errors == (torch.inf, torch.inf)


@for_each(
    "op, shapes, message",
    [
        (lambda x: x.long(), [N], "expected one floating tensor"),
        (lambda x: (x, x), [N], "gave tuple; expected one floating tensor"),
        (torch.zeros_like, [N], "expected positive, finite numbers"),
        (torch.sign, [N], "expected positive, finite numbers"),
        (lambda x, y: x * 2, [N, N], "pass inputs that it does not use"),
        (torch.log, [N], "expected positive, finite numbers"),
    ],
)
def test_operations_without_factors_raise(op, shapes, message):
    with pytest.raises(ModelError, match=message):
        unit.calibrate(op, shapes)
    with pytest.raises(ModelError, match="expected one or more"):
        unit.calibrate(op, shapes, runs=0)
