"""Figures of unit scaling: Blake, Orr and Luschi 2023, and the official library's examples."""

import pytest
import torch
import torch.nn.functional as F

from families import for_each
from halfstep import round_to, unit


def std(x):
    return float(x.detach().double().std())


def rms(x):
    return float(x.detach().double().square().mean().sqrt())


@for_each(
    "constraint, expected",
    [("none", (1.0, 1.0, 1.0)), ("geometric_mean", (0.707, 1.412, 1.0)), ("to_output", (1.0, 2.0, 1.0))],
)
def test_standard_deviations_of_a_256_to_1024_linear_layer(constraint, expected):
    x, w = torch.randn(512, 256, requires_grad=True), torch.randn(1024, 256, requires_grad=True)
    y = unit.linear(x, w, constraint=constraint)
    y.backward(torch.randn_like(y))
    assert [std(y), std(x.grad), std(w.grad)] == pytest.approx(expected, rel=0.01)


@for_each("classes, batch", [(2, 1), (10, 7), (1000, 64), (50257, 3)])
def test_cross_entropy_gradients_of_equal_logits_have_an_rms_of_1(classes, batch):
    logits = torch.zeros(batch, classes, requires_grad=True)
    unit.cross_entropy(logits, torch.randint(classes, (batch,))).backward()
    assert rms(logits.grad) == pytest.approx(1.0, abs=1e-5)


def test_gradients_of_embedding_and_norm_weights_have_unit_rms():
    table = torch.randn(500, 64, requires_grad=True)
    y = unit.embedding(torch.randint(500, (4096,)), table)
    y.backward(torch.randn_like(y))
    assert rms(table.grad) == pytest.approx(1, rel=0.05)
    for norm in (unit.layer_norm, unit.rms_norm):
        x, w = torch.randn(16, 256, 512), torch.ones(512, requires_grad=True)
        y = norm(x, (512,), w)
        y.backward(torch.randn_like(y))
        assert std(y) == pytest.approx(1, rel=0.05)
        assert rms(w.grad) == pytest.approx(1, rel=0.1)  # of 512 numbers


@for_each("options", [{"ratio": 0.5}, {"ratio": 2.0}, {"variance_fraction": 0.2}])
def test_a_residual_scales_only_the_gradients_inside_the_branch(options):
    x = torch.randn(20, 8, dtype=torch.float64, requires_grad=True)
    w = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(20, 8, dtype=torch.float64)
    tau = options.get("ratio") or (options["variance_fraction"] / (1 - options["variance_fraction"])) ** 0.5
    weight = tau / (1 + tau**2) ** 0.5

    plain = weight * torch.tanh(x @ w) + x / (1 + tau**2) ** 0.5
    expected = torch.autograd.grad(plain, [x, w], grad)
    branch, skip = unit.residual_split(x, **options)
    y = unit.residual_add(torch.tanh(branch @ w), skip, **options)
    found = torch.autograd.grad(y, [x, w], grad)
    torch.testing.assert_close(y, plain, rtol=0, atol=1e-12)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1], expected[1] * (1 + tau**2) ** 0.5 / tau, rtol=1e-12, atol=1e-12)


def _cosines(constraint):
    """Cosines between scaled and true weight gradients of a net whose residual branch has this constraint."""
    torch.manual_seed(0)
    weights = [
        torch.randn(n, m, dtype=torch.float64, requires_grad=True) for n, m in ((32, 16), (64, 32), (32, 64), (8, 32))
    ]
    x, grad = torch.randn(40, 16, dtype=torch.float64), torch.randn(40, 8, dtype=torch.float64)

    h = unit.linear(x, weights[0])
    branch, skip = unit.residual_split(h, ratio=0.7)
    branch = unit.linear(unit.gelu(unit.linear(branch, weights[1], constraint=constraint)), weights[2])
    y = unit.linear(unit.residual_add(branch, skip, ratio=0.7), weights[3], constraint=None)
    scaled = torch.autograd.grad(y, weights, grad)

    h = x @ weights[0].T / 16**0.5
    alpha = unit.linear(torch.ones(1, 32).double(), torch.ones(64, 32).double(), constraint=constraint)[0, 0] / 32
    inner = unit.gelu(h @ weights[1].T * alpha, constraint="none")  # a gelu with its true factor forward
    factor = inner.detach() / F.gelu(h @ weights[1].T * alpha).detach()
    inner = F.gelu(h @ weights[1].T * alpha) * factor.mean()
    y = (0.7 * inner @ weights[2].T / 64**0.5 + h) / (1 + 0.49) ** 0.5 @ weights[3].T / 32**0.5
    true = torch.autograd.grad(y, weights, grad)
    return [float(F.cosine_similarity(a.flatten(), b.flatten(), dim=0)) for a, b in zip(scaled, true, strict=True)]


def test_constrained_gradients_are_multiples_of_the_true_ones():
    for constraint in ("to_output", "geometric_mean", "to_grad_input"):
        assert _cosines(constraint) == pytest.approx([1.0] * 4, abs=1e-9)


def test_an_unconstrained_branch_turns_only_gradients_before_the_split():
    first, *others = _cosines("none")
    assert 0.9 < first < 0.999
    assert others == pytest.approx([1.0] * 3, abs=1e-9)


def _error(x, w, exact):
    cast = round_to(x, "e4m3fn", overflow="saturate") @ round_to(w, "e4m3fn", overflow="saturate")
    return float((cast - exact).norm() / exact.norm())


def test_a_plain_fp8_cast_keeps_unit_scale_values_and_loses_small_ones():
    x, w = torch.randn(512, 256), torch.randn(256, 512)
    assert _error(x, w, x @ w) == pytest.approx(0.037, abs=0.002)
    for power, error, zeros in ((6, 0.047, 0.05), (8, 0.147, 0.20), (10, 0.575, 0.68), (12, 1.0, 1.0)):
        small = x * 2.0**-power
        assert _error(small, w, small @ w) == pytest.approx(error, abs=0.006)
        assert float((round_to(small, "e4m3fn") == 0).float().mean()) == pytest.approx(zeros, abs=0.01)
