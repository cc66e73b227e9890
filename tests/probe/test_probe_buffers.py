"""Effects of buffers that `model.to(dtype)` rounds are measured, and reported if larger than a rounding error."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import halfstep
from halfstep.bits.origin import progression
from halfstep.errors import ModelError, RecipeError
from tiny import adamw


class Rotary(nn.Module):
    """A block with rotary positions whose tables are computed in the forward or kept in a buffer."""

    def __init__(self, kept="inv_freq", length=512):
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        frequencies = 10000.0 ** (-torch.arange(16) / 16)
        positions = torch.arange(length).float()
        tables = {"inv_freq": frequencies, "angles": torch.outer(positions, frequencies), "positions": positions}
        self.kept, self.length, self.frequencies = kept, length, frequencies
        self.register_buffer(kept, tables[kept], persistent=False)

    def forward(self, x):
        if self.kept == "angles":
            angles = self.angles.float()
        elif self.kept == "positions":
            angles = torch.outer(self.positions.float(), self.frequencies)
        else:
            angles = torch.outer(torch.arange(self.length).float(), self.inv_freq.float())
        turned = []
        for t in (self.q(x), self.k(x)):
            one, two = t.float().chunk(2, -1)
            turned.append(
                torch.cat([one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()], -1)
            )
        weights = (turned[0] @ turned[1].mT).softmax(-1)
        return weights.to(x.dtype) @ self.v(x)


class Biased(nn.Module):
    """Attention with a buffer added to its logits: ALiBi's slopes times distances."""

    def __init__(self, slopes, length=256):
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.q, self.v = nn.Linear(32, 32), nn.Linear(32, 32)
        self.register_buffer("bias", slopes[:, None] * torch.arange(length).float())

    def forward(self, x):
        logits = self.q(x) @ x.mT + self.bias[:, None].to(x.dtype).mean(0)
        return logits.softmax(-1) @ self.v(x)


def probed(model, to="bf16", length=512):
    torch.default_generator.manual_seed(1)
    return halfstep.probe_model(model, to, data=[2 * torch.randn(1, length, 32)])


@pytest.mark.parametrize("kept", ["inv_freq", pytest.param("angles", marks=pytest.mark.slow), "positions"])
def test_rounded_positions_change_more_than_rounded_weights(kept):
    report = probed(Rotary(kept))
    (found,) = report.buffers.harmful
    assert (found.name, found.error > 4 * 2**-8) == (kept, True)
    assert f"buffers: {kept} rounded to bf16, as model.to() does, changes the output of the model by" in str(report)
    assert report.to_dict()["buffers"][0]["name"] == kept
    assert report.cast.output_error > report.trial.output_error  # the recipe keeps them in float32
    passed = report.suggestion
    assert passed is None or passed.recipe.float32_buffers == (kept,)


def test_probe_restores_buffers_and_reports_rounded_ones():
    model = Rotary()
    probed(model)
    assert torch.equal(model.inv_freq, model.frequencies)
    assert model.inv_freq.dtype == torch.float32
    model.inv_freq = model.inv_freq.bfloat16()
    report = probed(model)
    assert report.buffers.arrived == ("inv_freq",)
    assert "buffers: 1 arrived rounded to 16 bits (inv_freq)" in str(report)


def test_suggested_recipe_rejects_the_cast_model():
    model = Rotary("positions", 1024)
    report = probed(model, length=1024)
    assert (report.verdict, report.suggestion.recipe.name) == ("UNSAFE", "bf16-master-kept")
    recipe = report.suggestion.recipe
    assert halfstep.get_recipe("bf16-master").float32_buffers == ()
    assert recipe.float32_buffers == ("positions",)
    assert "in fp32      positions" in recipe.describe()
    halfstep.prepare(model, adamw(model), recipe)
    model = Rotary("positions", 1024)
    model.positions = model.positions.bfloat16()
    before = dict(model.named_parameters())["q.weight"].clone()
    with pytest.raises(
        ModelError, match=r"positions in torch.bfloat16 holds values rounded to bf16, and 'bf16-master-"
    ):
        halfstep.prepare(model, adamw(model), recipe)
    assert torch.equal(model.q.weight, before)


