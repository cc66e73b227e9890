"""`plan`: what each module of a traced model gets: multipliers, factors, or a list of scaled calls."""

import math
from dataclasses import dataclass, field
from typing import TypeVar

from halfstep.errors import ModelError
from halfstep.nn.unit.forwards import PASSIVE, Own, Step, Whole
from halfstep.nn.unit.graph import Graph, Node, Value
from halfstep.recipe import LinearSpec, Matmul, Multiplier


_Made = TypeVar("_Made")


@dataclass
class Plan:
    """The multipliers and scaling factors of every module of a model, by path."""

    name: str
    """The model's class, for messages."""
    is_fixed: bool
    """Whether all residual branches have one share of variance."""
    products: dict[str, LinearSpec] = field(default_factory=dict)
    """The multipliers of layers with matmuls."""
    whole: dict[str, tuple[str, Whole]] = field(default_factory=dict)
    """The kind and the factors of each other module that is one operation."""
    own: dict[str, Own] = field(default_factory=dict)
    """The scaled calls of modules with code of their own."""

    def once(self, table: dict[str, _Made], path: str, made: _Made) -> None:
        """Enter a module's factors in a table.

        Raises:
            ModelError: another call of the module needs other factors.
        """
        if table.setdefault(path, made) != made:
            shares = (
                "Give `residual` a fixed share of variance (0.5, say), so that the factors of residual additions do "
            )
            way = "Give" if self.is_fixed else f"{shares}not differ; or give"
            raise ModelError(
                f"{self.name}: {path or 'the model'} is called several times in one forward pass, with other factors "
                f"or other code each time, and has one class. {way} each call a module of its own (they may share "
                "their parameters). Nothing was changed"
            )


def plan(graph: Graph, name: str, is_fixed: bool) -> Plan:
    """The plan of a traced model with factors.

    Args:
        name: the model's class, for messages.
        is_fixed: its residual branches have one share of variance.

    Raises:
        ModelError: a module is called several times and would need other factors or calls each time.
    """
    made = Plan(name, is_fixed)
    for node in graph.nodes:
        if node.facts.get("leaf"):
            _whole(made, node)
    steps = {node: step for node in graph.nodes if not node.facts.get("leaf") and (step := _step(node)) is not None}
    owners = {node.path for node, step in steps.items() if step.kind != PASSIVE}
    by_call: dict[tuple[str, int], list[Step]] = {
        call: [] for node in graph.nodes for call in node.calls if call[0] in owners
    }
    for node, step in steps.items():
        owner = next((call for call in reversed(node.calls) if call[0] in owners), None)
        if owner is not None:
            by_call[owner].append(step)
    for (path, _), found in by_call.items():
        scaled = frozenset(step.function for step in found if step.kind != PASSIVE)
        made.once(made.own, path, Own(path, tuple(step for step in found if step.function in scaled)))
    return made


def entries(graph: Graph) -> None:
    """Multiply the factors of residual branches into the gradients where the branches begin.

    In the backward pass a branch's factor is thus applied at the branch's input instead of its output: gradients
    outside are the same, and those inside have unit size.
    """
    for node in graph.living():
        for consumer, operand, factor in node.facts.get("entries", ()):
            consumer.betas[operand] *= factor


def at_output(graph: Graph, factor: float, name: str) -> None:
    """Multiply the gradient of the model's output by a factor, in the operation that computes the output.

    Raises:
        ModelError: there are several outputs, or the model uses its output itself.
    """
    values = [_made(value) for value in graph.outputs]
    if len(values) != 1 or sum(c.alive for c, _ in values[0].consumers) + values[0].is_output > 1:
        raise ModelError(
            f"{name} has {len(values)} outputs that a loss is made of, or computes with them itself; a factor for the "
            "loss's gradient needs one. Leave `loss` out, and scale the loss's gradient by halfstep.unit's losses"
        )
    node = values[0].producer
    node.betas = [beta * factor for beta in node.betas]
    node.gamma = factor


def _made(value: Value) -> Value:
    while value.producer.kind == "passive" and len(value.producer.operands) == 1:
        behind = value.producer.operands[0]
        if behind.is_output or sum(c.alive for c, _ in behind.consumers) > 1:
            break
        value = behind
    return value


