"""`scales`: standard deviations against torch's, of tensors that the test captures itself."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep.cli.terminal import save_figure
from halfstep.errors import DataError, FormatError, ModelError
from halfstep.lab.models.gpt import GPT
from halfstep.lab.tasks.mlm import BERT
from halfstep.probe import scales
from halfstep.probe.spread import KINDS, Moments, deviations, moments, rows, shares
from halfstep.probe.spread_plot import figure


class Residual(nn.Module):
    """A residual branch whose sum no module returns."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(x + 3 * self.inner(x))


@pytest.fixture
def residual():
    torch.manual_seed(0)
    return Residual(), torch.randn(5, 6)


def by_name(found):
    return {(s.kind, s.site.module, s.to_dict()["tensor"]): s for s in found.spreads}


def test_standard_deviations_equal_torch(residual):
    model, x = residual
    own = copy.deepcopy(model)
    inner = own.inner(x)
    total = x + 3 * inner
    out = own.norm(total)
    for tensor in (inner, total, out):
        tensor.retain_grad()
    (out**3).sum().backward()
    expected = {
        ("activation", "", "input"): x,
        ("activation", "inner", "output"): inner,
        ("activation", "norm", "input"): total,
        ("activation", "norm", "output"): out,
        ("activation gradient", "inner", "output"): inner.grad,
        ("activation gradient", "norm", "input"): total.grad,
        ("activation gradient", "norm", "output"): out.grad,
        **{
            (kind, layer, name): tensor
            for layer in ("inner", "norm")
            for name in ("weight", "bias")
            for kind, tensor in (
                ("weight", own.get_submodule(layer).get_parameter(name)),
                ("weight gradient", own.get_submodule(layer).get_parameter(name).grad),
            )
        },
    }
    found = by_name(scales(model, [x], loss=lambda m, batch: (m(batch) ** 3).sum()))
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].std == pytest.approx(float(tensor.detach().std(correction=0)), rel=1e-5, abs=1e-9), key
        assert found[key].moments.values == tensor.numel()


