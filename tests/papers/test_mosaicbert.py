"""examples/papers/mosaicbert.py: MosaicBERT's changes to the lab's BERT work as published."""

import importlib
import json
import math
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
def mosaic():
    return load("mosaicbert")


@pytest.fixture(scope="module")
def words(mosaic):
    found = torch.randint(3, mosaic.WORDS, (6, 64), generator=torch.Generator().manual_seed(0))
    found[:, 0] = mosaic.CLS
    for row, length in zip(found, (64, 40, 33, 9, 8, 64), strict=True):
        row[length:] = mosaic.PAD
    return found


def made(mosaic, *changes, like=None):
    torch.manual_seed(0)
    model = mosaic.Mosaic(changes)
    if like is not None:
        model.load_state_dict(like.state_dict())
    return model.requires_grad_(False)


@pytest.mark.slow  # tests a study
@pytest.mark.parametrize("more", [(), ("ALiBi", "GLU")])
def test_unpadding_does_not_change_features(mosaic, words, more):
    padded = made(mosaic, *more)
    packed = made(mosaic, "unpadding", *more, like=padded)
    real = words != mosaic.PAD
    expected, (found, places) = padded.features(words)[0], packed.features(words)
    assert len(found) == 256 > int(real.sum()) == 218
    assert len(places.unique()) == 256
    is_word = real.flatten()[places]
    assert int(is_word.sum()) == 218
    assert float((expected[places] - found)[is_word].abs().max()) < 1e-5
    shown, targets = mosaic.masked(words, 0.3, torch.Generator().manual_seed(0))
    losses = [model(shown, targets) for model in (padded, packed)]
    torch.testing.assert_close(*losses)
    assert float(losses[0]) == pytest.approx(math.log(mosaic.WORDS), abs=0.2)
    for model in (padded, packed):  # the contents of padding do not matter
        model.embeddings.word_embeddings.weight[mosaic.PAD] = 5.0
        torch.testing.assert_close(model.embeddings.word_embeddings(words)[~real], torch.full((384 - 218, 128), 5.0))
    torch.testing.assert_close(padded.features(words)[0][real.flatten()], expected[real.flatten()])
    torch.testing.assert_close(packed.features(words)[0][is_word], found[is_word])


@pytest.mark.slow  # tests a study
def test_rows_are_padded_to_a_multiple_of_64():
    rows, keep = load("mosaic").rows, torch.zeros(200, dtype=torch.bool)
    keep[[3, 70, 199]] = True
    assert rows(keep)[:5].tolist() == [3, 70, 199, 0, 1]
    assert len(rows(keep)) == 64
    assert len(rows(~keep)) == 200
    assert sorted(rows(~keep).tolist()) == list(range(200))


@pytest.mark.slow  # tests a study
def test_alibi_depends_only_on_distances(mosaic, words):
    assert load("mosaic").slopes(8).tolist() == [2.0**-h for h in range(1, 9)]
    alibi = made(mosaic, "ALiBi")
    bias = alibi.bias(torch.ones(1, 64, dtype=torch.bool))[0]
    assert torch.equal(bias, bias.transpose(1, 2))
    assert not bias.diagonal(dim1=1, dim2=2).any()
    assert bias[:, 3, 5].tolist() == [-2 * 2.0 ** (-8 * h / 4) for h in range(1, 5)]
    whole = words[:1]
    torch.testing.assert_close(alibi.features(whole.flip(1))[0].flip(0), alibi.features(whole)[0])
    learned = made(mosaic)
    assert float((learned.features(whole.flip(1))[0].flip(0) - learned.features(whole)[0]).abs().max()) > 0.1


@pytest.mark.slow  # tests a study
def test_parameter_counts_of_mosaicberts_changes(mosaic):
    d, inner = 128, 4 * 128
    plain = sum(p.numel() for p in made(mosaic).parameters())
    counts = {change: sum(p.numel() for p in made(mosaic, change).parameters()) - plain for change in mosaic.CHANGES}
    assert counts == {
        "ALiBi": -64 * d,
        "GLU": 2 * (2 * d * inner - d * inner - inner),
        "unpadding": 0,
        "bf16 norms": 0,
        "30% masked": 0,
        "vocabulary": (1024 - 1003) * (d + 1),
    }
    assert mosaic.Mosaic(("vocabulary",)).cls["predictions"].decoder.out_features % 64 == 0


@pytest.mark.slow  # tests a study
def test_bf16_norms_are_bf16_only_under_autocast(mosaic):
    model, x = made(mosaic, "bf16 norms"), torch.randn(3, 128)
    norms = [m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)]
    assert {type(norm) for norm in norms} == {load("mosaic").NarrowNorm}
    assert len(norms) == 6
    assert norms[0](x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        narrow = norms[0](x)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), norms[0](x), rtol=0, atol=0.04)


@pytest.mark.slow  # tests a study
def test_mosaicbert_masks_the_given_share(mosaic):
    words = torch.randint(3, mosaic.WORDS, (2000, 64), generator=torch.Generator().manual_seed(0))
    shown, targets = mosaic.masked(words, 0.3, torch.Generator().manual_seed(1))
    chosen = targets != -100
    assert torch.equal(targets[chosen], words[chosen])
    assert not chosen[words == mosaic.OTHER].any()
    assert float(chosen[words > mosaic.OTHER].float().mean()) == pytest.approx(0.3, abs=0.005)
    assert torch.equal(shown[~chosen], words[~chosen])
    assert float((shown[chosen] == mosaic.MASK).float().mean()) == pytest.approx(0.8, abs=0.01)
    assert float((shown[chosen] == words[chosen]).float().mean()) == pytest.approx(0.1, abs=0.01)


@pytest.mark.slow  # tests a study
def test_front_is_pareto_optimal(mosaic):
    points = {"a": (1.0, 3.0), "b": (2.0, 2.0), "c": (2.0, 2.5), "d": (3.0, 1.0), "e": (1.0, 3.0)}
    assert mosaic.front(points) == ["a", "b", "d", "e"]


def test_documentation_shows_the_mosaicbert_results():
    page = (ROOT / "docs" / "papers.md").read_text()
    kept = json.loads((ROOT / "benchmarks" / "results" / "mosaicbert.json").read_text())
    for change, means in kept["means"].items():
        losses = [run["loss"] for name, run in kept["runs"].items() if name.startswith(f"{change}, seed")]
        assert len(losses) == 3
        assert statistics.fmean(losses) == pytest.approx(means["loss"])
        assert f"| {means['loss']:.3f} (" in page
    loss = kept["gains"]["all, loss"]
    assert f"the loss is lower by {-loss['mean']:.3f} ({-loss['high']:.3f} to {-loss['low']:.3f})" in page
    assert kept["fronts"] == {"loss": ["all"], "probes": ["unpadding", "30% masked", "vocabulary", "all"]}
