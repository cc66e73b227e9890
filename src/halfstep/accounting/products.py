"""The matmuls of a model's forward pass, and the theoretical cost of a training step's matmuls under a recipe.

The cost weighs each matmul by the speed of its formats, and is relative to training in 16 bits.
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
"""Whether a matmul has a layer's weight as an operand, is one of torch's attention, or is of other activations."""
PASSES = "forward", "input gradient", "weight gradient"
"""The three matmuls of a layer, or of each of attention's two matmuls."""
ATTENTION, FEED_FORWARD, ATTENTION_CORE = "attention linears", "feed-forward linears", "attention core"
LAYERS, OTHERS = "other layers", "other products"
HEAD = "head"
"""The kind of the layer whose outputs are the logits."""
KINDS = ATTENTION, FEED_FORWARD, LAYERS, ATTENTION_CORE, OTHERS, HEAD
"""The kinds of matmuls, in the order of the report."""
ROTATIONS, REMAINDERS, ESTIMATES = "Hadamard transforms", "clamped remainders", "estimators"
OVERHEADS = ROTATIONS, REMAINDERS, ESTIMATES
"""Additional computations of a recipe's matmuls, which training in 16 bits does not have."""
SPEEDS = {16: 1.0, 8: 2.0, 4: 4.0}
"""Throughput relative to 16 bits by the bits of the wider operand: the nominal ratios of tensor cores."""
BASE = 16


@dataclass(frozen=True)
class RecordedMatmul:
    """A matmul of a forward pass. In the backward pass each operand that requires a gradient has one matmul of as many
    multiply-adds: `input_grad` for the left operand, `weight_grad` for the right one."""

    path: str
    """The module that has the weight; without a weight the module that is running."""
    kind: str
    """`LAYER`, `CORE` (a matmul of torch's scaled_dot_product_attention) or `OTHER`."""
    multiply_adds: int
    elements: tuple[int, int, int]
    """The elements of the left operand (input, or q), of the right one (weight, or k) and of the output."""
    input_grad: bool
    weight_grad: bool


class MatmulRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records the matmuls of a model's forward pass, in order, in `found`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[RecordedMatmul] = []
        self._model = model
        self._stack: list[tuple[str, bool]] = [("", torch.is_grad_enabled())]
        own = ((p, path) for path, module in model.named_modules() for p in module.parameters(recurse=False))
        self._owners = grouped((_storage_id(parameter), path) for parameter, path in own)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A context with the mode active and with module hooks that tell it which module is running."""
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
                f"{self._stack[-1][0] or 'the model'} calls {func}, whose multiply-adds halfstep cannot count; use "
                "torch.matmul, F.linear, a convolution or scaled_dot_product_attention"
            )
        return result

    def _product(
        self, left: Tensor, right: Tensor, outputs: int, multiply_adds: int, kind: str, inputs: int | None = None
    ) -> RecordedMatmul:
        path, trains = self._stack[-1]
        owners = self._owners.get(_storage_id(right))
        if owners is None and inputs is None and (owners := self._owners.get(_storage_id(left))) is not None:
            left, right = right, left
        if owners is not None:
            path, kind = path if path in owners else owners[0], LAYER
        elements = left.numel() if inputs is None else inputs, right.numel(), outputs
        grads = trains and left.requires_grad, trains and right.requires_grad
        return RecordedMatmul(path, kind, multiply_adds, elements, *grads)


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


_Found = list[tuple[Any, ...]]
"""The arguments of `MatmulRecorder._product` for each matmul: left and right operand, elements of the output,
multiply-adds, kind; and the elements of the left operand if the tensor given for it is only a stand-in."""


def _matmul(args: tuple[Any, ...], result: Any) -> _Found:
    """A matmul of (..., m, k) and (..., k, n), the operator's last two tensors: addmm and baddbmm have a bias first."""
    left, right = [each for each in args if isinstance(each, Tensor)][-2:]
    return [(left, right, result.numel(), result.numel() * left.shape[-1], OTHER)]


def _convolution(args: tuple[Any, ...], result: Any) -> _Found:
    """A convolution: positions of the output (of the input if transposed) times the weight's elements."""
    x, weight, transposed = args[0], args[1], args[6]
    places = math.prod((x if transposed else result).shape[2:])
    return [(x, weight, result.numel(), x.shape[0] * places * weight.numel(), LAYER)]


def _attention(args: tuple[Any, ...], result: Any) -> _Found:
    """Both matmuls of attention, q k^T and probabilities times v, including pairs that a causal mask excludes."""
    query, key, value = args[:3]
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    weights = query if query.requires_grad else key
    scores = (query, key, pairs, pairs * query.shape[-1], CORE)
    outputs = math.prod(query.shape[:-1]) * value.shape[-1]
    return [scores, (weights, value, outputs, pairs * value.shape[-1], CORE, pairs)]


