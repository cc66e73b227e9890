"""A time-delay network: convolutions over time, from spectra to characters."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn


class TDNN(nn.Module):
    """Spectra (batch, frames, bins) -> logits (batch, frames / 2, characters + 1), the first for CTC's blank."""

    def __init__(self, bins: int, characters: int, width: int) -> None:
        super().__init__()
        widths, strides = (bins, width, width, width), (2, 1, 1)
        layers = [
            nn.Sequential(nn.Conv1d(a, b, 5, stride=s, padding=2, bias=False), nn.BatchNorm1d(b), nn.ReLU())
            for (a, b), s in zip(pairwise(widths), strides, strict=True)
        ]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, characters + 1)

    def forward(self, features: Tensor) -> Tensor:
        """The logits of each second frame."""
        return self.head(self.layers(features.transpose(1, 2)).transpose(1, 2))  # type: ignore[no-any-return]