@pytest.mark.parametrize("cast", [lambda b: b.bfloat16(), lambda b: b.bfloat16().float(), lambda b: b.half().float()])
def test_float32_buffers_reject_rounded_values_of_any_dtype(cast):
    recipe = replace(halfstep.get_recipe("bf16-mixed"), name="mine", float32_buffers=("*inv_freq",))
    halfstep.plan(Rotary(), recipe)
    model = Rotary()
    model.inv_freq = cast(model.inv_freq)
    with pytest.raises(
        ModelError, match=r"inv_freq in torch\..* holds values rounded to .*compute them again in float32"
    ):
        halfstep.plan(model, recipe)


def test_float32_buffers_reject_16_bit_buffers_and_unknown_names():
    recipe = replace(halfstep.get_recipe("bf16-mixed"), name="mine", float32_buffers=("bias",))
    model = Biased(2.0 ** -torch.arange(1.0, 9))
    model.bias = model.bias.bfloat16()  # exact in bf16
    with pytest.raises(ModelError, match=r"bias is torch.bfloat16, .* expected torch.float32"):
        halfstep.plan(model, recipe)
    with pytest.raises(RecipeError, match=r"float32_buffers: unknown buffer 'bias'. Known: inv_freq"):
        halfstep.plan(Rotary(), replace(recipe, float32_buffers=("bias",)))


def test_rounded_positions_are_found_by_their_steps():
    model = Rotary("positions").bfloat16()
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    with pytest.warns(UserWarning, match="1 of 1 buffers arrive rounded to 16 bits"):
        halfstep.apply(model, "bf16-mixed")
    (finding,) = [f for f in halfstep.audit(Rotary("positions").bfloat16().float()).findings if f.level == "warning"]
    assert (finding.what, finding.tensors) == ("rounded buffers", ("positions",))
    slopes = 2.0 ** -torch.arange(1.0, 9)
    alibi = slopes[:, None, None] * torch.arange(1000.0)
    for dtype, name, exact in ((torch.bfloat16, "bf16", 256), (torch.float16, "fp16", 2048)):
        for table in (torch.arange(4096.0), torch.arange(4096.0)[:, None], slopes[:, None] * torch.arange(4096.0)):
            assert progression(table.to(dtype)) == progression(table.to(dtype).float()) == name
            assert progression(table) is None
        for table in (torch.arange(exact + 1.0), torch.ones(9, 99), torch.zeros(3, 0), torch.tensor(1.1)):
            assert progression(table.to(dtype)) is progression(table.to(dtype).float()) is None
    assert progression(alibi.bfloat16()) == "bf16"


def test_exact_alibi_bias_is_harmless():
    report = probed(Biased(2.0 ** -torch.arange(1.0, 9)), length=256)
    assert report.buffers.found == ()
    assert "buffers:" not in str(report)


def test_norm_statistics_are_harmless_unless_mean_exceeds_deviation():
    for mean, harmless in ((1.0, True), (7.9, True), (100.3, False)):
        model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64))
        model[1].running_mean.copy_(mean * torch.linspace(0.1, 1, 64))
        model[1].running_var.copy_(1.0 + torch.arange(64) / 90)
        stock, x = model.eval()[1], model[1].running_mean + torch.randn(64, 64)
        exact = stock(x)
        model.bfloat16()
        stock.float()
        assert ((stock(x) - exact).abs().mean() < 0.02) == harmless  # relative to values of size 1
        model.bfloat16()
        warned = [f for f in halfstep.audit(model, None).findings if f.what == "rounded buffers"]
        assert (not warned) == harmless
