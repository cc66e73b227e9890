"""Differences from float32 that are the model's own: its sensitivity, and gradients that are rounding errors."""

import copy
import math

import pytest
import torch
from torch import nn

import halfstep
import planted
from halfstep.probe.trial import reference, sensitivity
from planted import WIDTH, tokens


class Sine(nn.Module):
    """A sine of a phase in the thousands: one rounding to 16 bits changes it by radians."""

    def __init__(self, gain):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gain = gain

    def forward(self, x):
        return self.outer(torch.sin(self.gain * self.inner(x)))


def gradients(model, batch):
    """Gradients of a loss like the default one, with every value in the model's dtype."""
    model.zero_grad()
    output = model(batch)
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output.dtype)
    (output * noise).sum().backward()
    return {name: p.grad.double() for name, p in model.named_parameters()}


@pytest.mark.parametrize("size", [2.0**-8, 2.0**-11])
def test_linear_output_changes_as_much_as_its_weights(size):
    """Independent factors 1 + size u with u uniform in [-1, 1], whose standard deviation is 1 / sqrt(3)."""
    model, x = nn.Linear(256, 256, bias=False), torch.randn(64, 256)
    before = copy.deepcopy(model.state_dict())
    found = sensitivity(model, x, None, reference(model, x, None), size)
    assert found.output_error == pytest.approx(size / math.sqrt(3), rel=0.05)
    assert found.output_is_stable
    assert found.unstable == frozenset()
    assert torch.equal(model.weight, before["weight"])


def test_healthy_model_is_not_sensitive():
    report = halfstep.probe_model(planted.healthy(), data=[tokens()])
    assert report.noise == ()
    assert report.sensitivity.size == 2.0**-11
    assert 1e-4 < report.sensitivity.output_error < 0.01
    assert "weights moved by up to 2^-11 of themselves, fp16's rounding, change the output by 0.00" in str(report)
    assert "is that sensitive" not in str(report)


def test_model_too_sensitive_for_16_bits_is_reported():
    torch.manual_seed(0)
    model, x = Sine(5e3), torch.randn(32, WIDTH)
    report = halfstep.probe_model(model, data=[x])
    assert report.findings == ()  # nothing overflows or underflows
    assert not report.safe
    assert report.suggestion is None
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.half())
        off = torch.linalg.vector_norm(rounded(x) - model(x)) / torch.linalg.vector_norm(model(x))
    assert off > 0.3
    assert report.sensitivity.output_error == pytest.approx(float(off), rel=0.5)
    text = str(report)
    assert "the model itself is that sensitive: the output changes by more than passes" in text
    assert f"suggestion: none; {len(report.tried)} recipes were run and none passed\n  fp16-master: " in text
    assert all(t.recipe.name in text.replace(", with inner in float32", "-kept") for t in report.tried)


def test_gradients_that_are_rounding_errors_are_not_compared():
    """Judged in float64: float32's gradients of queries and keys are unrelated to its own."""
    model = planted.large_logits(fused=True)
    exact, single = gradients(copy.deepcopy(model).double(), tokens()), gradients(copy.deepcopy(model), tokens())
    wrong = {name for name, wanted in exact.items() if float((single[name] - wanted).norm() / wanted.norm()) > 0.5}
    report = halfstep.probe_model(model, data=[tokens()])
    assert wrong == {"blocks.1.attention.q.weight", "blocks.1.attention.k.weight"}
    assert set(report.noise) == wrong
    assert report.first_failure == "attention logits of blocks.1.attention (Attention)"
    assert report.suggestion.recipe.name == "fp16-master-kept"
    assert report.suggestion.recipe.float32_modules == ("blocks.*.attention",)
    assert "not compared: the gradient of blocks.1.attention.k.weight and 1 more: nothing but fp32's own" in str(report)
