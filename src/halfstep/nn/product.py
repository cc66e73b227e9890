"""The matmul of a layer that follows a recipe, and `cached_weights`, which rounds weights once for several forwards.

Such forwards are the micro-batches of a step, an evaluation, generation. Frozen weights stored as codes pass gradients
to the input and the bias alone.
"""

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from halfstep import ops
from halfstep.errors import ModelError
from halfstep.nn.adopt import applied_to
from halfstep.nn.following import root_of
from halfstep.nn.noise import localize, states_and_key
from halfstep.nn.quantized_weights import quantized_weight, rows_of
from halfstep.ops.few_rows import StoredWeight
from halfstep.ops.function import apart
from halfstep.ops.linear import grouped_linear, supports_grouped
from halfstep.ops.linear_passes import RoundedSides, States, bias_gradient, product_dtype
from halfstep.ops.operand import Operand, operand
from halfstep.ops.part import KEY, key_of, part_of, parts_of, seeds_of
from halfstep.ops.plain import matrix
from halfstep.quant.rounding import capturing
from halfstep.quant.tracing import has_memory
from halfstep.recipe import LinearSpec
from halfstep.unit import multipliers_of


# ---- cached weights --------------------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    """A rounded weight of the cache, and what it was rounded for."""

    spec: LinearSpec
    dtype: torch.dtype
    """The dtype of the matmuls."""
    written: int
    """The parameter's version (torch's count of writes in place) when it was rounded."""
    made: RoundedSides
    sample: Tensor
    """A view of a few of the parameter's values, as integers."""
    then: Tensor
    """A copy of `sample` from when the weight was rounded."""


class CachedWeights:
    """A cache of a model's rounded weights, which counts how often they were used."""

    def __init__(self) -> None:
        self.rounded = 0
        """How many times a weight was rounded."""
        self.used = 0
        """How many matmuls took a rounded weight from here."""
        self._most = 0
        self._entries: dict[Hashable, _Entry] = {}
        # Holds the parameters' storages, too, so that no other tensor is allocated at their addresses.
        self._seen: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._changed: list[Tensor] = []

    def __str__(self) -> str:
        mebibytes = self.nbytes / 2**20
        return f"{self.rounded} roundings of weights for {self.used} products; they took {mebibytes:.1f} MiB at most"

    @property
    def nbytes(self) -> int:
        """The most bytes that the rounded weights took so far, not counting the weights themselves."""
        tensors = [tensor for entry in self._entries.values() for tensor in entry.made.tensors()]
        return max(self._most, sum({t.data_ptr(): t.nbytes for t in tensors}.values()))

    def clear(self) -> None:
        """Drop the rounded weights: they are rounded again when next used."""
        self._most = self.nbytes
        self._entries.clear()
        self._seen.clear()
        self._changed.clear()

    def weight(self, key: Hashable, weight: Any, x: Tensor, spec: LinearSpec, states: States, record: bool) -> Any:
        """The weight (out, in) for a matmul with x: a `RoundedWeight`, from the cache or rounded now. The weight itself
        if it is neither a parameter nor a view of one, or if each matmul rounds it with noise of its own.

        Args:
            key: identifies the layer and which of its matmuls this is.
        """
        if not has_memory(x) or not spec.rounds_weight_once:  # Dynamo evaluates only the first
            return weight
        parameter = weight if type(weight) is nn.Parameter else weight._base if type(weight) is Tensor else None
        if type(parameter) is not nn.Parameter or parameter.is_inference():
            return weight
        dtype, backward, written = product_dtype(x), torch.is_grad_enabled(), parameter._version
        key = key, weight.data_ptr(), weight.shape, weight.stride(), backward, record
        found, place = self._entries.get(key), (parameter.data_ptr(), written)
        if found is not None and (found.spec is not spec or found.dtype != dtype or found.written != written):
            found = None
        moved = found is not None and not self._stays(found)
        if found is None or moved:
            _, made = ops.rounded_weight(weight, spec, dtype, states, record, x, backward)
            sample = _sample(parameter)
            found = self._entries[key] = _Entry(spec, dtype, written, made, sample, sample.clone())
            self.rounded += 1
            if moved or place not in self._seen:
                self._seen[place] = parameter.detach(), _bits(parameter)
        self.used += 1
        return ops.RoundedWeight(weight, found.made)

    def _stays(self, entry: _Entry) -> bool:
        """Whether a sample of the weight's values is unchanged: this catches weights that are swapped through `.data`
        for an average and back. On a GPU the host does not wait: True, and `check` compares later."""
        if entry.sample.is_cpu:
            return torch.equal(entry.sample, entry.then)
        if entry.sample.device.type != "meta":
            self._changed.append((entry.sample != entry.then).any())
        return True

    def check(self) -> None:
        """Check that no weight was written to without a change of its version, which left matmuls with older values.

        Raises:
            ModelError: a weight was.
        """
        if capturing():  # the host cannot wait for a CUDA graph's capture
            return
        weights = [(t, before) for (_, version), (t, before) in self._seen.items() if t._version == version]
        changed = [before != _bits(t) for t, before in weights]
        if any(bool(torch.stack(found).any()) for found in (changed, self._changed) if found):
            shapes = sorted({tuple(t.shape) for (t, _), differs in zip(weights, changed, strict=True) if differs})
            raise ModelError(
                f"weights{f' of shapes {shapes}' if shapes else ''} were written to within halfstep.cached_weights "
                "where torch counts no write (through .data, numpy, or another library's kernel), and the products "
                "since took their older values. Write to them outside it, or call .clear() of what it gives after "
                "writing"
            )


