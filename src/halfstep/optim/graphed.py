"""A whole training step as one CUDA graph, of which the host launches one thing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from halfstep.errors import ModelError, OptimizerError
from halfstep.optim.lowbit import LowBit
from halfstep.quant import CUDAGraph


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
