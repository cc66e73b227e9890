"""Native FP8 and FP4 matmuls: whether tensor cores compute those of a recipe, and a linear layer of three such matmuls.

That layer equals `ops.linear_passes.Rounded` for the specs that it takes. It rounds each operand once for both of its
matmuls and decides everything else once for a layer's sizes, so that a pass is allocations, kernel launches and GEMMs.
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
from halfstep.ops.operand import factor_or_amax
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
    """Whether the device's FP8 or FP4 tensor cores compute every matmul whose operands the recipe rounds. The rest is
    emulated in 16 or 32 bits.

    Matmuls whose sizes are not multiples of 16 are always emulated (with tiles of 1x32 and 1x16, the shared dimension
    must be a multiple of 32; with tiles of 128, the shared dimension and a side in square tiles of 128, rows of 4).

    Args:
        return_reason: return (available, reason); the reason is empty if it is available.

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
    """Why the device's tensor cores do not compute a matmul; None if they do."""
    if product.accumulate is not None:
        return str(product.accumulate)
    return scaled_mm.product_refusal(product.lhs, product.rhs, device)


def gemm_dtype(product: Matmul, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the GEMM that emulates a matmul with a result in `dtype`: int8 if both operands are integers, whose
    sums are exact; float32 if an operand does not fit `dtype` exactly, or the device has no matrix units for `dtype`;
    else `dtype`."""
    if product.accumulate is not None:
        return torch.float32
    found = {operand_dtype(quantizer, dtype, device) for quantizer in (product.lhs, product.rhs)}
    if found == {torch.int8}:
        return torch.int8
    if product.folds:  # the integers of rhs; its scales are multiplied into lhs
        found.discard(torch.int8)
    return dtype if found == {dtype} and not carried.supports(dtype, device) else torch.float32


_ALIGNED = 4
"""Words of 4 bytes in the 16 bytes that kernels read at a time."""


class Scaled:
    """Allocates the scales of matrices of one shape and of their transposes, in the layout that tensor cores read:
    float32 in row or column order, or swizzled and padded with zeros."""

    def __init__(self, kind: Kind, tile: Tile, shape: tuple[int, int], device: torch.device) -> None:
        self._device, self._dtype, self._sizes = device, SHORT.get(kind, torch.float32), list[int]()
        shapes = shape, shape[::-1]
        grids: list[tuple[int, ...]] = [tile.grid(*each) for each in shapes]
        self.form, self.zeros, self.strides = "number", 0, [(across, 1) for _, across in grids]
        """`form`: the layout that kernels write; `zeros`: how many zeroed words of 4 bytes a call needs; `strides`: of
        the scales of the matrix, and of its transpose."""
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
        """The scales of the matrix and of its transpose, uninitialized, or views of `zeros` where padding is needed."""
        if zeros is not None and self.zeros:
            return torch.split(zeros.view(self._dtype), self._sizes)
        return [torch.empty_strided(*laid, dtype=self._dtype, device=self._device) for laid in self._laid]


class Rounding:
    """Rounds matrices of one shape and dtype for both of their matmuls: the codes and scales of the matrix, and those
    of its transpose, which a Hadamard transform with `signs`, if given, rotates first."""

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
            constants = turned.constants(torch.empty(shape, dtype=dtype, device="meta"), quantizer, signs)
            assert constants is not None
            self._turned = turned.BothTurned(
                quantizer, constants, len(signs), shape, dtype, device, form, strides, noisy
            )
            needed = self._turned.zeros
        else:
            self._both = layouts.Both(quantizer, shape, dtype, device, form, strides, noisy)
            if kind is not TENSORS:
                self._largest = Largest(quantizer, shape, dtype, device, both=True)
                needed = self._largest.zeros
        self._found = -(-needed // _ALIGNED) * _ALIGNED
        self.zeros = self._found + self._scales.zeros
        """How many zeroed int32 a call takes in `zeros`: for the amaxes, and for the padding of scales."""

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
            factor, amax, found = factor_or_amax(x, self._quantizer.format, self._rule, state, record, zeros)
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
    """The prepared kernels of a linear layer for one (rows, in, out) shape."""

    input: Rounding
    weight: Rounding
    grad_output: Rounding
    dtype: torch.dtype
    """The dtype of the matmuls' results."""
    draws: tuple[Matmul, Matmul] | None = None
    """The two backward matmuls if the gradient is rounded stochastically, else None."""

    def seeds(self, states: States, grad: Tensor) -> tuple[Seed | None, Seed | None]:
        """The seeds of the gradient's two stochastic roundings; None each where it is not rounded so."""
        if self.draws is None:
            return None, None
        one, other = (seed_of("stochastic", seeds.lhs, grad.device) for seeds in seeds_of(states, grad, *self.draws))
        return one, other

    def zeros(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """The zeros that the roundings of input and weight take, allocated by one kernel launch; None if none."""
        count, more = self.input.zeros, self.weight.zeros
        if not count + more:
            return None, None
        made = torch.zeros(count + more, dtype=torch.int32, device=device)
        return made[:count], made[count:]


def native_layer(spec: LinearSpec, x: Tensor, weight: Tensor, dtype: torch.dtype) -> NativeLayer | None:
    """The prepared kernels of a layer whose three matmuls, with results in `dtype`, run on tensor cores, each operand
    rounded once for both of its matmuls (`TensorCores.both`).

    None if no kernel takes x or the weight with its strides; if the spec has more than rounding, a stochastic gradient
    and a rotation of the weight gradient's operands; or if shapes or devices do not match: the usual path reports that.
    """
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
        constants = (
            layouts.constants(x, quantizer, scale_given=kind is TENSORS)
            if spun is None
            else turned.constants(x, quantizer, spun)
        )
        if constants is None:
            return None
        place = shape, dtype, device, quantizer, spun is None  # layers that share an input share its `Rounding`
        if place not in spec.known:
            spec.known[place] = Rounding(quantizer, kind, shape, dtype, device, spun)
        made.append(spec.known[place])
    draws = (spec.grad_input, spec.grad_weight) if noisy[2] else None
    return NativeLayer(made[0], made[1], made[2], dtypes[-1], draws)


class Native(Once):
    """The autograd Function of a native layer: y, an anchor (see `Rounded`), and the tensors saved for backward."""

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
        """Save the tensors and options that the backward reads."""
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
    """The gradients of x, weight and bias; None for those that `needs` leaves out."""
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
