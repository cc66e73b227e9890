"""`GraphedStep`: a training step as one CUDA graph. `PerLayer`: parameters that step within the backward pass."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from halfstep.errors import ModelError, OptimizerError
from halfstep.optim.lowbit import LowBit
from halfstep.optim.shards import is_spread
from halfstep.quant import CUDAGraph


# ---- a training step as a CUDA graph ---------------------------------------------------------------------------------


class GraphedStep:
    """A training step that is captured in a `CUDAGraph` and replayed: equal bit for bit, without overhead of the host.

        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        step = halfstep.GraphedStep(step, optimizer)
        for x, y in loader:
            loss = step(x, y)

    The first `warmup` calls run the function eagerly, as do all calls with a model on a CPU. The next call captures it;
    from then on a call copies its tensors to the graph's inputs and replays it. Every call is a step of the run.
    Learning rates are read from the optimizer's groups at each call, so schedulers work.

    Args:
        step: forward, backward, `scaler.step` and `scaler.update` on the tensors that it is called with (dictionaries
            and lists of tensors too). It must not read a tensor's value (`loss.item()`), nor do per-step work on the
            host.
        optimizer: the one of `halfstep.prepare`. If built with `capturable=True`, its first step raises for a parameter
            that no GPU kernel steps, and names it.
        warmup: at least 1, to compile kernels and create states.

    Raises:
        OptimizerError: the optimizer is not halfstep's; GPU kernels do not step all of its parameters; options other
            than learning rates have changed since the capture.
        ModelError: a call's arguments differ from the captured ones in structure, shape or dtype. Nothing was changed.
            Or the first call returned an object whose tensors a replay could not copy.
    """

    def __init__(self, step: Callable[..., Any], optimizer: LowBit, warmup: int = 3) -> None:
        if not isinstance(optimizer, LowBit):
            raise OptimizerError(
                f"optimizer is a {type(optimizer).__name__}, expected the one that halfstep.prepare returns: a graph "
                "of another one would keep the learning rate that it was captured with"
            )
        if warmup < 1:
            raise OptimizerError(f"warmup={warmup}: expected at least 1, since states begin in the first step")
        self.step = step
        """The function itself, for batches of another shape."""
        self._optimizer, self._left = optimizer, warmup
        self._graph: CUDAGraph | None = None

    def __call__(self, *given: Any, **named: Any) -> Any:
        """The step's result; for a replay, with copies of its tensors."""
        device = next(p for group in self._optimizer.param_groups for p in group["params"]).device
        if not _has_graphs(device):
            return self.step(*given, **named)
        if self._left:
            self._left -= 1
            return self._aside(given, named)
        self._optimizer.follow_options()
        if self._graph is None:
            self._graph = self._captured(*tree_map_only(Tensor, lambda own: own.to(device, copy=True), (given, named)))
        self._take(given, named)
        self._graph.replay()
        return tree_map_only(Tensor, Tensor.clone, self._found)

    def _aside(self, given: Any, named: Any) -> Any:
        """Run the step eagerly on a side stream, as torch requires before a capture."""
        aside, current = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            found = self.step(*given, **named)
        current.wait_stream(aside)
        for leaf in tree_leaves(found):
            if not isinstance(leaf, Tensor | _CONSTANT):
                raise ModelError(_UNCOPIED.format(type(leaf).__name__))
        return found

    def _captured(self, given: Any, named: Any) -> CUDAGraph:
        if not self._optimizer.steps_all_together:
            raise OptimizerError(
                "kernels on the GPU do not step all parameters of this optimizer, and what the host does in a step is "
                "not in a graph. Build it with capturable=True, and its first step names a parameter that none steps; "
                "or call the step without GraphedStep"
            )
        self._leaves, self._form = tree_flatten((given, named))
        for leaf in self._leaves:
            if not isinstance(leaf, Tensor | _CONSTANT):
                raise ModelError(_UNSEEN.format(type(leaf).__name__))
        graph = CUDAGraph()
        with torch.cuda.graph(graph):
            self._found = self.step(*given, **named)
        return graph

    def _take(self, given: Any, named: Any) -> None:
        """Copy the tensors of a call to the graph's inputs, after checking that the arguments match."""
        leaves, form = tree_flatten((given, named))
        if form != self._form:
            raise ModelError(_OTHER.format("arguments in another structure", "those that were captured"))
        for own, leaf in zip(self._leaves, leaves, strict=True):
            if _kind(own) != _kind(leaf):
                raise ModelError(_OTHER.format(_kind(leaf), _kind(own)))
        for own, leaf in zip(self._leaves, leaves, strict=True):
            if isinstance(own, Tensor):
                own.copy_(leaf, non_blocking=True)


