"""Weights that are rounded once for several forwards: the micro-batches of a step, an evaluation, generation."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from halfstep import ops
from halfstep.errors import ModelError
from halfstep.nn.applied import applied_to
from halfstep.nn.following import root_of
from halfstep.ops.linear_passes import RoundedSides, States, product_dtype
from halfstep.ops.part import part_of, parts_of
from halfstep.quant.captured import capturing
from halfstep.quant.hadamard import RANDOM
from halfstep.quant.memory import has_memory
from halfstep.recipe import LinearSpec


class CachedWeights:
    """The rounded weights of a model, for as long as they are valid, and how often they were used."""

    def __init__(self) -> None:
        self.rounded = 0
        """How many times a weight was rounded."""
        self.used = 0
        """How many products took one."""
        self._most = 0
        self._entries: dict[Hashable, tuple[tuple[Any, ...], RoundedSides]] = {}
        # Also keeps the memory that entries were made of, so that nothing else comes to its address.
        self._seen: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __str__(self) -> str:
        mebibytes = self.nbytes / 2**20
        return f"{self.rounded} roundings of weights for {self.used} products; they took {mebibytes:.1f} MiB at most"

    @property
    def nbytes(self) -> int:
        """The most bytes that rounded weights took, beside the weights."""
        tensors = [tensor for _, made in self._entries.values() for tensor in made.tensors()]
        return max(self._most, sum({t.data_ptr(): t.nbytes for t in tensors}.values()))

    def clear(self) -> None:
        """Round weights again when they are next used."""
        self._most = self.nbytes
        self._entries.clear()
        self._seen.clear()

    def weight(self, key: Hashable, weight: Any, x: Tensor, spec: LinearSpec, states: States, record: bool) -> Any:
        """The weight (out, in) for a product with x, rounded before or now; as it is where it is no parameter nor a
        view of one, or is to be rounded with noise of each product.

        Args:
            key: of the layer and its product.
        """
        parameter = weight if type(weight) is nn.Parameter else weight._base if type(weight) is Tensor else None
        if type(parameter) is not nn.Parameter or parameter.is_inference():
            return weight
        if not _is_deterministic(spec) or not has_memory(x):
            return weight
        dtype, backward, written = product_dtype(x), torch.is_grad_enabled(), parameter._version
        key = key, weight.data_ptr(), weight.shape, weight.stride(), backward, record
        asked = written, id(spec), dtype
        found = self._entries.get(key)
        if found is None or found[0] != asked:
            _, made = ops.rounded_weight(weight, spec, dtype, states, record, x, backward)
            found = self._entries[key] = asked, made
            self.rounded += 1
            place = parameter.data_ptr(), written
            if place not in self._seen:
                self._seen[place] = parameter.detach(), _bits(parameter)
        self.used += 1
        return ops.RoundedWeight(weight, found[1])

    def check(self) -> None:
        """Find out whether a weight was written to where torch counts no write, and its products took older values.

        Raises:
            ModelError: one was.
        """
        if capturing():  # which a host cannot wait for
            return
        weights = [(t, before) for (_, version), (t, before) in self._seen.items() if t._version == version]
        changed = [before != _bits(t) for t, before in weights]
        if changed and bool(torch.stack(changed).any()):
            several = sum(map(bool, changed))
            shapes = {tuple(t.shape) for (t, _), differs in zip(weights, changed, strict=True) if differs}
            raise ModelError(
                f"{several} weights of shapes {sorted(shapes)} were written to within halfstep.cached_weights where "
                "torch counts no write (through .data, numpy, or another library's kernel), and the products since "
                "took their older values. Write to them outside it, or call .clear() of what it gives after writing"
            )


@contextmanager
def cached_weights(model: nn.Module) -> Iterator[CachedWeights]:
    """Within it layers round their weights once for all forwards, until an optimizer steps or a weight changes.

    For forwards between which weights stay as they are: the micro-batches of a step (gradient accumulation), an
    evaluation, generation. Results are the same to the last bit, and the rounded weights stay in memory meanwhile.

        with halfstep.cached_weights(model) as cached:
            for x, y in micro_batches:
                loss_fn(model(x), y).backward()
        print(cached)

    It holds for layers whose weight is a matrix (nn.Linear, Conv1D, attention's projections), in modules as they run
    eagerly. Weights that are rounded with noise are rounded for each product, as without it.

    Args:
        model: the model that `apply` or `prepare` was called on, or what wraps it.

    Raises:
        RecipeError: it follows no recipe.
        ModelError: at its end, or when an optimizer steps: a weight was written to where torch counts no write (through
            `.data`), so that products took older values.

    Warns:
        UserWarning: the recipe rounds weights, and none was: torch.compile traced the model, or weights are computed in
            each forward.
    """
    root = root_of(model)
    applied_to(root)
    following = part_of(root).following
    if following.cached is not None:  # within another one
        yield following.cached
        return
    cached = following.cached = CachedWeights()
    before = register_optimizer_step_pre_hook(lambda *_: cached.check())
    after = register_optimizer_step_post_hook(lambda *_: cached.clear())
    try:
        yield cached
        cached.check()
    finally:
        following.cached = None
        before.remove()
        after.remove()
    if not cached.used and any(_is_deterministic(own.linear) for _, _, own in parts_of(root) if own.linear is not None):
        warnings.warn(
            "no weight was rounded within halfstep.cached_weights: the model was not called, is compiled "
            "(torch.compile), or its weights are computed in each forward (codes, parametrizations)",
            stacklevel=3,
        )
    cached.clear()


def _is_deterministic(spec: LinearSpec) -> bool:
    """Whether a weight that is rounded for one product is rounded alike for all."""
    products = spec.output, spec.grad_input
    noisy = any(p.rhs is not None and p.rhs.rounding == "stochastic" for p in products)
    drawn = any(p.hadamard is not None and p.hadamard.seed == RANDOM for p in products)
    return spec.output.rhs is not None and not noisy and not drawn


@torch.no_grad()
def _bits(weight: Tensor) -> Tensor:
    """The sum of a weight's bits, taken as integers, which nearly every write changes."""
    found = weight.detach().reshape(-1).view(torch.uint8)
    begin = min(-found.storage_offset() % 8, len(found))
    end = len(found) - (len(found) - begin) % 8
    return found[begin:end].view(torch.int64).sum() + found[:begin].sum() + found[end:].sum()
