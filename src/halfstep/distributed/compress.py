"""What DDP, FSDP2 and sequence parallelism send in few bits: `compress`, as the recipe says; `GatherCodes`."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn.parallel import DistributedDataParallel

from halfstep.distributed.collectives import LIMIT
from halfstep.distributed.hook import fp8_hook
from halfstep.distributed.reduction import Reduction
from halfstep.distributed.sharded import install, modules_of
from halfstep.errors import ModelError, RecipeError
from halfstep.nn.following import root_of
from halfstep.ops.part import own_part, part_of
from halfstep.ops.snapshot import values_of
from halfstep.optim import LossScaler
from halfstep.recipe import Communication, Recipe
from halfstep.recipe.origin import digest


def compress(
    model: nn.Module,
    communication: Communication | None = None,
    *,
    scaler: LossScaler | None = None,
    limit: timedelta = LIMIT,
) -> Reduction:
    """Have a model under DDP or FSDP2 send its gradients, and gather its weights, in few bits; call it on all ranks.

        model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe)
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        halfstep.distributed.compress(ddp)          # then the usual loop, with ddp(x)

    What it remembers from step to step is saved and loaded with the scaler's state, on each rank its own.

    Args:
        model: a `DistributedDataParallel`, or one that fully_shard was called on, before its first pass.
        communication: what is sent; None is the recipe's. Models without a recipe may have one too.
        scaler: of a recipe that scales its loss, for error feedback: gradients are remembered without the scale.
        limit: how long to wait for other ranks to come here.

    Raises:
        RecipeError: the recipe has no communication, and none is given; error feedback without the scaler.
        ModelError: the model is neither under DDP nor sharded, or has a hook; another rank has another model, other
            weights or another recipe, or does not come within the limit. Nothing was sent.
    """
    ddp = model if isinstance(model, DistributedDataParallel) else None
    if ddp is None and not modules_of(model):
        raise ModelError(
            f"{type(model).__name__} is neither under DDP nor sharded: compress(DistributedDataParallel(model)), after "
            "fully_shard(model), or halfstep.distributed.reduce_gradients(model) before each scaler.step"
        )
    root = root_of(model if ddp is None else ddp.module)
    recipe = _recipe(root)
    communication = communication or (recipe.communication if recipe else None)
    if communication is None:
        name = f"recipe {recipe.name!r} has no communication" if recipe else "the model follows no recipe"
        raise RecipeError(
            f"{name}, and none was given: halfstep.distributed.compress(ddp, halfstep.recipe.FP8), or a recipe with "
            "communication = halfstep.recipe.FP8"
        )
    if ddp is None:
        _check_sharded(communication)
    state = _reduction(root, communication, None if ddp is None else ddp.process_group, scaler)
    state.exchange.agree(_said(root, communication, recipe), limit)
    if ddp is not None:
        try:
            ddp.register_comm_hook(state, fp8_hook)
        except RuntimeError as error:
            raise ModelError(f"this DDP model has a communication hook already, and takes one: {error}") from error
        state.divides_by_all = partial(_divides_by_all, weakref.ref(ddp))
    else:
        install(model, state)
    own_part(root).reduction = state
    return state


def _check_sharded(communication: Communication) -> None:
    """Refuse what FSDP2's collectives do not hold."""
    if communication.reduce != "all_to_all" or communication.feeds_back:
        raise RecipeError(
            f"gradients of sharded weights as {communication}: under fully_shard they are summed in float32, once, and "
            "nothing is kept of them: Communication(..., reduce='all_to_all', error_feedback=False)"
        )


def _divides_by_all(reference: Callable[[], Any]) -> bool:
    """Whether DDP's mean is over all ranks, those included that have no batches left (`join`)."""
    ddp = reference()
    return ddp is None or not ddp._join_config.enable or ddp._divide_by_initial_world_size


def reduction_of(
    model: nn.Module, communication: Communication | None, process_group: Any, scaler: LossScaler | None
) -> Reduction:
    """The reduction of a model without DDP, which the first call makes; ranks then agree on it."""
    root = root_of(model)
    state = part_of(root).reduction
    if state is None:
        recipe = _recipe(root)
        communication = communication or (recipe.communication if recipe else None)
        state = _reduction(root, communication, process_group, scaler)
        state.exchange.agree(_said(root, communication, recipe))
        own_part(root).reduction = state
    return state  # type: ignore[no-any-return]


def _recipe(root: nn.Module) -> Recipe | None:
    applied = part_of(root).applied
    return None if applied is None else applied.recipe


def _reduction(
    root: nn.Module, communication: Communication | None, group: Any, scaler: LossScaler | None
) -> Reduction:
    recipe = _recipe(root)
    scales = recipe is not None and recipe.loss_scale is not None and recipe.loss_scale.scales
    if communication is not None and communication.feeds_back and scales and scaler is None:
        raise RecipeError(
            f"recipe {recipe.name!r} scales its loss, and error feedback keeps what rounding took without the scale: "  # type: ignore[union-attr]
            "halfstep.distributed.compress(ddp, scaler=scaler)"
        )
    names = {parameter: name for name, parameter in root.named_parameters()}
    return Reduction(communication, group, names, None if scaler is None else scaler.get_scale)


def _said(root: nn.Module, communication: Communication | None, recipe: Recipe | None) -> str:
    """What ranks compare: the recipe, what is sent, and which parameters of which values."""
    weights = hashlib.sha256()
    for name, parameter in root.named_parameters():
        weights.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}".encode())
        if not hasattr(parameter, "device_mesh"):
            weights.update(str(_bits(values_of(parameter.detach()))).encode())
    what = "gradients as they are" if communication is None else str(communication)
    whose = "without a recipe" if recipe is None else f"of recipe {recipe.name!r} ({digest(recipe)[:8]})"
    return f"{what}, {whose}, of {type(root).__name__} with the weights {weights.hexdigest()[:8]}"


def _bits(tensor: Tensor) -> int:
    """The sum of a tensor's bits as whole numbers: alike on all machines."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return int(tensor.contiguous().view(whole).sum(dtype=torch.int64))


class GatherCodes(ColwiseParallel):
    """torch's `ColwiseParallel` of a layer whose input's tokens are spread over ranks, and whose recipe rounds them:
    ranks send their tokens' codes, in the forward pass and again in the backward pass, and keep no others' tokens.

        parallelize_module(model, mesh, {"up": GatherCodes(Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))})

    `ColwiseParallel(input_layouts=Shard(1))` gives the same bits, sends tokens in the dtype that they have, once, and
    keeps all of them for the backward pass.

    Args:
        tokens: the dimension of the input that is spread: `Shard(1)` of (batch, tokens, in).
        options: as `ColwiseParallel`.
    """

    def __init__(self, tokens: Shard, **options: Any) -> None:
        super().__init__(input_layouts=tokens, **options)
        self.desired_input_layouts: tuple[Any] = self.input_layouts  # as they are
