"""Bytes of training and inference by role (weights, gradients, moments, activations ...), measured on live tensors."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep.errors import AccountError, one_of
from halfstep.kernels.operator import FOLLOW
from halfstep.quant.scaling.base import STATES
from halfstep.recipe import BytesPerParameter, is_master
from halfstep.text import grouped


__all__ = [
    "Live", "StepBytes", "activation_bytes", "measure", "measure_persistent", "measure_step",
    "measure_update", "parts_of", "stored_bytes",
]  # fmt: skip


PASSING = "passing"
"""The role of storages that operators allocate, until `give` or `settle` assigns another."""

_NOTHING = frozenset({"nothing"})
"""The sources of an operator's output without tensor inputs (torch.empty): kernels may fill it without being seen."""


@dataclass
class _Held:
    nbytes: int
    role: str
    sources: frozenset[str]
    """The roles of the tensors from which it was computed, directly or not."""
    ref: weakref.ref[Any]


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that tracks every storage that operators allocate or that is given a role: its bytes, its role,
    and the roles of the tensors from which it was computed. A FakeTensor counts with the bytes of a real one.

    Each storage counts once and entirely, however many views it has.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held: dict[int, _Held] = {}
        self._now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        """Bytes by role at the time when their sum was largest."""

    def give(self, role: str, tensors: Iterable[Tensor]) -> None:
        """Assign a role to the storages of tensors. Whatever is computed from them has the role among its sources."""
        for tensor in tensors:
            for part in parts_of(tensor).values():
                held = self._tracked(part, role)
                self._now[held.role] -= held.nbytes
                self._now[role] += held.nbytes
                held.role, held.sources = role, held.sources | {role}
        self._update_peak()

    def settle(self, sources: frozenset[str], role: str, otherwise: str) -> None:
        """Assign a role to the storages of role `PASSING`: `role` if they were computed only from `sources`, else
        `otherwise`."""
        self._now = Counter()
        for held in self._held.values():
            if held.role == PASSING:
                held.role = role if held.sources and held.sources <= sources else otherwise
            self._now[held.role] += held.nbytes

    def bytes_of(self, role: str) -> int:
        """The bytes of the live storages with that role."""
        return self._now[role]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper subclass: its own dispatch calls operators on its inner tensors
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if made:
            follows = func is FOLLOW
            leaves = tree_leaves(args[:1] if follows else (args, kwargs))
            given = [self._sources(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
            sources = frozenset[str]().union(*given) if given else _NOTHING
            for tensor in made:
                held = self._tracked(tensor, PASSING)
                held.sources = sources if follows else held.sources | sources
            self._update_peak()
        return result

    def _sources(self, tensor: Tensor) -> frozenset[str]:
        held = self._held.get(tensor.untyped_storage()._cdata)
        return frozenset() if held is None else held.sources

    def _tracked(self, tensor: Tensor, role: str) -> _Held:
        storage = tensor.untyped_storage()
        key = storage._cdata
        held = self._held.get(key)
        if held is None:
            held = _Held(storage.nbytes(), role, frozenset(), weakref.ref(storage, partial(self._freed, key)))
            self._held[key] = held
            self._now[role] += held.nbytes
        return held

    def _freed(self, key: int, _: Any) -> None:
        held = self._held.pop(key)
        self._now[held.role] -= held.nbytes

    def _update_peak(self) -> None:
        if self._now.total() > self.peak.total():
            self.peak = self._now.copy()


def parts_of(tensor: Any) -> dict[str, Tensor]:
    """The plain tensors that store a tensor, by attribute name: codes and scales, or the tensor itself under ""."""
    if not hasattr(tensor, "__tensor_flatten__") or hasattr(tensor, "device_mesh"):
        return {"": tensor}
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


_ROLES = ("weights", "buffers", "master", "states", "scales", "state_scales")


@dataclass(frozen=True)
class StepBytes:
    """Bytes by role. The fields before `compute_copies` persist from step to step; the others exist within a pass."""

    weights: int
    """Parameters as stored, frozen ones included."""
    buffers: int
    """The model's buffers: running statistics, position tables."""
    gradients: int
    master: int
    states: int
    """Moments, step counts, and the rest of the optimizer's state."""
    scales: int
    """Scales and zero points of weights and gradients stored as codes; amax histories."""
    state_scales: int
    """Scales and zero points of master weights and optimizer states stored as codes."""
    compute_copies: int = 0
    """Weights cast or quantized for matmuls and saved for backward."""
    activations: int = 0
    """Everything else saved for backward when the loss is computed, the batch included."""
    peak: int = 0
    """The largest sum of bytes at any time in the forward and the backward pass."""
    peak_gradients: int = 0
    """The bytes of gradients at the time of `peak`."""
    update: int = 0
    """Temporary bytes of the optimizer's step."""

    @property
    def persistent(self) -> int:
        """The bytes between backward and step: weights, gradients, master weights, states, scales, buffers."""
        return self.gradients + sum(int(getattr(self, role)) for role in _ROLES)


def measure(model: nn.Module, optimizer: torch.optim.Optimizer) -> BytesPerParameter:
    """The current bytes per trained parameter by role: call it between backward() and step().

    Every tensor counts once, however many names it has. Tensors of one element do not count: step counters, and the
    scale of a whole tensor. Autocast's compute copies exist only within a pass and are not measured here;
    `Recipe.bytes_per_parameter` states them.

    Raises:
        ValueError: the model trains no parameter.
    """
    weights = {id(p): p for p in model.parameters() if p.requires_grad}
    count = sum(p.numel() for p in weights.values())
    if count == 0:
        raise ValueError("the model trains no parameter, so bytes per parameter are undefined")
    kept = [
        (is_master(name), value)
        for parameter, state in optimizer.state.items()
        for name, value in state.items()
        if isinstance(value, Tensor) and name != "step" and (value.numel() > 1 or value.shape == parameter.shape)
    ]
    return BytesPerParameter(
        weights=_counted(weights.values()) / count,
        grads=_counted(p.grad for p in weights.values() if p.grad is not None) / count,
        master=_counted(value for master, value in kept if master) / count,
        states=_counted(value for master, value in kept if not master) / count,
    )


def stored_bytes(model: nn.Module) -> int:
    """The bytes of a model's parameters and buffers; each tensor counts once, however many names it has."""
    return _element_bytes(
        part for tensor in (*model.parameters(), *model.buffers()) for part in parts_of(tensor).values()
    )


def _counted(tensors: Iterable[Tensor]) -> int:
    parts = (parts_of(tensor) for tensor in tensors)
    return _element_bytes(t for found in parts for name, t in found.items() if name != "scale" or t.numel() > 1)


def _element_bytes(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.numel() * t.element_size() for t in tensors if t.numel()}.values())


def measure_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    loss_of: Callable[[], Tensor],
    batch: Any = (),
    scale: Callable[[Tensor], Tensor] = lambda loss: loss,
    per_layer: bool = False,
) -> StepBytes:
    """Run one forward and one backward pass and measure bytes by role. Existing gradients are dropped first.

        model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe)
        bytes = measure_step(model, optimizer, lambda: loss_fn(model(x), y), (x, y), scaler.scale)

    The optimizer does not step: its current states are counted. `measure_update` measures the step.

    Args:
        loss_of: calls the model and returns the loss; it must keep no reference to any other tensor that it computes.
        batch: the tensors with which the model is called, in any nesting.
        scale: the loss scaler's `scale`.
        per_layer: drop each gradient as soon as it is accumulated, like an optimizer that steps within backward.

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
        with ExitStack() as hooks:
            for parameter in trained:
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(_marker(live, per_layer)))
            torch.autograd.backward(scale(loss))
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return replace(
        _by_role(persistent, grads),
        compute_copies=copies,
        activations=activations,
        peak=live.peak.total(),
        peak_gradients=live.peak["gradients"],
    )


def measure_persistent(model: nn.Module, optimizer: torch.optim.Optimizer, per_layer: bool = False) -> StepBytes:
    """Measure the persistent bytes by role without a forward pass: every trained parameter gets a gradient of zeros.

    Args:
        per_layer: make no gradients, since an optimizer that steps within backward keeps none.
    """
    model.zero_grad()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad and not per_layer]
    if trained:  # by backward, so that the hooks run that store gradients as codes
        torch.autograd.backward(trained, [torch.zeros_like(parameter) for parameter in trained])
    grads = [parameter.grad for parameter in trained if parameter.grad is not None]
    return _by_role(_persistent(model, optimizer), grads)


def measure_update(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The peak bytes of an optimizer step beyond those before it.

    The optimizer steps once; parameters without a gradient get one of zeros.
    """
    bare = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.grad is None]
    if bare:  # by backward, so that the hooks run that store gradients as codes
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
    """The plain tensors that exist before a pass, by role."""
    parameters = (pair for parameter in model.parameters() for pair in parts_of(parameter).items())
    states = () if optimizer is None else (pair for state in optimizer.state.values() for pair in state.items())
    kept = ((name, part) for name, value in states if isinstance(value, Tensor) for part in parts_of(value).values())
    found = grouped(
        [
            *(("scales" if _is_scale(name) else "weights", part) for name, part in parameters),
            *(("scales" if STATES in name else "buffers", buffer) for name, buffer in model.named_buffers()),
            *(
                ("state_scales" if _is_scale(name) else "master" if is_master(name) else "states", part)
                for name, part in kept
            ),
        ]
    )
    return {role: found.get(role, []) for role in _ROLES}