@contextmanager
def cached_weights(model: nn.Module) -> Iterator[CachedWeights]:
    """A context in which layers round weights once for all forwards, until an optimizer steps or a weight changes.

    For forwards between which weights do not change: the micro-batches of a step (gradient accumulation), an
    evaluation, generation. Results are equal bit for bit; the rounded weights stay in memory until the context ends.

        with halfstep.cached_weights(model) as cached:
            for x, y in micro_batches:
                loss_fn(model(x), y).backward()
        print(cached)

    It covers layers whose weight is a matrix (nn.Linear, Conv1D, attention's projections) in modules that run eagerly.
    Weights that are rounded with noise are rounded for each matmul, as outside of it.

    Args:
        model: the model that `apply` or `prepare` was called on, or a wrapper of it.

    Raises:
        RecipeError: the model follows no recipe.
        ModelError: the model is sharded by `fully_shard`. When the context ends, or an optimizer steps: a weight was
            written to where torch counts no write (through `.data`), so that matmuls took older values.

    Warns:
        UserWarning: the recipe rounds weights, but none was rounded: torch.compile traced the model, or weights are
            computed in each forward.
    """
    root = root_of(model)
    applied_to(root)
    following = part_of(root).following
    if any(hasattr(module, "set_requires_gradient_sync") for module in model.modules()):  # of torch's FSDPModule
        raise ModelError(
            f"{type(root).__name__} is sharded by fully_shard, and halfstep.cached_weights would keep every rounded "
            "weight whole on every rank. Leave it out: weights are then rounded as they are gathered"
        )
    if following.cached is not None:  # within another one
        yield following.cached
        return
    cached = following.cached = CachedWeights()
    hooks = (
        register_optimizer_step_pre_hook(lambda *_: cached.check()),
        register_optimizer_step_post_hook(lambda *_: cached.clear()),
    )
    with hooks[0], hooks[1]:
        try:
            yield cached
            cached.check()
        finally:
            following.cached = None
    if not cached.used and any(
        own.linear is not None and own.linear.rounds_weight_once for _, _, own in parts_of(root)
    ):
        warnings.warn(
            "no weight was rounded within halfstep.cached_weights: the model was not called, is compiled "
            "(torch.compile), or its weights are computed in each forward (codes, parametrizations)",
            stacklevel=3,
        )
    cached.clear()


