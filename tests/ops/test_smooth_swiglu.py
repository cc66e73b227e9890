"""Smooth-SwiGLU: the same function without rounding, an exact merge, and outliers that grow half as fast."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep import formats, ops
from halfstep.quant.scaling.delayed import Delayed
from tiny import assert_same


pytestmark = pytest.mark.cpu
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])


@every_dtype
def test_channel_scale_is_the_largest_power_of_two_that_brings_the_amax_to_at_most_1(dtype):
    linear = (torch.randn(5, 3, 64) * torch.logspace(-3, 3, 64)).to(dtype)
    scale = ops.channel_scale(linear)
    assert scale.dtype == torch.float32
    assert scale.shape == (64,)
    assert (torch.frexp(scale)[0] == 0.5).all()
    largest = linear.abs().amax((0, 1)).float() * scale
    assert ((largest > 0.5) & (largest <= 1)).all()


def test_scales_of_zero_empty_and_nonfinite_channels():
    strange = torch.tensor([[0.0, torch.inf, torch.nan, 4.0, 1e-40]])
    assert ops.channel_scale(strange).tolist() == [1, 1, 1, 0.25, 2.0**126]
    assert ops.channel_scale(torch.empty(0, 3)).tolist() == [1, 1, 1]
    assert ops.token_scale(strange.t()).flatten().tolist()[:4] == [1, 1, 1, 4]
    assert ops.channel_scale(torch.tensor([1e-7, 6e4]).half()).tolist() == [2.0**14, 2.0**-14]


def branches(alpha=1.0, dtype=torch.float64):
    """gate and linear of 16 channels, one with aligned weights times alpha, and the down-projection."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 32, generator=generator, dtype=dtype)
    gate, up = (torch.randn(16, 32, generator=generator, dtype=dtype) / 8 for _ in range(2))
    up[0] = gate[0] = alpha * gate[0] * 2
    return x @ gate.t(), x @ up.t(), torch.randn(8, 16, generator=generator, dtype=dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-5)])
