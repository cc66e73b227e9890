"""Matmuls on a GPU's FP8 and FP4 tensor cores against the exact ones: `halfstep doctor`, where there are such."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep import formats, quant
from halfstep.formats import Float, Format
from halfstep.kernels import scaled_mm, unit_kinds
from halfstep.kernels.selftest import Case, Outcome, outcome
from halfstep.quant import Quantized, Quantizer, Scales, get_quantizer
from halfstep.quant.pack import pack
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import ROW, TENSOR, Tile


_SIZES = ((1, 16, 16), (33, 64, 48))
_TILED_SIZES = ((4, 128, 128), (36, 384, 256), (128, 256, 48), (256, 384, 128))
"""Each way of scaling is tested at those that its tensor cores take."""
_TILES = {
    "1x128 x 128x128": ("fp8_1x128", "fp8_128x128"),
    "1x128 x 1x128": ("fp8_1x128", "fp8_1x128"),
    "128x128 x 1x128": ("fp8_128x128", "fp8_1x128"),
    "mxfp8_e4m3": ("mxfp8_e4m3", "mxfp8_e4m3"),
    "nvfp4": ("nvfp4", "nvfp4"),
}
_NONE = torch.empty(0, dtype=torch.float32, device="cpu")


def outcomes() -> Iterator[Outcome]:
    """Every way of scaling that the units of the first GPU take."""
    gpu = torch.device("cuda")
    for name in ("float8_e4m3fn", "float8_e5m2"):
        if scaled_mm.refusal(_current(formats.get(name), TENSOR), gpu) is None:
            yield outcome("fp8 units", name, lambda name: fp8_units(name, gpu))
    for name, (left, right) in _TILES.items():
        if scaled_mm.product_refusal(get_quantizer(left), get_quantizer(right), gpu) is None:
            yield outcome("units, tiles", name, lambda name: tiled_units(name, gpu))


def fp8_units(name: str, device: torch.device) -> Iterator[Case]:
    """The product by FP8 tensor cores: E4M3 on the right, `name` on the left; one scale a tensor, then one a row. Whole
    numbers, so that any order of summing gives the exact product: what is wrong here is a layout or a scale."""
    left, right = formats.get(name, Float), formats.get("float8_e4m3fn", Float)
    generator = torch.Generator().manual_seed(1)
    for rows, shared, across in _SIZES:
        draw = torch.randint(
            -8, 9, (2, max(rows, across), shared), generator=generator, dtype=torch.int64, device="cpu"
        ).float()
        lhs, rhs = quant.round_to(draw[0, :rows], left), quant.round_to(draw[1, :across], right)
        exact = (lhs.double() @ rhs.double().t()).float()
        scales = [torch.tensor(0.375, dtype=torch.float32, device="cpu")]
        if scaled_mm.refusal(_current(left, ROW), device) is None:
            scales.append(2.0 ** torch.arange(rows, dtype=torch.float32, device="cpu")[:, None])
        for scale in scales:
            a = Fp8(lhs.to(device, unit_kinds.dtype_of(left)), scale.to(device))
            b = Fp8(rhs.to(device, unit_kinds.dtype_of(right)).t(), torch.ones((), device=device, dtype=torch.float32))
            found = scaled_mm.run(a, b, None, torch.bfloat16)
            assert found is not None
            yield (exact * scale).bfloat16(), found.cpu(), _NONE, f"{rows}x{shared}x{across}, {scale.numel()} scales"


def _current(format: Format, tile: Tile) -> Quantizer:
    return Quantizer(format, scales=Scales(tile, get_scaling("current")))


class Fp8(NamedTuple):
    """An operand of `scaled_mm`."""

    values: Tensor
    scale: Tensor | None


def tiled_units(name: str, device: torch.device) -> Iterator[Case]:
    """The product of small whole numbers, each tile times a power of two of its own: exact in any order."""
    generator = torch.Generator().manual_seed(1)
    quantizers = [get_quantizer(format) for format in _TILES[name]]
    for rows, shared, across in _TILED_SIZES:
        if scaled_mm.misfit(quantizers[0], quantizers[1], (rows, shared, across)) is not None:
            continue
        sides = [_powers(q, size, shared, generator) for q, size in zip(quantizers, (rows, across), strict=True)]
        exact = sides[0].dequantize(torch.float64) @ sides[1].dequantize(torch.float64).t()
        there = [replace(one, tensors={key: part.to(device) for key, part in one.tensors.items()}) for one in sides]
        found = scaled_mm.run_tiled(there[0], there[1], None, torch.bfloat16)
        assert found is not None
        yield exact.float().bfloat16(), found.cpu(), _NONE, f"{rows}x{shared}x{across}"


def _powers(quantizer: Quantizer, rows: int, columns: int, generator: torch.Generator) -> Quantized:
    """Whole numbers of at most 4 times 1, 2 or 4, one power a tile; half of that where the tensor has a scale."""
    scales, format = quantizer.scales, quantizer.format
    assert scales is not None
    whole = torch.randint(-4, 5, (rows, columns), generator=generator, dtype=torch.int64, device="cpu").float()
    powers = torch.randint(0, 3, scales.tile.grid(rows, columns), generator=generator, dtype=torch.int64, device="cpu")
    tensors = {"codes": pack(quant.encode(whole, format), format.bits, format.high_nibble_first)}
    held = scales.rule.holds
    tensors["scale"] = 2.0**powers if held == "float32" else quant.encode(2.0**powers, formats.get(held))
    if scales.rule.two_level:
        tensors["tensor_scale"] = torch.tensor(0.5, dtype=torch.float32, device="cpu")
    return Quantized(quantizer, (rows, columns), torch.float32, tensors)
