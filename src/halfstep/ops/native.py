"""Products on tensor cores for their own format: whether a recipe's run there, and a linear layer of three such.

That layer is `ops.linear_passes.Rounded` where nothing else is asked of it, with operands rounded once for both of
their products and all decided once for its sizes: what is left of a pass are allocations, launches and products.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from halfstep.kernels import carried, scaled_mm
from halfstep.kernels.gpu import layouts, plain, turned
from halfstep.kernels.gpu.blocks import Largest
from halfstep.kernels.operator import unseen
from halfstep.kernels.units_mm import (
    NUMBERS,
    NV,
    ROWS_OF_128,
    SHORT,
    TENSORS,
    Kind,
    Side,
    dtype_of,
    kind_of,
    swizzled_size,
    units_mm,
)
from halfstep.ops.casts import operand_dtype, seed_of
from halfstep.ops.function import LastInput, Once, no_autocast, once
from halfstep.ops.linear_passes import RoundedSides, States, bias_gradient
from halfstep.ops.operand import yet_to_form
from halfstep.ops.part import seeds_of
from halfstep.ops.plain import matrix, unflatten
from halfstep.quant import Quantizer
from halfstep.quant.rounding import Seed
from halfstep.quant.tile import Tile
from halfstep.recipe import LinearSpec, Matmul, Recipe, get_recipe


@overload
def is_native_available(recipe: str | Recipe, device: str | torch.device = "cuda") -> bool: ...


@overload
def is_native_available(
    recipe: str | Recipe, device: str | torch.device = "cuda", *, return_reason: Literal[True]
) -> tuple[bool, str]: ...


def is_native_available(
    recipe: str | Recipe, device: str | torch.device = "cuda", *, return_reason: bool = False
) -> bool | tuple[bool, str]:
    """Whether every product of rounded operands in the recipe is formed by a GPU's FP8 or FP4 tensor cores there; else
    those that are not are carried in 16 or 32 bits.

    Products whose sides are not multiples of 16 are always carried (tiles of 1x32 and 1x16: the shared side, of 32;
    tiles of 128: the shared side and a side of squares, of 128, rows, of 4).

    Args:
        return_reason: return (available, reason), the reason empty where it is.

    >>> is_native_available("bf16-mixed", "cpu", return_reason=True)
    (False, 'bf16-mixed rounds no operand')
    """
    recipe, device = get_recipe(recipe), torch.device(device)
    rules = [rule for stage in recipe.by_stage for rule in stage.rules]
    products = {p for r in rules for p in (r.linear.output, r.linear.grad_input, r.linear.grad_weight)}
    rounded = [product for product in products if product.lhs is not None or product.rhs is not None]
    found = [scaled_mm.product_refusal(product.lhs, product.rhs, device) for product in rounded]
    refusals = {why for why in found if why is not None}
    refusals |= {str(product.accumulate) for product in products if product.accumulate is not None}
    reason = "; ".join(sorted(refusals)) if rounded else f"{recipe.name} rounds no operand"
    return (not reason, reason) if return_reason else not reason


def matmuls_text(spec: LinearSpec, dtype: torch.dtype, device: torch.device) -> str:
    """What computes a layer's three matmuls in `dtype` on a device: "native", or the dtypes that emulate them, and why.

    Native ones whose sizes do not fit the tensor cores (`is_native_available`) are emulated too.
    """
    products = (spec.output, spec.grad_input, spec.grad_weight)
    rounded = [product for product in products if product.lhs or product.rhs or product.accumulate]
    why = {_refusal(product, device) for product in rounded}
    if why == {None}:
        return "native"
    dtypes = dict.fromkeys(
        str(gemm_dtype(product, dtype, device)).removeprefix("torch.")
        for product in rounded
        if _refusal(product, device) is not None
    )
    native = "native and " if None in why else ""
    return f"{native}emulated in {' and '.join(dtypes)} ({'; '.join(sorted(filter(None, why)))})"


def _refusal(product: Matmul, device: torch.device) -> str | None:
    """Why tensor cores there do not compute a product; None where they do."""
    if product.accumulate is not None:
        return str(product.accumulate)
    return scaled_mm.product_refusal(product.lhs, product.rhs, device)


def gemm_dtype(product: Matmul, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the GEMM that emulates a product whose result comes in `dtype`: int8 of integers, whose sums are
    exact; float32 where an operand does not fit `dtype` exactly, or the device has no matrix units for that."""
    if product.accumulate is not None:
        return torch.float32
    found = {operand_dtype(quantizer, dtype, device) for quantizer in (product.lhs, product.rhs)}
    if found == {torch.int8}:
        return torch.int8
    if product.folds:  # integers of one side, whose scales the other one takes in
        found.discard(torch.int8)
    return dtype if found == {dtype} and not carried.supports(dtype, device) else torch.float32


