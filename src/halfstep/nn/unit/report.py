"""What `unit_scale` did to a model, operation by operation."""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.nn.unit.graph import SOURCES, Graph, Node


@dataclass(frozen=True)
class Operation:
    """One operation that is scaled, and its factors at the traced shapes."""

    path: str
    """The module whose code it is."""
    name: str
    """The operation: `nn.Linear`, `layer_norm`, `add` ..."""
    forward: str
    """What its output, or each of its operands, is multiplied by."""
    backward: tuple[float, ...]
    """What the gradient of each operand is multiplied by, its parameters last."""
    tied: bool
    """Whether the gradient of an operand takes the output's factor, since its edge is no cut-edge."""
    rule: str
    """What the factors follow from."""

    def __str__(self) -> str:
        back = ", ".join(f"{factor:.4g}" for factor in self.backward)
        tied = " (tied)" if self.tied else ""
        return f"{self.path or '(model)'}: {self.name}: {self.forward}; gradients {back}{tied}: {self.rule}"


@dataclass(frozen=True)
class UnitReport:
    """What `unit_scale` did, what it left alone and what it could not see. `print(report)` shows it."""

    model: str
    constraint: str
    residual: str
    operations: tuple[Operation, ...]
    weights: dict[str, float]
    """The standard deviation that each weight was divided by."""
    zeroed: tuple[str, ...]
    """Biases, gains and such that did not begin at 0 or 1, and now do."""
    unseen: tuple[str, ...]
    """Operations that are left alone, since their size is not known."""
    uncalled: tuple[str, ...]
    """Layers that the traced pass did not call: they are as they were."""
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
    """Those that are scaled."""
    shown = (
        node
        for node in graph.living()
        if node.kind not in SOURCES and (node.rule or node.alpha != 1 or any(beta != 1 for beta in node.betas))
    )
    return tuple(_operation(node) for node in shown)


def unseen(graph: Graph) -> tuple[str, ...]:
    """Those whose size is not known."""
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
    rule = node.rule or "a branch begins here"
    return Operation(node.path, name, forward, tuple(node.betas), node.tied, rule)
