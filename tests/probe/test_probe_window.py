"""Loss scales: exact ends of the window, the trial's dynamic scale, and criteria of the verdict."""

import math

import pytest
import torch
from torch import nn

import halfstep
from halfstep import formats, get_recipe
from halfstep.bits.what_if import limits_of
from halfstep.probe.observe import Counts, Range, Site, window
from halfstep.probe.trial import reference, trial
from halfstep.tracking import exponents
from planted import WIDTH


SITE = Site("layer", "Linear", "gradient of the weight", backward=True)
LIMITS = limits_of(formats.get("fp16"), stored=True)


@pytest.mark.parametrize(
    ("largest", "scale"), [(65520.0, 2**-1), (65519.0, 1), (2.0**-10, 2**25), (65520 / 8, 4), (65519 / 8, 8)]
)
def test_largest_scale_is_the_last_before_fp16_overflows(largest, scale):
    found = window([Range(SITE, 0, Counts(largest), LIMITS)], {}, LIMITS, 0.01)
    assert found.largest == scale
    assert torch.tensor(largest * scale).half().isfinite()
    assert not torch.tensor(2 * largest * scale).half().isfinite()


def test_zero_or_negligible_gradients_do_not_narrow_the_window():
    found = window([Range(SITE, 0, Counts(), LIMITS)], {SITE: exponents([torch.full((9,), 2.0**-41)])}, LIMITS, 0.01)
    assert (found.smallest, found.largest) == (0.0, math.inf)
    assert found.holds(1.0)
    asked = window([], {SITE: exponents([torch.full((9,), 2.0**-40)])}, LIMITS, 0.01)
    assert asked.smallest == 2.0**15
    assert asked.first_to_vanish == SITE


def test_trial_halves_the_scale_until_gradients_are_finite():
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH)
    found = trial(model, [x], get_recipe("fp16-master"), None, reference(model, x, None), start=2.0**40)
    assert found.passed
    assert 1 < found.loss_scale < 2**20
    assert found.loss_scale == halfstep.probe_model(model, data=[x]).window.largest


def test_float32_loss_does_not_narrow_the_window():
    class WithLoss(nn.Linear):
        def forward(self, x):
            return super().forward(x).square().mean() * 1e5

    report = halfstep.probe_model(WithLoss(WIDTH, WIDTH), data=[torch.randn(4, WIDTH)])
    assert report.conditions.loss == "the model's own"
    assert not any(found.site.role.endswith("output") for found in report.ranges)


def test_underflowing_weight_is_unsafe_despite_a_small_output_error():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.loud, self.quiet = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            with torch.no_grad():
                self.quiet.weight *= 1e-9

        def forward(self, x):
            return self.loud(x) + self.quiet(x)

    report = halfstep.probe_model(Sum(), data=[torch.randn(4, WIDTH)])
    assert report.trial.passed
    assert not report.safe
    assert report.first_failure == "weight of quiet (Linear)"
    assert report.suggestion.recipe.float32_modules == ("quiet",)
