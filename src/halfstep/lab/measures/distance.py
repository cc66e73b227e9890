"""How far two sets of samples lie apart: the Frechet distance of the Gaussians fitted to their features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Space:
    """A fixed linear feature space: the first principal components of some data."""

    centre: Tensor
    directions: Tensor

    @classmethod
    def of(cls, data: Tensor, size: int) -> Space:
        """The `size` first principal components of data (count, features), scaled to a total variance of 1."""
        data = data.double()
        centre = data.mean(0)
        _, _, directions = torch.linalg.svd(data - centre, full_matrices=False)
        kept = directions[:size].t()
        scale = ((data - centre) @ kept).square().sum(1).mean().sqrt()
        return cls(centre, kept / scale)

    def features(self, data: Tensor) -> Tensor:
        """(count, size) float64."""
        return (data.double() - self.centre) @ self.directions


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """|mean a - mean b|^2 + tr(A + B - 2 (A B)^(1/2)) with the covariances A and B of features (count, size).

    Source: Dowson and Landau 1982; Heusel et al. 2017 for its use on generated images.
    """
    a, b = a.double(), b.double()
    if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        return float("nan")
    first, second = torch.cov(a.t()), torch.cov(b.t())
    values, vectors = torch.linalg.eigh(first)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.t()
    shared = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0).sqrt().sum()
    return float((a.mean(0) - b.mean(0)).square().sum() + first.trace() + second.trace() - 2 * shared)
