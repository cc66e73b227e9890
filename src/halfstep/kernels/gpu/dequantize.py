"""Packed codes and the scales of their tiles back to values, on a GPU: `quant.Quantized.dequantize`, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep.formats import ocp
from halfstep.kernels.gpu import quantizers
from halfstep.kernels.gpu.cut import WARPS, Cut, cut
from halfstep.kernels.gpu.launch import KINDS, bits, functions, launch, lies_plain
from halfstep.kernels.gpu.quantizers import Meaning, Rule
from halfstep.quant import Quantizer
from halfstep.quant.scaling.double_absmax import MAP


_KNOWN = {"codes", "scale", "tensor_scale", "scale_scale", "scale_offset"}


def known(tensors: dict[str, Tensor], out: Tensor, quantizer: Quantizer) -> tuple[Cut, Rule, Meaning] | None:
    """What the kernel is compiled for; None where `run` does not write these values, wherever they are."""
    scales, format = quantizer.scales, quantizer.format
    if scales is None or tensors.keys() - _KNOWN or not lies_plain(out) or not out.numel():
        return None
    rule, meaning = quantizers.rule(format, scales.rule), quantizers.meaning(format)
    made = cut(tuple(out.shape), scales.tile, format.bits)
    if rule is None or meaning is None or made is None or not all(lies_plain(t, t.dtype) for t in tensors.values()):
        return None
    return (made, rule, meaning) if rule.kind != "power" or scales.rule.holds == "float8_e8m0fnu" else None


def run(tensors: dict[str, Tensor], out: Tensor, quantizer: Quantizer) -> bool:
    """Write the values of `tensors` (`codes`, `scale` ...) to `out`. False where that is not done here: it takes dense
    contiguous tensors, values in fp32, bf16 or fp16."""
    found, format = known(tensors, out, quantizer), quantizer.format
    if found is None:
        return False
    made, rule, meaning = found
    whole, group = tensors.get("tensor_scale", tensors.get("scale_offset")), tensors.get("scale_scale")
    coded: Any = quantizers.meaning(ocp.float8_e4m3fn)
    scale = coded.decoding if rule.kind == "two_level" else None
    launch(
        functions("restore").restore, made.blocks,
        bits(tensors["codes"]), bits(tensors["scale"]), None if whole is None else bits(whole),
        None if group is None else bits(group), quantizers.table(format, out.device),
        None if group is None else quantizers.table(MAP, out.device), bits(out), made.rows, made.columns // made.unit,
        device=out.device, warps=WARPS if made.unit > 1 else 2 * WARPS, R=rule, M=meaning,
        E=scale, TARGET=KINDS[out.dtype],
        OUT=None if out.dtype == torch.float32 else quantizers.written(out.dtype), H=made.tile[0], W=made.tile[1],
        UNIT=made.unit, ROWS=made.block[0], COLUMNS=made.block[1],
    )  # fmt: skip
    return True
