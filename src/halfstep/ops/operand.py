"""One side of a product: rounded values in a dtype that matrix units take, and the scale of the whole tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halfstep import formats
from halfstep.errors import RecipeError
from halfstep.formats import Format
from halfstep.kernels import carried, scaled_mm
from halfstep.ops.casts import quantize, values
from halfstep.ops.quantized import Quantized
from halfstep.ops.scaled import amax_of, round_scaled
from halfstep.quant import Quantizer
from halfstep.quant.scaling import StatefulScaling
from halfstep.quant.tile import ROW, TENSOR


@dataclass(frozen=True, eq=False)
class Operand:
    """A matrix, `values` times `scale`: a float32 scalar, or one a row or column; None is 1.

    Values of at most 8 significant bits fit bfloat16 exactly, whatever power of two multiplies them: so operands in 8
    bits and less are carried in bf16, which matrix units multiply exactly, and the scale enters the product before its
    one rounding (`ops.matmul`). On a GPU with FP8 units they stay in 8 bits (`kernels.scaled_mm`).
    """

    values: Tensor
    scale: Tensor | None = None

    def t(self) -> Operand:
        """The transposed matrix."""
        return Operand(self.values.t(), None if self.scale is None else self.scale.t())

    def widened(self, dtype: torch.dtype) -> Operand:
        """The same operand for a product that FP8 units do not form: in `dtype` where its numbers fit."""
        if self.values.itemsize > 1:
            return self
        if self.scale is not None and self.scale.dim():
            return Operand(self.values.float() * self.scale)
        return Operand(self.values.to(_carrier(formats.get(self.values.dtype), dtype)), self.scale)


def operand(
    x: Tensor, quantizer: Quantizer | None, dtype: torch.dtype, state: Tensor | None = None, record: bool = False
) -> Operand:
    """The matrix `x` as one side of a product whose result comes in `dtype`.

    Args:
        x: (rows, columns).
        quantizer: how it is rounded; None leaves it as it is.
        dtype: the dtype that the product computes in, where values fit it exactly.
        state: of a stateful scaling (`quant.scaling.delayed`).
        record: raise the amax of x in the state.
    """
    if quantizer is None:
        return Operand(x.to(dtype))
    format, scaling = quantizer.format, quantizer.scaling
    if scaling is None:
        return Operand(values(x, quantizer, dtype=_carrier(format, dtype)))
    native = scaled_mm.dtype_of(format) if scaled_mm.refusal(quantizer, x.device) is None else None
    if quantizer.tile == TENSOR:
        factor = _factor(x, quantizer, state, record)
        if factor is not None:
            rounded = round_scaled(x, factor, format, quantizer.rounding, _carrier(format, dtype))
            return Operand(rounded if native is None else rounded.to(native), factor.reciprocal())
    elif native is not None:
        return _rows(x, quantizer, native)
    if scaling.name == "two_level":
        whole = quantize(x, quantizer)
        scale = whole.tensors["tensor_scale"]
        blocks = replace(whole, tensors=whole.tensors | {"tensor_scale": torch.ones_like(scale)})
        return Operand(Quantized.dequantize(blocks, _carrier(format, dtype, 4)), scale)
    return _blocks(x, quantizer, dtype)


def _factor(x: Tensor, quantizer: Quantizer, state: Tensor | None, record: bool) -> Tensor | None:
    """What all of x is multiplied by before it is rounded."""
    scaling = quantizer.scaling
    assert scaling is not None
    if not isinstance(scaling, StatefulScaling):
        amax = amax_of(x) if scaling.reads else x.new_zeros((), dtype=torch.float32)
        return scaling.factor(amax, quantizer.format)
    if state is None:
        raise RecipeError(
            f"{scaling.name} scaling needs the state of its operand: halfstep.apply keeps one beside each layer, and "
            "`ops.linear` takes them as `states`"
        )
    own = amax_of(x) if record or scaling.waits else None
    factor = scaling.in_use(state, own, quantizer.format)  # of this step, whatever happens to the state
    if record and own is not None:
        scaling.record(state, own)
    return factor


def _rows(x: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> Operand:
    """FP8 numbers, and the scale of each row (or column, where the tiles lie so)."""
    assert quantizer.scaling is not None
    if quantizer.tile != ROW:
        return _rows(x.t().contiguous(), quantizer.down, dtype).t()
    made = quantize(x, quantizer)
    return Operand(made.codes.view(dtype), quantizer.scaling.multiplier(made.tensors, quantizer.format).float())


def _blocks(x: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> Operand:
    """Tiles times their scales. A power of two moves no bit of a value; a scale with a mantissa takes float32's.

    bf16 matrix units of CPUs take subnormal numbers for zeros: where there are any, the product is float32's.
    """
    assert quantizer.scaling is not None
    assert quantizer.tile is not None
    if quantizer.tile.columns == 1 and quantizer.tile.rows != 1:  # kernels know tiles along rows
        return _blocks(x.t().contiguous(), quantizer.down, dtype).t()
    narrow = dtype == torch.bfloat16 and quantizer.scaling.exact and quantizer.format.significant_bits <= 8
    if not narrow or carried.supports(dtype, x.device):
        return Operand(values(x, quantizer, dtype=torch.promote_types(dtype, torch.float32)))
    carrier = values(x, quantizer, dtype=dtype)
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        magnitude = carrier.abs()
        if bool(((magnitude < torch.finfo(dtype).smallest_normal) & (magnitude > 0)).any()):
            return Operand(values(x, quantizer, dtype=torch.float32))
    return Operand(carrier)


def _carrier(format: Format, dtype: torch.dtype, scale_bits: int = 0) -> torch.dtype:
    """`dtype` if it holds the format's values, times scales of so many significant bits, exactly; else float32."""
    if dtype == torch.float64:
        return dtype
    info = torch.finfo(dtype)
    bits, room = format.significant_bits + scale_bits, 2.0 ** (15 if scale_bits else 0)
    smallest = info.smallest_normal if dtype == torch.bfloat16 else info.smallest_normal * info.eps
    fits = 2.0 ** (1 - bits) >= info.eps and format.max * room <= info.max and format.smallest / room >= smallest
    return dtype if fits else torch.float32
