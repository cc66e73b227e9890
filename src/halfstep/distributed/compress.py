"""Low-precision gradients across ranks: with DDP and FSDP2 (`compress`), without (`reduce_gradients`), and `Dealt`."""

import hashlib
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel

from halfstep.distributed.collectives import LIMIT, Exchange
from halfstep.distributed.sharded import Reduction, fp8_hook, install, modules_of
from halfstep.errors import ModelError, RecipeError
from halfstep.nn.following import root_of
from halfstep.ops import CodeTensor
from halfstep.ops.part import own_part, part_of
from halfstep.ops.snapshot import values_of
from halfstep.optim import LossScaler, LowBit
from halfstep.optim.unscaling import unwrapped
from halfstep.recipe import Communication, Recipe, digest


def compress(
    model: nn.Module,
    communication: Communication | None = None,
    *,
    scaler: LossScaler | None = None,
    limit: timedelta = LIMIT,
) -> Reduction:
    """Make a DDP or FSDP2 model reduce gradients, and gather sharded weights, in few bits. Call it on all ranks.

        model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe)
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        halfstep.distributed.compress(ddp)          # then the usual loop, with ddp(x)

    The state that persists between steps (rounding errors, or FP8-LM's mu) is saved and loaded with the scaler's state;
    each rank has its own.

    Args:
        model: a `DistributedDataParallel`, or a model on which fully_shard was called, before its first pass.
        communication: the formats to send; None: the recipe's. A model without a recipe may have one too.
        scaler: the loss scaler. Error feedback needs it if the recipe scales its loss: it keeps unscaled rounding
            errors.
        limit: how long to wait for all other ranks to call this.

    Raises:
        RecipeError: the recipe has no communication, and none is given; error feedback without the scaler.
        ModelError: the model is neither under DDP nor sharded, or has a hook; another rank has another model, other
            weights or another recipe, or did not call within the limit. Nothing was sent.
    """
    ddp = model if isinstance(model, nn.parallel.DistributedDataParallel) else None
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
    if ddp is None and (communication.reduce != "all_to_all" or communication.feeds_back):
        raise RecipeError(
            f"gradients of sharded weights as {communication}: under fully_shard they are summed once, in float32, "
            "without error feedback: Communication(..., reduce='all_to_all', error_feedback=False)"
        )
    state = _reduction(root, communication, None if ddp is None else ddp.process_group, scaler, limit)
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


def _divides_by_all(reference: Callable[[], Any]) -> bool:
    """Whether DDP divides by the number of all ranks, including those that ran out of batches under `ddp.join`."""
    ddp = reference()
    return ddp is None or not ddp._join_config.enable or ddp._divide_by_initial_world_size


def _recipe(root: nn.Module) -> Recipe | None:
    applied = part_of(root).applied
    return None if applied is None else applied.recipe


def _reduction(
    root: nn.Module,
    communication: Communication | None,
    group: Any,
    scaler: LossScaler | None,
    limit: timedelta = LIMIT,
) -> Reduction:
    """A new Reduction for a model, after `Exchange.agree` found that all ranks want the same."""
    recipe = _recipe(root)
    scales = recipe is not None and recipe.loss_scale is not None and recipe.loss_scale.scales
    if communication is not None and communication.feeds_back and scales and scaler is None:
        raise RecipeError(
            f"recipe {recipe.name!r} scales its loss, but error feedback keeps unscaled rounding errors: "  # type: ignore[union-attr]
            "halfstep.distributed.compress(ddp, scaler=scaler)"
        )
    names = {parameter: name for name, parameter in root.named_parameters()}
    state = Reduction(communication, group, names, None if scaler is None else scaler.get_scale)
    state.exchange.agree(_summary(root, communication, recipe), limit)
    return state


def _summary(root: nn.Module, communication: Communication | None, recipe: Recipe | None) -> str:
    """The text that ranks compare: communication, recipe, model class, and a hash of the parameters' names, shapes,
    dtypes, requires_grad and (unless sharded) values."""
    weights = hashlib.sha256()
    for name, parameter in root.named_parameters():
        weights.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}".encode())
        if not hasattr(parameter, "device_mesh"):
            weights.update(str(_bits(values_of(parameter.detach()))).encode())
    what = "gradients as they are" if communication is None else str(communication)
    whose = "without a recipe" if recipe is None else f"of recipe {recipe.name!r} ({digest(recipe)[:8]})"
    return f"{what}, {whose}, of {type(root).__name__} with the weights {weights.hexdigest()[:8]}"


