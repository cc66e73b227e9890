"""Weights that are rounded once for several forwards: the micro-batches of a step, an evaluation, generation."""

import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

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
from halfstep.quant.memory import has_memory
from halfstep.recipe import LinearSpec


class _Entry(NamedTuple):
    """A weight as it was rounded."""

    spec: LinearSpec
    """What it was rounded for, in products of `dtype`, when torch had counted so many writes."""
    dtype: torch.dtype
    written: int
    made: RoundedSides
    sample: Tensor
    """A few of its values where they are, as integers."""
    then: Tensor
    """What these were."""


class CachedWeights:
    """The rounded weights of a model, for as long as they are valid, and how often they were used."""

    def __init__(self) -> None:
        self.rounded = 0
        """How many times a weight was rounded."""
        self.used = 0
        """How many products took one."""
        self._most = 0
        self._entries: dict[Hashable, _Entry] = {}
        # Also keeps the memory that entries were made of, so that nothing else comes to its address.
        self._seen: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._changed: list[Tensor] = []

    def __str__(self) -> str:
        mebibytes = self.nbytes / 2**20
        return f"{self.rounded} roundings of weights for {self.used} products; they took {mebibytes:.1f} MiB at most"

    @property
    def nbytes(self) -> int:
        """The most bytes that rounded weights took, beside the weights."""
        tensors = [tensor for entry in self._entries.values() for tensor in entry.made.tensors()]
        return max(self._most, sum({t.data_ptr(): t.nbytes for t in tensors}.values()))

    def clear(self) -> None:
        """Round weights again when they are next used."""
        self._most = self.nbytes
        self._entries.clear()
        self._seen.clear()
        self._changed.clear()

    def weight(self, key: Hashable, weight: Any, x: Tensor, spec: LinearSpec, states: States, record: bool) -> Any:
        """The weight (out, in) for a product with x, rounded before or now; as it is where it is no parameter nor a
        view of one, or is to be rounded with noise of each product.

        Args:
            key: of the layer and its product.
        """
        if not has_memory(x) or not spec.rounds_weight_once:  # Dynamo traces the first alone
            return weight
        parameter = weight if type(weight) is nn.Parameter else weight._base if type(weight) is Tensor else None
        if type(parameter) is not nn.Parameter or parameter.is_inference():
            return weight
        dtype, backward, written = product_dtype(x), torch.is_grad_enabled(), parameter._version
        key = key, weight.data_ptr(), weight.shape, weight.stride(), backward, record
        found, place = self._entries.get(key), (parameter.data_ptr(), written)
        if found is not None and (found.spec is not spec or found.dtype != dtype or found.written != written):
            found = None
        moved = found is not None and not self._stays(found)
        if found is None or moved:
            _, made = ops.rounded_weight(weight, spec, dtype, states, record, x, backward)
            sample = _sample(parameter)
            found = self._entries[key] = _Entry(spec, dtype, written, made, sample, sample.clone())
            self.rounded += 1
            if moved or place not in self._seen:
                self._seen[place] = parameter.detach(), _bits(parameter)
        self.used += 1
        return ops.RoundedWeight(weight, found.made)

    def _stays(self, entry: _Entry) -> bool:
        """Whether a few of the weight's values are what they were: nothing else would see an average that is put in its
        place through `.data`, and taken out again. A GPU is not waited for: there `check` finds out."""
        if entry.sample.is_cpu:
            return torch.equal(entry.sample, entry.then)
        if entry.sample.device.type != "meta":
            self._changed.append((entry.sample != entry.then).any())
        return True

    def check(self) -> None:
        """Find out whether a weight was written to where torch counts no write, and its products took older values.

        Raises:
            ModelError: one was.
        """
        if capturing():  # which a host cannot wait for
            return
        weights = [(t, before) for (_, version), (t, before) in self._seen.items() if t._version == version]
        changed = [before != _bits(t) for t, before in weights]
        if any(bool(torch.stack(found).any()) for found in (changed, self._changed) if found):
            shapes = sorted({tuple(t.shape) for (t, _), differs in zip(weights, changed, strict=True) if differs})
            raise ModelError(
                f"weights{f' of shapes {shapes}' if shapes else ''} were written to within halfstep.cached_weights "
                "where torch counts no write (through .data, numpy, or another library's kernel), and the products "
                "since took their older values. Write to them outside it, or call .clear() of what it gives after "
                "writing"
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
        ModelError: the model is sharded by `fully_shard`. At its end, or when an optimizer steps: a weight was written
            to where torch counts no write (through `.data`), so that products took older values.

    Warns:
        UserWarning: the recipe rounds weights, and none was: torch.compile traced the model, or weights are computed in
            each forward.
    """
    root = root_of(model)
    applied_to(root)
    following = part_of(root).following
    if any(hasattr(module, "set_requires_gradient_sync") for module in model.modules()):  # of torch's FSDPModule
        raise ModelError(
            f"{type(root).__name__} is sharded by fully_shard, and halfstep.cached_weights would keep every rounded "
            "weight whole on every rank. Leave it out: weights are then rounded as they are gathered"
        )
    if following.cached is not None:  # within another one
        yield following.cached
        return
    cached = following.cached = CachedWeights()
    hooks = (
        register_optimizer_step_pre_hook(lambda *_: cached.check()),
        register_optimizer_step_post_hook(lambda *_: cached.clear()),
    )
    with hooks[0], hooks[1]:
        try:
            yield cached
            cached.check()
        finally:
            following.cached = None
    if not cached.used and any(
        own.linear is not None and own.linear.rounds_weight_once for _, _, own in parts_of(root)
    ):
        warnings.warn(
            "no weight was rounded within halfstep.cached_weights: the model was not called, is compiled "
            "(torch.compile), or its weights are computed in each forward (codes, parametrizations)",
            stacklevel=3,
        )
    cached.clear()


def _sample(weight: Tensor) -> Tensor:
    """A few of a weight's values, spread over it, as integers: a view."""
    some = weight.detach()[tuple(slice(None, None, max(1, size // 4)) for size in weight.shape)]
    return some.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[some.itemsize])


@torch.no_grad()
def _bits(weight: Tensor) -> Tensor:
    """The sum of a weight's bits, taken as integers, which nearly every write changes."""
    found = weight.detach().reshape(-1).view(torch.uint8)
    begin = min(-found.storage_offset() % 8, len(found))
    end = len(found) - (len(found) - begin) % 8
    return found[begin:end].view(torch.int64).sum() + found[:begin].sum() + found[end:].sum()
