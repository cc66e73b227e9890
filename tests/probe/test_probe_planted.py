"""Models with one planted fault each: the probe finds it at the right module, also if the forward alone looks fine."""

import copy

import pytest
import torch
from torch import nn

import halfstep
import planted
from halfstep.tracking import first_nonfinite
from planted import WIDTH, tokens


PLANTED = {
    "the input of wo": (planted.wide_ffn, "input of blocks.1.ffn.wo (Linear)"),
    "an explicit product": (lambda: planted.large_logits(False), "product of blocks.1.attention (Attention)"),
    "fused attention": (lambda: planted.large_logits(True), "attention logits of blocks.1.attention (Attention)"),
    "an embedding": (planted.tiny_embedding, "weight of embed (Embedding)"),
    "the backward": (planted.steep, "gradient of the output of blocks.1.inner (Linear)"),
}


def probe(model, to="fp16", **options):
    return halfstep.probe_model(model, to, data=[tokens()], **options)


@pytest.mark.quick("an explicit product", "fused attention", "an embedding", "the backward")
@pytest.mark.parametrize(("make", "first"), PLANTED.values(), ids=PLANTED)
def test_planted_fault_is_found_at_its_module(make, first):
    report = probe(make())
    assert not report.safe
    assert report.first_failure == first
    assert not report.trial.passed
    assert first in str(report)


