"""The theoretical cost of a recipe's products on an architecture, as a share of training in 16 bits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import pairwise

from torch import nn

from halfstep import formats
from halfstep.accounting.products import (
    ATTENTION,
    ATTENTION_CORE,
    CORE,
    ESTIMATES,
    FEED_FORWARD,
    HEAD,
    KINDS,
    LAYER,
    LAYERS,
    OTHERS,
    OVERHEADS,
    PASSES,
    REMAINDERS,
    ROTATIONS,
    SPEEDS,
    Cost,
    Product,
    Products,
    Work,
    speed_of,
)  # fmt: skip
from halfstep.accounting.subject import Subject, blank, sequence_of
from halfstep.errors import AccountError
from halfstep.nn.adapters import wide
from halfstep.nn.layers import Matched, match
from halfstep.quant import Quantizer
from halfstep.recipe import HEADS, LinearSpec, Matmul, Recipe, get_recipe, starts


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
    functions = {name for stage in recipe.by_stage for name in stage.float32_functions}
    for name in sorted(_FORM_PRODUCTS & functions):
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
    places = (*KINDS, *OVERHEADS, *PASSES)
    order = {name: place for place, name in enumerate(places)}
    made = sorted((Work(*key, count) for key, count in found.items()), key=lambda w: (order[w.kind], order[w.step]))
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
        for step, matmul, formed in _steps(product, spec):
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


def _steps(product: Product, spec: LinearSpec) -> tuple[tuple[str, Matmul, bool], ...]:
    """The three products: their operands, and whether they are formed."""
    forward, of_input, of_weight = PASSES
    return (
        (forward, spec.output, True),
        (of_input, spec.grad_input, product.input_grad),
        (of_weight, spec.grad_weight, product.weight_grad),
    )


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
    def bits(quantizer: Quantizer | None) -> int:
        return plain if quantizer is None else quantizer.format.bits

    return max(bits(matmul.lhs), bits(matmul.rhs))
