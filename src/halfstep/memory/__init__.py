"""What training keeps in memory, by role, and what a model does; measured from live tensors."""

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
"""The role of what operators make, until it is given another."""

_NOTHING = frozenset({"nothing"})
"""What memory is computed from that no operator has written to, as far as can be seen: a kernel may have."""


@dataclass
class _Held:
    nbytes: int
    role: str
    sources: frozenset[str]
    """Roles of what it was computed from."""
    ref: weakref.ref[Any]


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, every storage that torch's operators make or read is known: its bytes, its role, and from what it was
    computed. A tensor without memory (a FakeTensor) counts with the bytes that it stands for.

    Each storage counts once, whole, however many tensors show parts of it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held: dict[int, _Held] = {}
        self._now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        """Bytes by role, when they were most in all."""

    def give(self, role: str, tensors: Iterable[Tensor]) -> None:
        """Give the storages of tensors a role. What is computed from a role's tensors remembers it."""
        for tensor in tensors:
            for part in parts_of(tensor).values():
                held = self._known(part, role)
                self._now[held.role] -= held.nbytes
                self._now[role] += held.nbytes
                held.role, held.sources = role, held.sources | {role}
        self._note()

    def settle(self, sources: frozenset[str], role: str, otherwise: str) -> None:
        """Give what is passing a role: `role` where it was computed from nothing but those sources, or `otherwise`."""
        self._now = Counter()
        for held in self._held.values():
            if held.role == PASSING:
                held.role = role if held.sources and held.sources <= sources else otherwise
            self._now[held.role] += held.nbytes

    def bytes_of(self, role: str) -> int:
        """The bytes that are held now in that role."""
        return self._now[role]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor made of others: its own dispatch brings those here
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if made:
            follows = func is FOLLOW
            leaves = tree_leaves(args[:1] if follows else (args, kwargs))
            given = [self._sources(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
            sources = frozenset[str]().union(*given) if given else _NOTHING
            for tensor in made:
                held = self._known(tensor, PASSING)
                held.sources = sources if follows else held.sources | sources
            self._note()
        return result

    def _sources(self, tensor: Tensor) -> frozenset[str]:
        held = self._held.get(tensor.untyped_storage()._cdata)
        return frozenset() if held is None else held.sources

    def _known(self, tensor: Tensor, role: str) -> _Held:
        storage = tensor.untyped_storage()
        key = storage._cdata
        held = self._held.get(key)
        if held is None:
            held = _Held(storage.nbytes(), role, frozenset(), weakref.ref(storage, partial(self._gone, key)))
            self._held[key] = held
            self._now[role] += held.nbytes
        return held

    def _gone(self, key: int, _: Any) -> None:
        held = self._held.pop(key)
        self._now[held.role] -= held.nbytes

    def _note(self) -> None:
        if self._now.total() > self.peak.total():
            self.peak = self._now.copy()


def parts_of(tensor: Any) -> dict[str, Tensor]:
    """The tensors with memory that one is made of, by name: itself, or codes and scales."""
    if not hasattr(tensor, "__tensor_flatten__") or hasattr(tensor, "device_mesh"):
        return {"": tensor}
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


_ROLES = ("weights", "buffers", "master", "states", "scales", "state_scales")


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
        return self.gradients + sum(int(getattr(self, role)) for role in _ROLES)


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
    """Bytes of every parameter and buffer of a model, each tensor once, however many names it has."""
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
    one_of("way to recompute", recompute, ("none", "selective", "full"), AccountError)
    if recompute == "full":
        return float(nbytes * sequence * batch * width)
    masks = 2 * mask_bytes if dropout else 0
    inner = 4 * width if inner is None else inner
    beside = 4 * nbytes + masks  # the inputs of both norms and of both groups of matrices; the masks
    split = 4 * nbytes + 2 * nbytes * inner / width
    kept = 0 if recompute == "selective" else 2 * nbytes + mask_bytes if dropout else nbytes
    total = beside / (parallel if split_sequence else 1) + (split + kept * heads * sequence / width) / parallel
    return sequence * batch * width * total + (4 * sequence * batch * nbytes if statistics else 0)
