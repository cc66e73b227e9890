"""The products of matrices that a model forms in a forward pass, and what a step's take, by the speeds of formats.

The theoretical cost of a recipe's products on an architecture is a share of training in 16 bits.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from halfstep import formats
from halfstep.accounting.subject import Subject, blank, sequence_of
from halfstep.errors import AccountError
from halfstep.nn.adapters import wide
from halfstep.nn.layers import Matched, match
from halfstep.recipe import HEADS, LinearSpec, Matmul, Recipe, get_recipe, starts
from halfstep.text import grouped


_aten = torch.ops.aten

LAYER, CORE, OTHER = "layer", "core", "activations"
"""What a product is of: a layer's weight, attention's queries, keys and values, or other activations."""
PASSES = "forward", "input gradient", "weight gradient"
"""The three products of a layer, or of each of attention's two."""
ATTENTION, FEED_FORWARD, ATTENTION_CORE = "attention linears", "feed-forward linears", "attention core"
LAYERS, OTHERS = "other layers", "other products"
HEAD = "head"
"""The kind of work of the layer whose outputs are the logits."""
KINDS = ATTENTION, FEED_FORWARD, LAYERS, ATTENTION_CORE, OTHERS, HEAD
"""What products are of, in the order of the report."""
ROTATIONS, REMAINDERS, ESTIMATES = "Hadamard transforms", "clamped remainders", "estimators"
OVERHEADS = ROTATIONS, REMAINDERS, ESTIMATES
"""What a recipe's products have beside them, which training in 16 bits has not."""
SPEEDS = {16: 1.0, 8: 2.0, 4: 4.0}
"""Multiply-adds in the time of one in 16 bits, by the bits of the wider operand: as tensor cores are sold."""
BASE = 16


@dataclass(frozen=True)
class Product:
    """A product of a forward pass. Each operand that requires a gradient has a product of its own in the backward
    pass, of as many multiply-adds: that of the input, or of q; that of the weight, or of k."""

    path: str
    """Of the layer that has the weight; else of the module that multiplies."""
    kind: str
    """`LAYER`, `CORE` (where torch's attention forms it) or `OTHER`."""
    multiply_adds: int
    elements: tuple[int, int, int]
    """Of the input, or of q; of the weight, or of k; of the output."""
    input_grad: bool
    weight_grad: bool


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it the products of a model's forward pass are written down, in order; nothing is changed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Product] = []
        self._model = model
        self._stack: list[tuple[str, bool]] = [("", torch.is_grad_enabled())]
        own = ((p, path) for path, module in model.named_modules() for p in module.parameters(recurse=False))
        self._owners = grouped((_memory(parameter), path) for parameter, path in own)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While it lasts, products are those of the module that is being called."""
        with ExitStack() as hooks:
            for path, module in self._model.named_modules():
                hooks.enter_context(module.register_forward_pre_hook(partial(self._entered, path), prepend=True))
                hooks.enter_context(module.register_forward_hook(self._left, always_call=True))
            hooks.enter_context(self)
            yield

    def _entered(self, path: str, module: nn.Module, args: Any) -> None:
        self._stack.append((path, torch.is_grad_enabled()))

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        count = _COUNTS.get(func.overloadpacket)
        if count is not None:
            self.found += [self._product(*each) for each in count(args, result)]
        elif func.overloadpacket in flop_registry:
            raise AccountError(
                f"{self._stack[-1][0] or 'the model'} multiplies by {func}, of which no count is known; form the "
                "product with torch.matmul, F.linear, a convolution or scaled_dot_product_attention"
            )
        return result

    def _product(
        self, left: Tensor, right: Tensor, outputs: int, multiply_adds: int, kind: str, inputs: int | None = None
    ) -> Product:
        path, trains = self._stack[-1]
        owners = self._owners.get(_memory(right))
        if owners is None and inputs is None and (owners := self._owners.get(_memory(left))) is not None:
            left, right = right, left
        if owners is not None:
            path, kind = path if path in owners else owners[0], LAYER
        elements = left.numel() if inputs is None else inputs, right.numel(), outputs
        grads = trains and left.requires_grad, trains and right.requires_grad
        return Product(path, kind, multiply_adds, elements, *grads)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


_Found = list[tuple[Any, ...]]
"""Left operand, right operand, elements of the product, multiply-adds, kind; and the elements of the left operand,
where no tensor has them."""


def _matrices(args: tuple[Any, ...], result: Any) -> _Found:
    """Of (..., rows, shared) and (..., shared, columns); what they are added to may stand before them."""
    left, right = [each for each in args if isinstance(each, Tensor)][-2:]
    return [(left, right, result.numel(), result.numel() * left.shape[-1], OTHER)]


def _convolution(args: tuple[Any, ...], result: Any) -> _Found:
    """Places of the output, or of the input of a transposed one, times the weight's window."""
    x, weight, transposed = args[0], args[1], args[6]
    places = math.prod((x if transposed else result).shape[2:])
    return [(x, weight, result.numel(), x.shape[0] * places * weight.numel(), LAYER)]


