"""`unit_scale`: unit-scale an existing model, in place; and its undoing."""

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves, tree_map

from halfstep.errors import ModelError, RecipeError
from halfstep.nn.adopt import adopt, extend, is_covered, release
from halfstep.nn.layers import kind_of
from halfstep.nn.ranks import check_factors
from halfstep.nn.unit.factors import Factors
from halfstep.nn.unit.forwards import WHOLE, Shield, Unsaved, own
from halfstep.nn.unit.functions import is_floating
from halfstep.nn.unit.graph import SOURCES, Graph, Node
from halfstep.nn.unit.plan import Plan, at_output, entries, plan
from halfstep.nn.unit.trace import trace
from halfstep.ops.part import part_of
from halfstep.ops.subclasses import check_initialized
from halfstep.unit.calibration import Constraint
from halfstep.unit.roles import set_unit_part, unit_part


@dataclass(frozen=True)
class UnitScaled:
    """The record that `unit_scale` leaves on a model's root, to undo it."""

    report: "UnitReport"
    vectors: dict[str, Tensor]
    """The change of each bias, gain or other vector that was not 0 or 1 before."""


def unit_scale(
    model: nn.Module,
    *inputs: Any,
    constraint: str | Constraint | None = "geometric_mean",
    residual: float | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    **named: Any,
) -> "UnitReport":
    """Unit-scale a model in place: weights, activations and gradients start with a standard deviation near 1.

    One forward pass on the inputs is traced. Linear, convolutional and embedding layers, norms, activation functions,
    attention and additions get factors, forward and backward, inside of the operation, whichever library wrote it.
    Weights are divided by their standard deviation; biases become 0, gains 1. Parameters, names and state-dict keys
    stay. A recipe is applied afterwards (`halfstep.prepare`); `halfstep.revert` undoes it.

    The model computes another function than before, as every unit-scaled model does: train it from scratch, with a
    learning rate tuned for it. Factors of values are constants of the traced shapes (of attention, of the traced
    length), so that the model's function does not depend on later shapes.

    Args:
        inputs, named: the arguments of the model in training; a single mapping is passed as `**mapping`. If left out, a
            Hugging Face model's `dummy_inputs`.
        constraint: how a group of tied factors becomes one. Gradients of weights are then those of the scaled function,
            each times a positive constant, unless it is `none`.
        residual: the share of variance of each residual branch in its sum; None: a running mean over the branches, 1/2,
            1/3, 1/4 ...
        loss: a function of the model's output that returns the training loss, whose gradient at the output is then
            scaled to unit size. None: that gradient is not scaled (halfstep.unit.cross_entropy's has unit size).

    Raises:
        ModelError: no inputs; a weight without a standard deviation; a residual addition with an operand of unknown
            size, with the module and the operation; ranks with different batches. Nothing was changed.
        RecipeError: the model follows a recipe, or is unit-scaled already.

    Source: Blake, Orr and Luschi 2023 (Unit Scaling); the residual scheme is its running mean, or its fixed one.
    """
    _check(model, residual)
    name = type(model).__name__
    args, kwargs = _inputs(model, inputs, named)
    graph, output = trace(model, args, kwargs)
    divided = _unit_parameters(model, graph)
    deviations = standard_deviations(divided, name)
    for node in graph.nodes:
        if node.kind == "parameter":
            node.outputs[0].square = 1.0 if node.function in divided else None
    factors = Factors(graph, constraint, residual, name)
    entries(graph)
    if loss is not None:
        at_output(graph, 1 / _gradient(loss, output, name), name)
    _check_finite(graph, name)
    check_factors(name, {f"{n.index} {n.place}": (n.alpha, *n.betas, *(n.weighted or ())) for n in graph.living()})
    made = plan(graph, name, residual is not None)
    taken = divide(model, deviations, _vectors(model, graph))
    _adopt(model, made)
    notes = _notes(graph, bool(factors.residuals), loss is not None)
    rule = getattr(constraint, "__name__", None) or str(constraint or "none")
    shares = "a running mean" if residual is None else f"with a share of {residual:g}"
    uncalled = tuple(
        path for path, m in model.named_modules()
        if kind_of(m) is not None and path not in made.products
    )  # fmt: skip
    report = UnitReport(name, rule, shares, operations(graph), deviations, tuple(taken), unseen(graph), uncalled, notes)
    set_unit_part(model, scaled=UnitScaled(report, taken))
    extend(model, Loading())
    return report


