"""Every Triton kernel of rotations against the reference, bit for bit: cases of `selftest_gpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from halfstep import formats, quant
from halfstep.kernels.gpu import layouts, rotated, turned
from halfstep.kernels.selftest import Case, words
from halfstep.kernels.selftest_gpu_tiles import cell, hard_matrix
from halfstep.quant import Hadamard, Quantized, Quantizer, Scales, get_quantizer
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import block


_SEED = 0x9E3779B97F4A7C15
_NONE = torch.empty(0, dtype=torch.float32, device="cpu")
_MXFP4 = Quantizer(formats.get("e2m1fn"), "stochastic", scales=Scales(block(32), get_scaling("rceil")))
_SPUN: dict[str, tuple[Quantizer, Hadamard]] = {
    "nvfp4 1x16, NVFP4's signs": (replace(get_quantizer("nvfp4"), rounding="stochastic"), Hadamard()),
    "mxfp4 1x32, 64 signs": (_MXFP4, Hadamard(64, 5)),
    "nvfp4 1x16 up, 32 signs": (get_quantizer("nvfp4", scale="two_level_up"), Hadamard(32, 5)),
    "mxfp6 1x32, 32 signs": (get_quantizer("mxfp6_e2m3"), Hadamard(32, 7)),
    "fp8 1x4 absmax, 8 signs": (
        Quantizer(formats.get("float8_e4m3fn"), scales=Scales(block(4), get_scaling("absmax"))),
        Hadamard(8, 1),
    ),
    "nvfp4 1x16 four_over_six, NVFP4's signs": (
        get_quantizer("nvfp4", scale="four_over_six", rounding="stochastic"),
        Hadamard(),
    ),
}
"""The quantizers of the recipes that rotate first, and others; tiles along rows."""
_TURNED = ("fp8 1x4 absmax, 8 signs", "nvfp4 1x16, NVFP4's signs", "nvfp4 1x16 up, 32 signs", "mxfp6 1x32, 32 signs")
_INPUTS = ((torch.bfloat16, (0, 512)), (torch.float32, (3, 45)))
"""Dtypes, rows beyond a block of the rotation, columns: whole blocks of a whole program, and short ones both ways."""


def matrix(shape: tuple[int, int], dtype: torch.dtype, quantizer: Quantizer) -> Tensor:
    """Hard numbers, few of which are not finite: a rotation spreads them over its block."""
    x = hard_matrix(shape, dtype, quantizer)
    small = torch.where(x.abs() < 1e30, x, 1.0) if dtype != torch.float16 else x.nan_to_num(1.0, 1.0, 1.0)
    small[:2, :3], small[-1, -1] = x[:2, :3], torch.inf
    return small


def rotations(x: Tensor, hadamard: Hadamard, device: torch.device) -> Iterator[Case]:
    """The transform alone, both ways."""
    signs = hadamard.signs()
    for dim in (0, 1):
        if (found := rotated.run(x.to(device), signs.to(device), dim)) is not None:
            yield quant.rotate(x, signs, dim), found.cpu(), _NONE, words(x)


def valued(x: Tensor, quantizer: Quantizer, hadamard: Hadamard, device: torch.device) -> Iterator[Case]:
    """Values both ways, of three quarters and of all, with the tensor's scale and without."""
    signs, seed = hadamard.signs(), _SEED if quantizer.rounding == "stochastic" else None
    there = x.to(device), signs.to(device)
    assert quantizer.scales is not None
    two_level = quantizer.scales.rule.two_level
    for dim, dtype, part in ((0, torch.bfloat16, 0.75), (1, x.dtype, 1.0)):
        own = quantizer if dim else quantizer.down
        if (told := rotated.told(x, signs, dim, own)) is None:
            continue
        wide = quant.rotate(x, signs, dim) * part
        upright = dim or two_level
        expected = own.quantize(wide, seed) if upright else quantizer.quantize(wide.t().contiguous(), seed)
        values = expected.dequantize(dtype)
        found = rotated.run_values(*there, dim, own, told, seed, dtype, part)
        yield values if upright else values.t(), found.cpu(), _NONE, words(x, f"dim {dim}", str(dtype))
        if two_level:
            scale = torch.zeros((), device=device, dtype=torch.float32)
            found = rotated.run_values(*there, dim, own, told, seed, torch.float32, part, scale)
            apart = expected.tensors | {"tensor_scale": torch.ones((), dtype=torch.float32, device="cpu")}
            yield expected.tensors["tensor_scale"], scale.cpu(), _NONE, words(x, f"dim {dim}", "tensor's scale")
            values = Quantized(own, expected.shape, torch.float32, apart).dequantize()
            yield values, found.cpu(), _NONE, words(x, f"dim {dim}", "without the tensor's scale")