def _attention(args: tuple[Any, ...], result: Any) -> _Found:
    """All of q k^T and of the weights times v: what a causal mask leaves out is counted too."""
    query, key, value = args[:3]
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    weights = query if query.requires_grad else key
    scores = (query, key, pairs, pairs * query.shape[-1], CORE)
    outputs = math.prod(query.shape[:-1]) * value.shape[-1]
    return [scores, (weights, value, outputs, pairs * value.shape[-1], CORE, pairs)]


def _recurrent(args: tuple[Any, ...], result: Any) -> _Found:
    """One direction of one layer, (time, batch, in): the input's product, and the state's, which depends on weights."""
    x, of_input, of_state = args[:3]
    steps, state = x.shape[0] * x.shape[1], next((each for each in args[:3] if each.requires_grad), x)
    outputs = steps * of_state.shape[0]
    of_states = (state, of_state, outputs, steps * of_state.numel(), LAYER, steps * of_state.shape[-1])
    return [(x, of_input, outputs, steps * of_input.numel(), LAYER), of_states]


_COUNTS: dict[Any, Callable[[tuple[Any, ...], Any], _Found]] = {
    **dict.fromkeys((_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm, _aten.mv, _aten.addmv), _matrices),
    _aten.convolution: _convolution,
    _aten.mkldnn_rnn_layer: _recurrent,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention: _attention,
    _aten._scaled_dot_product_efficient_attention: _attention,
    _aten._scaled_dot_product_cudnn_attention: _attention,
}


@dataclass(frozen=True)
class Work:
    """Products of one kind in one pass whose wider operand has so many bits."""

    kind: str
    """One of `KINDS`, or of `OVERHEADS`."""
    step: str
    """One of `PASSES`."""
    bits: int
    multiply_adds: float
    """Of a recipe with stages the mean over a run's steps."""


@dataclass(frozen=True)
class Cost:
    """What a recipe's products take on an architecture, in multiply-adds at 16 bits' speed.

    Nothing here is measured: what rounding costs, memory, communication and the optimizer are left out.
    """

    recipe: str
    speeds: Mapping[int, float]
    works: tuple[Work, ...]

    @property
    def time(self) -> float:
        """Of all products, and of what is beside them."""
        return sum(work.multiply_adds / speed_of(work.bits, self.speeds) for work in self.works)

    @property
    def multiply_adds(self) -> float:
        """Of all products, without what is beside them."""
        return sum(work.multiply_adds for work in self.works if work.kind in KINDS)

    @property
    def base(self) -> float:
        """The time of the same products with operands in 16 bits, and nothing beside them."""
        return self.multiply_adds / speed_of(BASE, self.speeds)

    @property
    def share(self) -> float:
        """Of the time of training in 16 bits."""
        return self.time / self.base

    @property
    def speed_up(self) -> float:
        """Over training in 16 bits."""
        return self.base / self.time

    def without(self, *kinds: str) -> Cost:
        """The same without products of these kinds, as papers count that leave the head out."""
        return Cost(self.recipe, self.speeds, tuple(work for work in self.works if work.kind not in kinds))

    def of(self, step: str) -> Cost:
        """One of `PASSES` alone."""
        return Cost(self.recipe, self.speeds, tuple(work for work in self.works if work.step == step))


