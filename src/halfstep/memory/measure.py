"""Bytes, by role: what a model and its optimizer keep and what a step holds, measured from live tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from halfstep.errors import AccountError, one_of
from halfstep.memory.live import Live, parts_of
from halfstep.quant.scaling.base import STATES
from halfstep.recipe import BytesPerParameter, is_master


_ROLES = ("weights", "buffers", "master", "states", "scales", "state_scales")
_RECOMPUTED = ("none", "selective", "full")


@dataclass(frozen=True)
class StepBytes:
    """Bytes by role, whole numbers. Those before `compute_copies` stay from step to step, the others live in a pass."""

    weights: int
    """Parameters as stored, frozen ones too."""
    buffers: int
    """What else the model keeps: running statistics, tables of positions."""
    gradients: int
    master: int
    states: int
    """Moments, step counts, and whatever else the optimizer keeps."""
    scales: int
    """What stands beside codes of weights and gradients; histories of amaxes."""
    state_scales: int
    """What stands beside codes of masters and states."""
    compute_copies: int = 0
    """Weights cast or rounded for products and kept for the backward pass."""
    activations: int = 0
    """What else the backward pass waits for when the loss is there; the batch too."""
    peak: int = 0
    """The most bytes held at once from the first operation of the forward pass to the last of the backward pass."""
    peak_gradients: int = 0
    """The gradients that were there then."""
    update: int = 0
    """What the optimizer makes for itself while it steps, and gives back."""

    @property
    def persistent(self) -> int:
        """What is there between the backward pass and the step: weights, gradients, master, states, scales, buffers."""
        model = self.weights + self.buffers + self.scales
        return model + self.gradients + self.master + self.states + self.state_scales


def measure(model: nn.Module, optimizer: torch.optim.Optimizer) -> BytesPerParameter:
    """Bytes per trained parameter by role, as they are now: call it between backward() and step().

    Every tensor counts once, however many names it has. What has one element does not count: counters (`step`), and
    the scale of a whole tensor. The compute copies that autocast makes live inside a pass only and cannot be seen here;
    `Recipe.bytes_per_parameter` states them.

    Raises:
        ValueError: the model trains no parameter.
    """
    weights = {id(p): p for p in model.parameters() if p.requires_grad}
    count = sum(p.numel() for p in weights.values())
    if count == 0:
        raise ValueError("the model trains no parameter; bytes per parameter mean nothing")
    masters: list[Tensor] = []
    moments: list[Tensor] = []
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and name != "step" and (value.numel() > 1 or value.shape == parameter.shape):
                (masters if is_master(name) else moments).append(value)
    return BytesPerParameter(
        weights=_counted(weights.values()) / count,
        grads=_counted(p.grad for p in weights.values() if p.grad is not None) / count,
        master=_counted(masters) / count,
        states=_counted(moments) / count,
    )


def stored_bytes(model: nn.Module) -> int:
    """Bytes of every parameter and buffer of a model, each tensor once, however many names it has."""
    return _element_bytes(
        part for tensor in (*model.parameters(), *model.buffers()) for part in parts_of(tensor).values()
    )


def _counted(tensors: Iterable[Tensor]) -> int:
    parts = (parts_of(tensor) for tensor in tensors)
    return _element_bytes(t for found in parts for name, t in found.items() if name != "scale" or t.numel() > 1)


def _element_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.numel() * t.element_size() for t in tensors if t.numel()}
    return sum(storages.values())


def measure_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    loss_of: Callable[[], Tensor],
    batch: Any = (),
    scale: Callable[[Tensor], Tensor] = lambda loss: loss,
    per_layer: bool = False,
) -> StepBytes:
    """Run one forward and one backward pass and measure what they hold. Gradients that were there are dropped first.

        model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe)
        bytes = measure_step(model, optimizer, lambda: loss_fn(model(x), y), (x, y), scaler.scale)

    The optimizer does not step: its states are counted as they are. `measure_update` says what it needs for itself.

    Args:
        loss_of: calls the model and returns the loss; what else it makes it must not keep.
        batch: the tensors that the model is called with, however nested.
        scale: the loss scaler's.
        per_layer: drop each gradient when it has arrived, as an optimizer does that steps within the backward pass.

    Raises:
        RuntimeError: the loss requires no gradient.
    """
    model.zero_grad()
    with Live() as live:
        persistent = _persistent(model, optimizer)
        for role, tensors in persistent.items():
            live.give(role, tensors)
        live.give("batch", (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)))
        loss = loss_of()
        live.settle(frozenset({"weights", "scales"}), "compute copies", "activations")
        copies, activations = live.bytes_of("compute copies"), live.bytes_of("activations") + live.bytes_of("batch")
        trained: list[Any] = [p for p in model.parameters() if p.requires_grad]
        hooks = [parameter.register_post_accumulate_grad_hook(_marker(live, per_layer)) for parameter in trained]
        try:
            torch.autograd.backward(scale(loss))
        finally:
            for hook in hooks:
                hook.remove()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return replace(
        _by_role(persistent, grads),
        compute_copies=copies,
        activations=activations,
        peak=live.peak.total(),
        peak_gradients=live.peak["gradients"],
    )


def measure_persistent(model: nn.Module, optimizer: torch.optim.Optimizer, per_layer: bool = False) -> StepBytes:
    """What stays from step to step, without a pass: gradients are made of zeros, and stay.

    Args:
        per_layer: as for `measure_step`: none stays.
    """
    model.zero_grad()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad and not per_layer]
    if trained:  # as they accumulate, by the hooks that keep them in few bits
        torch.autograd.backward(trained, [torch.zeros_like(parameter) for parameter in trained])
    grads = [parameter.grad for parameter in trained if parameter.grad is not None]
    return _by_role(_persistent(model, optimizer), grads)


def measure_update(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The most bytes that a step of the optimizer holds beside what was there before it.

    It steps once, by the gradients that are there, or else by zeros.
    """
    bare = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.grad is None]
    if bare:  # as they accumulate, by the hooks that keep them in few bits
        torch.autograd.backward(bare, [torch.zeros_like(parameter) for parameter in bare])
    with Live() as live:
        for role, tensors in _persistent(model, optimizer).items():
            live.give(role, tensors)
        live.give("gradients", [parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        before = live.peak.total()
        optimizer.step()
    return int(live.peak.total() - before)


def _by_role(persistent: Mapping[str, Iterable[Tensor]], grads: Iterable[Tensor]) -> StepBytes:
    gradients = [part for grad in grads for part in parts_of(grad).items()]
    sizes = {role: _storage_bytes(tensors) for role, tensors in persistent.items()}
    sizes["gradients"] = _storage_bytes(part for name, part in gradients if not _is_scale(name))
    sizes["scales"] += _storage_bytes(part for name, part in gradients if _is_scale(name))
    return StepBytes(**sizes)


def _persistent(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, list[Tensor]]:
    """The tensors that are there before the pass, by role; each storage in one."""
    found: dict[str, list[Tensor]] = {role: [] for role in _ROLES}
    for parameter in model.parameters():
        for name, part in parts_of(parameter).items():
            found["scales" if _is_scale(name) else "weights"].append(part)
    for name, buffer in model.named_buffers():
        found["scales" if STATES in name else "buffers"].append(buffer)
    for state in optimizer.state.values() if optimizer is not None else ():
        for name, value in state.items():
            if isinstance(value, Tensor):
                role = "state_scales" if _is_scale(name) else "master" if is_master(name) else "states"
                found[role] += parts_of(value).values()
    return found


def _is_scale(name: str) -> bool:
    """Whether what a tensor is made of, by that name, stands beside its codes."""
    return name.rpartition("_")[2] in ("scale", "point")


def _marker(live: Live, drop: bool) -> Callable[[Tensor], None]:
    """What tells that a gradient has arrived. A function of its own: it must not know the model."""

    def mark(parameter: Tensor) -> None:
        if parameter.grad is not None:
            live.give("gradients", [parameter.grad])
            if drop:
                parameter.grad = None

    return mark


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of tensors, each storage once."""
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


def activation_bytes(
    batch: int,
    sequence: int,
    width: int,
    heads: int,
    *,
    nbytes: int = 2,
    mask_bytes: int = 1,
    inner: int | None = None,
    dropout: bool = True,
    parallel: int = 1,
    split_sequence: bool = False,
    recompute: str = "none",
    statistics: bool = False,
) -> float:
    """Bytes of one layer: with s tokens, b examples, h width, a heads, p and m bytes a value and a mask's element,

        s b h ((16 p + 2 m) + (2 p + m) a s / h)

    which is s b h (34 + 5 a s / h) for p = 2 and m = 1. The layer is GPT's: two norms, attention with an explicit
    softmax, an MLP of two matrices with GELU, three dropouts. torch's CPU keeps a dropout's mask in the activations'
    dtype: there m is p.

    Args:
        inner: the width within the MLP; 4 h unless told.
        dropout: without, both masks of the residual branch, and all of attention's probabilities but the softmax's
            output, are not there.
        parallel: over how many devices the matrices are split (tensor parallelism).
        split_sequence: split what stands beside the matrices too (sequence parallelism).
        recompute: `selective`: attention's scores and probabilities are computed again; `full`: all but the input is.
        statistics: count the mean and the deviation that each norm keeps, p bytes each.

    Raises:
        AccountError: an unknown way to recompute.

    Source: Korthikanti et al. 2022, arXiv 2205.05198, section 4.

    >>> activation_bytes(1, 2048, 12288, 96) / (2048 * 12288)  # 34 + 5 a s / h = 34 + 80
    114.0
    """
    one_of("way to recompute", recompute, _RECOMPUTED, AccountError)
    if recompute == "full":
        return float(nbytes * sequence * batch * width)
    masks = 2 * mask_bytes if dropout else 0
    inner = 4 * width if inner is None else inner
    beside = 4 * nbytes + masks  # the inputs of both norms and of both groups of matrices; the masks
    split = 4 * nbytes + 2 * nbytes * inner / width
    scores = (2 * nbytes + mask_bytes if dropout else nbytes) * heads * sequence / width
    if recompute == "selective":
        scores = 0.0
    total = beside / (parallel if split_sequence else 1) + (split + scores) / parallel
    return sequence * batch * width * total + (4 * sequence * batch * nbytes if statistics else 0)
