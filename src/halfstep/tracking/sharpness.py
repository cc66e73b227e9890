"""The sharpness of a loss in its logits: how much it rises within a small box around them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.errors import QuantizationError


EPSILON = 5e-4
"""Keskar et al.'s smaller box."""


def logit_sharpness(logits: Tensor, targets: Tensor, epsilon: float = EPSILON) -> Tensor:
    """The relative rise of the cross-entropy in a box around the logits, in percent, at each position, (...) float64.

        phi(z) = 100 (max over |d_j| <= epsilon (|z_j| + 1) of f(z + d) - f(z)) / (1 + f(z)),   f(z) = -log softmax(z)_y

    The derivative of f by z_j is p_j - [j = y]: negative at y alone, whatever z. So the maximum is at a corner of the
    box, d_y = -epsilon (|z_y| + 1) and the others positive; no optimizer is needed.

    Args:
        logits: (..., classes).
        targets: the right classes, (...) int64.

    Raises:
        QuantizationError: shapes that do not belong together; an epsilon that is negative or not finite.

    Source: Keskar et al. 2017, arXiv 1609.04836, of weights; Lee et al. 2024, arXiv 2405.18710, of the logits. The
    latter's epsilon and normalisation were not in what was read of it.
    """
    if logits.shape[:-1] != targets.shape or not logits.is_floating_point():
        raise QuantizationError(
            f"logits {tuple(logits.shape)} {logits.dtype} with targets {tuple(targets.shape)}; expected floating "
            "logits (..., classes) and a class for each position (...)"
        )
    if not 0 <= epsilon < float("inf"):
        raise QuantizationError(f"epsilon = {epsilon}; expected a number of at least 0, such as {EPSILON}")
    z, y = logits.detach().double().flatten(0, -2), targets.flatten()
    box = epsilon * (z.abs() + 1)
    corner = z + box
    rows = torch.arange(len(y), dtype=torch.int64, device=y.device)
    corner[rows, y] = z[rows, y] - box[rows, y]
    before, after = (F.cross_entropy(values, y, reduction="none") for values in (z, corner))
    return (100 * (after - before) / (1 + before)).view(targets.shape)