def speeds_from(text: str) -> dict[int, float]:
    """Speeds by the bits of operands, of a text such as `fp16=1,fp8=2,fp4=4`.

    Raises:
        AccountError: it is not such a text, a width comes twice, or 16 bits are not among them.

    >>> speeds_from("fp16=1,fp8=2,fp4=4")
    {16: 1.0, 8: 2.0, 4: 4.0}
    """
    speeds: dict[int, float] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*(?:fp|int)?(\d+)\s*=\s*(\d+\.?\d*|\.\d+)\s*", part)
        if found is None or not float(found[2]) > 0:
            raise AccountError(f"speed {part.strip()!r} in {text!r}; expected widths and speeds: fp16=1,fp8=2,fp4=4")
        if int(found[1]) in speeds:
            raise AccountError(f"{text!r} gives two speeds for {found[1]} bits; give each width once")
        speeds[int(found[1])] = float(found[2])
    if BASE not in speeds:
        raise AccountError(f"{text!r} says nothing of 16 bits, which the others are compared with; add fp16=1")
    return speeds


def speed_of(bits: int, speeds: Mapping[int, float]) -> float:
    """The speed of products whose wider operand has so many bits: that of the next width that takes it.

    Raises:
        AccountError: no width takes it.
    """
    widths = [width for width in speeds if width >= bits]
    if not widths:
        raise AccountError(
            f"products of {bits} bits, and speeds up to {max(speeds)} bits are given; add what your device makes of "
            f"them, such as --speeds fp{bits}=0.5,fp16=1,fp8=2,fp4=4"
        )
    return speeds[min(widths)]


_Key = tuple[str, str, int]
"""Kind, pass and bits."""

_FORM_PRODUCTS = frozenset({
    "matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "addmv", "einsum", "tensordot", "linear", "bilinear",
    "scaled_dot_product_attention", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
})  # fmt: skip


def cost(
    subject: Subject,
    recipe: str | Recipe,
    speeds: Mapping[int, float] = SPEEDS,
    *,
    batch: int = 1,
    sequence: int | None = None,
    total_steps: int | None = None,
) -> Cost:
    """Run the model forward without memory, and weigh every product by the speed of its wider operand.

    An operand that the recipe rounds has its format's bits, another those that the recipe computes in; so a model
    whose recipe rounds nothing costs 1. The backward pass has a product for each operand that requires a gradient.
    Attention's core is all pairs of places, whether a mask leaves some out or not.

    Args:
        recipe: a name, a file, or a `Recipe`: one's own too.
        speeds: by bits, as `speeds_from` reads them.
        batch, sequence: as for `account`.
        total_steps: of the run, for a recipe with stages that begin at a step: its cost is the mean over a run.

    Raises:
        AccountError: a checkpoint, which cannot run; a width without a speed; an operator whose products have no count;
            stages that begin at steps of a run of unknown length.
        RecipeError, ModelError: rules that match no layer; as `account`.
    """
    recipe = get_recipe(recipe)
    if subject.batch is None:
        raise AccountError(f"{subject.name}: a checkpoint alone cannot be run; give its config.json, or its folder")
    shares = _shares(recipe, total_steps)
    for name in sorted(_FORM_PRODUCTS & {name for stage in recipe.by_stage for name in stage.float32_functions}):
        raise AccountError(
            f"recipe {recipe.name!r} takes {name} in float32, and which of the model's products it forms cannot be "
            "seen; leave it out of float32_functions, or name its modules in float32_modules"
        )
    length = sequence_of(subject, sequence)
    with blank(subject):
        model = subject.build()
        data = subject.batch(model, batch, length)
        products = Products(model)
        with products.watched():
            data.call(model)
        found: dict[_Key, float] = defaultdict(float)
        for share, stage in zip(shares, recipe.by_stage, strict=True):
            for key, count in _weighed(model, products.found, stage).items():
                found[key] += count * share
    if not found:
        raise AccountError(
            f"{subject.name} forms no product of matrices in its forward pass: there is nothing to weigh"
        )
    order = (*KINDS, *OVERHEADS, *PASSES).index
    made = sorted((Work(*key, count) for key, count in found.items()), key=lambda w: (order(w.kind), order(w.step)))
    for work in made:
        speed_of(work.bits, speeds)
    return Cost(recipe.name, dict(speeds), tuple(made))


