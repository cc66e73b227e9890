"""The two training loops that docs/which_bf16.md compares, in plain torch without halfstep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn


Batches = Iterable[tuple[Tensor, Tensor]]
Setup = Callable[[nn.Module], tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]]


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy, in the dtype in which the logits come."""
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def to_bfloat16(model: nn.Module, batches: Batches, setup: Setup) -> Iterator[Tensor]:
    """model.to(bfloat16); x.to(bfloat16): no master copy, gradients are bfloat16."""
    model.to(torch.bfloat16)
    optimizer, schedule = setup(model)
    for x, y in batches:
        if x.is_floating_point():  # token ids stay integers
            x = x.to(torch.bfloat16)
        loss = loss_fn(model, x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        yield loss


def autocast(model: nn.Module, batches: Batches, setup: Setup) -> Iterator[Tensor]:
    """with torch.autocast: the weights are their own float32 master copy."""
    optimizer, schedule = setup(model)
    for x, y in batches:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            loss = loss_fn(model, x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        yield loss


LOOPS = {"model.to(bfloat16)": to_bfloat16, "torch.autocast": autocast}