def _recurrent(args: tuple[Any, ...], result: Any) -> _Found:
    """Both matmuls of one direction of a recurrent layer, of the input (time, batch, in) and of the hidden state. The
    state has no tensor here: any operand that requires a gradient stands in, because the state then requires one."""
    x, of_input, of_state = args[:3]
    steps, state = x.shape[0] * x.shape[1], next((each for each in args[:3] if each.requires_grad), x)
    outputs = steps * of_state.shape[0]
    of_states = (state, of_state, outputs, steps * of_state.numel(), LAYER, steps * of_state.shape[-1])
    return [(x, of_input, outputs, steps * of_input.numel(), LAYER), of_states]


_COUNTS: dict[Any, Callable[[tuple[Any, ...], Any], _Found]] = {
    **dict.fromkeys((_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm, _aten.mv, _aten.addmv), _matmul),
    _aten.convolution: _convolution,
    _aten.mkldnn_rnn_layer: _recurrent,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention: _attention,
    _aten._scaled_dot_product_efficient_attention: _attention,
    _aten._scaled_dot_product_cudnn_attention: _attention,
}


@dataclass(frozen=True)
class Work:
    """The multiply-adds of all matmuls of one kind, in one of the passes, whose wider operand has `bits` bits."""

    kind: str
    """One of `KINDS` or `OVERHEADS`."""
    step: str
    """One of `PASSES`."""
    bits: int
    multiply_adds: float
    """For a recipe with stages the mean over a run's steps."""


@dataclass(frozen=True)
class Cost:
    """The theoretical time of a recipe's matmuls for a model, in multiply-adds at the speed of 16 bits.

    Nothing is measured; quantization, memory traffic, communication and the optimizer are not included.
    """

    recipe: str
    speeds: Mapping[int, float]
    works: tuple[Work, ...]

    @property
    def time(self) -> float:
        """The time of all matmuls and of their overheads."""
        return sum(work.multiply_adds / speed_of(work.bits, self.speeds) for work in self.works)

    @property
    def multiply_adds(self) -> float:
        """The multiply-adds of all matmuls, without overheads."""
        return sum(work.multiply_adds for work in self.works if work.kind in KINDS)

    @property
    def base(self) -> float:
        """The time of the same matmuls in 16 bits, without overheads."""
        return self.multiply_adds / speed_of(BASE, self.speeds)

    @property
    def share(self) -> float:
        """The time divided by that of training in 16 bits."""
        return self.time / self.base

    @property
    def speed_up(self) -> float:
        """The speed relative to training in 16 bits."""
        return self.base / self.time

    def without(self, *kinds: str) -> Cost:
        """The cost without matmuls of these kinds: some papers leave the head out."""
        return Cost(self.recipe, self.speeds, tuple(work for work in self.works if work.kind not in kinds))

    def of(self, step: str) -> Cost:
        """The cost of one of `PASSES` only."""
        return Cost(self.recipe, self.speeds, tuple(work for work in self.works if work.step == step))