def _shares(recipe: Recipe, total: int | None) -> list[float]:
    """Of a run's steps, those of each stage."""
    if not recipe.stages:
        return [1]
    if total is None and not all(stage.is_fraction for stage in recipe.stages):
        first = next(stage for stage in recipe.stages if not stage.is_fraction)
        raise AccountError(
            f"recipe {recipe.name!r}: its stage {first.recipe.name!r} begins at {first.when}, and of how many is not "
            "said; give the run's length (total_steps, --steps)"
        )
    found = starts(recipe.name, recipe.stages, total)
    ends = [0.0, *(stage.start for stage in recipe.stages), 1.0] if total is None else [0, *(found or ()), total]
    return [(end - start) / ends[-1] for start, end in pairwise(ends)]


def _weighed(model: nn.Module, products: Iterable[Product], recipe: Recipe) -> dict[_Key, float]:
    """The multiply-adds of all three passes by kind, pass and bits, as that recipe rounds the operands."""
    matched = match(model, recipe, None)
    float32 = wide.find(model, recipe.float32_modules)
    found: dict[_Key, float] = defaultdict(float)
    cores: Counter[str] = Counter()
    for product in products:
        kind = _kind(product, model)
        spec = _spec(product, kind, matched, recipe, cores[product.path])
        cores[product.path] += kind == ATTENTION_CORE
        plain = 32 if any(f"{product.path}.".startswith(f"{path}.") for path in float32) else _bits(recipe)
        matmuls = spec.output, spec.grad_input, spec.grad_weight
        for step, matmul, formed in zip(PASSES, matmuls, (True, product.input_grad, product.weight_grad), strict=True):
            if formed:
                found[kind, step, _wider(matmul, plain)] += product.multiply_adds
                for beside, count in _beside(product, step, matmul, spec):
                    found[beside, step, plain] += count
    return found


def _kind(product: Product, model: nn.Module) -> str:
    """What a product is of, by the names that models give their layers: for the report alone."""
    path = product.path.lower()
    attention = "attn" in path or "attention" in path
    if product.kind != LAYER:
        return ATTENTION_CORE if product.kind == CORE or attention else OTHERS
    module = model.get_submodule(product.path)
    if isinstance(module, nn.Embedding) or any(fnmatchcase(product.path, head) for head in HEADS):
        return HEAD
    if attention or isinstance(module, nn.MultiheadAttention):
        return ATTENTION
    linear = not isinstance(module, (nn.modules.conv._ConvNd, nn.RNNBase, nn.modules.rnn.RNNCellBase))
    return FEED_FORWARD if linear and any(part.isdigit() for part in path.split(".")) else LAYERS


def _spec(product: Product, kind: str, matched: Matched, recipe: Recipe, index: int) -> LinearSpec:
    """How the recipe rounds a product's operands: the first of attention's two is that of its scores."""
    if product.kind == LAYER:
        return matched.specs.get(product.path, LinearSpec())
    if kind == ATTENTION_CORE and recipe.attention is not None and product.path in matched.attends:
        return recipe.attention.mix if index % 2 else recipe.attention.scores
    return LinearSpec()


def _beside(product: Product, step: str, matmul: Matmul, spec: LinearSpec) -> Iterable[tuple[str, float]]:
    """What one of the three products has beside it, and its multiply-adds: a rotation of both operands; of an operand
    whose clamp is compensated a sparse product, of the share of values that are beyond a quantile; of a weight whose
    rounding has a derivative one for each element of its gradient."""
    input, weight, output = product.elements
    operands = dict(zip(PASSES, (input + weight, output + weight, output + input), strict=True))
    if matmul.hadamard is not None:
        yield ROTATIONS, matmul.hadamard.size * operands[step]
    for quantizer in (matmul.lhs, matmul.rhs):
        if quantizer is not None and quantizer.clamp is not None and quantizer.clamp.compensation:
            yield REMAINDERS, 2 * (1 - quantizer.clamp.quantile) * product.multiply_adds
    rounded = spec.output.rhs
    if step == PASSES[2] and rounded is not None and rounded.estimator is not None:
        yield ESTIMATES, weight


def _bits(recipe: Recipe) -> int:
    """The bits of an operand that no rule rounds."""
    return formats.get(recipe.weights if recipe.compute == "fp32" else recipe.compute).bits


def _wider(matmul: Matmul, plain: int) -> int:
    return max(plain if operand is None else operand.format.bits for operand in (matmul.lhs, matmul.rhs))
