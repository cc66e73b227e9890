"""An optimizer's gradients for a loss scaler: their names, checks that they are finite, norms, multiplication."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from halfstep.errors import LossScaleError
from halfstep.ops.snapshot import values_of
from halfstep.ops.subclasses import foreign
from halfstep.optim.shards import local, whole


NO_GRADIENT = 2.0
"""The value of `found` on a rank without gradients; 1 means an overflow, 0 none."""


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The parameters whose gradients the optimizer has, in order: its own, or those of all ranks
    (`distributed.Dealt`)."""
    of_all_ranks: Sequence[Tensor] = getattr(optimizer, "reduced", ())
    return iter(of_all_ranks or [parameter for group in optimizer.param_groups for parameter in group["params"]])


def names_of(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> tuple[str, ...]:
    """The names of the parameters of `parameters_of`, in order."""
    found: dict[Any, str] = {
        parameter: f"parameter {p} of group {g}"
        for g, group in enumerate(optimizer.param_groups)
        for p, parameter in enumerate(group["params"])
    }
    return tuple(map((found | dict(names)).__getitem__, parameters_of(optimizer)))


def grads_of(optimizer: torch.optim.Optimizer) -> list[Tensor | None]:
    """The gradients of the parameters of `parameters_of`, in order; the values tensor of a sparse one."""
    grads = [parameter.grad for parameter in parameters_of(optimizer)]
    return [grad._values() if grad is not None and grad.is_sparse else grad for grad in grads]


@torch.no_grad()
def find_nonfinite(grads: Sequence[Tensor | None], device: torch.device, process_group: Any) -> tuple[Tensor, Tensor]:
    """(found, lost). found: a float32 scalar above 0 if any rank has an infinity or NaN, `NO_GRADIENT` if one has no
    gradient at all. lost: a boolean for each gradient of this rank, True if it is not finite. The host reads neither.

    Args:
        grads: the gradient of every parameter, or None.
        device: the device of the results and of the all-reduce.
        process_group: the ranks that exchange `found`; None: the default group, if there is one.
    """
    if not _are_plain(grads):
        grads = [None if grad is None else values_of(local(grad)) for grad in grads]
    finite = [torch.ones((), dtype=torch.bool, device=device)] * len(grads)
    for places, parts in alike(grads):
        for place, fine in zip(places, _are_finite(parts).to(device).unbind(), strict=True):
            finite[place] = fine
    lost = ~torch.stack(finite) if finite else torch.zeros(0, dtype=torch.bool, device=device)
    here = any(grad is not None for grad in grads)
    found = lost.any().float() if here else torch.full((), NO_GRADIENT, device=device, dtype=torch.float32)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=process_group)
    return found, lost


def _are_finite(parts: Sequence[Tensor]) -> Tensor:
    """Whether all elements of each tensor are finite, by one pass over it."""
    if parts[0].is_cpu:  # the norm takes six times as long there; aminmax returns NaN if there is one
        return torch.stack([end for part in parts for end in torch.aminmax(part)]).view(-1, 2).isfinite().all(1)
    return torch.stack(torch._foreach_norm(parts, torch.inf)).isfinite()  # type: ignore[arg-type]


def alike(tensors: Sequence[Tensor | None]) -> list[tuple[list[int], list[Tensor]]]:
    """The tensors that have elements, with their indices, grouped by device and dtype for foreach functions. Tensor
    subclasses are groups of their own."""
    present = [tensor for tensor in tensors if tensor is not None]
    if len(kinds := set(map(_kind, present))) == 1 and kinds.pop()[0] is Tensor and all(map(Tensor.numel, present)):
        return [([place for place, tensor in enumerate(tensors) if tensor is not None], present)]
    groups: dict[object, tuple[list[int], list[Tensor]]] = {}
    for place, tensor in enumerate(tensors):
        if tensor is not None and tensor.numel():
            alone = foreign(tensor) is not None
            places, members = groups.setdefault(place if alone else (tensor.device, tensor.dtype), ([], []))
            places.append(place)
            members.append(tensor)
    return list(groups.values())


def _are_plain(tensors: Sequence[Tensor | None]) -> bool:
    """Whether none is of a subclass, such as a DTensor or a CodeTensor."""
    return {Tensor, type(None)} >= set(map(type, tensors))


