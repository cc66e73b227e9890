"""examples/papers/foa.py: FOA's search and shift, and Tent, work as published, on an int8 model."""

import importlib
import json
import statistics
from pathlib import Path

import pytest
import torch


ROOT = Path(__file__).parents[2]


def load(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples" / "papers")
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def foa():
    pytest.importorskip("cma")
    return load("foa")


@pytest.fixture(scope="module")
def digits(foa):
    return foa.images(False, 128, torch.Generator().manual_seed(1))[0]


@pytest.mark.slow  # tests a study
def test_foa_search_equals_cma_es(foa):
    target = torch.linspace(-1, 1, 21).view(3, 7)

    class Sphere(foa.Foa):
        def score(self, x, prompts):
            return float((prompts - target).square().sum()), x, x.mean(0)

    sphere, evaluations = Sphere(lambda x: (x, x[:, None]), torch.rand(4, 7), seed=0), 0
    while not sphere.losses or min(sphere.losses) > 1e-8:
        sphere(torch.rand(4, 7))
        evaluations += len(sphere.losses)
        assert evaluations < 3000


@pytest.mark.slow  # tests a study
def test_foa_adapts_an_int8_model_without_changing_weights(foa, digits):
    torch.manual_seed(0)
    small = foa.Transformer()
    foa.halfstep.quantize_model(small, foa.int8())
    before = {name: value.clone() for name, value in small.state_dict().items()}
    assert before["blocks.0.up.weight_codes"].element_size() == 1
    assert not any(parameter.requires_grad for parameter in small.parameters())
    adapted = foa.Foa(small, digits[:64], seed=0)
    adapted(digits[:64])
    last = adapted.best
    expected = adapted.score(digits[64:], last)[0]
    adapted(digits[64:])
    assert adapted.losses[0] == expected, "the last batch's best is scored on this one"
    assert min(adapted.losses) <= expected
    assert torch.equal(adapted.best, last) == (min(adapted.losses) == expected)
    assert all(torch.equal(value, before[name]) for name, value in small.state_dict().items())


@pytest.mark.slow  # tests a study
def test_foa_shifts_the_last_feature_to_the_training_mean(foa, digits):
    torch.manual_seed(0)
    model = foa.Transformer().requires_grad_(False)
    shift, x = foa.Foa(model, digits, seed=0, prompts=False), foa.corrupted(digits, "contrast", 0.1, None)
    first = shift(x).mean(0)
    for _ in range(100):
        logits = shift(x)
    source = model(digits)[0][0].mean(0)  # the head is linear
    torch.testing.assert_close(logits.mean(0), source, rtol=0, atol=1e-3)
    assert float((first - source).abs().max()) > 1e-2


@pytest.mark.slow  # tests a study
def test_tent_changes_only_norms_of_a_copy(foa, digits):
    torch.manual_seed(0)
    model = foa.Transformer()
    tent = foa.Tent(model.requires_grad_(False), 1.0)
    before = foa.entropy(tent(digits))
    assert foa.entropy(tent(digits)) < before
    moved = {n for n, p in tent.model.named_parameters() if not torch.equal(p, model.get_parameter(n))}
    assert moved
    assert all("norm" in name for name in moved)


@pytest.mark.slow  # tests a study
@pytest.mark.parametrize(("kind", "amount"), [("noise", 0.5), ("blur", 1.0), ("contrast", 0.5), ("shift", 2)])
def test_corruptions_follow_their_amount(foa, digits, kind, amount):
    x = foa.corrupted(digits, kind, amount, torch.Generator().manual_seed(0))
    assert x.shape == digits.shape
    if kind == "noise":
        assert float((x - digits).std()) == pytest.approx(amount, rel=0.02)
    if kind == "contrast":
        torch.testing.assert_close(x.std((1, 2)), amount * digits.std((1, 2)))
        torch.testing.assert_close(x.mean((1, 2)), digits.mean((1, 2)))
    if kind == "blur":
        point = torch.zeros(1, 12, 12)
        point[0, 6, 6] = 1
        spread = foa.corrupted(point, kind, amount, None)[0]
        places = torch.arange(12.0) - 6
        assert float((spread.sum(1) * places.square()).sum()) == pytest.approx(amount**2, rel=0.02)
    if kind == "shift":
        point = torch.zeros(64, 12, 12)
        point[:, 5:7, 5:7] = 1
        moved = foa.corrupted(point, kind, amount, torch.Generator().manual_seed(0))
        places = torch.arange(12.0) - 5.5
        by = torch.stack([(moved.sum(d) * places).sum(1) / moved.sum((1, 2)) for d in (1, 2)])
        torch.testing.assert_close(by.norm(dim=0), torch.full((64,), float(amount)), rtol=0, atol=0.1)


def test_documentation_shows_the_foa_results():
    page = (ROOT / "docs" / "papers.md").read_text()
    kept = json.loads((ROOT / "benchmarks" / "results" / "foa.json").read_text())
    clean = [run["FOA, int8"] for name, run in kept["runs"].items() if name.startswith("clean")]
    assert len(clean) == 3
    assert f"| {statistics.fmean(clean):.3f} |\n" in page
    gain, search = (kept["gains"][f"FOA, int8 - {other}, int8"] for other in ("none", "shift alone"))
    assert f"{gain['mean']:.3f} ({gain['low']:.3f} to {gain['high']:.3f}) over no adaptation" in page
    assert search["verdict"] == "cannot tell"
    assert f"{search['low']:.3f} to {search['high']:+.3f}" in page
    held = {name: each["peak"] + each["search"] for name, each in kept["runs"]["bytes (192, 12, 32)"].items()}
    assert f"Memory: {held['TENT, fp32'] / held['FOA, int8']:.1f} times less" in page
    # with entropy only it is worse than with statistics, as in the paper
    assert kept["gains"]["FOA, int8, harder - entropy alone, int8, harder"]["low"] > 0
