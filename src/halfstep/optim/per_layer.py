"""Updates in the backward pass: each parameter steps as soon as its gradient is there, and the gradient is freed."""

import weakref
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import OptimizerError
from halfstep.optim.lowbit import LowBit
from halfstep.optim.shards import is_spread


class PerLayer:
    """Lets an optimizer step in the backward pass, so that no two layers' gradients are in memory at once.

        model, optimizer, scaler = halfstep.prepare(model, optimizer, "galore-8bit")
        halfstep.optim.PerLayer(optimizer)

    The loop stays as it is: `optimizer.step()` then ends the step, of which each micro-batch's `backward()` took its
    part. Gradients of several micro-batches accumulate in the subspace, where there is one: the first of them chooses
    it, when it is time to, and the others are projected to the same. Others accumulate in `.grad`, as always.

    Norms of all gradients together are not known while a layer steps, so `scaler.clip_grad_norm_` is an error here, and
    torch's own finds no gradients and returns 0: clip layer by layer with `max_norm`. A copy of the optimizer steps in
    `step()` again.

    Args:
        optimizer: what `halfstep.prepare` returned, or one of `halfstep.optim`'s classes.
        micro_batches: how many backward passes make a step.
        max_norm: what the norm of each parameter's gradient is clipped to; of a projected one, in its subspace.

    Raises:
        OptimizerError: several ranks train together, or parameters are sharded; the recipe scales its loss or keeps
            weights as codes; the optimizer steps so already; an argument means nothing. Nothing was changed.

    Source: Zhao et al. 2024, section 4.3; Lv et al. 2023, arXiv 2306.09782.
    """

    def __init__(self, optimizer: LowBit, micro_batches: int = 1, max_norm: float | None = None) -> None:
        self._optimizer, self._micro_batches, self._max_norm = weakref.ref(optimizer), micro_batches, max_norm
        self._arrived: dict[Tensor, int] = {}
        self._sums: dict[Tensor, Tensor] = {}
        _check(optimizer, micro_batches, max_norm)
        optimizer.per_layer = self
        pairs = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
        self._places = {parameter: (group, index) for index, (parameter, group) in enumerate(pairs)}
        self._handles: list[Any] = [optimizer.register_step_pre_hook(self._end)]
        self._handles += [p.register_post_accumulate_grad_hook(self._take) for p in self._places if p.requires_grad]

    def remove(self) -> None:
        """Step in `optimizer.step()` again."""
        self.drop()
        for handle in self._handles:
            handle.remove()
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.per_layer = None

    def drop(self) -> None:
        """Forget gradients of a step that is not whole: what `zero_grad` does."""
        self._sums.clear()
        self._arrived = {p: count for p, count in self._arrived.items() if count >= self._micro_batches}

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        """A micro-batch's gradient has arrived."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        if not self._arrived:
            _check_ranks(optimizer)
            optimizer.check()
        count = self._arrived.get(parameter, 0)
        if count >= self._micro_batches:
            raise OptimizerError(
                f"parameter {self._places[parameter][1]} has stepped in this step already: end each step of "
                f"{self._micro_batches} micro-batches with optimizer.step(). Reentrant activation checkpointing brings "
                "a gradient in parts: pass use_reentrant=False"
            )
        self._arrived[parameter] = count + 1
        low = optimizer.lowered(parameter, *self._places[parameter], first=count == 0)
        if low is not None:
            self._sums[parameter] = self._sums[parameter] + low if parameter in self._sums else low
            parameter.grad = None
        if count + 1 == self._micro_batches:
            self._step(optimizer, parameter)

    def _step(self, optimizer: LowBit, parameter: Tensor) -> None:
        grad = self._sums.pop(parameter, parameter.grad)
        assert grad is not None
        if self._max_norm is not None:
            norm = torch.linalg.vector_norm(grad, dtype=torch.float32)
            grad = grad.float() * (self._max_norm / (norm + 1e-6)).clamp(max=1.0)
        optimizer.step_on(parameter, *self._places[parameter], grad)
        parameter.grad = None

    @torch.no_grad()
    def _end(self, optimizer: Any, *_: Any) -> None:
        """`optimizer.step()`: parameters that some micro-batches did not use take what the others brought."""
        most = max(self._arrived.values(), default=0)
        if 0 < most < self._micro_batches:
            raise OptimizerError(
                f"step() after {most} of {self._micro_batches} micro-batches: call backward() for each of them first, "
                f"or give PerLayer micro_batches={most}"
            )
        for parameter, count in self._arrived.items():
            if count < self._micro_batches:
                self._step(optimizer, parameter)
        self._arrived.clear()


def _check(optimizer: Any, micro_batches: int, max_norm: float | None) -> None:
    if not isinstance(optimizer, LowBit):
        raise OptimizerError(
            f"PerLayer takes an optimizer of halfstep.prepare, or a class of halfstep.optim that steps; found "
            f"{type(optimizer).__name__}"
        )
    if micro_batches < 1 or not (max_norm is None or max_norm > 0):
        raise OptimizerError(
            f"micro_batches = {micro_batches}, max_norm = {max_norm}; expected at least 1, and a norm above 0 or None"
        )
    if optimizer.per_layer is not None:
        raise OptimizerError("this optimizer steps in the backward pass already; call remove() on its PerLayer first")
    if optimizer.recipe.loss_scale is not None or optimizer.recipe.codes is not None:
        raise OptimizerError(
            f"recipe {optimizer.recipe.name!r} scales its loss or keeps weights as codes: a layer cannot step before "
            "all gradients are known to be finite, or rounded. Take a bf16 recipe, such as 'galore' or 'bf16-mixed'"
        )
    _check_ranks(optimizer)


def _check_ranks(optimizer: LowBit) -> None:
    if any(is_spread(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        raise OptimizerError(
            "PerLayer under fully_shard: a gradient is reduced after the layer would step. Step in optimizer.step()"
        )
    if optimizer.several_ranks:
        raise OptimizerError(
            "PerLayer with several ranks: a layer would step before DDP has summed its gradient over them, and ranks "
            "would drift apart. Step in optimizer.step(), or train on one rank"
        )
