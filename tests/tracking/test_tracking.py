"""Exponent histograms, shares zeroed and lost, and the first nonfinite tensor."""

import re

import pytest
import torch
from torch import nn

from halfstep import formats
from halfstep.tracking import activation_gradients, exponents, first_nonfinite, share_lost, share_zeroed


FP16, BF16 = formats.get("fp16"), formats.get("bf16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_histogram_counts_floor_log2(dtype):
    values = torch.tensor([1.0, 1.99, 2.0, -0.5, 2.0**-14, 0.0, -0.0, float("inf"), float("nan")]).to(dtype)
    found = exponents([values, torch.empty(0, dtype=dtype)])
    top = 1 if torch.tensor(1.99).to(dtype) == 2.0 else 0
    expected = {0: 1, 1: 1, -1: 1, -14: 1}
    expected[top] += 1
    assert dict(found.counts) == expected
    assert (found.zeros, found.nonfinite) == (2, 2)


def test_histogram_just_below_a_power_of_two_and_at_the_smallest_subnormal():
    below = torch.nextafter(torch.tensor(8.0), torch.tensor(0.0))
    assert dict(exponents([below, torch.tensor([2.0**-149])]).counts) == {2: 1, -149: 1}


@pytest.mark.parametrize(("scale", "share"), [(1.0, 1 / 3), (8.0, 2 / 15), (2.0**10, 0.0)])
def test_underflow_shares_of_log_uniform_gradients(scale, share):
    """g = 2^U(-30, -15): the share zeroed in fp16, from the histogram and from the values."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.exp2(torch.rand(300_000, generator=generator, dtype=torch.float64) * 15 - 30).float()
    assert exponents([gradients]).share_zeroed(FP16, scale) == pytest.approx(share, abs=3e-3)
    assert share_zeroed([gradients * scale], FP16) == pytest.approx(share, abs=3e-3)


def test_share_subnormal_equals_torchs_cast():
    gradients = torch.randn(100_000) * 2.0**-13
    cast = gradients.half().float().abs()
    share = ((cast > 0) & (cast < 2.0**-14)).double().mean().item()
    assert exponents([gradients]).share_subnormal(FP16) == pytest.approx(share, abs=2e-3)


def test_scale_that_is_no_power_of_two_raises():
    with pytest.raises(ValueError, match="power of two"):
        exponents([torch.ones(3)]).share_zeroed(FP16, 3.0)


def test_share_zeroed_equals_torchs_cast():
    x = torch.randn(50_000) * 1e-7
    zeroed = ((x.half() == 0) & (x != 0)).sum().item() / (x != 0).sum().item()
    assert share_zeroed([x[:10_000], x[10_000:]], FP16) == zeroed > 0.1
    assert share_zeroed([torch.zeros(3)], FP16) == 0.0


@pytest.mark.parametrize("format", ["fp16", "e4m3fn", "e5m2", "bf16"])
def test_half_of_the_smallest_value_is_zeroed_and_more_is_not(format):
    half = torch.tensor(formats.get(format).smallest / 2)
    above = torch.nextafter(half, torch.ones(()))
    assert share_zeroed([torch.stack([half, -half, above, -above, above])], formats.get(format)) == 2 / 5


@pytest.mark.parametrize("format", ["posit8_1", "posit16_2", "e8m0", "e10m5"])
def test_formats_that_round_nothing_to_zero(format):
    """Posits and powers of two saturate at their smallest value; float32 ends before e10m5."""
    small = torch.tensor([formats.get(format).smallest / 4, 1e-45, 1.0])
    assert share_zeroed([small[small > 0]], formats.get(format)) == 0.0


def test_share_lost_equals_torchs_bf16_addition():
    before = torch.randn(20_000)
    after = before * (1 + torch.randn(20_000) * 2.0**-9)
    stored = before.bfloat16()
    moved = (stored.float() + (after - before)).bfloat16()
    changes = after != before
    expected = ((moved == stored) & changes).sum().item() / changes.sum().item()
    assert share_lost([(before, after)], BF16) == pytest.approx(expected, abs=1e-9)
    assert 0.2 < expected < 0.9
    assert share_lost([(before, before)], BF16) == 0.0


def test_activation_gradients_are_of_leaf_outputs_and_hooks_are_removed():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with activation_gradients(model) as collected:
        model(torch.ones(5, 3)).sum().backward()
    assert sorted(tuple(g.shape) for g in collected) == [(5, 2), (5, 4), (5, 4)]
    torch.testing.assert_close(next(g for g in collected if g.shape == (5, 2)), torch.ones(5, 2))
    assert not any(m._forward_hooks for m in model.modules())
    with activation_gradients(model, enabled=False) as collected:
        model(torch.ones(5, 3)).sum().backward()
    assert collected == []


class Spoil(nn.Module):
    """Multiplies by a factor in the forward or the backward."""

    def __init__(self, forward: float = 1.0, backward: float = 1.0) -> None:
        super().__init__()
        self.factors = forward, backward

    def forward(self, x):
        y = x * self.factors[0]
        if y.requires_grad:
            y.register_hook(lambda grad: grad * self.factors[1])
        return y


def spoiled(**factors: float) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), Spoil(**factors), nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (spoiled(), None),
        (spoiled(forward=float("nan")), r"output of 1 \(Spoil\)"),
        (spoiled(forward=float("inf")), r"output of 1 \(Spoil\)"),
        (spoiled(backward=float("nan")), r"gradient of the output of 1 \(Spoil\)"),
    ],
)
def test_first_nonfinite_names_the_first_tensor(model, name):
    def loss():
        return model(torch.ones(2, 3)).sum()

    if name is None:
        assert first_nonfinite(model, loss) is None
    else:
        assert re.match(name, first_nonfinite(model, loss) or "")
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_first_nonfinite_checks_weights_and_inputs_first():
    model = spoiled()
    bad = torch.tensor([[1.0, float("inf"), 1.0]])
    assert (first_nonfinite(model, lambda: model(bad).sum()) or "").startswith("input of the model")
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    assert first_nonfinite(model, lambda: model(bad).sum()) == "weight 2.weight"