def test_smoothing_without_rounding_keeps_the_function(dtype, tolerance):
    gate, linear, down = branches(3.0, dtype)
    expected = (F.silu(gate) * linear) @ down.t()
    hidden, scale = ops.smooth_channels(gate, linear)
    assert_same(hidden @ (down / scale.to(dtype)).t(), expected)
    hidden, scale = ops.smooth_tokens(gate, linear)
    torch.testing.assert_close(hidden @ down.t() * scale, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("smooth", [ops.smooth_channels, ops.smooth_tokens])
def test_gradients_treat_the_scale_as_a_constant(smooth):
    gate, linear, down = (t.requires_grad_() for t in branches())
    hidden, scale = smooth(gate, linear)
    assert not scale.requires_grad
    whole = hidden @ (down / scale.double()).t() if scale.dim() == 1 else hidden @ down.t() * scale
    grads = torch.autograd.grad(whole.square().sum(), (gate, linear, down))
    expected = torch.autograd.grad(((F.silu(gate) * linear) @ down.t()).square().sum(), (gate, linear, down))
    torch.testing.assert_close(grads, expected, rtol=1e-12, atol=1e-12)


def test_an_aligned_channel_grows_quadratically_and_smoothed_linearly():
    plain, channels = [], []
    for power in range(6):
        gate, linear, _ = branches(2.0**power)
        plain.append((F.silu(gate) * linear)[:, 0].abs().amax().item())
        channels.append(ops.smooth_channels(gate, linear)[0][:, 0].abs().amax().item())
    slopes = [torch.tensor(s).log2().diff() for s in (plain, channels)]
    assert ((slopes[0] - 2).abs() < 0.2).all()  # from alpha = 4 on it is 2, since the gate is linear there
    assert ((slopes[1] - 1).abs() < 0.2).all()
    assert ((slopes[0][2:] - 2).abs() < 0.01).all()
    assert ((slopes[1][2:] - 1).abs() < 0.01).all()


def test_a_stale_scale_loses_less_of_a_smoothed_product():
    """The scale is from an earlier step, and the aligned channel has since grown fourfold."""
    e4m3 = formats.get("e4m3fn")
    errors = {}
    before, after = branches(1.0), branches(4.0)
    expected = (F.silu(after[0]) * after[1]) @ after[2].t()

    def rounded(old, new):
        factor = e4m3.max / old.abs().amax()
        return ops.round_to(new * factor, e4m3) / factor

    hidden = rounded(F.silu(before[0]) * before[1], F.silu(after[0]) * after[1])
    errors["plain"] = hidden @ after[2].t()
    old, (new, scale) = ops.smooth_channels(*before[:2])[0], ops.smooth_channels(*after[:2])
    errors["channel"] = rounded(old, new) @ (after[2] / scale.double()).t()
    old, (new, scale) = ops.smooth_tokens(*before[:2])[0], ops.smooth_tokens(*after[:2])
    errors["token"] = (rounded(old, new) @ after[2].t()) * scale
    found = {name: ((y - expected).norm() / expected.norm()).item() for name, y in errors.items()}
    assert found["channel"] < found["token"] < found["plain"], found


def test_delayed_scales_are_powers_of_two():
    rule = Delayed("delayed", history=1, power_of_two=True)
    state = rule.init()
    for amax, factor in ((1.0, 128), (240.0, 1), (241.0, 0.5), (0.9375, 256), (0.0, 256), (3e-5, 2.0**22)):
        rule.record(state, torch.tensor(amax))
        rule.advance(state, formats.get("e4m3"))
        assert state[0] == factor, amax


def test_traced_smoothing_equals_eager():
    gate, linear, _ = branches(dtype=torch.float32)
    for smooth in (ops.smooth_channels, ops.smooth_tokens):
        compiled = torch.compile(smooth, backend="aot_eager", fullgraph=True)
        assert_same(compiled(gate, linear), smooth(gate, linear))
    assert nn.SiLU()(gate).equal(ops.smooth_channels(gate, torch.ones_like(linear))[0])


def test_smoothing_with_a_current_scale_gains_little():
    """Smoothing is for stale scales: with the product's own amax the errors are nearly the same."""
    e4m3 = formats.get("e4m3")
    gate, linear, down = branches(2.0)
    expected = (F.silu(gate) * linear) @ down.t()

    def error(hidden, weight):
        factor = e4m3.max / hidden.abs().amax()
        found = (ops.round_to(hidden * factor, e4m3) / factor) @ weight.t()
        return ((found - expected).norm() / expected.norm()).item()

    hidden, scale = ops.smooth_channels(gate, linear)
    plain, smooth = error(F.silu(gate) * linear, down), error(hidden, down / scale.double())
    assert 0.01 < smooth < 0.05
    assert 0.75 < smooth / plain < 1.25, (plain, smooth)


def test_e5m2_suits_second_moments_and_e4m3_first_moments():
    """v spans more powers of two than E4M3 (largest 240) has; m does not, and E4M3's error is half as large."""
    generator = torch.Generator().manual_seed(0)
    v = (torch.randn(100_000, generator=generator, dtype=torch.float64) * 4 - 18).exp()
    m = torch.randn(100_000, generator=generator, dtype=torch.float64)
    lost, errors = {}, {}
    for name in ("e4m3", "e5m2"):
        fmt = formats.get(name)
        lost[name] = (ops.round_to(v * (fmt.max / v.max()), name) == 0).double().mean().item()
        factor = fmt.max / m.abs().max()
        errors[name] = (ops.round_to(m * factor, name) / factor / m - 1).abs().median().item()
    assert lost["e4m3"] == pytest.approx(0.89, abs=0.08)
    assert lost["e5m2"] == pytest.approx(0.12, abs=0.08)
    assert 1.7 < errors["e5m2"] / errors["e4m3"] < 2.1
