"""Packed codes and the scales of their tiles back to values, on a GPU: `quant.Quantized.dequantize`, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep.formats import ocp
from halfstep.kernels.gpu import quantizers
from halfstep.kernels.gpu.cut import WARPS, cut
from halfstep.kernels.gpu.launch import KINDS, bits, functions, launch, lies_plain
from halfstep.quant import Quantizer
from halfstep.quant.scaling.double_absmax import MAP


_KNOWN = {"codes", "scale", "tensor_scale", "scale_scale", "scale_offset"}


def takes(tensors: dict[str, Tensor], out: Tensor, quantizer: Quantizer) -> bool:
    """Whether `run` can write the values to `out`, wherever they are: dense and contiguous, fp32, bf16 or fp16."""
    scales, format = quantizer.scales, quantizer.format
    if scales is None or tensors.keys() - _KNOWN:
        return False
    rule = quantizers.rule(format, scales.rule)
    return (
        rule is not None
        and not (rule.kind == "power" and scales.rule.holds != "float8_e8m0fnu")
        and quantizers.meaning(format) is not None
        and lies_plain(out)
        and out.numel() > 0
        and all(lies_plain(t, t.dtype) for t in tensors.values())
        and cut(tuple(out.shape), scales.tile, format.bits) is not None
    )


def run(tensors: dict[str, Tensor], out: Tensor, quantizer: Quantizer) -> None:
    """Write the values of `tensors` (`codes`, `scale` ...) to `out`."""
    scales, format = quantizer.scales, quantizer.format
    assert scales is not None
    made: Any = cut(tuple(out.shape), scales.tile, format.bits)
    rule: Any = quantizers.rule(format, scales.rule)
    whole, group = tensors.get("tensor_scale", tensors.get("scale_offset")), tensors.get("scale_scale")
    coded: Any = quantizers.meaning(ocp.float8_e4m3fn)
    scale = coded.decoding if rule.kind == "two_level" else None
    launch(
        functions("restore").restore, made.blocks,
        bits(tensors["codes"]), bits(tensors["scale"]), None if whole is None else bits(whole),
        None if group is None else bits(group), quantizers.table(format, out.device),
        None if group is None else quantizers.table(MAP, out.device), bits(out), made.rows, made.columns // made.unit,
        device=out.device, warps=WARPS if made.unit > 1 else 2 * WARPS, R=rule, M=quantizers.meaning(format),
        E=scale, TARGET=KINDS[out.dtype],
        OUT=None if out.dtype == torch.float32 else quantizers.written(out.dtype), H=made.tile[0], W=made.tile[1],
        UNIT=made.unit, ROWS=made.block[0], COLUMNS=made.block[1],
    )  # fmt: skip