def _sample(weight: Tensor) -> Tensor:
    """A view of a few values, spread over the weight, as integers."""
    some = weight.detach()[tuple(slice(None, None, max(1, size // 4)) for size in weight.shape)]
    return some.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[some.itemsize])


@torch.no_grad()
def _bits(weight: Tensor) -> Tensor:
    """A checksum: the sum of a weight's bits, read as integers. Nearly every write changes it."""
    found = weight.detach().reshape(-1).view(torch.uint8)
    begin = min(-found.storage_offset() % 8, len(found))
    end = len(found) - (len(found) - begin) % 8
    return found[begin:end].view(torch.int64).sum() + found[:begin].sum() + found[end:].sum()


# ---- products of layers ----------------------------------------------------------------------------------------------


def product(
    module: Any,
    x: Tensor,
    weight: "Tensor | Operand | StoredWeight | FrozenWeight | ops.RoundedWeight",
    bias: Tensor | None,
    part: str = "",
    channels: Tensor | None = None,
) -> Tensor:
    """x w^T + b, rounded by the layer's spec (`ops.linear`); only calls that train the model record amaxes.

    Args:
        part: which of the layer's matmuls this is, if it has several.
        channels: as for `ops.linear`.
    """
    if isinstance(weight, FrozenWeight):

        def forward(x: Tensor, w: Operand, b: Tensor | None) -> Tensor:
            return product(module, x, w, b, part, channels)

        return _Frozen.apply(x, bias, weight, spec_of(module), key_of(module), forward)  # type: ignore[no-any-return, no-untyped-call]
    if hasattr(weight, "device_mesh"):
        localize(module)
    own, states = part_of(module), states_and_key(module, part)
    spec, following = own.linear or multipliers_of(module), own.following
    if following is None:
        return ops.linear(x, weight, bias, spec, states, False, channels, own.saved_codes)
    record, evaluates = following.modes(module)
    cached = following.cached
    used = weight if cached is None else cached.weight((module, part), weight, x, spec, states, record)
    return ops.linear(x, used, bias, spec, states, record, channels, own.saved_codes, evaluates, following.last_input)


def grouped_product(
    module: Any, name: str, x: Tensor, bias: Tensor | None, counts: Sequence[int], transposed: bool
) -> Tensor | None:
    """`ops.linear.grouped_linear` of x with the experts' matrices in the parameter `name`; None if it does not apply.

    Args:
        counts: the number of rows of x of each expert.
        transposed: the parameter is (experts, in, out), not (experts, out, in).
    """
    own, spec = part_of(module), spec_of(module)
    if own.stored or own.saved_codes is not None or not supports_grouped(spec, x):
        return None
    weight = ops.values_of(getattr(module, name))
    if type(weight) not in (Tensor, Parameter):
        return None
    evaluates = own.following is not None and own.following.modes(module)[1]
    return grouped_linear(x, weight.mT if transposed else weight, bias, counts, spec, evaluates)


def spec_of(module: Any) -> LinearSpec:
    """The layer's spec: how its matmuls round their operands, and their multipliers."""
    return part_of(module).linear or multipliers_of(module)


def records(module: Any) -> bool:
    """Whether this call trains the model, so that scaling states record amaxes."""
    following = part_of(module).following
    return following is not None and following.modes(module)[0]


def weight_of(module: Any, name: str, x: Tensor) -> Any:
    """The layer's parameter `name` for a matmul with x; an `Operand`, a `StoredWeight` or a `FrozenWeight` if the layer
    is quantized for inference."""
    if part_of(module).stored:
        return _stored(module, name, x)
    weight = getattr(module, name)
    return weight if type(weight) is Parameter else ops.values_of(weight)


def weights_of(module: Any, name: str, x: Tensor, experts: int) -> Sequence[Callable[[], Any]]:
    """For each expert, a function that returns `weight_of` of its matrix in the parameter `name`."""
    if part_of(module).stored:
        return [partial(_stored, module, name, x, expert) for expert in range(experts)]
    return [partial(ops.values_of, matrix) for matrix in ops.values_of(getattr(module, name)).unbind()]


def _stored(module: Any, name: str, x: Tensor, expert: int | None = None) -> Any:
    if part_of(module).adapts and torch.is_grad_enabled():
        like = x.new_empty(0, dtype=product_dtype(x))
        return FrozenWeight(lambda: _decoded(quantized_weight(module, name, like, expert)), rows_of(module, name))
    return quantized_weight(module, name, x, expert)


def repeated_weight(module: Any, name: str, x: Tensor, part: str) -> Any:
    """`weight_of` for matmuls of `part` with several tensors, x being one of them: rounded once for all, and with a
    gradient that is accumulated in float32."""
    weight = weight_of(module, name, x)
    if isinstance(weight, (Operand, StoredWeight, FrozenWeight)):
        return weight if isinstance(weight, FrozenWeight) else _decoded(weight)
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    if not has_memory(x, or_fake=True):  # a compiled graph removes what it would compute twice
        return weight
    states, dtype = states_and_key(module, part), product_dtype(x)
    return ops.rounded_weight(weight, spec_of(module), dtype, states, records(module), x)


def _decoded(weight: Operand | StoredWeight) -> Operand:
    return weight.operand() if isinstance(weight, StoredWeight) else weight


# ---- frozen weights of codes -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FrozenWeight:
    """A matrix (out, in) of a quantized layer, decoded whenever a matmul takes it: no decoded values are saved for
    backward."""

    operand: Callable[[], Operand]
    rows: int

    def t(self) -> "FrozenWeight":
        """The transposed matrix. It has no row count, so it cannot be sliced or split."""
        return FrozenWeight(lambda: self.operand().t(), 0)

    def __getitem__(self, rows: slice) -> "FrozenWeight":
        return FrozenWeight(lambda: self.operand()[rows], len(range(self.rows)[rows]))

    def split(self, rows: int) -> "tuple[FrozenWeight, ...]":
        """The matrix in pieces of `rows` rows each."""
        return tuple(self[start : start + rows] for start in range(0, self.rows, rows))


class _Frozen(torch.autograd.Function):
    """`forward(x, operand, bias)`, with gradients of x and bias. The input gradient's matmul follows the spec: it
    rounds the output's gradient, and the weight again if it rounds it otherwise than the forward matmul."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        weight: FrozenWeight,
        spec: LinearSpec,
        noise: Tensor | None,
        forward: Callable[..., Tensor],
    ) -> Tensor:
        ctx.states = {} if noise is None else {KEY: noise}
        ctx.weight, ctx.spec, ctx.dtypes = weight, spec, (x.dtype, None if bias is None else bias.dtype)
        return apart(forward(x, weight.operand(), bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        spec, grad_x, grad_bias = ctx.spec, None, None
        with torch.autocast(grad.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                weight, later = ctx.weight.operand(), spec.grad_input.rhs
                (seeds,) = seeds_of(ctx.states, grad, spec.grad_input)
                if "weight" in spec.rerounded:
                    weight = operand(weight.scaled(), later and later.down, grad.dtype, dim=0, seed=seeds.rhs)
                alone = LinearSpec(output=spec.grad_input)
                grad_x = ops.linear(grad, weight.t(), None, alone, ctx.states).to(ctx.dtypes[0])
            if ctx.needs_input_grad[1]:
                grad_bias = bias_gradient(matrix(grad), spec.grad_weight.multiplier).to(ctx.dtypes[1])
        return grad_x, grad_bias, None, None, None, None
