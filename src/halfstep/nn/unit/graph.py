"""The operations of one forward pass as a graph: what each takes and gives, and which edges are cut-edges."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


SOURCES = ("parameter", "input")
"""Kinds of nodes that only give a tensor."""


@dataclass(eq=False, repr=False)
class Value:
    """A floating tensor that a gradient may flow through."""

    producer: "Node"
    shape: tuple[int, ...]
    square: float | None = None
    """Its expected mean square at initialisation; None where that is not known."""
    terms: int = 1
    """How many terms an addition counts in it."""
    depth: int = 1
    """How many terms a residual addition counts in it, where it is what is skipped."""
    mask: Any = None
    """What masks it, where it is scores: False, or very negative, where there is no attention."""
    weights: bool = False
    """Whether it is what softmax gives over its last dimension."""
    consumers: "list[tuple[Node, int]]" = field(default_factory=list)
    """The nodes that take it, and as which of their operands."""
    is_output: bool = False


@dataclass(eq=False, repr=False)
class Node:
    """One operation: a whole module, a function that a module's own code calls, a parameter or an input."""

    kind: str
    """What its factors follow from: `product`, `norm`, `add`, `scale` ...; `passive` or `unknown`."""
    function: str
    """The canonical name of the function, or the path of the whole module or parameter."""
    calls: tuple[tuple[str, int], ...]
    """The modules that were running, outermost first: path, and how many calls of modules came before."""
    operands: list[Value]
    slots: list[int | str]
    """Where each operand stands among the arguments' leaves; a parameter's name within its module."""
    index: int
    facts: dict[str, Any] = field(default_factory=dict)
    outputs: list[Value] = field(default_factory=list)
    alive: bool = False
    """Whether an output of the model depends on it."""
    alpha: float = 1.0
    """What its output is multiplied by."""
    betas: list[float] = field(default_factory=list)
    """What the gradient of each operand is multiplied by, its own alpha included."""
    gamma: float = 1.0
    """What the gradient of its output is multiplied by before."""
    weighted: tuple[float, float] | None = None
    """Of an addition: what its two operands are multiplied by."""
    tied: bool = False
    """Whether the gradient of an operand takes the output's factor."""
    rule: str = ""
    """What the factors follow from, for the report."""

    def __post_init__(self) -> None:
        self.betas = [1.0] * len(self.operands)

    def tie(self, factor: float, rule: str) -> None:
        """Multiply the output and the gradients of all operands by one factor."""
        self.alpha, self.betas, self.tied, self.rule = factor, [factor] * len(self.operands), True, rule

    def weigh(self, weights: tuple[float, float], betas: tuple[float, float], rule: str) -> None:
        """Multiply the two operands by weights, and their gradients by factors."""
        self.weighted, self.betas, self.tied, self.rule = weights, list(betas), True, rule

    def mark(self, **marks: Any) -> None:
        """Say that of all outputs."""
        for value in self.outputs:
            vars(value).update(marks)

    @property
    def path(self) -> str:
        """The module whose code it is, or the whole module."""
        return self.calls[-1][0] if self.calls else ""

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        where = self.path or "the model's own forward"
        return where if self.facts.get("leaf") else f"{where}: {self.function}"


Edge = tuple[Node, int]
"""A node, and which of its operands."""


@dataclass(repr=False)
class Graph:
    """The operations of one forward pass, in the order that they ran in."""

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
        """The edges whose removal leaves the graph, taken as undirected, in two parts (bridges).

        What the outputs go to, a loss, is a node of it too.
        """
        loss = len(self.nodes)
        edges = [(node, i) for node in self.living() for i in range(len(node.operands))]
        ends = [(node.operands[i].producer.index, node.index) for node, i in edges]
        found = _bridges([*ends, *((value.producer.index, loss) for value in self.outputs)])
        return {edges[number] for number in found if number < len(edges)}

    def inside(self, node: Node, operand: int) -> set[Node]:
        """The nodes all of whose paths to the model's outputs go through that operand: a residual branch.

        A branch does not begin in a module that is called several times: its other calls may lie elsewhere.
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
        """Whether `second` depends on what `first` gives, or is it."""
        reached = {first}
        for node in self.nodes[first.index : second.index + 1]:
            if any(value.producer in reached for value in node.operands):
                reached.add(node)
        return second in reached

    def _is_repeated(self, node: Node) -> bool:
        return any(path in self._repeated for path, _ in node.calls)


def _bridges(ends: list[tuple[int, int]]) -> list[int]:
    """The edges, by number, that lie on no cycle, of nodes that all lead to the last one, each by edges to later ones.

    The first edge out of each node is its branch of a spanning tree. Every other edge closes a cycle, and is a bit of
    what its ends are told: a branch lies on those cycles that an odd number of ends beyond it tell of.
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
