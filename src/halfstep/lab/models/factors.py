"""Neural collaborative filtering: the product of two embeddings beside an MLP on two others."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class NeuralFactors(nn.Module):
    """Users (batch,) and items (batch,), int64 -> logits (batch,).

    Source: He et al. 2017, Neural Collaborative Filtering (NeuMF).
    """

    def __init__(self, users: int, items: int, width: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, 2 * width), nn.Embedding(items, 2 * width)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)
        self.mlp = nn.Sequential(nn.Linear(2 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width), nn.ReLU())
        self.head = nn.Linear(2 * width, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """How likely each user likes the item beside it, as a logit."""
        user_product, user_mlp = self.users(users).chunk(2, -1)
        item_product, item_mlp = self.items(items).chunk(2, -1)
        deep = self.mlp(torch.cat([user_mlp, item_mlp], -1))
        return self.head(torch.cat([user_product * item_product, deep], -1)).squeeze(-1)  # type: ignore[no-any-return]
