"""What an account is of: a model that can be built without memory, and the batches that it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Batch:
    """What a model is called with: positional or named tensors."""

    args: tuple[Any, ...] = ()
    named: tuple[tuple[str, Any], ...] = ()

    def call(self, model: nn.Module, **more: Any) -> Any:
        """What the model returns for it."""
        return model(*self.args, **dict(self.named), **more)

    def without(self, name: str) -> Batch:
        """The same but for that one."""
        return Batch(self.args, tuple(pair for pair in self.named if pair[0] != name))

    @property
    def tensors(self) -> list[Tensor]:
        """All of its tensors."""
        return [leaf for leaf in tree_leaves((self.args, dict(self.named))) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Subject:
    """A model to be built again for every account, and what is known of its batches.

    `build` and `batch` are called where tensors have no memory (`Blank`).
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[nn.Module, int, int], Batch] | None = None
    """The batch of so many examples of so many tokens; None where only parameters are known, and nothing can run."""
    sequence: int | None = None
    """Tokens in an example unless told; None where examples are no sequences of tokens."""
    longest: int | None = None
    """The most tokens that it has positions for."""
    remarks: tuple[str, ...] = ()
    has_layers: bool = True
    """Whether its modules are the model's own; else all that is known are parameters."""


def loss_of(output: Any, batch: Batch) -> Tensor:
    """A scalar for the backward pass: the model's own loss where it returns one; cross-entropy against the tokens
    where it returns a row of logits for each; else the mean of the squares of what it returns."""
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if len(found) == 1 and not found[0].dim():
        return found[0]
    tokens = batch.tensors[0] if batch.tensors else None
    if tokens is not None and not tokens.is_floating_point() and found and found[0].shape[:-1] == tokens.shape:
        return F.cross_entropy(found[0].flatten(0, -2), tokens.flatten().long())
    return torch.stack([tensor.square().mean() for tensor in found]).sum()
