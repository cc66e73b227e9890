"""A small vision-language model: the patches of an image stand before the words of a decoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.lab.models.gpt import Block


_PATCH = 2  # pixels a side


class Captioner(nn.Module):
    """Images (batch, 1, side, side) and the text so far (batch, time) int64 -> logits (batch, time, vocabulary).

    A patch is projected to the width of the decoder, as a token is embedded (LLaVA's way, Liu et al. 2023, arXiv
    2304.08485, without an encoder of its own).
    """

    def __init__(self, vocabulary: int, side: int, longest: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.patches = (side // _PATCH) ** 2
        self.project = nn.Linear(_PATCH**2, width)
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(self.patches + longest, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.3)  # about what the patches' projection gives

    def forward(self, images: Tensor, text: Tensor) -> Tensor:
        """The logits of the next token at each place of the text."""
        seen = self.project(F.unfold(images, _PATCH, stride=_PATCH).transpose(1, 2))
        x = torch.cat([seen, self.token(text)], 1)
        x = x + self.position(torch.arange(x.shape[1], device=x.device, dtype=torch.int64))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, self.patches :]))  # type: ignore[no-any-return]
