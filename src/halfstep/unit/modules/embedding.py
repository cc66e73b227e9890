"""A table whose rows have unit variance."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from halfstep.errors import ModelError
from halfstep.unit.layers import embedding
from halfstep.unit.roles import Tag, set_tag


class Embedding(nn.Embedding):
    """nn.Embedding with rows from N(0, 1), whose gradient is multiplied by (rows / look-ups)^1/2.

    Arguments as torch's.

    Raises:
        ModelError: `max_norm` or `scale_grad_by_freq`, which give rows and gradients other scales.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.max_norm is not None or self.scale_grad_by_freq:
            raise ModelError(
                f"max_norm = {self.max_norm}, scale_grad_by_freq = {self.scale_grad_by_freq} given; expected neither "
                "in a table of unit scale: leave them out, or take nn.Embedding"
            )
        set_tag(self, "weight", Tag("embedding"))

    def forward(self, input: Tensor) -> Tensor:
        """Indices (...) int64 -> (..., width)"""
        return embedding(input, self.weight, self.padding_idx, self.sparse)