def coded(x: Tensor, quantizer: Quantizer, hadamard: Hadamard, device: torch.device) -> Iterator[Case]:
    """Codes and scales both ways: down columns, the transposed matrix's."""
    signs, seed = hadamard.signs(), _SEED if quantizer.rounding == "stochastic" else None
    for dim in (0, 1):
        if (told := rotated.told(x, signs, dim, quantizer, turned=True)) is not None:
            wide = quant.rotate(x, signs, dim)
            expected = quantizer.quantize(wide if dim else wide.t().contiguous(), seed).tensors
            shape, found = rotated.run_codes(x.to(device), signs.to(device), dim, quantizer, told, seed)
            assert shape == tuple(wide.shape if dim else wide.t().shape)
            for key, tensor in found.items():
                yield expected[key], tensor.cpu(), _NONE, words(x, key, f"dim {dim}")


def both(x: Tensor, quantizer: Quantizer, hadamard: Hadamard, device: torch.device) -> Iterator[Case]:
    """Codes and scales as the matrix lies, and of its rotated columns, by a seed each: one is in the GPU's memory."""
    signs, stochastic = hadamard.signs(), quantizer.rounding == "stochastic"
    if (told := turned.told(x, quantizer, signs)) is not None:
        made = layouts.empty(x.to(device), quantizer)
        seeds = (cell(_SEED, device), 7) if stochastic else ()
        turned.run(x.to(device), quantizer, told, signs.to(device), *made, *seeds)
        one = quantizer.quantize(x, _SEED if stochastic else None).tensors
        other = quantizer.quantize(quant.rotate(x, signs, 0).t().contiguous(), 7 if stochastic else None).tensors
        for expected, found, which in ((one, made[0], "as it lies"), (other, made[1], "rotated")):
            for key, tensor in found.items():
                yield expected[key], tensor.cpu(), _NONE, words(x, key, which)


def _rotations(name: str, device: torch.device) -> Iterator[Case]:
    quantizer, hadamard = get_quantizer("mxfp4"), Hadamard(int(name), 3)
    for dtype, (beyond, columns) in (*_INPUTS, (torch.float16, (1, 80))):
        yield from rotations(matrix((hadamard.size + beyond, columns), dtype, quantizer), hadamard, device)


def _each(
    test: Callable[[Tensor, Quantizer, Hadamard, torch.device], Iterator[Case]], name: str, device: torch.device
) -> Iterator[Case]:
    quantizer, hadamard = _SPUN[name]
    for dtype, (beyond, columns) in _INPUTS:
        yield from test(matrix((hadamard.size + beyond, columns), dtype, quantizer), quantizer, hadamard, device)


def _valued(name: str, device: torch.device) -> Iterator[Case]:
    return _each(valued, name, device)


def _coded(name: str, device: torch.device) -> Iterator[Case]:
    return _each(coded, name, device)


def _both(name: str, device: torch.device) -> Iterator[Case]:
    quantizer, hadamard = _SPUN[name]
    for dtype, (rows, columns) in ((torch.bfloat16, (64, 160)), (torch.float32, (32, 144)), (torch.float16, (32, 48))):
        yield from both(matrix((rows, columns), dtype, quantizer), quantizer, hadamard, device)


TESTS: tuple[tuple[str, tuple[str, ...], Callable[[str, torch.device], Iterator[Case]]], ...] = (
    ("rotated", ("16", "8", "64"), _rotations),
    ("rotated values", tuple(_SPUN), _valued),
    ("rotated codes", tuple(_SPUN), _coded),
    ("rotated and as it lies", _TURNED, _both),
)
