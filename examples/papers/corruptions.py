"""scikit-learn's digits, turned and shifted at random, and corruptions of them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from ibp import digits
from torch import Tensor


SIDE = 12
"""An image's side in pixels."""
CORRUPTIONS = {"noise": (0.2, 0.3), "blur": (0.8, 1.2), "contrast": (0.5, 0.3), "shift": (1, 2)}
"""The amounts of each corruption, the harder one last."""


def images(train: bool, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Digits of one part, each turned, scaled and shifted a little at random, with `SIDE` x `SIDE` pixels in [0, 1]."""
    x, y = (part[:1100] if train else part[1100:] for part in digits())
    rounds = [torch.randperm(len(x), generator=generator) for _ in range(count // len(x) + 1)]
    rows = torch.cat(rounds)[:count]
    most = torch.tensor([[0.2], [0.1], [0.1], [0.1]])
    angle, scale, *moved = (torch.rand(4, count, generator=generator) * 2 - 1) * most
    cos, sin = angle.cos() * (1 + scale), angle.sin() * (1 + scale)
    theta = torch.stack([cos, -sin, moved[0], sin, cos, moved[1]], 1)
    return _sampled(x[rows].view(-1, 8, 8), theta), y[rows]


def _sampled(x: Tensor, theta: Tensor) -> Tensor:
    grid = F.affine_grid(theta.view(-1, 2, 3), [len(x), 1, SIDE, SIDE], align_corners=False)
    return F.grid_sample(x[:, None], grid, align_corners=False)[:, 0]


def corrupted(x: Tensor, kind: str, amount: float, generator: torch.Generator) -> Tensor:
    """Corrupted images. The amount is a standard deviation of noise or blur, a contrast, or a shift in pixels."""
    if kind == "noise":
        return x + amount * torch.randn(x.shape, generator=generator)
    if kind == "contrast":
        mean = x.mean((1, 2), keepdim=True)
        return mean + amount * (x - mean)
    if kind == "blur":
        line = torch.exp(-0.5 * (torch.arange(-4.0, 5.0) / amount).square())
        kernel = torch.outer(line, line)[None, None] / line.sum() ** 2
        return F.conv2d(x[:, None], kernel, padding=4)[:, 0]
    if kind == "shift":
        angle = 2 * math.pi * torch.rand(len(x), generator=generator)
        theta = torch.eye(2, 3).repeat(len(x), 1, 1)
        theta[:, :, 2] = 2 * amount / SIDE * torch.stack([angle.cos(), angle.sin()], 1)
        return _sampled(x, theta)
    return x
