"""FSDP2's collectives in few bits: weights gathered as codes, gradients scattered as codes and summed in float32."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from halfstep.distributed.mean import Message, granule, mean_of, shares
from halfstep.distributed.reduction import FORMATS, Reduction
from halfstep.errors import ModelError
from halfstep.ops.part import part_of
from halfstep.quant import Quantizer
from halfstep.recipe import LinearSpec, Storage, get_storage


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
