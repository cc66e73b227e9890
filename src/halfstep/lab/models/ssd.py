"""A small single-shot detector: one pass, boxes and classes at every place of several feature maps."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from halfstep.lab.models.cnn import conv_block


class SSD(nn.Module):
    """Images (batch, 1, size, size) -> class logits (batch, anchors, classes) and box offsets (batch, anchors, 4).

    Three feature maps with strides 4, 8 and 16, a 3x3 convolution on each for `per_place` anchors at every place.

    Source: Liu et al. 2016 (single shot, several maps); Lin et al. 2017 (one sigmoid a class, its first bias).
    """

    def __init__(self, classes: int, per_place: int, width: int, norm: bool = True) -> None:
        super().__init__()
        self.classes, self.per_place = classes, per_place
        block = conv_block if norm else _plain_block
        self.stem = nn.Sequential(block(1, width, 2), block(width, 2 * width))
        widths = [2 * width, 3 * width, 4 * width, 4 * width]
        self.stages = nn.ModuleList(nn.Sequential(block(a, b, 2), block(b, b)) for a, b in pairwise(widths))
        self.heads = nn.ModuleList(nn.Conv2d(w, per_place * (classes + 4), 3, padding=1) for w in widths[1:])
        for head in self.heads:
            assert isinstance(head, nn.Conv2d)
            assert head.bias is not None
            nn.init.normal_(head.weight, std=0.01)
            nn.init.zeros_(head.bias)
            with torch.no_grad():  # every anchor starts as background with probability 0.99
                head.bias.view(per_place, classes + 4)[:, :classes] = -math.log(99)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and offsets, the finest map's anchors first, row by row."""
        x = self.stem(images)
        outputs = []
        for stage, head in zip(self.stages, self.heads, strict=True):
            x = stage(x)
            y = head(x).permute(0, 2, 3, 1)
            outputs.append(y.reshape(len(y), -1, self.classes + 4))
        joined = torch.cat(outputs, 1)
        return joined[..., : self.classes], joined[..., self.classes :]


def _plain_block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1)
    nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
    return nn.Sequential(convolution, nn.ReLU())
