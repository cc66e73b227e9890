"""A small GPT trained on 2 and 4 ranks with gradients reduced in few bits, compared with float32, three seeds.

    python benchmarks/reductions.py [--keep]

The ranks are simulated in one process: each has its own batch, and gradients go through the reduction that processes
would run, bit for bit. The loss is that of held-out text after the last step; gaps are paired by seed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.distributed.mean import copy_back, fp8lm_steps, mean_steps, run, spread
from halfstep.lab.environment import environment
from halfstep.lab.models.gpt import GPT
from halfstep.lab.task import VOCABULARY, Corpus, load_corpus
from halfstep.recipe import FP4, FP8, FP8_LM, Communication, get_storage
from harness import keep, keeps
from losses import Losses, summary


SENT: dict[str, Communication] = {
    "fp32": Communication(gradients=get_storage("fp32")),
    "bf16": Communication(gradients=get_storage("bf16")),
    "FP8": FP8,
    "FP4": FP4,
    "FP4 without error feedback": replace(FP4, error_feedback=False),
    "FP8-LM": FP8_LM,
}
RANKS, SEEDS, STEPS, BATCH, CONTEXT, WIDTH, LAYERS = (2, 4), 3, 150, 8, 64, 64, 2


class Reduced:
    """The mean of the ranks' gradients, computed by one kind of reduction."""

    def __init__(self, communication: Communication, ranks: int, lengths: list[int]) -> None:
        assert communication.gradients is not None
        self.communication, self.storage, self.lengths, self.ranks = (
            communication,
            communication.gradients,
            lengths,
            ranks,
        )
        rows = ranks if communication.feeds_back else 1
        size = spread(torch.zeros(sum(lengths)), lengths, self.storage, rows).numel() if not self._by_fp8lm else 0
        self.residuals = torch.zeros(ranks, size) if communication.feeds_back else None
        self.mu = torch.ones(ranks, len(lengths))
        self.rows = rows

    @property
    def _by_fp8lm(self) -> bool:
        return self.communication.reduce != "all_to_all"

    def __call__(self, gradients: Tensor) -> Tensor:
        """The mean that each rank receives, of gradients (ranks, elements)."""
        if self._by_fp8lm:
            quantizer = self.storage.quantizer
            run(lambda to: fp8lm_steps(gradients[to.rank], self.lengths, quantizer, to, self.mu[to.rank]), self.ranks)
            return gradients[0]
        laid = [spread(each, self.lengths, self.storage, self.rows) for each in gradients]
        kept: Any = [None] * self.ranks if self.residuals is None else self.residuals
        run(lambda to: mean_steps(laid[to.rank], self.storage, to, kept[to.rank]), self.ranks)
        copy_back(laid[0], self.lengths, self.storage, gradients[0], self.rows)
        return gradients[0]


def trained(kind: str, ranks: int, seed: int, corpus: Corpus) -> float:
    """The held-out loss after training."""
    torch.manual_seed(seed)
    model = GPT(VOCABULARY, CONTEXT, LAYERS, WIDTH, 4)
    parameters = list(model.parameters())
    reduced = Reduced(SENT[kind], ranks, [p.numel() for p in parameters])
    optimizer = torch.optim.AdamW(parameters, lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 20) * (1 - step / STEPS))
    stream = torch.Generator().manual_seed(1000 + seed)
    for _ in range(STEPS):
        found = torch.stack([flat(model, batch(corpus, "train", stream)) for _ in range(ranks)])
        for p, grad in zip(parameters, reduced(found).split_with_sizes([p.numel() for p in parameters]), strict=True):
            p.grad = grad.view(p.shape)
        optimizer.step()
        scheduler.step()
    stream = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return float(torch.stack([loss_of(model, batch(corpus, "held_out", stream)) for _ in range(64)]).mean())


def batch(corpus: Corpus, split: str, stream: torch.Generator) -> Tensor:
    """A batch of windows of bytes."""
    length = len(corpus.train if split == "train" else corpus.held_out) - CONTEXT - 1
    return corpus.windows(split, torch.randint(0, length, (BATCH,), generator=stream), CONTEXT + 1)


def loss_of(model: GPT, window: Tensor) -> Tensor:
    """The cross-entropy of the next bytes."""
    return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


def flat(model: GPT, window: Tensor) -> Tensor:
    """The gradients of a batch, concatenated."""
    grads = torch.autograd.grad(loss_of(model, window), list(model.parameters()))
    return torch.cat([grad.flatten() for grad in grads])


def table(kept: dict[str, Any]) -> str:
    """The table of docs/distributed.md: gaps to float32 gradients, means and 95% intervals over seeds."""
    lines = ["| gradients | 2 ranks | 4 ranks |", "| --- | --- | --- |"]
    for kind in [kind for kind in SENT if kind != "fp32"]:
        found = [kept["ranks"][str(ranks)]["summary"][kind] for ranks in RANKS]
        cells = [f"{row['gap']:+.2%} ({row['low']:+.2%} to {row['high']:+.2%})" for row in found]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train, print, and with --keep write."""
    kept = keeps(__doc__)
    torch.set_num_threads(1)
    corpus = load_corpus(None, CONTEXT)
    found: dict[str, Any] = {}
    for ranks in RANKS:
        losses: Losses = {kind: [trained(kind, ranks, seed, corpus) for seed in range(SEEDS)] for kind in SENT}
        found[str(ranks)] = {"losses": losses, "summary": summary(losses)}
        print(ranks, found[str(ranks)]["summary"], flush=True)
    if kept:
        keep("reductions", {"machine": environment(), "seeds": SEEDS, "steps": STEPS, "ranks": found})


if __name__ == "__main__":
    main()
