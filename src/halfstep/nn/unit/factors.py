"""`Factors`: the unit-scaling factors of every operation of a traced model.

The expected mean square of every value is computed from the model's inputs on. Scaled operations bring it to about 1,
additions to exactly 1; other operations propagate it. After an unsupported operation it is unknown, which is an error
if a residual addition depends on it, and reported otherwise.
"""

import math
from collections.abc import Callable
from functools import partial

from halfstep.errors import ModelError
from halfstep.nn.unit.forwards import measured
from halfstep.nn.unit.graph import Edge, Graph, Node, Value
from halfstep.text import grouped
from halfstep.unit import factors, get_constraint
from halfstep.unit.calibration import Attended, Constraint


_MIXES = ("product", "linear", "matmul", "norm", "attention", "embedding", "softmax", "parameter", "input")
"""Kinds whose output is nearly independent of each single element of their inputs."""


class Factors:
    """Sets the factors of every node of a graph, and the mean square of its outputs.

    For each kind of node there is a method `_kind` that sets the factors and returns the outputs' mean square (None:
    unknown).

    Args:
        constraint: how a group of tied factors becomes one factor.
        residual: the share of variance of each residual branch; None: a running mean over the branches.
    """

    def __init__(self, graph: Graph, constraint: str | Constraint | None, residual: float | None, name: str) -> None:
        self._graph, self._rule, self._residual, self._model = graph, get_constraint(constraint), residual, name
        self._cuts = graph.cut_edges()
        self._attended = Attended()
        self.residuals: list[Node] = []
        self._whole = grouped((node.path, node) for node in graph.living() if node.facts.get("leaf"))
        for node in graph.living():
            rule: Callable[[Node], float | None] = getattr(self, f"_{node.kind}")
            node.mark(square=rule(node))

    def _is_free(self, node: Node, operand: int) -> bool:
        return (node, operand) in self._cuts

    def _per_call(self, node: Node, count: Callable[[Node], float]) -> float:
        """The rows or lookups of a layer per call: the mean over all calls of its module, which share one factor."""
        calls = self._whole.get(node.path, [node]) if node.facts.get("leaf") else [node]
        return sum(map(count, calls)) / len(calls)

    def _resolve(self, node: Node, alpha: float, betas: dict[int, float]) -> None:
        """Set the node's factors; the constraint ties those of edges that are no cut-edges to the output's.

        Args:
            alpha: the ideal factor of the output.
            betas: the ideal factors of the operands' gradients, by index.
        """
        tied = [i for i in betas if not self._is_free(node, i)]
        resolved = self._rule(alpha, *(betas[i] for i in tied))
        node.alpha, node.tied = resolved[0], bool(tied)
        for i, beta in (betas | dict(zip(tied, resolved[1:], strict=True))).items():
            node.betas[i] = beta

    # ---- inputs and parameters --------------------------------------------------------------------------------------

    def _input(self, node: Node) -> float | None:
        """The mean square of the traced batch; for a parameter the one it will have: 1 for a weight that is divided by
        its standard deviation, else unknown."""
        return node.outputs[0].square

    _parameter = _input

    # ---- operations that are scaled ---------------------------------------------------------------------------------

    def _product(self, node: Node) -> float | None:
        x = node.operands[0]
        fan_in, fan_out, _ = _fans(node)
        rows = self._per_call(node, lambda each: _fans(each)[2])
        size = math.sqrt(x.square) if x.producer.kind == "input" and x.square else 1.0
        weight = node.slots.index("weight")
        if self._is_free(node, weight) and node.facts["leaf"].name != "convolution":
            node.facts["rows"] = rows
        if "bias" in node.slots and not self._is_free(node, node.slots.index("bias")):
            raise ModelError(
                f"{self._model}.{node.path}: its bias is another layer's too, and its gradient cannot be the sum of "
                "two that are scaled apart; give each layer a bias of its own, or none"
            )
        self._resolve(node, fan_in**-0.5 / size, {0: fan_out**-0.5, weight: rows**-0.5 / size})
        node.rule = "fan_in^-1/2" + (f" / {size:.3g}" if size != 1 else "") + "; to the input fan_out^-1/2"
        return None if x.square is None else node.alpha**2 * fan_in * x.square

    def _linear(self, node: Node) -> float | None:
        """A call of F.linear in a module's own code."""
        x, (fan_in, fan_out), rows = node.operands[0], node.facts["fans"], max(node.facts["rows"], 1)
        self._resolve(
            node, fan_in**-0.5, {0: fan_out**-0.5} | dict.fromkeys(range(1, len(node.operands)), rows ** (-0.5))
        )
        node.rule = "fan_in^-1/2; to the input fan_out^-1/2; to the weight rows^-1/2, at the traced size"
        if x.square is None or node.operands[1].square is None:
            return None
        return node.alpha**2 * fan_in * x.square * node.operands[1].square  # type: ignore[no-any-return]

    def _embedding(self, node: Node) -> float:
        table = node.operands[0]
        beta = math.sqrt(table.shape[0] / max(self._per_call(node, lambda each: each.facts["lookups"]), 1))
        self._resolve(node, 1.0, {0: beta})
        node.rule = "1; to the table (vocabulary / lookups)^1/2"
        return node.alpha**2

    def _norm(self, node: Node) -> float:
        for i, slot in enumerate(node.slots):
            if (isinstance(slot, str) or i > 0) and self._is_free(node, i):
                rows = math.prod(node.outputs[0].shape) / max(math.prod(node.operands[i].shape), 1)
                node.betas[i] = rows**-0.5
        node.rule = "1; to gain and bias rows^-1/2"
        return 1.0

    def _elementwise(self, node: Node) -> float | None:
        x = node.operands[0]
        size = 1.0 if x.square is None else math.sqrt(x.square)
        module = node.facts.get("module")
        call = node.facts.get("call") or partial(type(module).forward, module)  # type: ignore[union-attr]
        deviation, slope, square = measured(call, size)
        if not (deviation > 0 and slope > 0):
            return self._unknown(node)
        self._resolve(node, 1 / deviation, {0: 1 / slope})
        node.rule = f"measured on N(0, {size:.3g}^2): 1 / {deviation:.4g}; to the input 1 / {slope:.4g}"
        return node.alpha**2 * square

    def _mean(self, node: Node) -> None:
        """The size of a mean depends on the correlation of its terms, which is unknown. Each term's gradient is that of
        the mean divided by their number."""
        if self._is_free(node, 0):
            node.betas[0] = float(node.facts["count"])
            node.rule = "1, and of unknown size; to the input the number of terms"
        else:
            self._unknown(node)

    def _scale(self, node: Node) -> float | None:
        """A multiplication by a constant is dropped: unit scaling sets the scale."""
        x = node.operands[0]
        if x.square is None:
            return None
        node.alpha = 1 / abs(node.facts["factor"])
        node.betas[0] = node.alpha
        node.rule = f"the factor {node.facts['factor']:.4g} is dropped"
        return _carry(node, x, x.square)

    def _matmul(self, node: Node) -> float | None:
        a, b = node.operands
        shared = node.facts["shared"]
        both = None if a.square is None or b.square is None else a.square * b.square
        size = math.sqrt(both) if a.weights and both is not None else 1.0
        rule = "shared^-1/2" if size == 1 else "1 / the mixed values' size, at the traced length"
        node.tie(1 / (math.sqrt(shared) * size), rule)
        return None if both is None else node.alpha**2 * shared * a.square * b.square

    def _softmax(self, node: Node) -> float | None:
        scores = node.operands[0]
        if not node.facts["last"] or scores.square is None:
            return self._unknown(node)
        energy = self._attended.energy(scores.shape, scores.square, scores.mask, causal=False)
        node.mark(weights=True)
        node.rule = "its factor is in the product that follows"
        return energy / max(scores.shape[-1], 1)

    def _attention(self, node: Node) -> float | None:
        q, k, v, *bias = node.operands
        facts = node.facts
        if q.square is None or k.square is None or v.square is None or any(x.square is None for x in bias):
            return self._unknown(node)
        scores = q.square * k.square
        facts["scale"] = facts["size"] ** -0.5
        mask = facts["mask"]
        if bias:
            mask, shares = bias[0].mask, (math.sqrt(0.5 / scores), math.sqrt(0.5 / bias[0].square))  # type: ignore[operator]
            facts["scale"] *= shares[0]
            facts["bias"] = shares[1]
            scores = 1.0
        shape = (*q.shape[:-1], facts["sources"])
        energy = self._attended.energy(shape, scores, mask, facts["causal"]) / (1 - facts["p"])
        rule = f"1 / the mixed values' size, at the traced length {facts['sources']}; logits by size^-1/2"
        node.tie(1 / math.sqrt(energy * v.square), rule)
        return 1.0

    def _cross_entropy(self, node: Node) -> None:
        facts = node.facts
        if self._is_free(node, 0) and facts["classes"] > 1:
            rows = facts["rows"] if facts["mean"] else 1
            node.betas[0] = rows * facts["classes"] / math.sqrt(facts["classes"] - 1)
            node.rule = "1; to the logits rows * classes / (classes - 1)^1/2"

    # ---- additions --------------------------------------------------------------------------------------------------

    def _add(self, node: Node) -> float | None:
        if len(node.operands) == 1:
            return self._shift(node)
        a, b = node.operands
        skip = self._skip(node)
        if skip is not None:
            return self._residual_add(node, skip)
        if a.square is None or b.square is None:
            return self._unknown(node)
        if _line(a) & _line(b):  # a rotation, say: parts of one tensor, whose squares add up
            return _carry(node, a, a.square + b.square)
        shares = a.terms / (a.terms + b.terms), b.terms / (a.terms + b.terms)
        weights = math.sqrt(shares[0] / a.square), math.sqrt(shares[1] / b.square)
        node.weigh(weights, weights, f"shares of variance {shares[0]:.3g} and {shares[1]:.3g}")
        self._sums(node)
        node.mark(terms=a.terms + b.terms)
        return 1.0

    def _sums(self, node: Node) -> None:
        """Give the gradient of a broadcast operand, a sum over its copies, the factor copies^-1/2.

        If the operand's edge is no cut-edge, the factor is undone where the branch that ends in it begins, as for a
        residual branch, so that only gradients inside the branch change.
        """
        for i, copies in enumerate(factors.broadcast(*(value.shape for value in node.operands))):
            if copies == 1:
                continue
            if not self._is_free(node, i):
                inner = self._graph.inside(node, i)
                begins = [(n, k) for n in inner for k, x in enumerate(n.operands) if x.producer not in inner]
                if node.operands[i].producer not in inner or any(n.kind == "join" for n, _ in begins):
                    continue
                node.facts["entries"] = [
                    *node.facts.get("entries", ()),
                    *((*e, node.betas[i] / copies) for e in begins),
                ]
            node.betas[i] = copies
            node.rule = f"{node.rule + '; ' if node.rule else ''}to a broadcast operand copies^-1/2"

    def _shift(self, node: Node) -> float | None:
        """An addition of a constant, or of a mask."""
        x, mask = node.operands[0], node.facts["masks"]
        constant = 0.0 if mask is not None else node.facts["constant"] or 0.0
        square = _carry(node, x, None if x.square is None else x.square + constant)
        if mask is not None:
            node.mark(mask=mask)
        return square

    def _skip(self, node: Node) -> int | None:
        """The index of an addition's operand that is a skip connection, since the branch that ends in the other operand
        begins with it; None if there is none."""
        bases = [_base(value) for value in node.operands]
        if bases[0] is bases[1]:
            raise self._refusal(node, "adds a tensor to a view or a dropout of itself")
        for skip, branch in ((0, 1), (1, 0)):
            if self._graph.leads(bases[skip].producer, bases[branch].producer):
                inner = self._graph.inside(node, branch)
                if any(_base(x) is bases[skip] for n in inner for x in n.operands):
                    return skip
        return None

    def _residual_add(self, node: Node, skip: int) -> float:
        branch = 1 - skip
        a, b = node.operands[skip], node.operands[branch]
        for value, what in ((a, "skipped value"), (b, "branch")):
            if value.square is None:
                raise self._refusal(node, f"is a residual addition whose {what} comes from {_blame(value)}")
        if a.shape != b.shape:
            raise self._refusal(node, f"adds {b.shape} to {a.shape} in a residual addition")
        share = self._residual if self._residual is not None else b.terms / (a.depth + b.terms)
        weights = {skip: math.sqrt((1 - share) / a.square), branch: math.sqrt(share / b.square)}  # type: ignore[operator]
        betas = weights | {branch: 1.0}
        rule = f"residual, share of the branch {share:.3g}; its gradient is scaled where the branch begins"
        node.weigh((weights[0], weights[1]), (betas[0], betas[1]), rule)
        inner = self._graph.inside(node, branch)
        entries: list[Edge] = [(n, i) for n in inner for i, x in enumerate(n.operands) if x.producer not in inner]
        if b.producer not in inner:
            entries.append((node, branch))
        node.facts["entries"] = [(n, i, weights[branch]) for n, i in entries]
        self.residuals.append(node)
        node.mark(depth=a.depth + b.terms)
        return 1.0

    # ---- operations that propagate the mean square ------------------------------------------------------------------

    def _mul(self, node: Node) -> float | None:
        if len(node.operands) == 1:
            x, constant = node.operands[0], node.facts["constant"]
            return _carry(node, x, None if x.square is None or constant is None else x.square * constant)
        a, b = node.operands
        if _elements(a) & _elements(b):
            return self._unknown(node)
        self._sums(node)
        return self._unknown(node) if a.square is None or b.square is None else a.square * b.square

    def _join(self, node: Node) -> float | None:
        counts = [math.prod(value.shape) for value in node.operands]
        if any(value.square is None for value in node.operands):
            return None
        total = sum(count * x.square for count, x in zip(counts, node.operands, strict=True))  # type: ignore[operator,misc]
        return _carry(node, node.operands[0], total / max(sum(counts), 1))

    def _passive(self, node: Node) -> float | None:
        square = _carry(node, node.operands[0], node.operands[0].square)
        if node.facts.get("mask") is not None:
            node.mark(mask=node.facts["mask"])
        return square

    def _dropout(self, node: Node) -> float | None:
        x, p = node.operands[0], node.facts["p"]
        return _carry(node, x, None if x.square is None else x.square / (1 - p))

    def _unknown(self, node: Node) -> float | None:
        node.facts["unseen"] = True
        return None

    def _refusal(self, node: Node, what: str) -> ModelError:
        return ModelError(
            f"{self._model}: {node.place} {what}, so its size at initialisation is not known, and the sum cannot be "
            "weighted. Write that part with halfstep.unit's functions or modules, or with operations that unit_scale "
            "knows; nothing was changed"
        )


