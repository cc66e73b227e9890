"""Whole tensors dealt to ranks: each keeps the optimizer states of its own, and sends these to the others as stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.distributed.collectives import Exchange
from halfstep.errors import ModelError
from halfstep.ops import CodeTensor
from halfstep.optim import LowBit
from halfstep.optim.unscaling import unwrapped


class Dealt:
    """A model's parameters, each of one rank of a group: the largest first, to the rank with the fewest elements.

        dealt = halfstep.distributed.Dealt(model)
        optimizer = torch.optim.AdamW(dealt.parameters, lr=1e-3)      # of this rank's tensors
        model, optimizer, scaler = halfstep.prepare(model, optimizer, "fp8lm-o2")
        dealt.attach(optimizer)                                       # sends them, now and after each step
        ...
        scaler.scale(loss).backward()
        halfstep.distributed.reduce_gradients(model)
        scaler.step(optimizer); scaler.update(); optimizer.zero_grad()

    Masters and moments are then 1/N of the model's a rank. Tensors are not cut, so that one with a scale of its own has
    one: as codes and that scale they are sent. Gradients are whole on every rank: they are checked, unscaled, clipped
    and zeroed together. Save and load the optimizer on every rank.

    Args:
        model: the same on every rank, before or after `prepare`.
        process_group: the ranks; None is all of them.

    Attributes:
        parameters: this rank's.
        exchange: the collectives, whose `sent` counts bytes.

    Source: Peng et al. 2023 (FP8-LM), arXiv 2310.18313, section 2.3: ZeRO without cutting tensors.
    """

    def __init__(self, model: nn.Module, process_group: Any = None) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.exchange = Exchange(process_group)
        self._of: list[list[nn.Parameter]] = [[] for _ in range(self.exchange.ranks)]
        held = [0] * self.exchange.ranks
        for parameter in sorted(trained, key=lambda parameter: -parameter.numel()):  # of equal ones the earlier first
            if hasattr(parameter, "device_mesh"):
                raise ModelError(
                    f"a parameter of shape {tuple(parameter.shape)} is sharded; whole tensors are dealt. Deal them "
                    "without fully_shard, or leave the sharding to it"
                )
            rank = held.index(min(held))
            held[rank] += parameter.numel()
            self._of[rank].append(parameter)
        self.parameters = self._of[self.exchange.rank]
        self._trained = trained
        if not self.parameters:
            raise ModelError(
                f"{len(trained)} tensors for {self.exchange.ranks} ranks: rank {self.exchange.rank} has none to step "
                "on. Deal them to fewer ranks (process_group=...)"
            )

    def attach(self, optimizer: LowBit) -> None:
        """Give every rank each tensor as its own rank stores it, now and after each step of the optimizer, which clips
        and zeroes the gradients of the whole model from here on. Call it on all ranks, once, after `prepare`.

        Raises:
            ModelError: the optimizer is not `prepare`'s, or steps other tensors than this rank's; a rank failed.
        """
        optimizer = unwrapped(optimizer)
        if not isinstance(optimizer, LowBit) or optimizer.per_layer is not None:
            raise ModelError(
                f"a {type(optimizer).__name__} was given; expected the optimizer that halfstep.prepare gives back, "
                "stepped after the backward pass"
            )
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if held != set(self.parameters):
            raise ModelError(
                f"this optimizer steps {len(held)} tensors, of which {len(held & set(self.parameters))} are among the "
                f"{len(self.parameters)} of this rank; build it on dealt.parameters"
            )
        optimizer.reduced = self._trained
        optimizer.register_step_post_hook(lambda *_: self.share())
        self.share()

    @torch.no_grad()
    def share(self) -> None:
        """Give every rank each tensor as its own rank stores it. `attach` does so after each step.

        Raises:
            ModelError: a rank failed; it is named.
        """
        memory = [[part for parameter in own for part in _memory(parameter)] for own in self._of]
        sizes = [sum(part.nbytes for part in parts) for parts in memory]
        everyone = torch.zeros(self.exchange.ranks, max(sizes), dtype=torch.uint8, device=memory[0][0].device)
        given = everyone[self.exchange.rank, : sizes[self.exchange.rank]]
        torch.cat([_bytes(part) for part in memory[self.exchange.rank]], out=given)
        self.exchange.all_gather(everyone).wait()
        for rank, own in enumerate(self._of):
            if rank == self.exchange.rank:
                continue
            _put(memory[rank], everyone[rank])
            for parameter in own:
                torch.autograd.graph.increment_version(parameter)


def _memory(parameter: Tensor) -> Sequence[Tensor]:
    """The plain tensors that a parameter is stored in."""
    return list(parameter.parts.values()) if isinstance(parameter, CodeTensor) else [parameter.detach()]


def _bytes(part: Tensor) -> Tensor:
    return part.contiguous().view(-1).view(torch.uint8)


def _put(parts: Sequence[Tensor], given: Tensor) -> None:
    first = 0
    for part in parts:
        part.copy_(given[first : first + part.nbytes].clone().view(part.dtype).view(part.shape))
        first += part.nbytes
