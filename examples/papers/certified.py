"""A network of linear layers and ReLU that computes bounds of its values over a box of inputs: the model of ibp.py."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


DEPTH, TAU = 4, 0.5


class Certified(nn.Module):
    """A network of linear layers and ReLU that computes its values and the bounds of a box around its inputs."""

    def __init__(self, fixes: bool, width: int) -> None:
        super().__init__()
        sizes = [64] + [width] * DEPTH
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.last = nn.Linear(width, 10)
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(DEPTH) if fixes)
        if fixes:
            for layer in self.layers:
                nn.init.normal_(layer.weight, std=math.sqrt(2 * math.pi) / layer.in_features)
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, y: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, lower bounds of the margins z_y - z_j, and the sum of the two regularizers."""
        value, centre, radius = x, x, torch.full_like(x, epsilon)
        penalty, first = x.new_zeros(()), None
        for i, layer in enumerate(self.layers):
            radius = _wide(F.linear(radius, layer.weight.abs()))
            value, centre = _wide(layer(value)), _wide(layer(centre))
            if self.norms:  # norms need the statistics of values, for the bounds too
                value, scale, shift = self._normed(self.norms[i], value)
                centre, radius = centre * scale + shift, radius * scale.abs()
            first = radius.mean() if first is None else first
            if epsilon:
                penalty = penalty + _penalty(centre, radius, first) / (TAU * DEPTH)
            low, high = (centre - radius).relu(), (centre + radius).relu()
            value, centre, radius = value.relu(), (low + high) / 2, (high - low) / 2
        rows = self.last.weight[y][:, None] - self.last.weight
        bias = self.last.bias[y][:, None] - self.last.bias
        margins = torch.einsum("bjk,bk->bj", rows, centre) - torch.einsum("bjk,bk->bj", rows.abs(), radius)
        return self.last(value), _wide(margins) + bias, penalty

    def _normed(self, norm: Any, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.training:
            mean, variance = value.mean(0), value.var(0, unbiased=False)
            norm.running_mean.lerp_(mean.detach(), 0.1)
            norm.running_var.lerp_(variance.detach(), 0.1)
        else:
            mean, variance = norm.running_mean, norm.running_var
        scale = norm.weight * torch.rsqrt(variance + norm.eps)
        shift = norm.bias - mean * scale
        return value * scale + shift, scale, shift


def _wide(t: Tensor) -> Tensor:
    """The tensor in float32, if its dtype is narrower."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _penalty(centre: Tensor, radius: Tensor, first: Tensor) -> Tensor:
    """One layer's penalty, on the growth of bounds and on the imbalance of active and inactive units."""
    penalty = F.relu(TAU - first / radius.mean())
    active, inactive = centre > radius, centre < -radius
    if active.any() and inactive.any():
        spread = (centre - centre.mean(0)).square()
        for amount in (centre.abs(), spread):
            ratio = (amount * active).sum() / (amount * inactive).sum()
            penalty = penalty + F.relu(TAU - torch.minimum(ratio, 1 / ratio))
    return penalty