def test_model_generators_and_gradients_are_restored(residual):
    model, x = residual
    model(x).sum().backward()
    model.eval()
    before, grads = copy.deepcopy(model.state_dict()), [p.grad.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    scales(model, [x], steps=3, learning_rate=0.1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_steps_equal_adamw_on_the_same_batches(residual):
    model, x = residual
    batches = [x, 2 * x]
    own = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        (own(batches[step % 2]) ** 3).sum().backward()
        optimizer.step()
    own.requires_grad_(False)
    found = scales(model, batches, loss=lambda m, batch: (m(batch) ** 3).sum(), steps=3, learning_rate=0.05)
    assert by_name(found)["weight", "inner", "weight"].std == pytest.approx(float(own.inner.weight.std(correction=0)))
    total = torch.cat([batch + 3 * own.inner(batch) for batch in batches])
    assert by_name(found)["activation", "norm", "input"].std == pytest.approx(float(total.std(correction=0)), rel=1e-5)
    assert found.moment == "after 3 steps of AdamW at 0.05"


def test_moments_of_pieces_add_up():
    torch.manual_seed(0)
    x = torch.randn(1000) * 3 + 100
    total = sum((moments(piece) for piece in x.split([1, 499, 0, 500])), Moments())
    assert (total.values, total.mean) == (1000, pytest.approx(float(x.double().mean()), rel=1e-6))
    assert total.std == pytest.approx(float(x.double().std(correction=0)), rel=1e-5)
    masked = torch.cat([x, torch.full((7,), -math.inf), torch.full((7,), torch.finfo(torch.float32).min)])
    assert moments(masked) == moments(x)
    assert math.isnan(moments(torch.tensor([1.0, math.nan])).std)
    assert moments(torch.empty(0)).std == 0.0
    for dtype in (torch.float16, torch.bfloat16):
        y = torch.randn(999).to(dtype)
        assert moments(y).std == pytest.approx(float(y.double().std(correction=0)), rel=1e-5)


def test_shares_of_overflow_subnormal_and_zero_per_format(residual):
    model, x = residual
    small = torch.zeros(6, 6)
    small[0, :4] = torch.tensor([2.0**-8, 2.0**-12, 1000.0, 1.0])  # in E4M3: subnormal, zero, overflow, normal
    with torch.no_grad():
        model.inner.weight.copy_(small)
    found = by_name(scales(model, [x], to=["fp16", torch.float8_e4m3fn]))["weight", "inner", "weight"].to_dict()
    assert found["formats"] == {
        "fp16": {"beyond": 0.0, "subnormal": 0.0, "zero": 0.0},
        "float8_e4m3fn": {"beyond": 1 / 36, "subnormal": 0.25, "zero": 0.25},
    }


@pytest.mark.quick("GPT-256")
@pytest.mark.parametrize(("kind", "vocabulary"), [(GPT, 256), (BERT, 257)])
def test_table_joins_repeated_blocks_and_has_every_tensor(kind, vocabulary):
    torch.manual_seed(0)
    model = kind(vocabulary, 8, layers=3, width=16, heads=2)
    tokens = torch.randint(256, (2, 8))
    found = scales(model, [tokens], loss=lambda m, batch: F.cross_entropy(m(batch).flatten(0, 1), batch.flatten()))
    table = rows(found)
    assert sum(len(cell) for row in table for cell in row.spreads) == len(found.spreads)
    repeated = [row for row in table if "*" in row.module]
    assert len(repeated) > 10
    assert {len(cell) for row in repeated for cell in row.spreads if row.tensor != "input"} <= {0, 3}
    names = [row.module for row in table]
    first, last = ("token", "head") if kind is GPT else ("embeddings.position_embeddings", "cls.predictions.decoder")
    assert (names[0], names[-1]) == (first, last)
    columns, lines = deviations(found)
    assert {len(line) for line in lines} == {len(columns)}
    weights = {row.module for row in table if row.spreads[KINDS.index("weight")]}
    assert len(weights) == len({s.folded for s in found.of("weight")})
    assert [line[0] for line in shares(found)[1]] == list(KINDS)


def test_model_under_a_recipe_is_measured_under_it(residual):
    model, x = residual
    halfstep.apply(model, "fp16-mixed-unscaled")
    found = by_name(scales(model, [1e-6 * x], loss=lambda m, batch: 1e-9 * m(batch).float().sum()))
    assert found["activation gradient", "inner", "output"].std == 0.0  # underflows fp16
    halfstep.revert(model)
    found = by_name(scales(model, [1e-6 * x], loss=lambda m, batch: 1e-9 * (m(batch) ** 2).sum()))
    assert found["activation gradient", "inner", "output"].std > 0


def test_figure_shows_every_tensor_with_nonzero_deviation(residual, tmp_path):
    model, x = residual
    before, after = (scales(model, [x], steps=steps, learning_rate=0.1) for steps in (0, 2))
    drawn = figure("a $title", [("before", before), ("after", after)])
    assert len(drawn.axes) == 2
    for axes, found in zip(drawn.axes, (before, after), strict=True):
        for kind, points in zip(KINDS, axes.collections, strict=True):
            wanted = [math.log2(s.std) for s in found.of(kind) if s.std > 0]
            assert sorted(points.get_offsets()[:, 0].tolist()) == pytest.approx(sorted(wanted))
        low, high = axes.get_xlim()
        assert low < -24
        assert high > 16
        assert [label.get_text() for label in axes.get_yticklabels()] == ["the model", "inner", "norm"]
    save_figure(drawn, str(tmp_path / "scales.png"), "scales", ModelError)
    assert (tmp_path / "scales.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ModelError, match=r"cannot write .*scales\.xyz.*give a file such as scales\.png"):
        save_figure(drawn, str(tmp_path / "scales.xyz"), "scales", ModelError)


@pytest.mark.parametrize(
    ("error", "model", "data", "options", "message"),
    [
        (DataError, nn.Linear(2, 2), [], {}, "no batches to run the model on"),
        (ModelError, nn.ReLU(), [torch.ones(2)], {}, "ReLU has no parameters"),
        (FormatError, nn.Linear(2, 2), [torch.ones(2)], {"to": ()}, "no format given to hold the scales against"),
        (FormatError, nn.Linear(2, 2), [torch.ones(2)], {"to": ["fp61"]}, "unknown format 'fp61'"),
        (FormatError, nn.Linear(2, 2), [torch.ones(2)], {"to": ["e8m0"]}, "has no negative values"),
        (FormatError, nn.Linear(2, 2), [torch.ones(2)], {"to": ["mxfp8"]}, "mxfp8"),
        (ModelError, nn.Linear(2, 2), [torch.ones(3)], {}, "Linear raised RuntimeError on a batch of"),
    ],
)
def test_unmeasurable_inputs_raise(error, model, data, options, message):
    with pytest.raises(error, match=message):
        scales(model, data, **options)