_CONSTANT = bool | int | float | complex | str | bytes | torch.dtype | torch.device | None
"""The types of arguments other than tensors, which can be compared by their `repr`."""

_UNSEEN = (
    "an argument of the step is a {}, and a graph would read what it held at the capture, whatever it holds later. "
    "Expected tensors, numbers and strings, in dictionaries, lists or tuples: of a tokenizer's or collator's batch, "
    "dict(batch)"
)

_UNCOPIED = (
    "the step returns a {}, and a replay returns copies, which are made of tensors, in dictionaries, lists and tuples, "
    "and not of what other objects hold: return the tensors themselves, as loss.detach()"
)


def _has_graphs(device: torch.device) -> bool:
    return device.type == "cuda"


def _kind(leaf: Any) -> str:
    """The properties of an argument that must not change between calls, as text."""
    return f"a {leaf.dtype} of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)


_OTHER = (
    "this call has {}, expected {}, as the step was captured. Drop the last, smaller batch (drop_last=True), or take "
    "its step without the graph: GraphedStep(...).step(...)"
)


# ---- updates in the backward pass ------------------------------------------------------------------------------------


class PerLayer:
    """Makes an optimizer step each parameter within the backward pass, so that the gradients of all layers are never in
    memory at once.

        model, optimizer, scaler = halfstep.prepare(model, optimizer, "galore-8bit")
        halfstep.optim.PerLayer(optimizer)

    The training loop does not change; `optimizer.step()` ends the step. The gradients of projected parameters are
    accumulated over micro-batches in their subspace, which the first micro-batch chooses if it is due. Others are
    accumulated in `.grad`, as usual.

    The norm of all gradients is not known while a layer steps, so `scaler.clip_grad_norm_` is an error, and torch's own
    finds no gradients and returns 0: clip layer by layer with `max_norm`. A copy of the optimizer steps in `step()`
    again.

    Args:
        optimizer: the one that `halfstep.prepare` returned, or of one of `halfstep.optim`'s classes.
        micro_batches: the number of backward passes in a step.
        max_norm: the norm that each parameter's gradient is clipped to; for a projected one, in its subspace.

    Raises:
        OptimizerError: several ranks train together, or parameters are sharded; the recipe scales its loss or stores
            weights as codes; the optimizer has a PerLayer already; an argument is invalid. Nothing was changed.

    Source: Zhao et al. 2024, section 4.3; Lv et al. 2023, arXiv 2306.09782.
    """

    def __init__(self, optimizer: LowBit, micro_batches: int = 1, max_norm: float | None = None) -> None:
        self._optimizer, self._micro_batches, self._max_norm = weakref.ref(optimizer), micro_batches, max_norm
        self._arrived: dict[Tensor, int] = {}
        self._sums: dict[Tensor, Tensor] = {}
        _check(optimizer, micro_batches, max_norm)
        optimizer.per_layer = self
        pairs = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
        self._places = {parameter: (group, index) for index, (parameter, group) in enumerate(pairs)}
        self._handles: list[Any] = [optimizer.register_step_pre_hook(self._end)]
        self._handles += [p.register_post_accumulate_grad_hook(self._take) for p in self._places if p.requires_grad]

    def remove(self) -> None:
        """Undo: the optimizer steps in `optimizer.step()` again."""
        self.drop()
        for handle in self._handles:
            handle.remove()
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.per_layer = None

    def drop(self) -> None:
        """Drop the gradients of an incomplete step; `zero_grad` calls it."""
        self._sums.clear()
        self._arrived = {p: count for p, count in self._arrived.items() if count >= self._micro_batches}

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        """A hook after a parameter's gradient was accumulated in a micro-batch: steps after the last one."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        if not self._arrived:
            _check_ranks(optimizer)
            optimizer.check()
        count = self._arrived.get(parameter, 0)
        if count >= self._micro_batches:
            raise OptimizerError(
                f"parameter {self._places[parameter][1]} has stepped in this step already: end each step of "
                f"{self._micro_batches} micro-batches with optimizer.step(). Reentrant activation checkpointing brings "
                "a gradient in parts: pass use_reentrant=False"
            )
        self._arrived[parameter] = count + 1
        low = optimizer.project_gradient(parameter, *self._places[parameter], first=count == 0)
        if low is not None:
            self._sums[parameter] = self._sums[parameter] + low if parameter in self._sums else low
            parameter.grad = None
        if count + 1 == self._micro_batches:
            self._step(optimizer, parameter)

    def _step(self, optimizer: LowBit, parameter: Tensor) -> None:
        grad = self._sums.pop(parameter, parameter.grad)
        assert grad is not None
        if self._max_norm is not None:
            norm = torch.linalg.vector_norm(grad, dtype=torch.float32)
            grad = grad.float() * (self._max_norm / (norm + 1e-6)).clamp(max=1.0)
        optimizer.step_on(parameter, *self._places[parameter], grad)
        parameter.grad = None

    @torch.no_grad()
    def _end(self, optimizer: Any, *_: Any) -> None:
        """A hook before `optimizer.step()`: steps the parameters that were not used in every micro-batch."""
        most = max(self._arrived.values(), default=0)
        if 0 < most < self._micro_batches:
            raise OptimizerError(
                f"step() after {most} of {self._micro_batches} micro-batches: call backward() for each of them first, "
                f"or give PerLayer micro_batches={most}"
            )
        for parameter, count in self._arrived.items():
            if count < self._micro_batches:
                self._step(optimizer, parameter)
        self._arrived.clear()


def _check(optimizer: Any, micro_batches: int, max_norm: float | None) -> None:
    if not isinstance(optimizer, LowBit):
        raise OptimizerError(
            f"PerLayer takes an optimizer of halfstep.prepare, or a class of halfstep.optim that steps; found "
            f"{type(optimizer).__name__}"
        )
    if micro_batches < 1 or not (max_norm is None or max_norm > 0):
        raise OptimizerError(
            f"micro_batches = {micro_batches}, max_norm = {max_norm}; expected at least 1, and a norm above 0 or None"
        )
    if optimizer.per_layer is not None:
        raise OptimizerError("this optimizer steps in the backward pass already; call remove() on its PerLayer first")
    if optimizer.recipe.loss_scale is not None or optimizer.recipe.codes is not None:
        raise OptimizerError(
            f"recipe {optimizer.recipe.name!r} scales its loss or keeps weights as codes: a layer cannot step before "
            "all gradients are known to be finite, or rounded. Take a bf16 recipe, such as 'galore' or 'bf16-mixed'"
        )
    _check_ranks(optimizer)


def _check_ranks(optimizer: LowBit) -> None:
    if any(is_spread(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        raise OptimizerError(
            "PerLayer under fully_shard: a gradient is reduced after the layer would step. Step in optimizer.step()"
        )
    if optimizer.several_ranks:
        raise OptimizerError(
            "PerLayer with several ranks: a layer would step before DDP has summed its gradient over them, and ranks "
            "would drift apart. Step in optimizer.step(), or train on one rank"
        )
