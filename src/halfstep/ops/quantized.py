"""A quantised tensor that knows the fast ways back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep import quant
from halfstep.kernels.cpu import operators
from halfstep.quant.cast import prepare_out


@dataclass(frozen=True, eq=False)
class Quantized(quant.Quantized):
    """Packed codes and scales: `quant.Quantized`, whose `dequantize` takes a kernel where one supports it.

    `.codes`, `.scale` and `.tensors` are plain tensors; `save_quantized` and `load_quantized` keep them in
    safetensors files.
    """

    def dequantize(self, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        result = prepare_out(self.shape, self.dtype, self.codes.device, out, dtype)
        if not torch.compiler.is_compiling():
            operators.dequantize_into(self, result)
            return result
        q, (names, tensors) = self.quantizer, zip(*self.tensors.items(), strict=True)
        s = q.scales
        rows, columns, rule = (s.tile.rows, s.tile.columns, s.rule.text) if s else (0, 0, None)
        torch.ops.halfstep.dequantize(
            list(tensors), list(names), result, q.format.key, rows, columns, rule, q.outliers, q.rounding
        )
        return result
