"""The theoretical cost of a recipe's products on an architecture, as a share of training in 16 bits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from halfstep import formats
from halfstep.accounting.account import blank, sequence_of
from halfstep.accounting.products import CORE, LAYER, Product, Products
from halfstep.accounting.subject import Subject
from halfstep.errors import AccountError
from halfstep.nn.adapters import wide
from halfstep.nn.layers import Matched, match
from halfstep.quant import Quantizer
from halfstep.recipe import LinearSpec, Matmul, Recipe, get_recipe
from halfstep.recipe.high_precision import HEADS


PASSES = "forward", "input gradient", "weight gradient"
"""The three products of a layer, or of each of attention's two."""

_ATTENTION, _FEED_FORWARD, _CORE = "attention linears", "feed-forward linears", "attention core"
_LAYERS, _OTHERS, HEAD = "other layers", "other products", "head"
KINDS = _ATTENTION, _FEED_FORWARD, _LAYERS, _CORE, _OTHERS, HEAD
"""What products are of, in the order of the report."""

SPEEDS = {16: 1.0, 8: 2.0, 4: 4.0}
"""Multiply-adds in the time of one in 16 bits, by the bits of the wider operand: as tensor cores are sold."""

BASE = 16

_FORM_PRODUCTS = frozenset({
    "matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "addmv", "einsum", "tensordot", "linear", "bilinear",
    "scaled_dot_product_attention", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
})  # fmt: skip


@dataclass(frozen=True)
class Work:
    """Products of one kind in one pass whose wider operand has so many bits."""

    kind: str
    step: str
    """One of `PASSES`."""
    bits: int
    multiply_adds: int


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
        """Of all products."""
        return sum(work.multiply_adds / speed_of(work.bits, self.speeds) for work in self.works)

    @property
    def multiply_adds(self) -> int:
        """Of all products."""
        return sum(work.multiply_adds for work in self.works)

    @property
    def base(self) -> float:
        """The time of the same products with operands in 16 bits."""
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


def cost(
    subject: Subject,
    recipe: str | Recipe,
    speeds: Mapping[int, float] = SPEEDS,
    *,
    batch: int = 1,
    sequence: int | None = None,
) -> Cost:
    """Run the model forward without memory, and weigh every product by the speed of its wider operand.

    An operand that the recipe rounds has its format's bits, another those that the recipe computes in; so a model
    whose recipe rounds nothing costs 1. The backward pass has a product for each operand that requires a gradient.
    Attention's core is all pairs of places, whether a mask leaves some out or not.

    Args:
        recipe: a name, a file, or a `Recipe`: one's own too.
        speeds: by bits, as `speeds_from` reads them.
        batch, sequence: as for `account`.

    Raises:
        AccountError: a checkpoint, which cannot run; a width without a speed; an operator whose products have no count.
        RecipeError, ModelError: rules that match no layer; as `account`.
    """
    recipe = get_recipe(recipe)
    if recipe.stages:
        raise AccountError(
            f"recipe {recipe.name!r} has stages, and each costs its own: ask for one of them; a run takes the mean of "
            "their shares, weighted by their steps"
        )
    if subject.batch is None:
        raise AccountError(f"{subject.name}: a checkpoint alone cannot be run; give its config.json, or its folder")
    for name in sorted(_FORM_PRODUCTS & set(recipe.float32_functions)):
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
        found = _weighed(model, products.found, recipe)
    if not found:
        raise AccountError(
            f"{subject.name} forms no product of matrices in its forward pass: there is nothing to weigh"
        )
    order = {name: place for place, name in enumerate((*KINDS, *PASSES))}
    works = sorted((Work(*key, count) for key, count in found.items()), key=lambda w: (order[w.kind], order[w.step]))
    for work in works:
        speed_of(work.bits, speeds)
    return Cost(recipe.name, dict(speeds), tuple(works))


def _weighed(model: nn.Module, products: Iterable[Product], recipe: Recipe) -> Counter[tuple[str, str, int]]:
    """The multiply-adds of all three passes by kind, pass and bits, as that recipe rounds the operands."""
    matched = match(model, recipe, None)
    float32 = wide.find(model, recipe.float32_modules)
    found: Counter[tuple[str, str, int]] = Counter()
    cores: Counter[str] = Counter()
    for product in products:
        kind = _kind(product, model)
        spec = _spec(product, kind, matched, recipe, cores[product.path])
        cores[product.path] += kind == _CORE
        plain = 32 if any(_within(product.path, path) for path in float32) else _bits(recipe)
        for step, matmul, formed in _steps(product, spec):
            if formed:
                found[kind, step, _wider(matmul, plain)] += product.multiply_adds
    return found


def _kind(product: Product, model: nn.Module) -> str:
    """What a product is of, by the names that models give their layers: for the report alone."""
    path = product.path.lower()
    attention = "attn" in path or "attention" in path
    if product.kind != LAYER:
        return _CORE if product.kind == CORE or attention else _OTHERS
    module = model.get_submodule(product.path)
    if isinstance(module, nn.Embedding) or any(fnmatchcase(product.path, head) for head in HEADS):
        return HEAD
    if attention or isinstance(module, nn.MultiheadAttention):
        return _ATTENTION
    linear = not isinstance(module, (nn.modules.conv._ConvNd, nn.RNNBase, nn.modules.rnn.RNNCellBase))
    return _FEED_FORWARD if linear and any(part.isdigit() for part in path.split(".")) else _LAYERS


def _spec(product: Product, kind: str, matched: Matched, recipe: Recipe, index: int) -> LinearSpec:
    """How the recipe rounds a product's operands: the first of attention's two is that of its scores."""
    if product.kind == LAYER:
        return matched.specs.get(product.path, LinearSpec())
    if kind == _CORE and recipe.attention is not None and product.path in matched.attends:
        return recipe.attention.mix if index % 2 else recipe.attention.scores
    return LinearSpec()


def _steps(product: Product, spec: LinearSpec) -> tuple[tuple[str, Matmul, bool], ...]:
    """The three products: their operands, and whether they are formed."""
    forward, of_input, of_weight = PASSES
    return (
        (forward, spec.output, True),
        (of_input, spec.grad_input, product.input_grad),
        (of_weight, spec.grad_weight, product.weight_grad),
    )


def _bits(recipe: Recipe) -> int:
    """The bits of an operand that no rule rounds."""
    return formats.get(recipe.weights if recipe.compute == "fp32" else recipe.compute).bits


def _wider(matmul: Matmul, plain: int) -> int:
    def bits(quantizer: Quantizer | None) -> int:
        return plain if quantizer is None else quantizer.format.bits

    return max(bits(matmul.lhs), bits(matmul.rhs))


def _within(path: str, above: str) -> bool:
    return path == above or path.startswith(above + ".")
