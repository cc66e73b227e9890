"""The operations of one forward pass as a graph of nodes and values, with its cut-edges (bridges)."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


SOURCES = ("parameter", "input")
"""Kinds of nodes without operands."""


@dataclass(eq=False, repr=False)
class Value:
    """A floating tensor that a gradient may flow through."""

    producer: "Node"
    shape: tuple[int, ...]
    square: float | None = None
    """Its expected mean square at initialization; None if unknown."""
    terms: int = 1
    """The number of terms that it counts as in an addition."""
    depth: int = 1
    """The number of terms that it counts as in a residual addition, as the skip connection."""
    mask: Any = None
    """The mask of attention scores: False, or very negative, where a position must not attend."""
    weights: bool = False
    """Whether it is a softmax over its last dimension."""
    consumers: "list[tuple[Node, int]]" = field(default_factory=list)
    """The nodes that take it, each with the index of the operand."""
    is_output: bool = False


@dataclass(eq=False, repr=False)
class Node:
    """One operation: a module that is one, a function call in a module's own code, a parameter or an input."""

    kind: str
    """The rule for its factors: `product`, `norm`, `add`, `scale` ...; `passive` or `unknown`."""
    function: str
    """The canonical name of the function, or the name of the module's operation or of the parameter."""
    calls: tuple[tuple[str, int], ...]
    """The modules whose forwards were running, outermost first: the path, and the serial number of the call."""
    operands: list[Value]
    slots: list[int | str]
    """The index of each operand among the flattened arguments, or a parameter's name within its module."""
    index: int
    """The node's position in the graph."""
    facts: dict[str, Any] = field(default_factory=dict)
    """More data for the rule of its kind: constants, sizes and flags."""
    outputs: list[Value] = field(default_factory=list)
    alive: bool = False
    """Whether an output of the model depends on it."""
    alpha: float = 1.0
    """The factor of its output."""
    betas: list[float] = field(default_factory=list)
    """The factor of each operand's gradient, alpha included."""
    gamma: float = 1.0
    """The factor by which the gradient of its output is multiplied first."""
    weighted: tuple[float, float] | None = None
    """For an addition: the factors of its two operands."""
    tied: bool = False
    """Whether the gradient of an operand has the factor of the output."""
    rule: str = ""
    """The origin of the factors, for the report."""

    def __post_init__(self) -> None:
        self.betas = [1.0] * len(self.operands)

    def tie(self, factor: float, rule: str) -> None:
        """Set one factor for the output and the gradients of all operands."""
        self.alpha, self.betas, self.tied, self.rule = factor, [factor] * len(self.operands), True, rule

    def weigh(self, weights: tuple[float, float], betas: tuple[float, float], rule: str) -> None:
        """Set the weights of an addition's two operands, and the factors of their gradients."""
        self.weighted, self.betas, self.tied, self.rule = weights, list(betas), True, rule

    def mark(self, **marks: Any) -> None:
        """Set these attributes of all outputs."""
        for value in self.outputs:
            vars(value).update(marks)

    @property
    def path(self) -> str:
        """The path of the module in whose forward it is called, or of the module that it is."""
        return self.calls[-1][0] if self.calls else ""

    @property
    def place(self) -> str:
        """The node's module and function, for messages."""
        where = self.path or "the model's own forward"
        return where if self.facts.get("leaf") else f"{where}: {self.function}"


Edge = tuple[Node, int]
"""A node and the index of one of its operands."""


@dataclass(repr=False)
class Graph:
    """The operations of one forward pass, in the order in which they ran."""

    nodes: list[Node]
    outputs: list[Value]

    def __post_init__(self) -> None:
        for value in self.outputs:
            value.is_output = True
        for node in reversed(self.nodes):
            node.alive = any(v.is_output or any(c.alive for c, _ in v.consumers) for v in node.outputs)
        calls = {call for node in self.nodes for call in node.calls}
        self._repeated = {path for path, count in Counter(path for path, _ in calls).items() if count > 1}

    def living(self) -> Iterator[Node]:
        """The nodes that an output depends on."""
        return (node for node in self.nodes if node.alive)

    def cut_edges(self) -> set[Edge]:
        """The bridges: edges whose removal disconnects the graph, taken as undirected. The loss, to which all outputs
        go, is a node of it too."""
        loss = len(self.nodes)
        edges = [(node, i) for node in self.living() for i in range(len(node.operands))]
        ends = [(node.operands[i].producer.index, node.index) for node, i in edges]
        found = _bridges([*ends, *((value.producer.index, loss) for value in self.outputs)])
        return {edges[number] for number in found if number < len(edges)}

    def inside(self, node: Node, operand: int) -> set[Node]:
        """The nodes from which all paths to the model's outputs go through that operand: a residual branch.

        A branch does not begin in a module that is called several times, since its other calls may be elsewhere.
        """
        outside: set[Node] = set()
        while True:
            inner = self._inside(node, operand, outside)
            begins = {n for n in inner if self._is_repeated(n) and any(x.producer not in inner for x in n.operands)}
            if not begins:
                return inner
            outside |= begins

    def _inside(self, node: Node, operand: int, outside: set[Node]) -> set[Node]:
        inner: set[Node] = set()
        for candidate in reversed(self.nodes[: node.index]):
            edges = [edge for value in candidate.outputs for edge in value.consumers if edge[0].alive]
            out = candidate in outside or any(value.is_output for value in candidate.outputs)
            if edges and not out and all(c in inner or (c is node and k == operand) for c, k in edges):
                inner.add(candidate)
        return inner

    def leads(self, first: Node, second: Node) -> bool:
        """Whether `second` is `first` or depends on its outputs."""
        reached = {first}
        for node in self.nodes[first.index : second.index + 1]:
            if any(value.producer in reached for value in node.operands):
                reached.add(node)
        return second in reached

    def _is_repeated(self, node: Node) -> bool:
        return any(path in self._repeated for path, _ in node.calls)


def _bridges(ends: list[tuple[int, int]]) -> list[int]:
    """The indices of the edges that lie on no cycle. Edges go from lower to higher nodes; all nodes lead to the last.

    The first edge out of each node belongs to a spanning tree. Every other edge closes one cycle and sets its bit, by
    exclusive or, in the label of both its ends. Summed by exclusive or over the subtree beyond a tree edge, labels have
    the bits of the cycles through that edge: none for a bridge.
    """
    branches: dict[int, int] = {}
    told: Counter[int] = Counter()
    for edge, (u, v) in enumerate(ends):
        if branches.setdefault(u, edge) != edge:
            told[u] ^= 1 << edge
            told[v] ^= 1 << edge
    for u, edge in sorted(branches.items()):
        told[ends[edge][1]] ^= told[u]
    return [edge for u, edge in branches.items() if not told[u]]
