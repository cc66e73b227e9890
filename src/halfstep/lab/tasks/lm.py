"""Language modelling: a small GPT, Llama or mixture of experts predicts the next byte of a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import unit
from halfstep.errors import ModelError, unknown
from halfstep.lab.data import VOCABULARY, Corpus, load_corpus
from halfstep.lab.facts import Facts, Metric
from halfstep.lab.models.gpt import GPT
from halfstep.lab.models.moe import MoE
from halfstep.lab.task import Batch, Task, TaskSpec, stream
from halfstep.ops import attention


_THETA = 10000.0
"""The longest wavelength of the positions, over 2 pi."""


class Attention(nn.Module):
    """Causal multi-head self-attention on (batch, time, width), queries and keys turned by their positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Attend to the present and the past."""
        batch, time, width = x.shape
        q, k, v = (
            project(x).view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = attention(rotated(q), rotated(k), v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, time, width))  # type: ignore[no-any-return]


def rotated(x: Tensor) -> Tensor:
    """x (batch, heads, time, d), each pair (x_i, x_{i + d/2}) turned by the angle position * theta^(-2i / d)."""
    time, size = x.shape[-2:]
    rates = _THETA ** (-torch.arange(0, size, 2, device=x.device, dtype=torch.int64).float() / size)
    angles = torch.arange(time, device=x.device, dtype=torch.int64).float()[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """The gated product, projected back."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(width, eps=1e-6)
        self.self_attn = Attention(width, heads)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=1e-6)
        self.mlp = MLP(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        """One block of the residual stream."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """Tokens (batch, time) int64 -> logits (batch, time, vocabulary)."""

    def __init__(self, vocabulary: int, context: int, layers: int, width: int, heads: int) -> None:
        """`context` is GPT's: rotary positions have no table to size."""
        super().__init__()
        inner = -(-8 * width // 24) * 8  # two thirds of 4 * width: as many weights as an MLP of two matrices
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # GPT-2's: the residual branches' last layers start smaller
                branch = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if branch else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the next token at each position."""
        x = self.embed_tokens(tokens)
        for block in self.layers:
            x = block(x)
        return self.lm_head(self.norm(x))  # type: ignore[no-any-return]


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


_MODELS: dict[str, tuple[Callable[..., nn.Module], int, int, int]] = {  # layers, width, heads
    "gpt-nano": (GPT, 2, 32, 2),
    "gpt-micro": (GPT, 2, 64, 4),
    "gpt-tiny": (GPT, 2, 128, 4),
    "gpt-small": (GPT, 6, 384, 6),
    "llama-tiny": (Llama, 2, 128, 4),
    "llama-small": (Llama, 6, 384, 6),
    "moe-tiny": (MoE, 2, 128, 4),
    "unit-gpt-tiny": (UnitGPT, 2, 128, 4),
    "unit-gpt-small": (UnitGPT, 6, 384, 6),
    "munit-gpt-tiny": (partial(UnitGPT, parametrization="munit"), 2, 128, 4),
    "munit-gpt-small": (partial(UnitGPT, parametrization="munit"), 6, 384, 6),
}


class LanguageModelling(Task):
    """Predict the next byte: the mean cross-entropy in nats over (batch, context) positions.

    A model takes tokens (batch, time) int64 and returns logits (batch, time, 256), bare or as `.logits`; its
    `.balance_loss`, where it has one, is added in training.
    """

    def __init__(self, corpus: Corpus, batch: int, context: int, validation_batches: int = 8) -> None:
        self.corpus = corpus
        self.size = batch
        self.context = context
        self.validation_batches = validation_batches

    def models(self) -> dict[str, Callable[[], nn.Module]]:
        """GPTs, Llamas, whose MLPs are gated, a mixture of experts, and GPTs under u-muP and munit scaling."""
        return {name: partial(kind, VOCABULARY, self.context, *size) for name, (kind, *size) in _MODELS.items()}

    def batch(self, seed: int, step: int) -> Batch:
        """Windows at uniform random places of the training part."""
        limit = len(self.corpus.train) - self.context
        starts = torch.randint(0, limit, (self.size,), generator=stream(seed, step), dtype=torch.int64, device="cpu")
        return self._batch("train", starts)

    def held_out(self) -> list[Batch]:
        """Windows spread evenly over the held-out part."""
        limit = len(self.corpus.held_out) - self.context - 1
        count = self.validation_batches * self.size
        starts = torch.arange(count, dtype=torch.int64, device="cpu") * limit // count
        return [self._batch("held_out", piece) for piece in starts.view(-1, self.size)]

    def _batch(self, split: str, starts: Tensor) -> Batch:
        window = self.corpus.windows(split, starts, self.context + 1)
        return {"tokens": window[:, :-1], "targets": window[:, 1:]}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy of the model's logits, and in training its balance loss."""
        output: Any = model(batch["tokens"])
        logits, targets = self.logits(output, batch)
        expected = (*batch["tokens"].shape, VOCABULARY)
        if not isinstance(logits, Tensor) or logits.shape != expected:
            found = tuple(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
            raise ModelError(f"the model returned {found}; expected logits of shape {expected}, one a byte value")
        loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))
        more = getattr(output, "balance_loss", None)
        return loss if more is None or not model.training else loss + more

    def logits(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """What the model returned, bare or as `.logits`, and the next bytes."""
        return getattr(output, "logits", output), batch["targets"]

    def metric(self, model: nn.Module, losses: Sequence[float]) -> float:
        """Bits per byte: the loss in bits."""
        return sum(losses) / len(losses) / math.log(2)

    def count(self, batch: Batch) -> int:
        """Tokens."""
        return batch["tokens"].numel()

    def digest(self) -> str:
        """The corpus's."""
        return self.corpus.digest


lm = TaskSpec(
    name="lm",
    summary="a small GPT on bytes: text of your own, or the Python standard library",
    facts=Facts(metric=Metric("bits/byte", higher_is_better=False, best=0.0)),
    open=lambda experiment: LanguageModelling(
        load_corpus(experiment.data, experiment.context), experiment.batch, experiment.context
    ),
    options=("data", "context"),
)
