"""Checks of training on several ranks: what recipes and unit scaling need beyond torch's data parallelism."""

import gc
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from halfstep.errors import ModelError
from halfstep.ops.code_tensor import ranks
from halfstep.ops.part import part_of
from halfstep.recipe import Recipe


def check_ranks(recipe: Recipe, parameters: Iterable[Tensor]) -> None:
    """Raise if the recipe accumulates gradients in another dtype than their parameters' and these are sharded: FSDP2
    returns gradients in the parameters' dtype.

    Raises:
        ModelError: so it is. Called before a model is changed or an optimizer is built.
    """
    if recipe.grads is None or not any(hasattr(p, "device_mesh") for p in parameters):
        return
    raise ModelError(
        f"recipe {recipe.name!r} accumulates the gradients of {recipe.weights} weights in {recipe.grads}, and FSDP2 "
        "gives back gradients in their parameters' dtype. Apply 'fp32' and shard with fully_shard(..., "
        "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)): the sharded fp32 "
        "weights are the master, and gradients accumulate in fp32; or train without fully_shard: "
        "halfstep.distributed.reduce_gradients(model) before each scaler.step"
    )


def check_unwrapped(model: nn.Module, recipe: Recipe) -> None:
    """Raise if DDP wraps the model, or a part of it, already, and the recipe changes the dtype of parameters: DDP's
    hooks would then reduce nothing.

    Raises:
        ModelError: so it is. Called before a model is changed.
    """
    if (recipe.weights == "fp32" and recipe.codes is None) or ranks() < 2:
        return
    parts = {*model.modules()}
    gc.collect()  # an unreferenced DDP wrapper does no harm
    for found in gc.get_objects():
        if issubclass(type(found), nn.parallel.DistributedDataParallel) and parts & {*found.modules()}:
            raise ModelError(
                f"this {type(model).__name__} is wrapped in DistributedDataParallel already, whose hooks belong to its "
                f"parameters as they were: under {recipe.name!r}, which stores them in another form, no gradient would "
                "be reduced over ranks. Call halfstep first, and then DistributedDataParallel(model)"
            )


def under_ddp(recipe: Recipe) -> ModelError:
    """The error for DDP with gradients in another dtype than their parameters', which its reducer does not support."""
    return ModelError(
        f"recipe {recipe.name!r} accumulates the gradients of {recipe.weights} weights in {recipe.grads}, and DDP "
        "reduces none in another dtype than their parameters'. Call the model itself, without DDP, and "
        "halfstep.distributed.reduce_gradients(model) before each scaler.step; or use 'bf16-master' or 'bf16-mixed'"
    )


class Reduced:
    """A check before each optimizer step: that gradients were averaged over ranks as the recipe says.

    Args:
        recipe: one with `communication`, or whose gradients only `halfstep.distributed` can reduce.
        model: returns the model.
    """

    def __init__(self, recipe: Recipe, model: Callable[[], nn.Module | None]) -> None:
        self._recipe, self._model, self._times = recipe, model, 0

    def __call__(self) -> None:
        """Raise unless gradients were averaged since the last step.

        Raises:
            ModelError: there are several ranks, and nothing was averaged.
        """
        if ranks() < 2:
            return
        model = self._model()
        reduction = None if model is None else part_of(model).reduction
        if reduction is None or reduction.times == self._times:
            what = "across ranks" if self._recipe.grads is None else f"in {self._recipe.grads}"
            raise ModelError(
                f"recipe {self._recipe.name!r} has its own reduction of gradients {what}, but with {ranks()} ranks it "
                "did not run since the last step: call halfstep.distributed.compress(ddp) once after DDP is made, or "
                "halfstep.distributed.reduce_gradients(model) before each scaler.step. Nothing was stepped on"
            )
        self._times = reduction.times


def uneven(recipe: str) -> ModelError:
    """The error for torch's `Join`, under which some ranks may run out of batches before others."""
    return ModelError(
        f"recipe {recipe!r} has ranks agree on overflows or amaxes in each step, and under torch's Join (model.join()) "
        "one that has no more batches takes no step: the others would wait for it. Give all ranks as many batches "
        "(DistributedSampler's drop_last), or take a recipe with neither loss scale nor scaling states ('bf16-mixed')"
    )


def check_states(model: nn.Module, states: Mapping[str, int], process_group: Any) -> None:
    """Check, once on every rank of a group before they first agree on amaxes, that all have the same scaling states.
    Otherwise their all-reduces would not match: they would hang, or mix amaxes of different layers.

    Stages of a pipeline with equally many layers have equal names; their weights differ, which gives a warning.

    Args:
        states: the number of elements of each state, by name.

    Raises:
        ModelError: on all of those ranks, if their states differ.
    """
    own = part_of(model)
    if own.applied.recipe.keeps_states:
        found: list[tuple[Mapping[str, int], str]] = [({}, "")] * dist.get_world_size(process_group)
        dist.all_gather_object(found, (states, _samples(model)), group=process_group)
        everyone = [each for each, _ in found]
        other = next((rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]), None)
        if other is not None:
            differ = sorted({*everyone[0].items()} ^ {*everyone[other].items()})
            raise ModelError(
                f"ranks 0 and {other} of the group that agrees on amaxes keep scaling states of other layers: "
                f"{len(everyone[0])} and {len(everyone[other])}, {differ[0][0]} among them. Where ranks hold parts of "
                "a model, as a pipeline's stages do, give halfstep.prepare the ranks of each part: "
                "amax_group=torch.distributed.new_group([...])"
            )
        if len({samples for _, samples in found}) > 1:
            warnings.warn(
                "the ranks that agree on the amaxes of scaling states hold different weights. Where they train copies "
                "of one model, its copies have come apart. Where they hold parts of one, as a pipeline's stages do, "
                "their scales follow each other's layers: give halfstep.prepare the ranks of each part, "
                "amax_group=torch.distributed.new_group([...])",
                stacklevel=5,
            )
    own.agreed = True


def _samples(model: nn.Module) -> str:
    """The first element of each parameter that is not sharded, as text."""
    whole = (p.detach() for p in model.parameters() if p.numel() and not hasattr(p, "device_mesh"))
    return repr([float(p.flatten()[0]) for p in whole])


def check_factors(model: str, factors: Mapping[str, tuple[float, ...]]) -> None:
    """Check, on every rank of the default group before a model is unit-scaled, that ranks found the same factors.

    Factors depend on the traced batch (its magnitude, a mask, the loss) and must agree between ranks that train the
    same model. Ranks with other operations have another model and are not compared.

    Args:
        factors: the factors of each operation, by name.

    Raises:
        ModelError: on all of those ranks, if their operations are the same and their factors differ.
    """
    if ranks() < 2:
        return
    everyone: list[Mapping[str, tuple[float, ...]] | None] = [None] * ranks()
    dist.all_gather_object(everyone, dict(factors))
    for rank, others in enumerate(everyone):
        if others is None or others.keys() != factors.keys():
            continue
        for place, mine in factors.items():
            theirs = others[place]
            if not all(math.isclose(x, y, rel_tol=1e-4) for x, y in zip(mine, theirs, strict=True)):
                raise ModelError(
                    f"{model}: {place} has the factors {theirs} on rank {rank} and {mine} on rank {dist.get_rank()}: "
                    "each rank traced a batch of its own. Call unit_scale with the same batch on all of them "
                    "(torch.distributed.broadcast it from one); nothing was changed"
                )
