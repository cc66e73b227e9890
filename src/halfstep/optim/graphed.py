"""A whole training step as one CUDA graph, and updates in the backward pass.

The host launches one thing, the graph. In the backward pass each parameter steps as soon as its gradient is there.
"""

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
    """A training step that is captured in a `CUDAGraph` and replayed: the same bits, without the host's time.

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

    The first `warmup` calls run the function as it is, and so does every call of a model on a CPU. The next one
    captures it, and from then on a call copies its tensors to where the graph reads them and replays it. All of them
    are steps of the run. Learning rates are those of the optimizer's groups at each call: schedulers work as ever.

    Args:
        step: forward, backward, `scaler.step` and `scaler.update`, by tensors that it is called with, in dictionaries
            or lists too. It may not read a number of a tensor (`loss.item()`), nor do on the host what each step needs.
        optimizer: of `halfstep.prepare`. Built with `capturable=True`, its first step names a parameter that no kernel
            on the GPU steps.
        warmup: at least 1: kernels are compiled and states begin.

    Raises:
        OptimizerError: the optimizer is not halfstep's; kernels on the GPU do not step all of its parameters; options
            other than learning rates have changed since the capture.
        ModelError: a call has other arguments than the captured one. Nothing has moved. Or the step returned, in its
            first call, an object whose tensors no replay would copy.
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
        """The function itself: for a batch of another shape."""
        self._optimizer, self._left = optimizer, warmup
        self._graph: CUDAGraph | None = None

    def __call__(self, *given: Any, **named: Any) -> Any:
        """What the step returns; of a replay, copies of its tensors."""
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
        """A step on a stream of its own, as torch asks for before a capture."""
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
        """Copy the tensors of a call to where the graph reads them."""
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
"""Arguments beside tensors: their `repr` says all of them."""

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
    """What may not change of an argument."""
    return f"a {leaf.dtype} of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)


_OTHER = (
    "this call has {}, expected {}, as the step was captured. Drop the last, smaller batch (drop_last=True), or take "
    "its step without the graph: GraphedStep(...).step(...)"
)


# ---- updates in the backward pass ------------------------------------------------------------------------------------


class PerLayer:
    """Lets an optimizer step in the backward pass, so that no two layers' gradients are in memory at once.

        model, optimizer, scaler = halfstep.prepare(model, optimizer, "galore-8bit")
        halfstep.optim.PerLayer(optimizer)

    The loop stays as it is: `optimizer.step()` then ends the step, of which each micro-batch's `backward()` took its
    part. Gradients of several micro-batches accumulate in the subspace, where there is one: the first of them chooses
    it, when it is time to, and the others are projected to the same. Others accumulate in `.grad`, as always.

    Norms of all gradients together are not known while a layer steps, so `scaler.clip_grad_norm_` is an error here, and
    torch's own finds no gradients and returns 0: clip layer by layer with `max_norm`. A copy of the optimizer steps in
    `step()` again.

    Args:
        optimizer: what `halfstep.prepare` returned, or one of `halfstep.optim`'s classes.
        micro_batches: how many backward passes make a step.
        max_norm: what the norm of each parameter's gradient is clipped to; of a projected one, in its subspace.

    Raises:
        OptimizerError: several ranks train together, or parameters are sharded; the recipe scales its loss or keeps
            weights as codes; the optimizer steps so already; an argument means nothing. Nothing was changed.

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
        """Step in `optimizer.step()` again."""
        self.drop()
        for handle in self._handles:
            handle.remove()
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.per_layer = None

    def drop(self) -> None:
        """Forget gradients of a step that is not whole: what `zero_grad` does."""
        self._sums.clear()
        self._arrived = {p: count for p, count in self._arrived.items() if count >= self._micro_batches}

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        """A micro-batch's gradient has arrived."""
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
        low = optimizer.lowered(parameter, *self._places[parameter], first=count == 0)
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
        """`optimizer.step()`: parameters that some micro-batches did not use take what the others brought."""
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