def _carry(node: Node, x: Value, square: float | None) -> float | None:
    """Mark the outputs as x is marked (terms, depth, mask, weights); returns `square`."""
    node.mark(terms=x.terms, depth=x.depth, mask=x.mask, weights=x.weights)
    return square


def _base(value: Value) -> Value:
    """The value behind views, casts, dropouts and multiplications by constants."""
    while value.producer.kind in ("passive", "dropout", "scale") and len(value.producer.operands) == 1:
        value = value.producer.operands[0]
    return value


def _walk(value: Value, through: Callable[[Node], bool]) -> set[Value]:
    """The values that this one is computed from, going back through the nodes for which `through` is true."""
    found: set[Value] = set()
    todo = [value]
    while todo:
        value = todo.pop()
        if through(value.producer) and value.producer.operands:
            todo += value.producer.operands
        else:
            found.add(value)
    return found


def _line(value: Value) -> set[Value]:
    """The values of which this one is a linear function, element by element, with constant coefficients."""
    linear = ("passive", "dropout", "join", "scale")
    return _walk(value, lambda n: n.kind in linear or (n.kind in ("mul", "add") and len(n.operands) == 1))


def _elements(value: Value) -> set[Value]:
    """The values on whose single elements this one's elements depend; parts of a split tensor count as separate."""
    parts = ("chunk", "split", "__getitem__", "unbind", "tensor_split", "split_with_sizes")
    return _walk(value, lambda n: n.kind not in _MIXES and n.function not in parts)


def _blame(value: Value) -> str:
    """The source location of the first operation that made the value's mean square unknown."""
    while (behind := next((x for x in value.producer.operands if x.square is None), None)) is not None:
        if not behind.producer.operands:
            break
        value = behind
    return value.producer.place


def _fans(node: Node) -> tuple[int, float, int]:
    """Fan-in, fan-out and rows of a layer's matmul; for a convolution the fan-out is an average over positions."""
    module, weight = node.facts["module"], node.facts["module"].weight
    if node.facts["leaf"].name == "convolution":
        places = math.prod(node.outputs[0].shape[2:])
        inside = max(math.prod(node.operands[0].shape[2:]), 1)
        groups = module.groups
        kernel = math.prod(weight.shape[2:])
        fan_in, fan_out = module.in_channels // groups * kernel, module.out_channels // groups * kernel
        if module.transposed:
            return fan_in, fan_out, node.outputs[0].shape[0] * inside
        return fan_in, fan_out * places / inside, node.outputs[0].shape[0] * places
    out, fan_in = weight.shape if node.facts["leaf"].name != "Conv1D" else weight.shape[::-1]
    return fan_in, out, math.prod(node.outputs[0].shape[:-1])