def revert_unit(model: nn.Module) -> None:
    """Undo `unit_scale`: restore classes and attributes, and multiply weights by their former standard deviations,
    exact within one rounding of their dtype.

    Raises:
        RecipeError: the model follows a recipe, or the class of a part was changed since.
    """
    if part_of(model).applied is not None:
        raise RecipeError(f"{type(model).__name__} follows a recipe; halfstep.revert it first")
    scaled: UnitScaled = unit_part(model).scaled
    for path, module in model.named_modules():
        if is_covered(module):
            raise RecipeError(f"{path or type(model).__name__} was given another class since; take that away first")
    for module in model.modules():
        release(module, beneath=True)
        set_unit_part(module, multipliers=None, forward=None, scaled=None)
    multiply(model, scaled)


def is_unit_scaled(model: nn.Module) -> bool:
    """Whether `unit_scale` was called on the model."""
    return unit_part(model).scaled is not None


def _check(model: nn.Module, residual: float | None) -> None:
    name = type(model).__name__
    if residual is not None and not 0 < residual < 1:
        raise ModelError(f"residual = {residual!r}; expected a share of variance between 0 and 1, such as 0.5")
    if isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        raise ModelError(f"{name} wraps a model; unit-scale the model first, then wrap it")
    for path, module in model.named_modules():
        where = f"its part {path!r}" if path else "it"
        if part_of(module).applied is not None:
            raise RecipeError(f"{name}: {where} follows a recipe; halfstep.revert it, unit-scale, then apply it again")
        if unit_part(module).forward is not None or unit_part(module).multipliers is not None:
            raise RecipeError(
                f"{name}: {where} is unit-scaled already (halfstep.revert undoes unit_scale), or is halfstep.unit's own"
            )
        if is_parametrized(module):
            raise ModelError(f"{name}: {where} is parametrized, so that its weight is computed; remove that first")
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ModelError(f"{name} has no parameters; there is nothing to scale")
    check_initialized(model)
    for path, parameter in parameters.items():
        if parameter.is_meta:
            raise ModelError(f"{name}: {path} is on the meta device; initialise the model first (to_empty, then init)")
        if hasattr(parameter, "device_mesh"):
            raise ModelError(f"{name}: {path} is sharded; unit-scale the model before fully_shard")


