"""Activation checkpointing as torch does it, put into a model: blocks, or attention alone, are computed again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from halfstep.errors import AccountError, one_of


def checkpointed(model: nn.Module, how: str) -> nn.Module:
    """The model with checkpoints. Blocks are those of the list of alike modules that has the most parameters.

    Args:
        how: `none`; `selective`: scaled dot-product attention is computed again; `full`: each block is, from its input.

    Raises:
        AccountError: no such way; or the model has no blocks.
    """
    return CHECKPOINTING[one_of("checkpointing", how, CHECKPOINTING, AccountError)](model)


def _full(model: nn.Module) -> nn.Module:
    for block in _blocks(model):
        block.forward = _again(block.forward)
    return model


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    def again(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return again


def _blocks(model: nn.Module) -> list[nn.Module]:
    lists = [
        [*found]
        for found in model.modules()
        if isinstance(found, (nn.ModuleList, nn.Sequential))
        and len({type(part) for part in found}) == 1
        and any(True for _ in found[0].children())
    ]
    if not lists:
        raise AccountError(
            f"{type(model).__name__} has no list of alike blocks (torch.nn.ModuleList or Sequential) to compute again; "
            "account for it without checkpointing"
        )
    return max(lists, key=lambda blocks: sum(p.numel() for block in blocks for p in block.parameters()))


class _AttentionAgain(TorchFunctionMode):
    found = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            self.found = True
            return _again(func)(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _selective(model: nn.Module) -> nn.Module:
    forward = model.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        with _AttentionAgain() as attention:
            output = forward(*args, **kwargs)
        if not attention.found:
            raise AccountError(
                f"{type(model).__name__} calls no torch.nn.functional.scaled_dot_product_attention to compute again; "
                "account for it with full checkpointing, or without"
            )
        return output

    model.forward = watched
    return model


CHECKPOINTING: dict[str, Callable[[nn.Module], nn.Module]] = {
    "none": lambda model: model,
    "selective": _selective,
    "full": _full,
}
"""Ways of checkpointing, by name."""
