"""The loop of nanoGPT's train.py under a recipe: `prepare` is added, autocast is removed, the rest is unchanged."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

import halfstep


class Tiny(nn.Module):
    """A small model with nanoGPT's interface: tied embeddings, groups with and without decay, logits and loss."""

    def __init__(self, vocabulary: int = 16, width: int = 32) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(12, width)
        self.h = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        logits = self.lm_head(self.h(x, nn.Transformer.generate_square_subsequent_mask(idx.shape[1]), is_causal=True))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(recipe: str = "bf16-master", max_iters: int = 60, gradient_accumulation_steps: int = 2) -> float:
    """Train on counting by ones and twos, and return the last loss."""
    torch.manual_seed(1337)
    model: nn.Module = Tiny()
    decay = [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1}]
    groups = [*decay, {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe)  # scaler = torch.amp.GradScaler(...)

    for iter_num in range(max_iters):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 + 4.5e-3 * (1 + math.cos(math.pi * iter_num / max_iters))
        for _ in range(gradient_accumulation_steps):
            tokens = (torch.randint(16, (16, 1)) + torch.randint(1, 3, (16, 1)) * torch.arange(13)) % 16
            _, loss = model(tokens[:, :-1], tokens[:, 1:])  # was inside `with ctx:`, torch's autocast
            scaler.scale(loss / gradient_accumulation_steps).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    print(f"{recipe}: loss {loss.item():.4f}")
    return loss.item()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name in ("fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "bf16-stochastic", "fp8-delayed"):
        main(name)
