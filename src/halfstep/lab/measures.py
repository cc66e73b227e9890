"""Metrics of the tasks, on plain tensors or lists: mean average precision of boxes, error rates, BLEU."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


Sentence = Sequence[Hashable]


@dataclass(frozen=True)
class Found:
    """A detector's output for one image: boxes (n, 4), scores (n,), classes (n,)."""

    boxes: Tensor
    scores: Tensor
    classes: Tensor


@dataclass(frozen=True)
class Truth:
    """The objects of one image: boxes (n, 4), classes (n,)."""

    boxes: Tensor
    classes: Tensor


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of boxes a (..., n, 4) with b (..., m, 4), as (..., n, m).

    >>> iou(torch.tensor([[0.0, 0, 2, 2]]), torch.tensor([[1.0, 0, 3, 2], [5, 5, 6, 6]]))
    tensor([[0.3333, 0.0000]])
    """
    low = torch.maximum(a[..., :, None, :2], b[..., None, :, :2])
    high = torch.minimum(a[..., :, None, 2:], b[..., None, :, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    areas = [(boxes[..., 2:] - boxes[..., :2]).prod(-1) for boxes in (a, b)]
    return shared / (areas[0][..., :, None] + areas[1][..., None, :] - shared).clamp(min=1e-9)


def suppress(boxes: Tensor, scores: Tensor, classes: Tensor, threshold: float = 0.5) -> Tensor:
    """Indices of the boxes kept, best first, when each removes boxes of its class that overlap it by more than
    `threshold`."""
    order = scores.argsort(descending=True, stable=True)
    overlap = (iou(boxes[order], boxes[order]) > threshold) & (classes[order][:, None] == classes[order])
    rows = overlap.tolist()
    kept: list[int] = []
    for i in range(len(rows)):
        if not any(rows[j][i] for j in kept):
            kept.append(i)
    return order[kept]


def mean_average_precision(found: Sequence[Found], truth: Sequence[Truth], classes: int, overlap: float = 0.5) -> float:
    """mAP: the mean over the classes in the truth of the area under the interpolated precision-recall curve.

    A detection is right if it overlaps, by at least `overlap`, a box of its class that no better-scored detection has
    taken. Of the boxes in its image, only the one it overlaps most is tried.

    Source: Everingham et al. 2010 and the PASCAL VOC development kit (areas under the curve, as from VOC2010 on).
    """
    every = (_average_precision(found, truth, kind, overlap) for kind in range(classes))
    present = [precision for precision in every if precision is not None]
    return sum(present) / len(present) if present else 0.0


def _average_precision(found: Sequence[Found], truth: Sequence[Truth], kind: int, overlap: float) -> float | None:
    """The average precision of one class, None if the truth has none of it."""
    boxes = [t.boxes[t.classes == kind] for t in truth]
    total = sum(map(len, boxes))
    if not total:
        return None
    candidates: list[tuple[float, int, float, int]] = []  # score, image, best overlap, and with which box
    for image, detections in enumerate(found):
        mine = detections.classes == kind
        table = (
            iou(detections.boxes[mine], boxes[image])
            if len(boxes[image])
            else torch.zeros(int(mine.sum()), 1, dtype=torch.float32, device="cpu")
        )
        best, which = table.max(-1)
        scores = detections.scores[mine].tolist()
        candidates += zip(scores, [image] * len(scores), best.tolist(), which.tolist(), strict=True)
    candidates.sort(key=lambda c: -c[0])
    taken: set[tuple[int, int]] = set()
    right, points = 0, []
    for rank, (_, image, best_overlap, box) in enumerate(candidates, 1):
        if best_overlap >= overlap and (image, box) not in taken:
            taken.add((image, box))
            right += 1
            points.append(right / rank)  # recall moves only here
    area, ceiling = 0.0, 0.0
    for precision in reversed(points):  # interpolated: the best precision at this recall or beyond
        ceiling = max(ceiling, precision)
        area += ceiling / total
    return area


def edit_distance(found: Sentence, wanted: Sentence) -> int:
    """The fewest insertions, deletions and substitutions that turn one into the other.

    >>> edit_distance("kitten", "sitting")
    3
    """
    row = list(range(len(wanted) + 1))
    for i, a in enumerate(found, 1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(wanted, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


def error_rate(found: Sequence[Sentence], wanted: Sequence[Sentence]) -> float:
    """The edits of all sentences over the length of all reference ones: CER on characters, WER on words.

    >>> error_rate(["abc", "d"], ["abd", "d"])
    0.25
    """
    return sum(map(edit_distance, found, wanted)) / max(1, sum(map(len, wanted)))


def bleu(found: Sequence[Sentence], wanted: Sequence[Sentence], order: int = 4) -> float:
    """BLEU of a corpus with one reference per sentence, in [0, 1], unsmoothed.

    exp(mean over n = 1..order of log p_n) * min(1, exp(1 - reference words / found words)), where p_n is the share of
    found n-grams that are in the reference, each counted at most as often as it occurs there.

    Source: Papineni et al. 2002.

    >>> bleu(["the cat sat on the mat".split()], ["the cat sat on the mat".split()])
    1.0
    """
    matches, totals = [0] * order, [0] * order
    for f, w in zip(found, wanted, strict=True):
        for n in range(1, order + 1):
            ours, theirs = _ngrams(f, n), _ngrams(w, n)
            matches[n - 1] += sum((ours & theirs).values())
            totals[n - 1] += sum(ours.values())
    if not all(matches):
        return 0.0
    precision = sum(math.log(m / t) for m, t in zip(matches, totals, strict=True)) / order
    shortness = 1 - sum(map(len, wanted)) / max(1, sum(map(len, found)))
    return math.exp(precision + min(0.0, shortness))


def _ngrams(words: Sentence, n: int) -> Counter[tuple[Hashable, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
