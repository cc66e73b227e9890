"""Products of a few rows, in evaluation: of a token that a model generates, with weights in codes or rounded anew.

Both sum in the order of `kernels.cpu.few_rows`, whatever the weight is stored as. So a model that is quantised for
inference computes what it computed in evaluation, bit for bit, at the speed at which its codes are read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halfstep.kernels.cpu import few_rows
from halfstep.ops.casts import Quantized
from halfstep.ops.operand import Operand, decoded, is_whole, scale_of
from halfstep.recipe import Matmul


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """A matrix (out, in) in codes, whose rows a product decodes as it needs them; `dtype` is the product's."""

    quantized: Quantized
    dtype: torch.dtype
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns."""
        return self.quantized.shape[::-1] if self.transposed else self.quantized.shape

    def operand(self) -> Operand:
        """All of it, decoded."""
        matrix = decoded(self.quantized, self.dtype)
        return matrix.t() if self.transposed else matrix

    def t(self) -> StoredWeight:
        """The transposed matrix."""
        return replace(self, transposed=not self.transposed)

    def __getitem__(self, rows: slice) -> Operand:
        return self.operand()[rows]

    def split(self, rows: int) -> tuple[Operand, ...]:
        """The matrix in pieces of so many rows."""
        return self.operand().split(rows)


def supports(lhs: Operand, shape: tuple[int, ...], product: Matmul) -> bool:
    """Whether the product of lhs (rows, in) and a weight of that shape (out, in), which `product` rounds, is one of few
    rows here. It hangs on nothing that is otherwise in inference than in evaluation."""
    values, quantizer = lhs.values, product.rhs
    return (
        0 < len(values) <= few_rows.ROWS
        and quantizer is not None
        and quantizer.clamp is None
        and product.accumulate is None
        and product.hadamard is None
        and lhs.remainder is None
        and (lhs.scale is None or lhs.scale.dim() == 0)
        and values.device.type == "cpu"
        and values.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and (torch.compiler.is_compiling() or not hasattr(values, "fake_mode"))
        and few_rows.knows(quantizer.plain, *shape)
    )


def few_rows_product(
    lhs: Operand, weight: Operand | StoredWeight, bias: Tensor | None, dtype: torch.dtype, multiplier: float | None
) -> Tensor:
    """lhs (rows, in) times the transpose of the weight (out, in), times `multiplier`, plus bias (out): in `dtype`,
    rounded once from float32."""
    x = lhs.values.to(torch.float32).contiguous()
    bias = None if bias is None else bias.detach().float().contiguous()
    if isinstance(weight, StoredWeight) and not weight.transposed and not torch.compiler.is_compiling():
        quantizer, tensors = weight.quantized.quantizer, weight.quantized.tensors
        scale = scale_of(lhs, Operand(x, _scale(weight.quantized)))
        stored = None if is_whole(quantizer) else tensors.get("scale")
        out = torch.empty(len(x), weight.quantized.shape[0], dtype=dtype)
        given = x, tensors["codes"], stored, quantizer, few_rows.factor(scale, multiplier), bias, out
        if few_rows.supports(x, out, tensors["codes"], stored) and few_rows.run(*given):
            return out
    matrix = weight.operand() if isinstance(weight, StoredWeight) else weight
    values, scale = matrix.values.contiguous(), scale_of(lhs, matrix)
    out = torch.empty(len(x), len(values), dtype=dtype)
    if torch.compiler.is_compiling():
        torch.ops.halfstep.few_rows(x, values, scale, multiplier, bias, out)
    else:
        few_rows.run_values(x, values, few_rows.factor(scale, multiplier), bias, out)
    return out


def _scale(quantized: Quantized) -> Tensor | None:
    """What the product of a stored weight is multiplied by."""
    quantizer, tensors = quantized.quantizer, quantized.tensors
    if is_whole(quantizer):
        assert quantizer.scales is not None
        return quantizer.scales.rule.multiplier(tensors, quantizer.format).view(())
    return tensors.get("tensor_scale")
