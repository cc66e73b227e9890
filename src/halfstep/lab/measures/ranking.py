"""How well scores rank: the area under the receiver operating characteristic."""

from __future__ import annotations

import torch
from torch import Tensor


def auc(scores: Tensor, labels: Tensor) -> float:
    """The chance that a random positive scores above a random negative, ties counting half; scores and labels (n,).

    From the rank sum of the positives (Mann and Whitney 1947). NaN where one of the classes is missing.

    >>> auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
    0.75
    """
    _, places, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    counts = counts.double()
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[places]  # the mean rank of equal scores
    positive = labels > 0
    n, m = int(positive.sum()), int((~positive).sum())
    if not n or not m:
        return float("nan")
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * m))
