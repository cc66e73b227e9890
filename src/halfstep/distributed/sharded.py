"""`Reduction`, the state of a model's gradient reductions; DDP's communication hook; and FSDP2's collectives.

FSDP2's collectives all-gather weights as codes, and reduce-scatter gradients as codes that are summed in float32.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from halfstep.distributed.collectives import Exchange
from halfstep.distributed.mean import (
    Message,
    Steps,
    copy_back,
    fp8lm_steps,
    granule,
    mean_of,
    mean_steps,
    shares,
    spread,
)
from halfstep.errors import ModelError, RecipeError
from halfstep.ops.part import part_of
from halfstep.quant import Quantizer
from halfstep.recipe import FP8, Communication, LinearSpec, Storage, get_storage


# ---- gradients, and DDP's hook ---------------------------------------------------------------------------------------


class Reduction:
    """Averages gradients over ranks, several buckets at a time: the state of `fp8_hook` and of `reduce_gradients`.

        state = halfstep.distributed.Reduction(FP8)
        ddp.register_comm_hook(state, halfstep.distributed.fp8_hook)

    `halfstep.distributed.compress(ddp)` makes one from the model's recipe, and has it saved with the scaler.

    Args:
        communication: the formats to send. None: gradients in their own dtype.
        process_group: the ranks whose gradients are averaged: DDP's process group.
        names: parameter names, under which `state_dict` saves the state. Without them it cannot be saved.
        scale: returns the current loss scale, by which incoming gradients are multiplied; for error feedback.

    Attributes:
        exchange: the collectives, whose `sent` counts bytes.
        times: how often gradients were reduced.
    """

    def __init__(
        self,
        communication: Communication | None = FP8,
        process_group: Any = None,
        names: Mapping[Any, str] | None = None,
        scale: Callable[[], float] | None = None,
    ) -> None:
        self.communication, self.exchange = communication, Exchange(process_group)
        self.times = 0
        self.divides_by_all: Callable[[], bool] = lambda: True
        self._feeds_back = communication is not None and communication.feeds_back
        self._adapts = communication is not None and communication.reduce == "fp8lm"
        self._names, self._scale = names or {}, scale
        self._states: dict[Any, Tensor] = {}
        self._saved: Mapping[str, Tensor] = {}
        self._under_way: list[tuple[Steps, Any, Callable[[], None]]] = []

    def exchange_of(self, group: Any) -> Exchange:
        """The Exchange of the process group with which FSDP2 calls a module's collectives; all modules of a model have
        the same group."""
        if self.exchange.group is not group:
            sent, self.exchange = self.exchange.sent, Exchange(group)
            self.exchange.sent = sent
        return self.exchange

    def begin(self, values: Tensor, parameters: Sequence[Tensor], done: Callable[[], None]) -> None:
        """Start to replace `values`, the concatenated gradients of `parameters`, in place by their mean over the ranks.
        Every reduction in flight advances one step. `done` is called once `values` has the mean.

        Raises:
            ModelError: another rank has failed.
        """
        steps = self._steps(values, parameters)
        begun = steps, next(steps), done
        self._advance()
        self._under_way.append(begun)

    def finish(self) -> None:
        """Complete all reductions in flight."""
        while self._under_way:
            self._advance()
        self.times += 1

    def _advance(self) -> None:
        """Advance each reduction in flight one step, in the order in which they began."""
        waiting, self._under_way = self._under_way, []
        for steps, pending, done in waiting:
            pending.wait()
            following = next(steps, None)
            if following is None:
                done()
            else:
                self._under_way.append((steps, following, done))

    def check_begin(self) -> None:
        """Check that a new backward pass may begin.

        Raises:
            ModelError: the last backward pass ended before its last bucket; or DDP's `join` is set to divide by the
                number of ranks that still have batches.
        """
        if not self.divides_by_all():
            raise ModelError(
                "ddp.join(divide_by_initial_world_size=False) divides by the number of ranks that have batches left, "
                "which a communication hook does not know; leave it True: the mean is then over all ranks"
            )
        if self._under_way:
            self._under_way.clear()
            raise ModelError(
                "a backward pass begins, but the last one stopped between two buckets, and other ranks may still wait "
                "for the rest. Restart from the last checkpoint"
            )

    def _steps(self, values: Tensor, parameters: Sequence[Tensor]) -> Steps:
        communication, lengths = self.communication, [parameter.numel() for parameter in parameters]
        given = communication.gradients if communication is not None else None
        storage = given or get_storage(FORMATS[values.dtype])
        if communication is not None and communication.reduce != "all_to_all":
            return self._by_fp8lm(values, parameters, lengths, storage)
        if self._feeds_back:
            return self._fed_back(values, parameters, lengths, storage)
        return self._plain(values, lengths, storage)

    def _plain(self, values: Tensor, lengths: Sequence[int], storage: Storage) -> Steps:
        laid = spread(values, lengths, storage)
        yield from mean_steps(laid, storage, self.exchange)
        copy_back(laid, lengths, storage, values)

    def _fed_back(
        self, values: Tensor, parameters: Sequence[Tensor], lengths: Sequence[int], storage: Storage
    ) -> Steps:
        """The mean with error feedback: adds the rounding errors of the last gradients, which are kept unscaled and are
        multiplied by the current loss scale here."""
        rows, scale = self.exchange.ranks, 1.0 if self._scale is None else self._scale()
        own = [self._state_of(p) for p in parameters]
        taken = torch.cat(own).mul_(scale)
        laid, residual = (spread(each, lengths, storage, rows) for each in (values, taken))
        yield from mean_steps(laid, storage, self.exchange, residual)
        copy_back(laid, lengths, storage, values, rows)
        copy_back(residual, lengths, storage, taken, rows)
        for mine, each in zip(own, taken.div_(scale).split_with_sizes(list(lengths)), strict=True):
            mine.copy_(each)

    def _by_fp8lm(
        self, values: Tensor, parameters: Sequence[Tensor], lengths: Sequence[int], storage: Storage
    ) -> Steps:
        own = [self._state_of(p) for p in parameters]
        mu = torch.stack(own)
        yield from fp8lm_steps(values, lengths, storage.quantizer, self.exchange, mu, self._adapts)
        for mine, each in zip(own, mu, strict=True):
            mine.copy_(each)

    def _state_of(self, parameter: Tensor) -> Tensor:
        """The state of a parameter, from a loaded state dict or newly initialized: with error feedback its rounding
        errors (float32, 1-D), with FP8-LM mu (a scalar)."""
        if parameter not in self._states:
            if self._feeds_back:
                kept = parameter.new_zeros(parameter.numel(), dtype=torch.float32)
            else:
                kept = parameter.new_full((), 1.0 if self._adapts else self.exchange.ranks**-0.5, dtype=torch.float32)
            saved = self._saved.get(self._names.get(parameter, ""))
            self._states[parameter] = kept if saved is None else kept.copy_(saved)
        return self._states[parameter]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copied or unpickled model has none: call compress or reduce_gradients for it

    def state_dict(self) -> dict[str, Any]:
        """The state that persists between steps, by parameter name: with error feedback this rank's rounding errors,
        under a key that names the rank, so that a distributed checkpoint keeps those of every rank; with FP8-LM mu.
        Empty for other communications.

        Raises:
            RecipeError: a parameter has no name.
        """
        if not (self._feeds_back or self._adapts):
            return {}
        if not self._states.keys() <= self._names.keys():
            raise RecipeError(
                "a reduction's state is saved under the parameters' names, but this Reduction has none: "
                "Reduction(..., names={p: n for n, p in model.named_parameters()})"
            )
        kept = {name: self._state_of(p).clone() for p, name in self._names.items() if p.requires_grad}
        return {"communication": str(self.communication), self._state_key: kept} if kept else {}

    @property
    def _state_key(self) -> str:
        if not self._feeds_back:
            return "mu"
        return f"rounding errors of rank {self.exchange.rank} of {self.exchange.ranks}"

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Load a result of `state_dict`. Returns warnings about state that cannot be used.

        With error feedback each rank needs its own state; that of another rank or number of ranks is dropped, and the
        rounding errors start at zero.
        """
        self._states, self._saved = {}, {}
        if not (self._feeds_back or self._adapts) and not saved:
            return []
        if saved.get("communication", str(self.communication)) != str(self.communication):
            return [
                f"the saved state of {saved['communication']} is dropped, since gradients are sent as "
                f"{self.communication}"
            ]
        if self._state_key in saved:
            self._saved = saved[self._state_key]
            return []
        found = ", ".join(sorted(saved.keys() - {"communication"})) or "nothing"
        return [
            f"gradients are sent as {self.communication}, whose state is the {self._state_key}; the scaler's state has "
            f"{found} instead: it starts over (save the scaler's state on each rank, and load it on as many)"
        ]


FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


# torch reads the hook's annotations, which must not be strings: no `from __future__ import annotations` here.
def fp8_hook(state: Reduction, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """A DDP communication hook: averages a bucket of gradients over the ranks in the state's format (default E4M3).

        ddp.register_comm_hook(Reduction(), fp8_hook)

    Each bucket is sent as soon as it is ready, while the backward pass goes on, and is summed after the next one was
    sent; the last bucket waits for all. `compress(ddp)` registers this hook, and also checks that ranks agree and saves
    the state.

    Args:
        state: the reduction of this one DDP model.
        bucket: DDP's bucket.

    Raises:
        ModelError: another rank has failed.
    """
    values = bucket.buffer()
    if bucket.index() == 0:
        state.check_begin()
    future: Any = torch.futures.Future(devices=[values.device] if values.is_cuda else None)
    state.begin(values, bucket.parameters(), lambda: future.set_result(values))
    if bucket.is_last():
        state.finish()
    return future  # type: ignore[no-any-return]


# ---- FSDP2's collectives ---------------------------------------------------------------------------------------------


def modules_of(model: nn.Module) -> list[Any]:
    """The modules of a model on which fully_shard was called."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def install(model: nn.Module, state: Reduction) -> None:
    """Make every sharded module reduce its gradients and gather its weights in the formats of `state.communication`.

    Raises:
        ModelError: a module with parameters on several meshes, for which torch accepts no custom collectives.
    """
    communication = state.communication
    assert communication is not None
    for module in modules_of(model):
        try:
            if communication.gradients is not None:
                module.set_custom_reduce_scatter(Scatter(state, communication.gradients))
            if communication.weights is not None:
                module.set_custom_all_gather(Gather(state, communication.weights, _managed(module)))
        except ValueError as error:
            raise ModelError(f"{type(module).__name__} accepts no custom collectives: {error}") from error


class _Allocates:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized tensor for a collective's input or output (torch calls this)."""
        return torch.empty(*size, dtype=dtype, device=device)


@dataclass
class Scatter(_Allocates):
    """A reduce-scatter for FSDP2: sends each rank its share encoded; each rank decodes and sums its own in float32, in
    rank order."""

    state: Reduction
    storage: Storage

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Reduce-scatter with the signature of torch's `reduce_scatter_single`."""
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise ModelError(
                f"gradients in few bits are averaged or summed, and set_gradient_divide_factor asks for {op}: divide "
                "the loss instead"
            )
        exchange, share = self.state.exchange_of(group), output_tensor.numel()
        unit = granule(self.storage)
        message = Message(self.storage, -(-share // unit) * unit)
        size = exchange.ranks, message.bytes
        sent, got = (exchange.buffers.take(size, torch.uint8, input_tensor.device) for _ in range(2))
        for rank, row in enumerate(input_tensor.view(exchange.ranks, share)):
            message.encode(shares(row, 1, message.length)[0], (got if rank == exchange.rank else sent)[rank])
        exchange.all_to_all(got, sent).wait()
        mean = exchange.buffers.take((message.length,), torch.float32, input_tensor.device)
        mean_of(got, message, exchange.buffers, total=mean)
        if op == dist.ReduceOp.SUM:
            mean *= exchange.ranks
        output_tensor.copy_(mean[:share])
        exchange.buffers.release(sent, got, mean)
        self.state.times += 1


@dataclass
class Gather(_Allocates):
    """An all-gather for FSDP2 that sends codes and scales. This rank's own shard is rounded too.

    Args:
        storage: the format of a module's flat weights; or `OPERANDS`.
        managed: the module's weights in torch's order: for each the shape of a rank's shard, and the quantizer that
            forward's and backward's matmuls share (`shared`), or None.
    """

    state: Reduction
    storage: Storage | str
    managed: list[tuple[tuple[int, ...], Quantizer | None]]
    _messages: dict[Any, list[tuple[int, int, Message]]] = field(default_factory=dict)

    @torch.no_grad()
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """All-gather with the signature of torch's `all_gather_single`."""
        exchange = self.state.exchange_of(group)
        parts = self._parts(input_tensor)
        ends = list(accumulate((message.bytes for _, _, message in parts), initial=0))
        everyone = torch.empty(exchange.ranks, ends[-1], dtype=torch.uint8, device=input_tensor.device)
        own, places = everyone[exchange.rank], list(zip(parts, pairwise(ends), strict=True))
        for (start, size, message), (begin, end) in places:
            message.encode(shares(input_tensor[start : start + size], 1, message.length)[0], own[begin:end])
        exchange.all_gather(everyone).wait()
        for row, given in zip(output_tensor.view(exchange.ranks, -1), everyone, strict=True):
            for (start, size, message), (begin, end) in places:
                target = row[start : start + size]
                found = target if size == message.length else target.new_empty(message.length)
                message.decode(given[begin:end], found)
                if found is not target:
                    target.copy_(found[:size])

    def _parts(self, values: Tensor) -> list[tuple[int, int, Message]]:
        """The ranges of a rank's flat weights that are encoded separately: (start, length, message) for each."""
        key = values.numel(), values.dtype
        if key not in self._messages:
            self._messages[key] = list(self._cut(values))
        return self._messages[key]

    def _cut(self, values: Tensor) -> Any:
        if isinstance(self.storage, Storage):
            unit = granule(self.storage)
            return [(0, values.numel(), Message(self.storage, -(-values.numel() // unit) * unit))]
        plain, sizes = get_storage(FORMATS[values.dtype]), [prod(shape) for shape, _ in self.managed]
        if sum(sizes) != values.numel():
            raise ModelError(
                f"a module's weights have {sum(sizes)} elements on a rank, but torch gathers {values.numel()}: gather "
                "them in their own dtype, or as codes of the flat weights (communication weights)"
            )
        storages = [get_storage(q) if q is not None and _whole(q, shape) else plain for shape, q in self.managed]
        parts = zip(accumulate(sizes, initial=0), sizes, storages, self.managed, strict=False)
        return [(start, size, Message(storage, size, shape)) for start, size, storage, (shape, _) in parts]


def _managed(module: Any) -> list[tuple[tuple[int, ...], Quantizer | None]]:
    """A sharded module's weights, without those of sharded modules within it, as `Gather.managed`."""
    inside = {id(each) for part in modules_of(module) if part is not module for each in part.modules()}
    found, seen = [], set()
    for each in module.modules():
        spec = part_of(each).linear
        for name, weight in each.named_parameters(recurse=False):
            if id(each) not in inside and id(weight) not in seen:
                seen.add(id(weight))
                rows = -(-weight.shape[0] // weight.device_mesh.size(-1))  # other mesh dimensions hold copies (HSDP)
                found.append(((rows, *weight.shape[1:]), shared(spec) if name == "weight" else None))
    return found


def shared(spec: LinearSpec | None) -> Quantizer | None:
    """The quantizer of the weight if the forward and the input gradient's matmul have the same, if quantizing its
    values again changes none of them, and if shards are rounded as the whole weight is; else None."""
    quantizer = None if spec is None else spec.output.rhs
    if quantizer is None or spec is None or quantizer != spec.grad_input.rhs or quantizer.rounding != "nearest_even":
        return None
    scales = quantizer.scales
    square = scales is None or (
        scales.rule.exact and (not scales.rule.reads or scales.tile.rows == scales.tile.columns)
    )
    alone = scales is None or not scales.rule.reads or bool(scales.tile.rows)
    return quantizer if square and alone and quantizer == quantizer.plain and quantizer.outliers is None else None


def _whole(quantizer: Quantizer, shape: tuple[int, ...]) -> bool:
    """Whether a shard of that shape consists of whole tiles, so that shards are rounded as the whole weight is."""
    scales = quantizer.scales
    return len(shape) == 2 and (scales is None or not scales.tile.rows or shape[0] % scales.tile.rows == 0)
