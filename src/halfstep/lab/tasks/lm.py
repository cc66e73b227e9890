"""Language modelling: a small GPT, Llama or mixture of experts predicts the next byte of a text."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.lab.models.gpt import GPT, UnitGPT
from halfstep.lab.models.llama import Llama
from halfstep.lab.models.moe import MoE
from halfstep.lab.task import VOCABULARY, Batch, Facts, Metric, TaskSpec, TextTask, load_corpus, logits_of


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


class LanguageModelling(TextTask):
    """Predict the next byte: the mean cross-entropy in nats over (batch, context) positions.

    A model takes tokens (batch, time) int64 and returns logits (batch, time, 256), bare or as `.logits`; its
    `.balance_loss`, if it has one, is added in training.
    """

    beyond = 1

    def models(self) -> dict[str, Callable[[], nn.Module]]:
        """GPTs, Llamas (with gated MLPs), a mixture of experts, and GPTs under u-muP and munit scaling."""
        return {name: partial(kind, VOCABULARY, self.context, *size) for name, (kind, *size) in _MODELS.items()}

    def cut(self, window: Tensor, generator: torch.Generator) -> Batch:
        """The bytes of windows, and the byte after each."""
        return {"tokens": window[:, :-1], "targets": window[:, 1:]}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy of the model's logits, plus its balance loss in training."""
        output: Any = model(batch["tokens"])
        logits = logits_of(output, batch["tokens"], VOCABULARY, "one a byte value")
        loss = nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), batch["targets"].reshape(-1))
        more = getattr(output, "balance_loss", None)
        return loss if more is None or not model.training else loss + more

    def logits(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """The model's logits, bare or as `.logits`, and the next bytes."""
        return getattr(output, "logits", output), batch["targets"]

    def metric(self, model: nn.Module, losses: Sequence[float]) -> float:
        """Bits per byte: the loss in bits."""
        return sum(losses) / len(losses) / math.log(2)


lm = TaskSpec(
    name="lm",
    summary="a small GPT on bytes: text of your own, or the Python standard library",
    facts=Facts(metric=Metric("bits/byte", higher_is_better=False, best=0.0)),
    open=lambda experiment: LanguageModelling(
        load_corpus(experiment.data, experiment.context), experiment.batch, experiment.context
    ),
    options=("data", "context"),
)