def _inputs(
    model: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if len(inputs) == 1 and isinstance(inputs[0], Mapping) and not named and _names(model, inputs[0]):
        return (), dict(inputs[0])
    if inputs or named:
        return inputs, dict(named)
    dummy = getattr(model, "dummy_inputs", None)
    if isinstance(dummy, Mapping):
        device = next(model.parameters()).device
        return (), {key: x.to(device) if isinstance(x, Tensor) else x for key, x in dummy.items()}
    raise ModelError(
        f"{type(model).__name__}: unit_scale runs the model once to see what it computes; give it a batch, "
        "unit_scale(model, *inputs), as training calls the model"
    )


def _names(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether a mapping holds the model's arguments by name, rather than being an argument itself."""
    signature = inspect.signature(model.forward)
    if any(key in signature.parameters for key in batch):
        return True
    try:
        signature.bind(**batch)
    except TypeError:
        return False
    return True


def _unit_parameters(model: nn.Module, graph: Graph) -> dict[str, nn.Parameter]:
    """The weights to divide by their standard deviation, by name."""
    parameters = dict(model.named_parameters())
    found: dict[str, nn.Parameter] = {}
    for node in graph.living():
        for slot, value in zip(node.slots, node.operands, strict=True):
            source = value.producer
            if source.kind != "parameter" or len(value.shape) < 2:
                continue
            leaf, parameter = node.facts.get("leaf"), parameters[source.function]
            if leaf is not None and (slot != "weight" or leaf.kind == "norm"):
                continue
            if leaf is not None or float(parameter.detach().float().std()) > 0:
                found[source.function] = parameter
    return found


def _vectors(model: nn.Module, graph: Graph) -> dict[str, float]:
    """The initial value, 0 or 1, of the biases and gains of layers and norms, by name."""
    return {
        value.producer.function: 0.0 if slot == "bias" else 1.0
        for node in graph.living()
        if node.facts.get("leaf")
        for slot, value in zip(node.slots, node.operands, strict=True)
        if slot == "bias" or (slot == "weight" and node.facts["leaf"].kind == "norm")
    }


def _gradient(loss: Callable[[Any], Tensor], output: Any, name: str) -> float:
    """The root mean square of the loss's gradient at the model's output."""

    def leaf(x: Any) -> Any:
        return x.detach().clone().requires_grad_() if is_floating(x) else x

    with torch.enable_grad():
        copy = tree_map(leaf, output)
        grads = torch.autograd.grad(loss(copy), [x for x in tree_leaves(copy) if is_floating(x)], allow_unused=True)
    found = [grad.double().square().sum() / grad.numel() for grad in grads if grad is not None]
    size = math.sqrt(float(sum(found)) / max(len(found), 1)) if found else 0.0
    if not 0 < size < math.inf:
        raise ModelError(
            f"{name}: the gradient of the loss at the model's output has a root mean square of {size}; expected a "
            "positive, finite number. Give `loss` as a function of what the model returns"
        )
    return size


def _check_finite(graph: Graph, name: str) -> None:
    for node in graph.living():
        numbers = (node.alpha, *node.betas, *(node.weighted or ()))
        if not all(math.isfinite(x) and x > 0 for x in numbers):
            raise ModelError(
                f"{name}: {node.place} would have the factors {numbers}; expected positive, finite ones: the traced "
                "batch gives it nothing to scale. Give unit_scale a batch like those of training; nothing was changed"
            )


def _adopt(model: nn.Module, made: Plan) -> None:
    modules: dict[str, Any] = dict(model.named_modules())
    kinds: dict[str, Any] = {path: kind_of(modules[path]) for path in made.products}
    given: list[tuple[str, dict[str, Any], Any]] = [
        *((path, {"multipliers": spec}, kinds[path].forward) for path, spec in made.products.items()),
        *((path, {"forward": whole}, WHOLE[kind]) for path, (kind, whole) in made.whole.items()),
        *((path, {"forward": steps}, own) for path, steps in made.own.items()),
    ]
    for path, part, forward in given:
        set_unit_part(modules[path], **part)
        adopt(modules[path], forward, beneath=True)
        if path not in made.own:
            extend(modules[path], Shield())
    for module in modules.values():
        if hasattr(module, "save_pretrained"):
            extend(module, Unsaved())


def _notes(graph: Graph, residual: bool, loss: bool) -> tuple[str, ...]:
    notes = []
    kinds = {node.kind for node in graph.living()}
    if "attention" in kinds or "matmul" in kinds:
        notes.append("attention: scores by size^-1/2, whatever factor the code has; its output's factor is that of the "
                     "traced length and mask")  # fmt: skip
    if not residual:
        notes.append("no residual addition was found")
    if not loss and "cross_entropy" not in kinds:
        notes.append("the loss is not seen: its gradient arrives at the model's output as it is; give `loss`, or take "
                     "halfstep.unit's losses, whose gradients are of unit size")  # fmt: skip
    return tuple(notes)


@dataclass(frozen=True)
class Operation:
    """One scaled operation, and its factors at the traced shapes."""

    path: str
    """The module in whose forward it is called."""
    name: str
    """The operation: `nn.Linear`, `layer_norm`, `add` ..."""
    forward: str
    """The factor of its output, or of each of its operands, in words."""
    backward: tuple[float, ...]
    """The factor of each operand's gradient, parameters last."""
    tied: bool
    """Whether the gradient of an operand has the output's factor, since its edge is no cut-edge."""
    rule: str
    """The origin of the factors."""

    def __str__(self) -> str:
        back = ", ".join(f"{factor:.4g}" for factor in self.backward)
        tied = " (tied)" if self.tied else ""
        return f"{self.path or '(model)'}: {self.name}: {self.forward}; gradients {back}{tied}: {self.rule}"


@dataclass(frozen=True)
class UnitReport:
    """The report of `unit_scale`: operations that are scaled, left alone, or not traced. `print(report)` shows it."""

    model: str
    constraint: str
    residual: str
    operations: tuple[Operation, ...]
    weights: dict[str, float]
    """The standard deviation that each weight was divided by."""
    zeroed: tuple[str, ...]
    """Biases, gains and other vectors that were set to 0 or 1."""
    unseen: tuple[str, ...]
    """Operations that are left alone, since the size of their outputs is unknown."""
    uncalled: tuple[str, ...]
    """Layers that the traced pass did not call; they are unchanged."""
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.model}, unit-scaled: constraint {self.constraint}, residual additions {self.residual}"]
        lines += [f"  {operation}" for operation in self.operations]
        lines += [f"  weight divided by {deviation:.4g}: {name}" for name, deviation in self.weights.items()]
        lines += [f"  set to its value at initialisation, 0 or 1: {name}" for name in self.zeroed]
        lines += [f"  not known, left alone: {place}" for place in self.unseen]
        lines += [f"  not called, left alone: {path}" for path in self.uncalled]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)