def speeds_from(text: str) -> dict[int, float]:
    """Parse speeds by bits from a text such as `fp16=1,fp8=2,fp4=4`.

    Raises:
        AccountError: the text has another form, gives a width twice, or has no speed for 16 bits.

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
        raise AccountError(f"{text!r} has no speed for 16 bits, with which the others are compared; add fp16=1")
    return speeds


def speed_of(bits: int, speeds: Mapping[int, float]) -> float:
    """The speed of matmuls whose wider operand has `bits` bits: that of the smallest width in `speeds` with at least
    as many.

    Raises:
        AccountError: all widths in `speeds` are smaller.
    """
    widths = [width for width in speeds if width >= bits]
    if not widths:
        raise AccountError(
            f"matmuls of {bits} bits, but speeds up to {max(speeds)} bits are given; add your device's speed, such as "
            f"--speeds fp{bits}=0.5,fp16=1,fp8=2,fp4=4"
        )
    return speeds[min(widths)]


_Key = tuple[str, str, int]
"""Kind, pass and bits."""

_MATMUL_FUNCTIONS = frozenset({
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
    """Run the model's forward pass on FakeTensors, and weigh every matmul by the speed of its wider operand.

    An operand that the recipe quantizes has its format's bits, any other those of the recipe's compute dtype; so the
    cost of a 16-bit recipe that quantizes nothing is 1. The backward pass has a matmul for each operand that requires a
    gradient. Attention counts all pairs of positions, masked ones included.

    Args:
        recipe: a name, a file, or a `Recipe`.
        speeds: relative speeds by bits, as from `speeds_from`.
        batch, sequence: as for `account`.
        total_steps: the steps of the run, for a recipe with stages that begin at a step: the cost is the mean over the
            run.

    Raises:
        AccountError: a checkpoint, which cannot run; a width without a speed; a matmul operator that cannot be counted;
            stages that begin at steps of a run of unknown length.
        RecipeError, ModelError: rules that match no layer; as `account`.
    """
    recipe = get_recipe(recipe)
    if subject.batch is None:
        raise AccountError(f"{subject.name}: a checkpoint alone cannot be run; give its config.json, or its folder")
    shares = _shares(recipe, total_steps)
    for name in sorted(_MATMUL_FUNCTIONS & {name for stage in recipe.by_stage for name in stage.float32_functions}):
        raise AccountError(
            f"recipe {recipe.name!r} runs {name} in float32, but an account cannot tell which of the model's matmuls "
            "it computes; leave it out of float32_functions, or name its modules in float32_modules"
        )
    length = sequence_of(subject, sequence)
    with blank(subject):
        model = subject.build()
        data = subject.batch(model, batch, length)
        recorder = MatmulRecorder(model)
        with recorder.watched():
            data.call(model)
        found: dict[_Key, float] = defaultdict(float)
        for share, stage in zip(shares, recipe.by_stage, strict=True):
            for key, count in _multiply_adds(model, recorder.found, stage).items():
                found[key] += count * share
    if not found:
        raise AccountError(f"{subject.name} runs no matmul in its forward pass: there is no cost to account for")
    order = (*KINDS, *OVERHEADS, *PASSES).index
    made = sorted((Work(*key, count) for key, count in found.items()), key=lambda w: (order(w.kind), order(w.step)))
    for work in made:
        speed_of(work.bits, speeds)
    return Cost(recipe.name, dict(speeds), tuple(made))


def _shares(recipe: Recipe, total: int | None) -> list[float]:
    """The fraction of a run's steps that each stage has."""
    if not recipe.stages:
        return [1]
    if total is None and not all(stage.is_fraction for stage in recipe.stages):
        first = next(stage for stage in recipe.stages if not stage.is_fraction)
        raise AccountError(
            f"recipe {recipe.name!r}: its stage {first.recipe.name!r} begins at {first.when}, but the run's length is "
            "unknown; give it (total_steps, --steps)"
        )
    found = starts(recipe.name, recipe.stages, total)
    ends = [0.0, *(stage.start for stage in recipe.stages), 1.0] if total is None else [0, *(found or ()), total]
    return [(end - start) / ends[-1] for start, end in pairwise(ends)]


def _multiply_adds(model: nn.Module, products: Iterable[RecordedMatmul], recipe: Recipe) -> dict[_Key, float]:
    """The multiply-adds of all three passes by kind, pass and bits, for the recipe's operand formats."""
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
                for overhead, count in _overheads(product, step, matmul, spec):
                    found[overhead, step, plain] += count
    return found


def _kind(product: RecordedMatmul, model: nn.Module) -> str:
    """Which of `KINDS` a matmul is, guessed from module names and types; only for the report and for `_spec`."""
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


def _spec(product: RecordedMatmul, kind: str, matched: Matched, recipe: Recipe, index: int) -> LinearSpec:
    """The quantizers of a matmul's operands in all three passes.

    Args:
        index: the number of attention matmuls seen before in this module: even for q k^T, odd for probabilities and v.
    """
    if product.kind == LAYER:
        return matched.specs.get(product.path, LinearSpec())
    if kind == ATTENTION_CORE and recipe.attention is not None and product.path in matched.attends:
        return recipe.attention.mix if index % 2 else recipe.attention.scores
    return LinearSpec()


def _overheads(product: RecordedMatmul, step: str, matmul: Matmul, spec: LinearSpec) -> Iterable[tuple[str, float]]:
    """The overheads of a matmul in one pass, with their multiply-adds: the Hadamard transform of both operands; for an
    operand with a compensated clamp, a sparse matmul of the fraction of values beyond the quantile; for a weight with a
    gradient estimator, one multiplication for each element of its gradient."""
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
    """The bits of an operand without a quantizer."""
    return formats.get(recipe.weights if recipe.compute == "fp32" else recipe.compute).bits


def _wider(matmul: Matmul, plain: int) -> int:
    return max(plain if operand is None else operand.format.bits for operand in (matmul.lhs, matmul.rhs))