_ALIGNED = 4
"""Numbers of 4 bytes in the 16 that kernels read at a time."""


class Scaled:
    """Memory for the scales of matrices of one shape and of their transposes, as tensor cores read them: float32
    numbers by rows or columns, or swizzled, filled up with zeros."""

    def __init__(self, kind: Kind, tile: Tile, shape: tuple[int, int], device: torch.device) -> None:
        self._device, self._dtype, self._sizes = device, SHORT.get(kind, torch.float32), list[int]()
        shapes = shape, shape[::-1]
        grids: list[tuple[int, ...]] = [tile.grid(*each) for each in shapes]
        self.form, self.zeros, self.strides = "number", 0, [(across, 1) for _, across in grids]
        """How kernels write them, how many zeros (of 4 bytes) a call needs, and the strides of both."""
        if kind is ROWS_OF_128:
            self.strides = [(1, down) for down, _ in grids]
        self._laid: list[Any] = list(zip(grids, self.strides, strict=True))
        if kind in SHORT:
            padded = [(rows, across) for (rows, _), (_, across) in zip(shapes, grids, strict=True)]
            self._sizes = [swizzled_size(*each) for each in padded]
            self.form, self.strides, self._laid = "swizzled", [(0, 0)] * 2, [((size,), (1,)) for size in self._sizes]
            if any(rows % 128 or across % 4 for rows, across in padded):
                self.zeros = sum(self._sizes) // 4

    def __call__(self, zeros: Tensor | None) -> Sequence[Tensor]:
        """Those of both; `zeros` where it needs some."""
        if zeros is not None and self.zeros:
            return torch.split(zeros.view(self._dtype), self._sizes)
        return [torch.empty_strided(*laid, dtype=self._dtype, device=self._device) for laid in self._laid]


