"""The small GPT from unit-scaled layers: under u-muP, and under munit scaling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from halfstep import unit
from halfstep.errors import ModelError, unknown


def _umup(head: int) -> dict[str, Any]:
    return {"residual": unit.equal_shares()}


def _munit(head: int) -> dict[str, Any]:
    # 0.4 is what the paper has for its models of 4 layers; tau falls with depth.
    return {"residual": unit.fixed(0.4), "place": "res-post", "constraint": unit.SAME, "mult": head**0.5}


_FAMILIES = {"umup": _umup, "munit": _munit}


class UnitGPT(nn.Module):
    """Tokens (batch, time) int64 -> logits (batch, time, vocabulary), as `gpt.GPT`, with weights of unit variance.

    The gradient that arrives at the logits is brought to unit scale, as `unit.cross_entropy` would, so that any mean
    cross-entropy may follow: its 1 / positions and the softmax of logits near zero are taken out.

    Args:
        parametrization: `umup`: norms at the start of each branch, u-muP's residual scheme; `munit`: norms at its end,
            a fixed tau, stock logits of attention and one factor in both directions.
    """

    def __init__(
        self, vocabulary: int, context: int, layers: int, width: int, heads: int, parametrization: str = "umup"
    ) -> None:
        super().__init__()
        if parametrization not in _FAMILIES:
            raise ModelError(unknown("parametrization of a UnitGPT", parametrization, _FAMILIES))
        options = _FAMILIES[parametrization](width // heads)
        readout = unit.SAME if parametrization == "munit" else "none"
        self.parametrization = parametrization
        self.token = unit.Embedding(vocabulary, width)
        self.position = unit.Embedding(context, width)
        self.blocks = unit.TransformerStack(layers, width, heads, norm="layer", mlp="gelu", is_causal=True, **options)
        self.norm = unit.LayerNorm(width)
        self.head = unit.LinearReadout(width, vocabulary, constraint=readout)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the next token at each position."""
        places = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.int64).expand_as(tokens)
        x = self.blocks(unit.add(self.token(tokens), self.position(places)))
        logits: Tensor = self.head(self.norm(x))
        classes = logits.shape[-1]
        return unit.scale_backward(logits, tokens.numel() * classes / (classes - 1) ** 0.5)
