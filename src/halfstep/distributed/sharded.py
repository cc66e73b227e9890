"""Gradients and weights sent in few bits: the reduction of a model's gradients, DDP's hook, and FSDP2's collectives.

With FSDP2 weights are gathered as codes, and gradients are scattered as codes and summed in float32.
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
from halfstep.distributed.mean import Message, Steps, fp8lm_steps, gather, granule, mean_of, mean_steps, shares, spread
from halfstep.errors import ModelError, RecipeError
from halfstep.ops.part import part_of
from halfstep.quant import Quantizer
from halfstep.recipe import FP8, Communication, LinearSpec, Storage, get_storage


# ---- gradients, and DDP's hook ---------------------------------------------------------------------------------------


class Reduction:
    """The state of `fp8_hook`, and of `reduce_gradients`.

        state = halfstep.distributed.Reduction(FP8)
        ddp.register_comm_hook(state, halfstep.distributed.fp8_hook)

    `halfstep.distributed.compress(ddp)` makes it as the model's recipe says, and has it saved with the scaler.

    Args:
        communication: what is sent; `recipe.FP8` by default. None: gradients in their own dtype.
        process_group: the ranks whose gradients are averaged: DDP's own.
        names: of the parameters, by which what is remembered is saved. Parameters without one cannot be saved.
        scale: gives the loss scale by which gradients are multiplied when they come, for error feedback.

    Attributes:
        exchange: the collectives, which count what they send.
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
        self._kept: dict[Any, Tensor] = {}
        self._saved: Mapping[str, Tensor] = {}
        self._under_way: list[tuple[Steps, Any, Callable[[], None]]] = []

    def exchange_of(self, group: Any) -> Exchange:
        """The collectives of the group that a sharded module's are called in: one group for all of them."""
        if self.exchange.group is not group:
            sent, self.exchange = self.exchange.sent, Exchange(group)
            self.exchange.sent = sent
        return self.exchange

    def begin(self, values: Tensor, parameters: Sequence[Tensor], done: Callable[[], None]) -> None:
        """Begin to replace gradients of these parameters, laid out one after the other, by their mean over the ranks;
        those that are under way go a step further. `done` is called when it is there.

        Raises:
            ModelError: another rank has failed.
        """
        steps = self._steps(values, parameters)
        begun = steps, next(steps), done
        self._go_on()
        self._under_way.append(begun)

    def finish(self) -> None:
        """Wait for all that are under way."""
        while self._under_way:
            self._go_on()
        self.times += 1

    def _go_on(self) -> None:
        """All that are under way go a step further, in turn."""
        waiting, self._under_way = self._under_way, []
        for steps, pending, done in waiting:
            pending.wait()
            following = next(steps, None)
            if following is None:
                done()
            else:
                self._under_way.append((steps, following, done))

    def check_begin(self) -> None:
        """Refuse what a new backward pass cannot begin with.

        Raises:
            ModelError: the last one ended before its last gradients were sent; DDP's `join` is to divide by the number
                of ranks that have batches left.
        """
        if not self.divides_by_all():
            raise ModelError(
                "ddp.join(divide_by_initial_world_size=False) divides by the ranks that have batches left, which a "
                "communication hook is not told; leave it True, and gradients in few bits are the mean over all ranks"
            )
        if self._under_way:
            self._under_way.clear()
            raise ModelError(
                "a backward pass begins, and the last one stopped between two buckets: other ranks may wait for the "
                "rest. Restart from the last checkpoint"
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
        gather(laid, lengths, storage, values)

    def _fed_back(
        self, values: Tensor, parameters: Sequence[Tensor], lengths: Sequence[int], storage: Storage
    ) -> Steps:
        """With what rounding took from these parameters' last gradients, which is kept without the loss scale."""
        rows, scale = self.exchange.ranks, 1.0 if self._scale is None else self._scale()
        own = [self._of(p) for p in parameters]
        taken = torch.cat(own).mul_(scale)
        laid, residual = (spread(each, lengths, storage, rows) for each in (values, taken))
        yield from mean_steps(laid, storage, self.exchange, residual)
        gather(laid, lengths, storage, values, rows)
        gather(residual, lengths, storage, taken, rows)
        for mine, each in zip(own, taken.div_(scale).split_with_sizes(list(lengths)), strict=True):
            mine.copy_(each)

    def _by_fp8lm(
        self, values: Tensor, parameters: Sequence[Tensor], lengths: Sequence[int], storage: Storage
    ) -> Steps:
        own = [self._of(p) for p in parameters]
        mu = torch.stack(own)
        yield from fp8lm_steps(values, lengths, storage.quantizer, self.exchange, mu, self._adapts)
        for mine, each in zip(own, mu, strict=True):
            mine.copy_(each)

    def _of(self, parameter: Tensor) -> Tensor:
        """What is kept of a parameter: what was saved of it, or a start. Of error feedback float32 numbers, of FP8-LM
        mu."""
        if parameter not in self._kept:
            if self._feeds_back:
                kept = parameter.new_zeros(parameter.numel(), dtype=torch.float32)
            else:
                kept = parameter.new_full((), 1.0 if self._adapts else self.exchange.ranks**-0.5, dtype=torch.float32)
            saved = self._saved.get(self._names.get(parameter, ""))
            self._kept[parameter] = kept if saved is None else kept.copy_(saved)
        return self._kept[parameter]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # ranks do not multiply: a copy of a model is reduced by what is called for it

    def state_dict(self) -> dict[str, Any]:
        """What is remembered from step to step: of error feedback what this rank's rounding took, under a name that
        says whose it is, so that a distributed checkpoint has that of every rank; of FP8-LM mu.

        Raises:
            RecipeError: a parameter has no name.
        """
        if not (self._feeds_back or self._adapts):
            return {}
        if not self._kept.keys() <= self._names.keys():
            raise RecipeError(
                "what a reduction keeps is saved by the parameters' names, and this Reduction was given none: "
                "Reduction(..., names={p: n for n, p in model.named_parameters()})"
            )
        kept = {name: self._of(p).clone() for p, name in self._names.items() if p.requires_grad}
        return {"communication": str(self.communication), self._whose: kept} if kept else {}

    @property
    def _whose(self) -> str:
        if not self._feeds_back:
            return "mu"
        return f"rounding errors of rank {self.exchange.rank} of {self.exchange.ranks}"

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Load it; what cannot be used, to be told.

        With error feedback each rank has its own: of another rank's, or another number of ranks', it starts over.
        """
        self._kept, self._saved = {}, {}
        if not (self._feeds_back or self._adapts) and not saved:
            return []
        if saved.get("communication", str(self.communication)) != str(self.communication):
            return [f"what was kept of {saved['communication']} is dropped: gradients are sent as {self.communication}"]
        if self._whose in saved:
            self._saved = saved[self._whose]
            return []
        found = ", ".join(sorted(saved.keys() - {"communication"})) or "nothing"
        return [
            f"gradients are sent as {self.communication}, and of what that keeps from step to step the scaler's state "
            f"has {found}, and not the {self._whose}: it starts over (save the scaler's state on each rank, and load "
            "it on as many)"
        ]


FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


# torch reads its annotations, which must not be strings: no `from __future__ import annotations` here.
def fp8_hook(state: Reduction, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Average a bucket of gradients over the ranks, in the format that the state says (E4M3 by default).

        ddp.register_comm_hook(Reduction(), fp8_hook)

    Buckets go out as they come, while the backward pass computes; each is summed when the next one has gone out, and
    the last one waits for all. `compress(ddp)` is this and more: ranks agree first, and the state is saved.

    Args:
        state: of one DDP model.
        bucket: DDP's.

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
    """Its modules that fully_shard was called on."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def install(model: nn.Module, state: Reduction) -> None:
    """Have every sharded module send its gradients and gather its weights as the state's communication says.

    Raises:
        ModelError: a module whose parameters lie on several meshes, which torch takes no collectives for.
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
            raise ModelError(f"{type(module).__name__} takes no collectives of others: {error}") from error


class _Allocates:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a collective's input or output."""
        return torch.empty(*size, dtype=dtype, device=device)


@dataclass
class Scatter(_Allocates):
    """A reduce-scatter: each rank's share goes to it as codes, and is summed in float32, in rank order."""

    state: Reduction
    storage: Storage

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """torch's `reduce_scatter_single`."""
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
        exchange.buffers.give(sent, got, mean)
        self.state.times += 1


@dataclass
class Gather(_Allocates):
    """An all-gather of codes, and of scales beside them; this rank's own part is rounded too.

    Args:
        storage: of the flat weights of a module; or `OPERANDS`.
        managed: the module's weights in torch's order: of each the shape of a rank's part, and the quantizer whose
            values products take in both passes, where there is one.
    """

    state: Reduction
    storage: Storage | str
    managed: list[tuple[tuple[int, ...], Quantizer | None]]
    _messages: dict[Any, list[tuple[int, int, Message]]] = field(default_factory=dict)

    @torch.no_grad()
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """torch's `all_gather_single`."""
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
        """The runs of a rank's flat weights that are encoded together: where each begins, how long it is, and how."""
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
                f"a module's weights take {sum(sizes)} elements of a rank, and torch gathers {values.numel()}: gather "
                "them as they are, or as codes of the flat weights (communication weights)"
            )
        storages = [get_storage(q) if q is not None and _whole(q, shape) else plain for shape, q in self.managed]
        parts = zip(accumulate(sizes, initial=0), sizes, storages, self.managed, strict=False)
        return [(start, size, Message(storage, size, shape)) for start, size, storage, (shape, _) in parts]


def _managed(module: Any) -> list[tuple[tuple[int, ...], Quantizer | None]]:
    """A sharded module's weights, without those of sharded modules within it."""
    inside = {id(each) for part in modules_of(module) if part is not module for each in part.modules()}
    found, seen = [], set()
    for each in module.modules():
        spec = part_of(each).linear
        for name, weight in each.named_parameters(recurse=False):
            if id(each) not in inside and id(weight) not in seen:
                seen.add(id(weight))
                rows = -(-weight.shape[0] // weight.device_mesh.size(-1))  # the others hold copies (HSDP)
                found.append(((rows, *weight.shape[1:]), shared(spec) if name == "weight" else None))
    return found


def shared(spec: LinearSpec | None) -> Quantizer | None:
    """The quantizer by which both products round a weight, where rounding its values again changes none, and parts are
    rounded as the whole is."""
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
    """Whether a part of that shape is whole tiles, so that parts are rounded as the whole is."""
    scales = quantizer.scales
    return len(shape) == 2 and (scales is None or not scales.tile.rows or shape[0] % scales.tile.rows == 0)
