"""The tasks' metrics, against other libraries' if installed, else against worked examples."""

import math

import pytest
import torch

from halfstep.lab.measures import Found, Truth, bleu, edit_distance, error_rate, iou, mean_average_precision, suppress
from halfstep.lab.task import load_digits
from halfstep.lab.tasks.detection import Detection
from halfstep.lab.tasks.gan import Space, frechet_distance
from halfstep.lab.tasks.recommender import auc
from halfstep.lab.tasks.speech import BINS, FRAMES, speak
from halfstep.lab.tasks.translation import END, LONGEST, SOURCE_WORDS, TARGET_WORDS, sentences


def test_auc_equals_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    generator = torch.Generator().manual_seed(0)
    for ties in (1000, 7):
        scores = torch.randint(0, ties, (400,), generator=generator).float()
        labels = torch.randint(0, 2, (400,), generator=generator)
        assert auc(scores, labels) == pytest.approx(metrics.roc_auc_score(labels.numpy(), scores.numpy()))
    assert math.isnan(auc(scores, torch.ones(400)))


def test_digits_equal_scikit_learns():
    datasets = pytest.importorskip("sklearn.datasets")
    images, classes = datasets.load_digits(return_X_y=True)
    train, held_out = load_digits()
    assert (len(train["images"]), len(held_out["images"])) == (1438, 359)
    assert (held_out["images"].flatten(1) * 16).int().tolist() == images[4::5].astype(int).tolist()
    assert held_out["classes"].tolist() == classes[4::5].tolist()


@pytest.mark.parametrize(
    ("found", "wanted", "distance"),
    [("", "", 0), ("", "abc", 3), ("abc", "abc", 0), ("flaw", "lawn", 2), ("ab", "ba", 2)],
)
def test_edit_distance(found, wanted, distance):
    assert edit_distance(found, wanted) == edit_distance(wanted, found) == distance


def test_error_rate_is_relative_to_all_expected_characters():
    assert error_rate(["abcd", ""], ["abcx", "y"]) == pytest.approx(2 / 5)
    assert error_rate(["ab"], ["ab"]) == 0


def test_bleu_equals_worked_examples():
    found, wanted = list("abcdef"), list("abcdxf")
    # 1-grams 5 of 6, 2-grams 3 of 5, 3-grams 2 of 4, 4-grams 1 of 3; equal lengths
    assert bleu([found], [wanted]) == pytest.approx((5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)
    short = list("abcd")
    assert bleu([short], [wanted]) == pytest.approx(math.exp(1 - 6 / 4))
    repeated = ["the"] * 7
    assert bleu([repeated], [["the", "cat", "the", "mat"]], order=1) == pytest.approx(2 / 7)  # Papineni's example
    assert bleu([[]], [wanted]) == 0.0


BOX = torch.tensor([[0.0, 0, 10, 10], [20, 20, 30, 30], [40, 40, 50, 50]])


def test_mean_average_precision_equals_worked_examples():
    truth = [Truth(BOX[:2], torch.tensor([0, 0])), Truth(BOX[2:], torch.tensor([1]))]
    perfect = [Found(t.boxes, torch.ones(len(t.boxes)), t.classes) for t in truth]
    assert mean_average_precision(perfect, truth, 3) == 1.0
    # class 0: right, wrong, a duplicate, right; precisions 1 and 2/4 at recalls 1/2 and 1
    boxes = torch.stack([BOX[0], BOX[2], BOX[0] + 0.1, BOX[1]])
    messy = [Found(boxes, torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.zeros(4)), perfect[1]]
    assert mean_average_precision(messy, truth, 3) == pytest.approx((0.75 + 1) / 2)
    none = [Found(BOX[:0], BOX[:0, 0], BOX[:0, 0])] * 2
    assert mean_average_precision(none, truth, 3) == 0.0
    shifted = [Found(f.boxes + 4, f.scores, f.classes) for f in perfect]  # overlap 36 / 164
    assert mean_average_precision(shifted, truth, 3) == 0.0


def test_average_precision_is_interpolated():
    """Wrong, right, right: precision 1/2 at recall 1/2, but 2/3 at recall 1."""
    truth = [Truth(BOX[:2], torch.tensor([0, 0]))]
    found = [Found(BOX[[2, 0, 1]], torch.tensor([0.9, 0.8, 0.7]), torch.zeros(3))]
    assert mean_average_precision(found, truth, 1) == pytest.approx(2 / 3)


def test_non_maximum_suppression_is_per_class():
    boxes = torch.cat([BOX[:1], BOX[:1] + 1, BOX[:1] + 1, BOX[1:2]])
    kept = suppress(boxes, torch.tensor([0.5, 0.9, 0.8, 0.1]), torch.tensor([0, 0, 1, 0]))
    assert kept.tolist() == [1, 2, 3]


def test_iou_of_equal_and_disjoint_boxes():
    assert iou(BOX, BOX).tolist() == torch.eye(3).tolist()


def test_frechet_distance_of_known_gaussians():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(200_000, 2, generator=generator)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)
    moved = a * torch.tensor([2.0, 1.0]) + torch.tensor([3.0, 0.0])
    assert frechet_distance(a, moved) == pytest.approx(9 + 1, rel=0.01)  # |shift|^2 + (2 - 1)^2
    assert math.isnan(frechet_distance(a, a * float("nan")))


def test_feature_space_has_unit_variance():
    data = torch.randn(500, 6, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 7)
    features = Space.of(data, 3).features(data)
    assert float(features.var(0, correction=0).sum()) == pytest.approx(1)


def test_detection_targets_decode_to_the_true_boxes():
    task = Detection(*load_digits(), batch=4)
    batch = task.batch(0, 1)
    positive = batch["classes"] >= 0
    decoded = task.decode(batch["offsets"])[positive]
    anchors = task.anchors.expand(4, -1, -1)[positive]
    assert positive.any(1).all()
    assert positive.float().mean() < 0.05
    assert (iou(decoded[:, None], anchors[:, None]) > 0.15).all()
    assert (decoded[:, :2] >= -1e-3).all()
    assert (decoded[:, 2:] <= 48 + 1e-3).all()


def test_translation_sentences_fit_their_vocabularies():
    pairs = sentences(500, torch.Generator().manual_seed(0))
    assert max(max(a) for a, _ in pairs) < SOURCE_WORDS
    assert max(max(b) for _, b in pairs) < TARGET_WORDS
    assert max(len(s) for pair in pairs for s in pair) <= LONGEST
    assert all(a[-1] == b[-1] == END for a, b in pairs)


def test_utterances_have_enough_frames_for_their_characters():
    utterances = speak(64, torch.Generator().manual_seed(0))
    assert utterances["features"].shape == (64, FRAMES, BINS)
    assert bool(torch.isfinite(utterances["features"]).all())
    assert ((utterances["characters"] > 0).sum(1) == utterances["lengths"]).all()
    assert {3, 7} == {int(utterances["lengths"].min()), int(utterances["lengths"].max())}