_kind, _device = attrgetter("__class__", "device", "dtype"), attrgetter("device")


def no_gradient(elsewhere: bool) -> str:
    """The message for an optimizer without gradients, on this rank or another one (`elsewhere`)."""
    where = "on another rank no parameter" if elsewhere else "no parameter"
    return (
        f"{where} of the optimizer has a gradient; call scaler.scale(loss).backward() first. If you did, something "
        "has replaced the model's parameters (load_state_dict with assign=True, to_empty, fully_shard): build the "
        "optimizer after it. Under FSDP2 call halfstep.apply(model, recipe), then fully_shard, and hand the optimizer "
        "of the sharded parameters to halfstep.optimize(model, optimizer)"
    )


def takes_float32(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer takes float32 gradients of 16-bit parameters (`LowBit` does, torch's do not)."""
    return bool(getattr(optimizer, "takes_float32_gradients", False))


def total_norm(grads: Sequence[Tensor], norm_type: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """The norm of all gradients together, computed in `dtype`; a plain tensor, over all ranks if they are sharded."""
    norms = [grad if grad.numel() else grad.new_zeros((), dtype=dtype) for grad in grads]
    for places, members in alike(grads):
        if foreign(members[0]) is not None:
            norms[places[0]] = torch.linalg.vector_norm(members[0], norm_type, dtype=dtype)
            continue
        for place, one in zip(places, torch._foreach_norm(members, norm_type, dtype=dtype), strict=True):
            norms[place] = one
    if not _are_plain(norms):
        norms = list(map(whole, norms))
    if len(set(map(_device, norms))) > 1:
        norms = [norm.to(norms[0].device) for norm in norms]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)  # type: ignore[no-any-return]


@torch.no_grad()
def multiply(optimizer: torch.optim.Optimizer, factor: Tensor, names: Mapping[nn.Parameter, str]) -> None:
    """Multiply every gradient by a factor in float32, in few launches. 16-bit gradients are replaced by float32 ones if
    the optimizer takes these. The host does not read the factor, a float64 scalar.

    Raises:
        LossScaleError: a gradient is fp16 and cannot become float32: small values would become zero. Nothing was
            changed.
    """
    wide, every = takes_float32(optimizer), list(parameters_of(optimizer))
    narrow_ones = [place for place, p in enumerate(every) if _half(p.grad)]
    if not wide and (stuck := [place for place in narrow_ones if every[place].grad.dtype == torch.float16]):  # type: ignore[union-attr]
        raise LossScaleError(
            f"dividing or clipping fp16 gradients in place would flush small ones to zero "
            f"({names_of(optimizer, names)[stuck[0]]} and {len(stuck) - 1} more). {_REMEDY}"
        )
    leaving = [every[place] for place in narrow_ones] if wide else []
    for parameter, grad in zip(leaving, _float32([p.grad for p in leaving if p.grad is not None]), strict=True):
        widen(parameter, grad)
    grads = [p.grad for p in every if p.grad is not None]
    for grad in grads:
        mark(grad)
    parts = [grad._values() if grad.is_sparse else grad for grad in grads]
    for _, members in alike(parts if _are_plain(parts) else list(map(local, parts))):
        first = members[0]
        by = factor.to(first.device, torch.float64 if first.dtype == torch.float64 else torch.float32)
        if foreign(first) is not None:
            first.mul_(by)
        elif _half(first):  # a factor on their device would be rounded to 16 bits first
            copies = _float32(members)
            torch._foreach_mul_(copies, by)
            torch._foreach_copy_(members, copies)
        else:
            torch._foreach_mul_(members, by)


def _float32(grads: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the gradients in float32."""
    wide = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
    for places, members in alike([local(grad) for grad in grads]):
        torch._foreach_copy_([local(wide[place]) for place in places], members)
    return wide


def _half(grad: Tensor | None) -> bool:
    return grad is not None and grad.dtype in (torch.float16, torch.bfloat16)


_REMEDY = (
    "Step with an optimizer from halfstep.prepare (or halfstep.optim.convert), which takes them in float32; a fused "
    "one from torch divides inside scaler.step(optimizer), without clipping"
)


def gradients_dropped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the gradients were dropped: all are None or zeros."""
    return not any(p.grad is not None and bool(p.grad.any()) for p in parameters_of(optimizer))


def gradients_multiplied(optimizer: torch.optim.Optimizer) -> bool:
    """Whether any gradient is one that `multiply` has changed."""
    return any(is_marked(parameter.grad) for parameter in parameters_of(optimizer))


def narrow_all(optimizer: torch.optim.Optimizer) -> None:
    """Call `narrow` for all parameters with a widened gradient."""
    for parameter in parameters_of(optimizer):
        if hasattr(parameter, _OWN):
            narrow(parameter)


# ---- 16-bit gradients that are float32 from unscaling or clipping until they are dropped -----------------------------
# Dividing a 16-bit gradient by the loss scale, or clipping it, in place rounds it, and small values are lost. So it is
# replaced by a float32 gradient then, and its parameter accumulates in float32 from then on. Once that gradient is
# dropped, the parameter's gradients have their own dtype again: by `optimizer.zero_grad()`, by the loss scaler's next
# `scale`, or, if neither is called (`model.zero_grad()` or `p.grad = None`, then backward), by hooks on the parameter.


_OWN = "_halfstep_own_gradients"  # on a parameter with a widened gradient
_TREATED = "_halfstep_treated"  # on a gradient that was unscaled or clipped; it vanishes with the gradient


@dataclass
class _Own:
    """The dtype that a parameter's gradients had before `widen`, to be restored."""

    stored: torch.dtype
    """The parameter's dtype then, to notice a later cast."""
    grads: torch.dtype | None
    handles: tuple[RemovableHandle, ...] = ()
    fresh: bool = False
    """Whether the gradient that backward is computing is not added to an existing one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a pickled parameter has neither the hooks nor the gradient dtype


def widen(parameter: Tensor, grad: Tensor) -> None:
    """Replace the parameter's 16-bit gradient by a float32 one, and let it accumulate in float32."""
    if _own(parameter) is None:
        own = _Own(parameter.dtype, parameter.grad_dtype)
        if parameter.requires_grad:
            own.handles = _hooks(parameter)
        setattr(parameter, _OWN, own)
    parameter.grad = None
    parameter.grad_dtype = torch.float32
    parameter.grad = grad
    mark(grad)


def put_back(parameter: Tensor, grad: Tensor | None) -> None:
    """Restore a gradient that the parameter had before, even if it is a widened one."""
    if grad is not None and parameter.dtype != grad.dtype == torch.float32 and is_marked(grad):
        widen(parameter, grad)
    else:
        parameter.grad = grad


def mark(grad: Tensor) -> None:
    """Mark a gradient as unscaled or clipped."""
    setattr(grad, _TREATED, True)


def is_marked(grad: Tensor | None) -> bool:
    """Whether the gradient is marked as unscaled or clipped; it may have been accumulated into since."""
    return hasattr(grad, _TREATED)


def narrow(parameter: Tensor) -> None:
    """Undo `widen`: restore the dtype of the parameter's gradients, if the widened one was dropped or is zeros."""
    own, grad = _own(parameter), parameter.grad
    if own is None or (grad is not None and not own.fresh and bool(grad.any())):
        return
    for handle in own.handles:
        handle.remove()
    delattr(parameter, _OWN)
    dtype = own.grads if parameter.dtype == own.stored else parameter.dtype
    parameter.grad = None
    parameter.grad_dtype = dtype
    parameter.grad = None if grad is None else grad.to(dtype or parameter.dtype)


def _own(parameter: Tensor) -> _Own | None:
    return getattr(parameter, _OWN, None)


def _hooks(parameter: Tensor) -> tuple[RemovableHandle, ...]:
    """Register hooks that call `narrow` after a gradient was stored where there was none, or zeros.

    (torch does not allow a hook to change a gradient's dtype before it is stored.)
    """
    reference = weakref.ref(parameter)

    def arriving(_: Tensor) -> None:
        present = reference()
        own = None if present is None else _own(present)
        if present is not None and own is not None:
            if present.grad is not None and not bool(present.grad.any()):
                present.grad = None
            own.fresh = present.grad is None

    return (
        parameter.register_hook(arriving),  # type: ignore[no-untyped-call]
        parameter.register_post_accumulate_grad_hook(narrow),  # type: ignore[no-untyped-call]
    )