class Rounding:
    """Rounds matrices of one shape and dtype for the two products that take them: codes and scales as they lie, and
    transposed, where there are `signs` rotated before."""

    def __init__(
        self,
        quantizer: Quantizer,
        kind: Kind,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        signs: Tensor | None = None,
    ) -> None:
        self._quantizer, self.kind, self._rule, self._device = quantizer, kind, quantizer.tiling.rule, device
        self._signs, self._dtype, bits = signs, dtype_of(quantizer.format), quantizer.format.bits
        self._shapes = [(rows, columns * bits // 8) for rows, columns in (shape, shape[::-1])]
        self._scales, noisy = Scaled(kind, quantizer.tiling.tile, shape, device), quantizer.rounding == "stochastic"
        form, strides = "whole" if kind is TENSORS else self._scales.form, self._scales.strides
        self._largest = self._turned = None
        needed = 1
        if signs is not None:
            told = turned.told(torch.empty(shape, dtype=dtype, device="meta"), quantizer, signs)
            assert told is not None
            self._turned = turned.BothTurned(quantizer, told, len(signs), shape, dtype, device, form, strides, noisy)
            needed = self._turned.zeros
        else:
            self._both = layouts.Both(quantizer, shape, dtype, device, form, strides, noisy)
            if kind is not TENSORS:
                self._largest = Largest(quantizer, shape, dtype, device, both=True)
                needed = self._largest.zeros
        self._found = -(-needed // _ALIGNED) * _ALIGNED
        self.zeros = self._found + self._scales.zeros
        """How many zeros a call may be given, for the largest magnitudes and for what fills scales up."""

    def __call__(
        self,
        x: Tensor,
        state: Tensor | None,
        record: bool,
        zeros: Tensor | None = None,
        seeds: tuple[Seed | None, Seed | None] = (None, None),
    ) -> tuple[Side, Side]:
        one, other = (torch.empty(shape, dtype=self._dtype, device=self._device) for shape in self._shapes)
        if self.kind is TENSORS:
            scale = torch.empty((), dtype=torch.float32, device=self._device)
            factor, amax, found = yet_to_form(x, self._quantizer.format, self._rule, state, record, zeros)
            self._both(x, (one, scale, None), (other, scale, None), found, None, factor, amax)
            return Side(one, self.kind, scale), Side(other, self.kind, scale)
        filled = None
        if self._scales.zeros:
            zeros = torch.zeros(self.zeros, dtype=torch.int32, device=self._device) if zeros is None else zeros
            filled = zeros[self._found :]
        scale, turned_scale = self._scales(filled)
        whole = turned_whole = None
        if self.kind is NV:
            whole, turned_whole = (torch.empty((), dtype=torch.float32, device=self._device) for _ in range(2))
        copies = (one, scale, whole), (other, turned_scale, turned_whole)
        if self._turned is not None and self._signs is not None:
            self._turned(x, self._signs, *copies, zeros, *seeds)
        elif self._largest is not None:
            found, turned_found = self._largest(x, zeros)
            self._both(x, *copies, found, turned_found, seed=seeds[0])
        return Side(one, self.kind, scale, whole), Side(other, self.kind, turned_scale, turned_whole)


class NativeLayer(NamedTuple):
    """What is decided for a layer of one size."""

    input: Rounding
    weight: Rounding
    grad_output: Rounding
    dtype: torch.dtype
    """Of the products."""
    draws: tuple[Matmul, Matmul] | None = None
    """The backward's products, where the gradient is rounded stochastically."""

    def seeds(self, states: States, grad: Tensor) -> tuple[Seed | None, Seed | None]:
        """Those of the gradient's two roundings."""
        if self.draws is None:
            return None, None
        one, other = (seed_of("stochastic", seeds.lhs, grad.device) for seeds in seeds_of(states, grad, *self.draws))
        return one, other

    def zeros(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Those of the input and of the weight, by one launch."""
        count, more = self.input.zeros, self.weight.zeros
        if not count + more:
            return None, None
        made = torch.zeros(count + more, dtype=torch.int32, device=device)
        return made[:count], made[count:]


def native_layer(spec: LinearSpec, x: Tensor, weight: Tensor, dtype: torch.dtype) -> NativeLayer | None:
    """A layer whose three products, in `dtype`, tensor cores compute of operands that are rounded once for two of them
    (`Units.both`). None where there is no kernel for x or the weight as it lies, or the recipe asks for more than
    rounding, noise in the gradient's and a rotation of the weight gradient's operands; or sizes or devices do not fit
    each other, of which the usual path tells."""
    if not (plain(x) and plain(weight)) or x.shape[-1] != weight.shape[1] or x.device != weight.device:
        return None
    rows, sizes = x.numel() // x.shape[-1], tuple(weight.shape)
    key = rows, sizes, x.dtype, weight.dtype, dtype, x.device
    if key not in spec.known:
        spec.known[key] = _decided(spec, rows, sizes, (x.dtype, weight.dtype, dtype), x.device)
    return spec.known[key]  # type: ignore[no-any-return]


def _decided(
    spec: LinearSpec, rows: int, sizes: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> NativeLayer | None:
    quantizers = spec.output.lhs, spec.output.rhs, spec.grad_input.lhs
    across, shared = sizes
    shapes = (rows, shared), (across, shared), (rows, across)
    rotation, noisy = spec.grad_weight.hadamard, [q is not None and q.rounding == "stochastic" for q in quantizers]
    if spec.multiplies or spec.estimates or any(noisy[:2]) or (spec.draws and not noisy[2]):
        return None
    signs = None if rotation is None else rotation.signs(device)
    made: list[Any] = []
    for quantizer, shape, dtype, spun in zip(quantizers, shapes, dtypes, (signs, None, signs), strict=True):
        assert quantizer is not None
        kind, x = kind_of(quantizer), torch.empty(shape, dtype=dtype, device="meta")
        if quantizer.clamp is not None or kind not in (TENSORS, *NUMBERS, *SHORT):
            return None
        whole = kind is TENSORS
        told = layouts.told(x, quantizer, given=whole) if spun is None else turned.told(x, quantizer, spun)
        if told is None:
            return None
        place = shape, dtype, device, quantizer, spun is None  # one for an input of several layers
        if place not in spec.known:
            spec.known[place] = Rounding(quantizer, kind, shape, dtype, device, spun)
        made.append(spec.known[place])
    draws = (spec.grad_input, spec.grad_weight) if noisy[2] else None
    return NativeLayer(made[0], made[1], made[2], dtypes[-1], draws)


class Native(Once):
    """y, a number that depends on whatever y does (`Rounded`), and what the backward takes."""

    outputs = 2

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: NativeLayer,
        states: States,
        record: bool,
        rounded: RoundedSides | None,
        last: LastInput | None,
    ) -> tuple[Tensor | None, ...]:
        rows = x if x.dim() == 2 else matrix(x)
        with no_autocast(x), unseen():
            zeros, more = layer.zeros(x.device)
            found = None if last is None else last.find(x, layer.input)
            lhs, lhs_turned = found or layer.input(rows, states.get("input"), record, zeros)
            if last is not None and found is None:
                last.note(x, layer.input, (lhs, lhs_turned))
            both = partial(layer.weight, weight, states.get("weight"), record, more)
            rhs, rhs_turned = both() if rounded is None else rounded.native(both)
            y = units_mm(lhs, rhs, None if bias is None else bias.to(layer.dtype), layer.dtype)
        y = y if x.dim() == 2 else unflatten(y, x)
        return y, y.new_empty(()), *_kept(lhs_turned), *_kept(rhs_turned)

    @staticmethod
    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        """Save what the backward takes."""
        x, weight, bias, layer, states, record, *_ = inputs
        ctx.set_materialize_grads(False)
        ctx.layer = layer, states, record, x.shape, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.save_for_backward(*output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return *once(_form, grads[0], ctx.needs_input_grad[:3], ctx.layer, *ctx.saved_tensors), *[None] * 5


def _kept(side: Side) -> tuple[Tensor | None, ...]:
    return side.codes, side.scale, side.whole


def _form(grad: Tensor, needs: tuple[bool, ...], given: tuple[Any, ...], _: Tensor, *kept: Any) -> Any:
    """The gradients of x, weight and bias, as far as they are needed."""
    layer, states, record, shape, dtypes = given
    rows = (grad if grad.dim() == 2 else matrix(grad)).contiguous().resolve_neg()
    grad_x = grad_weight = grad_bias = None
    with no_autocast(rows):
        if needs[0] or needs[1]:
            lhs, later = layer.grad_output(rows, states.get("grad_output"), record, None, layer.seeds(states, grad))
        if needs[0]:
            rhs = Side(kept[3], layer.weight.kind, *kept[4:])
            grad_x = units_mm(lhs, rhs, None, layer.dtype).view(shape).to(dtypes[0])
        if needs[1]:
            rhs = Side(kept[0], layer.input.kind, *kept[1:3])
            grad_weight = units_mm(later, rhs, None, layer.dtype).to(dtypes[1])
        if needs[2]:
            grad_bias = bias_gradient(rows, None).to(dtypes[2])
    return grad_x, grad_weight, grad_bias