def _is_scale(name: str) -> bool:
    """Whether an inner tensor of that name (`parts_of`) is a scale or zero point rather than codes."""
    return name.rpartition("_")[2] in ("scale", "point")


def _marker(live: Live, drop: bool) -> Callable[[Tensor], None]:
    """A post-accumulate-grad hook that gives gradients their role and drops them if `drop`. Defined here so that its
    closure holds no reference to the model."""

    def mark(parameter: Tensor) -> None:
        if parameter.grad is not None:
            live.give("gradients", [parameter.grad])
            if drop:
                parameter.grad = None

    return mark


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of the tensors' storages, each storage once."""
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
    """The activation bytes of one transformer layer: with s tokens, b examples, width h, a heads, and p and m bytes for
    an element of an activation and of a dropout mask,

        s b h ((16 p + 2 m) + (2 p + m) a s / h)

    which is s b h (34 + 5 a s / h) for p = 2 and m = 1. The layer is GPT's: two norms, attention with an explicit
    softmax, an MLP of two linear layers with GELU, three dropouts. On the CPU torch saves dropout masks in the
    activations' dtype, so m is p.

    Args:
        inner: the MLP's inner width; default 4 h.
        dropout: without it, neither dropout masks nor dropped-out attention probabilities are saved, only the softmax's
            output.
        parallel: the number of devices over which the weights are split (tensor parallelism).
        split_sequence: also split the activations outside the tensor-parallel matmuls (sequence parallelism).
        recompute: `selective`: recompute attention's scores and probabilities; `full`: save only the layer's input.
        statistics: count the mean and standard deviation that each norm saves, p bytes each.

    Raises:
        AccountError: an unknown value of `recompute`.

    Source: Korthikanti et al. 2022, arXiv 2205.05198, section 4.

    >>> activation_bytes(1, 2048, 12288, 96) / (2048 * 12288)  # 34 + 5 a s / h = 34 + 80
    114.0
    """
    one_of("way to recompute", recompute, ("none", "selective", "full"), AccountError)
    if recompute == "full":
        return float(nbytes * sequence * batch * width)
    masks = 2 * mask_bytes if dropout else 0
    inner = 4 * width if inner is None else inner
    beside = 4 * nbytes + masks  # not split by tensor parallelism: inputs of both norms, of attention and MLP; masks
    split = 4 * nbytes + 2 * nbytes * inner / width
    kept = 0 if recompute == "selective" else 2 * nbytes + mask_bytes if dropout else nbytes
    total = beside / (parallel if split_sequence else 1) + (split + kept * heads * sequence / width) / parallel
    return sequence * batch * width * total + (4 * sequence * batch * nbytes if statistics else 0)
