"""`trace`: record one forward pass of a model as a graph of operations."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from halfstep.errors import ModelError
from halfstep.nn.unit.forwards import Leaf, leaf_of
from halfstep.nn.unit.functions import (
    ATTENTION,
    CHOICES,
    DETACHED,
    ELEMENTWISE,
    JOINS,
    NORMS,
    SAME,
    VIEWS,
    canonical,
    counts,
    is_floating,
    is_in_place,
    named,
    number,
    signature,
    tensors,
)  # fmt: skip
from halfstep.nn.unit.graph import Graph, Node, Value


_MASKED = 1e4
"""An added constant with a larger magnitude counts as a mask."""


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Graph, Any]:
    """The graph of one forward pass in training mode, and the model's output.

    Modes, buffers and random state are restored. Gradients are off.
    """
    recorder = _Recorder(model)
    with _unchanged(model), torch.no_grad():
        for x in tree_leaves((args, dict(kwargs))):
            if is_floating(x):
                recorder.source("input", "input", x)
        with recorder.modules(model), recorder, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # activation checkpointing
            output = model(*args, **kwargs)
    found = [recorder.values[id(x)] for x in _outputs(output) if id(x) in recorder.values]
    if not found:
        raise ModelError(
            f"{type(model).__name__} returned {type(output).__name__} without a floating tensor that depends on its "
            "parameters; expected its logits or its loss. Give unit_scale what the model is trained with"
        )
    return Graph(recorder.nodes, list(dict.fromkeys(found))), output


def _outputs(output: Any) -> list[Any]:
    """The tensors that a loss depends on: the loss or logits if the output has them by name, else all except caches."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        for name in ("loss", "logits"):
            if isinstance(output.get(name), Tensor):
                return [output[name]]
        return [x for name, part in output.items() if "past_key" not in name for x in _outputs(part)]
    return [x for part in output for x in _outputs(part)] if isinstance(output, (tuple, list)) else []


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """A context with the model in training mode, which restores modes, buffers and random state when it ends."""
    modes = {module: module.training for module in model.modules()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            model.train()
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for name, buffer in model.named_buffers():
            if name in buffers and buffer.shape == buffers[name].shape:
                buffer.copy_(buffers[name])


class _Recorder(TorchFunctionMode):
    """A function mode that records the calls of torch's functions through which a gradient would flow."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.values: dict[int, Value] = {}
        self._kept: list[Any] = []  # keeps tensors alive, so that no id is reused
        self._calls: list[tuple[str, int]] = []
        self._serial = 0
        self._silent = 0
        self._leaves = {path: leaf for path, m in model.named_modules() if (leaf := leaf_of(m)) is not None}
        for name, parameter in model.named_parameters():
            self.source("parameter", name, parameter)

    def source(self, kind: str, name: str, x: Tensor) -> None:
        """Record an input, a parameter or a constant as a node without operands."""
        square = float(x.detach().double().square().mean()) if kind == "input" and x.numel() and not x.is_meta else None
        node = Node(kind, name, (), [], [], len(self.nodes))
        self.nodes.append(node)
        self._give(node, x, square)

    def _give(self, node: Node, x: Tensor, square: float | None = None) -> None:
        value = Value(node, tuple(x.shape), square)
        node.outputs.append(value)
        self.values[id(x)] = value
        self._kept.append(x)

    @contextmanager
    def modules(self, model: nn.Module) -> Iterator[None]:
        """A context in which hooks record calls of the model's modules."""
        with ExitStack() as hooks:
            for path, module in model.named_modules():
                before, after = self._hooks(path, module)
                hooks.enter_context(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(after, with_kwargs=True, always_call=True))
            yield

    def _hooks(self, path: str, module: nn.Module) -> tuple[Callable[..., None], Callable[..., None]]:
        leaf = self._leaves.get(path)

        def before(_: Any, args: Any, kwargs: Any) -> None:
            self._serial += 1
            self._calls.append((path, self._serial))
            self._silent += leaf is not None

        def after(_: Any, args: Any, kwargs: Any, output: Any) -> None:
            if leaf is not None:
                self._silent -= 1
                if self._silent == 0 and isinstance(output, Tensor):
                    with torch._C.DisableTorchFunction():
                        self._leaf(module, leaf, args, kwargs, output)
            self._calls.pop()

        return before, after

    def _leaf(self, module: nn.Module, leaf: Leaf, args: Any, kwargs: Any, output: Tensor) -> None:
        found = [(i, self.values[id(x)]) for i, x in tensors(args, kwargs) if id(x) in self.values]
        own = [(name, self.values[id(p)]) for name, p in module.named_parameters(recurse=False)]
        if not found and leaf.kind != "embedding":
            first = next((x for _, x in tensors(args, kwargs) if is_floating(x)), None)
            if first is None or not own:
                return
            self.source("input", "constant", first)
            found = [(0, self.values[id(first)])]
        facts: dict[str, Any] = {"leaf": leaf, "module": module}
        if leaf.kind == "attention":
            given = named(("query", "key", "value", "mask", "is_causal"), args, kwargs)
            facts |= _attention_facts(given, given.get("mask"), getattr(module, "dropout", 0.0))
        if leaf.kind == "embedding":
            facts["lookups"] = (args[0] if args else next(iter(kwargs.values()))).numel()
        self._add(leaf.kind, leaf.name, [*found, *own], facts, output)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if not self._silent:
            self._record(func, args, kwargs, output)
        return output

    def _record(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        name = canonical(func, args)
        given = tensors(args, kwargs)
        live = [(i, self.values[id(x)]) for i, x in given if id(x) in self.values]
        in_place = is_in_place(func, kwargs)
        if name == "__setitem__":
            if live:
                self._add("unknown", "assignment to elements", live, {}, args[0])
            return
        floats = [x for x in tree_leaves(output) if is_floating(x)]
        same = not in_place and all(any(x is y for _, y in given) for x in floats)  # it returned what it was given
        if not live or not floats or name in DETACHED or same:
            if counts(args, kwargs):  # recorded so that later runs can match calls in order
                self._add("constant", name, [], {"signature": signature(name, args)})
            return
        constants = [x for _, x in given if id(x) not in self.values and is_floating(x)]
        kind, facts = _kind(func, name, args, kwargs, live, constants, output)
        facts |= {"signature": signature(name, args), "in_place": in_place}
        self._add(kind, name, live, facts, *floats)

    def _add(
        self, kind: str, name: str, live: list[tuple[Any, Value]], facts: dict[str, Any], *outputs: Tensor
    ) -> None:
        operands, slots = [value for _, value in live], [slot for slot, _ in live]
        node = Node(kind, name, tuple(self._calls), operands, slots, len(self.nodes), facts)
        self.nodes.append(node)
        for i, value in enumerate(operands):
            value.consumers.append((node, i))
        for x in outputs:
            self._give(node, x)


def _kind(
    func: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    live: list[tuple[int, Value]],
    constants: list[Tensor],
    output: Any,
) -> tuple[str, dict[str, Any]]:
    """The node kind of a function call, and the facts that the kind's rule needs."""
    if name in ("add", "sub") and len(args) == 2 and not kwargs:
        return "add", {"constant": _square(constants), "masks": _masks(constants)}
    if name == "mul" and "out" not in kwargs:
        return "mul", {"constant": _square(constants)}
    if name == "scale" and (factor := number(func, args)):
        return "scale", {"factor": factor}
    if name == "matmul" and len(live) == 2:
        return "matmul", {"shared": args[0].shape[-1]}
    if name == "linear" and len(live) > 1 and live[0][0] == 0:
        return "linear", {"fans": args[1].shape[::-1], "rows": args[0].numel() // max(args[0].shape[-1], 1)}
    if name in NORMS and live[0][0] == 0:
        return "norm", {}
    if name == "embedding":
        return "embedding", {"lookups": args[0].numel()}
    if name == "softmax":
        return "softmax", {"last": kwargs.get("dim", args[1] if len(args) > 1 else None) in (-1, args[0].dim() - 1)}
    if name == "scaled_dot_product_attention":
        given = named(ATTENTION, args, kwargs)
        return "attention", _attention_facts(given, given.get("attn_mask"), given.get("dropout_p", 0.0))
    if name == "cross_entropy":
        return "cross_entropy", _loss_facts(*args, **kwargs)
    if name in ELEMENTWISE and len(live) == 1:
        others = {name: value for name, value in kwargs.items() if name != "inplace"}
        return "elementwise", {"call": lambda z: func(z, *args[1:], **others)}
    if name == "mean":
        return "mean", {"count": args[0].numel() / max(output.numel(), 1)}
    if name == "dropout":
        return "dropout", _dropout(*args, **kwargs)
    if name in CHOICES and len(live) == 1:
        return "passive", {"mask": _choice(name, args, live[0][0])}
    if (name in VIEWS or name in SAME or name == "shift") and len(live) == 1:
        return "passive", {}
    return ("join", {}) if name in JOINS else ("unknown", {})


def _choice(name: str, args: tuple[Any, ...], slot: int) -> Tensor | None:
    """The boolean mask of the elements that come from the live operand; None if unknown."""
    if name == "where" and isinstance(args[0], Tensor):
        return args[0] if slot == 1 else ~args[0]
    return ~args[1] if isinstance(args[1], Tensor) and args[1].dtype == torch.bool else None


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> dict[str, Any]:
    return {"p": p if training else 0.0}


def _loss_facts(input: Tensor, target: Tensor, *_: Any, **kwargs: Any) -> dict[str, Any]:
    ignored = int((target == kwargs.get("ignore_index", -100)).sum()) if not target.is_floating_point() else 0
    classes = input.shape[1] if input.dim() > 1 else input.shape[0]
    rows = max(input.numel() // classes - ignored, 1)
    return {"classes": classes, "rows": rows, "mean": kwargs.get("reduction", "mean") == "mean"}


def _attention_facts(given: Mapping[str, Any], mask: Tensor | None, p: float) -> dict[str, Any]:
    query, sources = given["query"], given["key"].shape[-2]
    return {"size": query.shape[-1], "sources": sources, "mask": mask, "causal": given.get("is_causal", False), "p": p}


def _square(constants: list[Tensor]) -> float | None:
    """The mean square of the constant operand; None if there is none."""
    return float(constants[0].double().square().mean()) if constants else None


def _masks(constants: list[Tensor]) -> Tensor | None:
    """The constant operand if it is a mask, else None."""
    if constants and constants[0].numel() and not float(constants[0].double().abs().max()) < _MASKED:
        return constants[0]
    return None