class Between(nn.Module):
    """An overflow between two elementwise operations that no module takes as input."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.first(x) * 1e6 * 1e-6)


def test_overflow_between_modules_is_found_by_the_trial():
    report = halfstep.probe_model(Between(), data=[torch.randn(8, WIDTH)])
    assert report.findings == ()
    assert report.headroom.headroom > 10
    assert report.trial.failure.what == "not finite"
    assert report.first_failure == "input of last (Linear)"
    assert not report.safe


def test_tensor_passed_between_modules_is_one_finding():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(), nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    with torch.no_grad():
        model[0].weight *= 1e5
        model[2][0].weight *= 0.1
    text = str(halfstep.probe_model(model, data=[torch.randn(8, WIDTH)]))
    assert "first to fail: output of 0 (Linear), which is the input of 2.0 (Linear)\n" in text
    assert text.count("does not fit: ") == 1
    assert "% of its values overflow, largest " in text


@pytest.mark.quick("bf16")
@pytest.mark.parametrize("to", ["fp16", "bf16", torch.float16])
def test_healthy_model_is_safe(to):
    report = probe(planted.healthy(), to)
    assert report.safe
    assert report.first_failure is None
    assert report.findings == report.gradient_findings == report.tried == ()
    assert report.suggestion is None
    assert report.trial.output_error < 0.02
    assert str(report).startswith("safe: Model in ")


@pytest.mark.quick("<lambda>")
@pytest.mark.parametrize("make", [planted.wide_ffn, lambda: planted.large_logits(False)])
def test_bf16_has_the_range_that_fp16_lacks(make):
    assert not probe(make(), "bf16").findings


def test_backward_overflow_is_found_despite_a_fine_forward():
    """Cast by torch to fp16, the forward is finite and far from 65504, but gradients are not finite."""
    model = planted.steep()
    half = copy.deepcopy(model).half()
    output = half(tokens())
    assert output.isfinite().all()
    output.float().square().sum().div(48 * 2).backward()
    assert not all(p.grad.isfinite().all() for p in half.parameters())
    report = probe(model)
    assert report.findings == ()
    assert 200 < report.headroom.counts.largest < 500
    assert {found.site.backward for found in report.gradient_findings} == {True}
    assert report.window.largest < 1
    assert not report.safe
    assert report.trial.failure.what == "not finite at loss scale 1"


def test_residual_stream_is_observed_forward_and_backward():
    report = probe(planted.steep())
    stream = {(found.site.module, found.site.role) for found in report.residual}
    roles = ("input", "output", "gradient of the input", "gradient of the output")
    assert stream == {(f"blocks.{i}", role) for i in range(3) for role in roles}
    forward = max(f.counts.largest for f in report.residual if not f.site.backward)
    backward = max(f.counts.largest for f in report.residual if f.site.backward)
    assert forward < 500 < 65504 < backward


def test_fused_and_explicit_attention_have_the_same_logits():
    torch.manual_seed(3)
    explicit = planted.large_logits(False)
    fused = copy.deepcopy(explicit)
    for block in fused.blocks:
        block.attention.fused = True
    (product,) = (f for f in probe(explicit).ranges if str(f.site) == PLANTED["an explicit product"][1])
    (logits,) = (f for f in probe(fused).ranges if str(f.site) == PLANTED["fused attention"][1])
    assert logits.counts.largest == pytest.approx(product.counts.largest / WIDTH**0.5, rel=1e-5)
    assert logits.counts.values == 4 * 12 * 12


def test_fused_attention_with_fewer_keys_than_queries():
    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            q, k = self.q(x).unflatten(-1, (4, 2)).transpose(1, 2), self.k(x).unflatten(-1, (2, 2)).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)

    model, x = Grouped(), torch.randn(2, 5, 8)
    report = halfstep.probe_model(model, data=[x])
    with torch.no_grad():
        q = model.q(x).view(2, 5, 4, 2).numpy()
        k = model.k(x).view(2, 5, 2, 2).numpy().repeat(2, axis=2)
    expected = max(abs(q[b, i, h] @ k[b, j, h]) for b in range(2) for h in range(4) for i in range(5) for j in range(5))
    found = [f.counts.largest for f in report.ranges if f.site.role in ("attention logits", "product")]
    assert max(found) == pytest.approx(expected / 2**0.5, rel=1e-5)


def test_torchs_multihead_attention_is_observed():
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
    with torch.no_grad():
        layer.self_attn.in_proj_weight[: 2 * WIDTH] *= 400
    report = halfstep.probe_model(layer, data=[torch.randn(2, 6, WIDTH)])
    assert report.first_failure in {
        "attention logits of self_attn (MultiheadAttention)", "product of self_attn (MultiheadAttention)"
    }  # fmt: skip


def test_no_loss_scale_works_if_gradients_are_too_far_apart():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), planted.TwoEnds())
    x = torch.randn(8, WIDTH)
    report = halfstep.probe_model(model, data=[x])
    assert report.findings == ()
    assert report.window.empty
    assert "1.quiet" in str(report.window.first_to_vanish)
    assert not report.safe
    assert "no loss scale works" in str(report)
    assert halfstep.probe_model(model, "bf16", data=[x]).safe


@pytest.mark.parametrize("seed", range(3))
def test_window_ends_where_torchs_cast_overflows_or_underflows(seed):
    torch.manual_seed(seed)
    model, x = nn.Linear(8, 8, bias=False), torch.randn(4, 8)
    window = halfstep.probe_model(model, data=[x], loss=lambda model, x: model(x).square().sum() / 8).window
    output = model(x)
    (output.square().sum() / 8).backward()
    gradients = [model.weight.grad, (output / 4).detach()]
    assert all((window.largest * g).half().isfinite().all() for g in gradients)
    assert not all((2 * window.largest * g).half().isfinite().all() for g in gradients)

    def lost(scale):
        return max(float(1 - ((scale * g).half() != 0).mul(g.abs()).sum() / g.abs().sum()) for g in gradients)

    assert lost(2 * window.smallest) < 0.01 < lost(window.smallest / 4)


def test_suggested_recipe_keeps_the_module_and_passes():
    model = planted.wide_ffn()
    report = probe(model)
    recipe = report.suggestion.recipe
    assert recipe.name == "fp16-master-kept"
    assert recipe.float32_modules == ("blocks.*.ffn",)
    halfstep.apply(model, recipe)
    assert model.blocks[1].ffn.wo.weight.dtype == torch.float32
    assert model.blocks[1].attention.q.weight.dtype == torch.float16
    assert first_nonfinite(model, lambda: model(tokens()).square().sum() / 48 / 2) is None


def test_bf16_is_suggested_if_most_of_the_model_would_be_kept():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), planted.TwoEnds())
    report = halfstep.probe_model(model, data=[torch.randn(8, WIDTH)])
    assert report.suggestion.recipe.name == "bf16-master"


def test_unscaled_fp8_gradients_underflow_and_scaled_ones_pass():
    report = probe(planted.healthy(), "e4m3fn", loss=lambda model, batch: model(batch).square().mean() / 1000)
    assert not report.safe
    assert report.trial.recipe.name == "float8_e4m3fn-unscaled"
    assert report.trial.failure.site.role.startswith("gradient of the weight")
    assert report.suggestion.recipe.name == "float8_e4m3fn-current"


def test_training_steps_change_ranges_but_not_the_model():
    model = planted.healthy()
    before = copy.deepcopy(model.state_dict())
    still, moved = probe(model), probe(model, train_steps=5, learning_rate=0.1)
    assert moved.conditions.train_steps == 5
    assert "before and after 5 steps" in str(moved)
    largest = {f.site: f.counts.largest for f in still.ranges}
    assert all(f.counts.largest >= largest[f.site] for f in moved.ranges)
    assert moved.headroom.counts.largest > still.headroom.counts.largest
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_constant_loss_scale_must_be_in_the_window():
    model = planted.healthy()
    window = probe(model).window
    assert probe(model, loss_scale=window.largest).safe
    beyond = probe(model, loss_scale=4 * window.largest)
    assert not beyond.safe
    assert beyond.trial.failure.what.startswith("not finite at loss scale")


def test_model_and_generators_are_restored():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)).train()
    model[2].eval()
    model(torch.randn(3, 4)).sum().backward()
    state, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    grads, classes = [p.grad.clone() for p in model.parameters()], [type(m) for m in model.modules()]
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    halfstep.probe_model(model, data=[torch.randn(6, 4, generator=torch.Generator())], train_steps=2)
    assert torch.equal(torch.randn(3), expected)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert [type(m) for m in model.modules()] == classes
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())


def test_half_precision_model_is_probed_in_float32():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).half()
    report = halfstep.probe_model(model, data=[(torch.randn(3, 4).half(),)])
    assert report.safe
    assert {p.dtype for p in model.parameters()} == {torch.float16}


def test_given_loss_is_used_and_its_errors_are_raised():
    model = planted.healthy()
    report = probe(model, loss=lambda model, batch: model(batch).square().mean())
    assert report.conditions.loss == "the given one"
    with pytest.raises(ZeroDivisionError):
        probe(model, loss=lambda model, batch: 1 / 0)
    assert not any(m._forward_hooks for m in model.modules())