def operations(graph: Graph) -> tuple[Operation, ...]:
    """The scaled operations of a graph."""
    shown = (
        node
        for node in graph.living()
        if node.kind not in SOURCES and (node.rule or node.alpha != 1 or any(beta != 1 for beta in node.betas))
    )
    return tuple(_operation(node) for node in shown)


def unseen(graph: Graph) -> tuple[str, ...]:
    """The source locations of operations whose outputs have an unknown size."""
    return tuple(
        dict.fromkeys(node.place for node in graph.living() if node.facts.get("unseen") or node.kind == "unknown")
    )


def _operation(node: Node) -> Operation:
    forward = f"times {node.alpha:.4g}"
    if node.weighted:
        forward = f"{node.weighted[0]:.4g} a + {node.weighted[1]:.4g} b"
    elif node.kind == "scale":
        forward = "as it is"
    name = node.facts["leaf"].name if node.facts.get("leaf") else node.function
    return Operation(node.path, name, forward, tuple(node.betas), node.tied, node.rule or "a branch begins here")


def standard_deviations(parameters: dict[str, nn.Parameter], name: str) -> dict[str, float]:
    """The standard deviation of each weight.

    Raises:
        ModelError: a standard deviation is zero or not finite.
    """
    found = {}
    for path, parameter in parameters.items():
        deviation = float(parameter.detach().double().std(correction=0))
        if not 0 < deviation < float("inf"):
            raise ModelError(
                f"{name}: {path} {tuple(parameter.shape)} has a standard deviation of {deviation}; expected a weight "
                "initialised at random, which unit_scale divides by it. Initialise it (torch.nn.init.normal_) first; "
                "nothing was changed"
            )
        found[path] = deviation
    return found


@torch.no_grad()
def divide(model: nn.Module, deviations: dict[str, float], vectors: dict[str, float]) -> dict[str, Tensor]:
    """Divide each weight by its deviation and set each vector to its value, in place; returns the vectors' changes."""
    parameters = dict(model.named_parameters())
    taken: dict[str, Tensor] = {}
    for name, value in vectors.items():
        parameter = parameters[name]
        if not bool((parameter == value).all()):
            taken[name] = parameter.detach() - value
            parameter.fill_(value)
    for name, deviation in deviations.items():
        parameters[name].div_(deviation)
    return taken


@torch.no_grad()
def multiply(model: nn.Module, scaled: UnitScaled) -> None:
    """Undo `divide`: weights are restored within one rounding of their dtype."""
    parameters: dict[str, Any] = dict(model.named_parameters())
    for name, deviation in scaled.report.weights.items():
        if name in parameters:
            parameters[name].mul_(deviation)
    for name, offset in scaled.vectors.items():
        if name in parameters:
            parameters[name].add_(offset.to(parameters[name].device))


def plain_ones(model: nn.Module, deviations: dict[str, float]) -> list[str]:
    """The names of weights whose standard deviation is nearer to the one before unit scaling than to 1, if those two
    are far apart: they are not unit-scaled."""
    parameters = dict(model.named_parameters())
    found = []
    for name, deviation in deviations.items():
        parameter = parameters.get(name)
        if parameter is None or parameter.is_meta or 0.5 < deviation < 2:
            continue
        size = float(parameter.detach().double().std(correction=0))
        if 0 < size < math.inf and abs(math.log(size / deviation)) < abs(math.log(size)):
            found.append(name)
    return found


@dataclass(frozen=True)
class Loading:
    """Members of the root: `load_state_dict` that warns if it loaded weights of a model that is not unit-scaled."""

    beneath: bool = True

    def __call__(self, stock: type[nn.Module]) -> dict[str, Any]:
        load: Any = stock.load_state_dict

        def load_state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            loaded, divided = load(module, *args, **kwargs), unit_part(module).scaled.report.weights
            if plain := plain_ones(module, divided):
                warnings.warn(
                    f"{type(module).__name__} is unit-scaled, and {len(plain)} of its {len(divided)} "
                    f"weights ({plain[0]} ...) were loaded in the size that they had before: a state dict of a model "
                    "that is not unit-scaled? With such weights it computes something else. Load them first "
                    "(halfstep.revert(model) undoes unit_scale), then call unit_scale",
                    stacklevel=2,
                )
            return loaded

        return {"load_state_dict": load_state_dict}
