"""Recurrent models for the lab's tasks, of LSTM cells: a language model, and a translator with attention.

With cells, each step's activations and gradients under autocast are 16-bit, as on the papers' GPUs; the
fused LSTM of a CPU computes all steps in float32 if the CPU has no kernel for the dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Stack(nn.Module):
    """Stacked LSTM layers, computed step by step."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers))

    def forward(
        self, x: Tensor, states: list[tuple[Tensor, Tensor]] | None = None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """x (batch, time, width) -> the last layer's outputs, of the same shape, and each layer's final states."""
        last = []
        for number, cell in enumerate(self.cells):
            state, outputs = None if states is None else states[number], []
            for step in x.unbind(1):
                state = cell(step, state)
                outputs.append(state[0])
            x = torch.stack(outputs, 1)
            last.append(state)
        return x, last


class LanguageModel(nn.Module):
    """Tokens (batch, time) int64 -> logits (batch, time, vocabulary) of the next tokens."""

    def __init__(self, vocabulary: int, layers: int, width: int) -> None:
        super().__init__()
        self.embedding, self.stack = nn.Embedding(vocabulary, width), Stack(layers, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits."""
        return self.head(self.stack(self.embedding(tokens))[0])  # type: ignore[no-any-return]


class Translator(nn.Module):
    """Source and target tokens (batch, time) int64 -> logits (batch, time, target): dot-product attention of the
    decoder's outputs over the encoder's."""

    def __init__(self, source: int, target: int, layers: int, width: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(source, width), nn.Embedding(target, width)
        self.encoder, self.decoder = Stack(layers, width), Stack(layers, width)
        self.query, self.mix = nn.Linear(width, width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, target)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """The logits of the next word at each position of the target."""
        memory, states = self.encoder(self.source(source))
        y, _ = self.decoder(self.target(target), states)
        weights = (self.query(y) @ memory.transpose(1, 2)).softmax(-1)
        return self.head(self.mix(torch.cat([y, weights.to(memory.dtype) @ memory], -1)).tanh())  # type: ignore[no-any-return]