def _whole(made: Plan, node: Node) -> None:
    leaf = node.facts["leaf"]
    if leaf.kind == "product":
        made.once(made.products, node.path, _multipliers(node))
        return
    inputs = [i for i, slot in enumerate(node.slots) if not isinstance(slot, str)]
    backward = tuple(node.betas[i] for i in inputs) or tuple(node.betas)
    free, beside = False, 1.0
    if leaf.kind == "norm":
        own = [i for i in range(len(node.slots)) if i not in inputs]
        rows = [math.prod(node.outputs[0].shape) / max(math.prod(node.operands[i].shape), 1) for i in own]
        free = bool(own) and math.isclose(node.betas[own[0]] / node.gamma, rows[0] ** -0.5) and rows[0] > 1
        beside = node.betas[own[0]] * (rows[0] ** 0.5 if free else 1.0) if own else 1.0
    whole = Whole(
        leaf.activation or leaf.name, _short(node.alpha), tuple(map(_short, backward)), leaf.eps, free, _short(beside)
    )
    made.once(made.whole, node.path, (leaf.kind, whole))


def _multipliers(node: Node) -> LinearSpec:
    """A layer's factors as multipliers of its matmuls, where they cost nothing."""
    beta, rows = node.betas[node.slots.index("weight")], node.facts.get("rows")
    weight = Multiplier(shared=-0.5, constant=_short(beta * rows**0.5)) if rows else Multiplier(constant=_short(beta))
    output, grad_input = (Multiplier(constant=_short(factor)) for factor in (node.alpha, node.betas[0]))
    return LinearSpec(Matmul(multiplier=output), Matmul(multiplier=grad_input), Matmul(multiplier=weight))


def _short(factor: float) -> float:
    """The factor rounded to 12 digits, since its last bits depend on the order in which it was computed."""
    return float(f"{factor:.12g}")


def _step(node: Node) -> Step | None:
    """The `Step` of a node that is a function call; None for other nodes."""
    if "signature" not in node.facts:
        return None
    call = node.facts["signature"]
    slots = [slot for slot in node.slots if isinstance(slot, int)]
    backward = tuple(zip(slots, node.betas, strict=True))
    plain = all(math.isclose(beta, node.alpha) for beta in node.betas) and node.alpha == 1
    if not node.alive or node.kind == "constant" or node.facts.get("unseen"):
        if any(beta != 1 for beta in node.betas):
            return _gradients(node, call, backward)
        return Step(PASSIVE, call, node.function)
    if node.weighted:
        return Step("add", call, node.function, 1.0, backward, node.facts["in_place"], node.weighted)
    if node.kind == "scale":
        factor = node.facts["factor"]
        total = node.betas[0] * abs(factor)
        if math.isclose(abs(factor) * node.alpha, 1) and (factor != 1 or not math.isclose(total, 1)):
            return Step("scale", call, node.function, 1.0, ((slots[0], total),), False, (math.copysign(1.0, factor),))
    if node.kind == "matmul":
        return Step("matmul", call, node.function, node.alpha, backward)
    if node.kind == "attention":
        numbers = (node.facts["scale"],)
        if len(node.operands) > 3:
            numbers += (node.facts["bias"], node.betas[3] / node.alpha)  # type: ignore[assignment]
        return Step("attention", call, node.function, node.alpha, backward, False, numbers)
    if node.kind == "elementwise":
        return Step("elementwise", call, node.function, node.alpha, backward, node.facts["in_place"])
    if plain:
        return Step(PASSIVE, call, node.function)
    if node.kind in ("cross_entropy", "mean") and node.alpha == 1 and len(backward) == len(node.operands) == 1:
        return Step("reduction", call, node.function, 1.0, backward)
    return _gradients(node, call, backward)


def _gradients(node: Node, call: str, backward: tuple[tuple[int, float], ...]) -> Step:
    if node.kind == "join":
        raise ModelError(
            f"{node.place}: a residual branch begins at a concatenation, where its gradient cannot be scaled; "
            "nothing was changed"
        )
    return Step("gradients", call, node.function, node.alpha, backward)