def _bits(tensor: Tensor) -> int:
    """A checksum: the sum of a tensor's bit patterns as integers, exact and therefore the same on all machines."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.itemsize, torch.int64)
    return int(tensor.reshape(-1).contiguous().view(whole).sum(dtype=torch.int64))


class GatherCodes(ColwiseParallel):
    """torch's `ColwiseParallel` for a layer whose input is sharded by tokens and quantized by the recipe: ranks
    all-gather the tokens' codes, in the forward and again in the backward pass, and save only their own tokens.

        parallelize_module(model, mesh, {"up": GatherCodes(Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))})

    `ColwiseParallel(input_layouts=Shard(1))` gives the same bits; it gathers the tokens once, in their own dtype, and
    saves all of them for backward.

    Args:
        tokens: the input's sharded dimension: `Shard(1)` of (batch, tokens, in).
        options: other arguments of `ColwiseParallel`.
    """

    def __init__(self, tokens: Shard, **options: Any) -> None:
        super().__init__(input_layouts=tokens, **options)
        self.desired_input_layouts: tuple[Any] = self.input_layouts  # no redistribution: the layer gathers codes itself


BUCKET = 2**24
"""The most elements of a bucket, in which gradients are sent together; a larger gradient has a bucket of its own."""


@torch.no_grad()
def reduce_gradients(
    model: nn.Module,
    communication: Communication | None = None,
    *,
    process_group: Any = None,
    scaler: LossScaler | None = None,
) -> Reduction:
    """Replace every gradient in place by its mean over the ranks, sent in the format of the recipe's `communication`.
    Returns the model's `Reduction`, whose `exchange.sent` counts bytes.

        loss.backward()                                  # as often as wanted
        halfstep.distributed.reduce_gradients(model)     # once a step, on all ranks
        scaler.clip_grad_norm_(optimizer, 1.0); scaler.step(optimizer); scaler.update(); optimizer.zero_grad()

    For recipes whose gradients have another dtype than their weights ('bf16-megatron'), which DDP and FSDP2 do not
    reduce, and for loops without DDP. Gradients are summed in float32 in rank order. Ranks must begin with the same
    weights: the first call compares checksums and raises if they differ. It does not overlap with the backward pass.

    A parameter that has a gradient on some ranks only counts as zero on the others; one without a gradient on any rank
    keeps none.

    Args:
        communication, scaler: as for `compress`, except that without a communication gradients are sent in their own
            dtype. Those of the first call hold for all later ones.
        process_group: the ranks that train together; None: all.

    Raises:
        RecipeError: error feedback under a recipe that scales its loss, without the scaler.
        ModelError: ranks have other models, recipes or weights, or one has failed; a gradient is sparse or sharded.
    """
    root = root_of(model)
    state: Reduction | None = part_of(root).reduction
    if state is None:
        recipe = _recipe(root)
        communication = communication or (recipe.communication if recipe else None)
        state = own_part(root).reduction = _reduction(root, communication, process_group, scaler)
    for bucket in _buckets(_with_gradients([p for p in model.parameters() if p.requires_grad], state)):
        values = torch.cat([_grad(p).flatten() for p in bucket])
        state.begin(values, bucket, lambda bucket=bucket, values=values: _write(bucket, values))  # type: ignore[misc]
    state.finish()
    return state


def _with_gradients(parameters: Sequence[Tensor], state: Reduction) -> list[Tensor]:
    """The parameters that have a gradient on any rank. Those that have none on this rank get a gradient of zeros."""
    here = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=parameters[0].device)
    everyone = here.repeat(state.exchange.ranks, 1)
    state.exchange.all_gather(everyone).wait()
    found = [parameter for parameter, somewhere in zip(parameters, everyone.amax(0).tolist(), strict=True) if somewhere]
    for parameter in found:
        if parameter.grad is None:
            dtype = parameter.grad_dtype or parameter.dtype
            parameter.grad = torch.zeros_like(parameter, dtype=dtype)
    return found


def _grad(parameter: Tensor) -> Tensor:
    grad = parameter.grad
    assert grad is not None
    if grad.layout != torch.strided or hasattr(grad, "device_mesh"):
        kind = "sharded (fully_shard reduces it)" if hasattr(grad, "device_mesh") else f"{grad.layout}"
        raise ModelError(
            f"a gradient of shape {tuple(grad.shape)} is {kind}; halfstep.distributed.reduce_gradients takes whole, "
            "dense gradients. It was not sent"
        )
    return grad


def _buckets(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group parameters, in order, by the dtype and device of their gradients, at most `BUCKET` elements a group."""
    found: dict[Any, list[list[Tensor]]] = {}
    for parameter in parameters:
        grad = _grad(parameter)
        groups = found.setdefault((grad.dtype, grad.device), [[]])
        if groups[-1] and sum(p.numel() for p in groups[-1]) + grad.numel() > BUCKET:
            groups.append([])
        groups[-1].append(parameter)
    return [group for groups in found.values() for group in groups]


def _write(bucket: Sequence[Tensor], values: Tensor) -> None:
    for parameter, mean in zip(bucket, values.split_with_sizes([p.numel() for p in bucket]), strict=True):
        _grad(parameter).copy_(mean.view(parameter.shape))


class Dealt:
    """A model's parameters dealt out to a group's ranks, each whole to one rank: the largest parameter first, always to
    the rank with the fewest elements so far.

        dealt = halfstep.distributed.Dealt(model)
        optimizer = torch.optim.AdamW(dealt.parameters, lr=1e-3)      # only this rank's parameters
        model, optimizer, scaler = halfstep.prepare(model, optimizer, "fp8lm-o2")
        dealt.attach(optimizer)                                       # shares the weights, now and after each step
        ...
        scaler.scale(loss).backward()
        halfstep.distributed.reduce_gradients(model)
        scaler.step(optimizer); scaler.update(); optimizer.zero_grad()

    Each rank then holds 1/N of the master weights and moments. Tensors are not split, so a weight with one scale for
    the whole tensor keeps it, and is sent as codes and that scale. Every rank has the whole model's gradients, and
    checks, unscales, clips and zeroes all of them. Save and load the optimizer on every rank.

    Args:
        model: the same on every rank, before or after `prepare`.
        process_group: the ranks; None: all.

    Attributes:
        parameters: the parameters that this rank's optimizer steps.
        exchange: the collectives, whose `sent` counts bytes.

    Source: Peng et al. 2023 (FP8-LM), arXiv 2310.18313, section 2.3: ZeRO without cutting tensors.
    """

    def __init__(self, model: nn.Module, process_group: Any = None) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.exchange = Exchange(process_group)
        self._of: list[list[nn.Parameter]] = [[] for _ in range(self.exchange.ranks)]
        held = [0] * self.exchange.ranks
        for parameter in sorted(trained, key=lambda parameter: -parameter.numel()):  # a stable sort: same on all ranks
            if hasattr(parameter, "device_mesh"):
                raise ModelError(
                    f"a parameter of shape {tuple(parameter.shape)} is sharded, but Dealt takes whole tensors. Use "
                    "either Dealt or fully_shard"
                )
            rank = held.index(min(held))
            held[rank] += parameter.numel()
            self._of[rank].append(parameter)
        self.parameters = self._of[self.exchange.rank]
        self._trained = trained
        if not self.parameters:
            raise ModelError(
                f"{len(trained)} parameters for {self.exchange.ranks} ranks: rank {self.exchange.rank} gets none. Use "
                "fewer ranks (process_group=...)"
            )

    def attach(self, optimizer: LowBit) -> None:
        """Call `share` now and after each step of the optimizer, and have the optimizer clip and zero the gradients of
        the whole model. Call it once on all ranks, after `prepare`.

        Raises:
            ModelError: the optimizer is not from `prepare`, or steps other parameters than `parameters`; a rank failed.
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
                f"this optimizer steps {len(held)} parameters, of which {len(held & set(self.parameters))} are among "
                f"the {len(self.parameters)} of this rank; build it on dealt.parameters"
            )
        optimizer.reduced = self._trained
        optimizer.register_step_post_hook(lambda *_: self.share())
        self.share()

    @torch.no_grad()
    def share(self) -> None:
        """Send this rank's parameters to all ranks as they are stored (codes and scales), and receive the other ranks'.
        After `attach` each step of the optimizer does so.

        Raises:
            ModelError: a rank failed; the message names it.
        """
        memory = [[part for parameter in own for part in _stored_tensors(parameter)] for own in self._of]
        sizes = [sum(part.nbytes for part in parts) for parts in memory]
        everyone = torch.zeros(self.exchange.ranks, max(sizes), dtype=torch.uint8, device=memory[0][0].device)
        ours = everyone[self.exchange.rank, : sizes[self.exchange.rank]]
        torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in memory[self.exchange.rank]], out=ours)
        self.exchange.all_gather(everyone).wait()
        for rank in (rank for rank in range(self.exchange.ranks) if rank != self.exchange.rank):
            given = everyone[rank, : sizes[rank]].split_with_sizes([part.nbytes for part in memory[rank]])
            for part, theirs in zip(memory[rank], given, strict=True):
                part.copy_(theirs.clone().view(part.dtype).view(part.shape))
            for parameter in self._of[rank]:
                torch.autograd.graph.increment_version(parameter)


def _stored_tensors(parameter: Tensor) -> Sequence[Tensor]:
    """The plain tensors that store a parameter: codes and scales, or the parameter itself."""
    return list(parameter.parts.values()) if isinstance(parameter, CodeTensor) else [parameter.detach()]
