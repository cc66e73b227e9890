"""A matrix in codes twice, as it lies and transposed, from one pass: `quant.Quantizer` of both, bit for bit.

It is what FP8 and FP4 products take of a tensor in a forward and a backward pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.gpu import quantizers
from halfstep.kernels.gpu.blocks import largest
from halfstep.kernels.gpu.cut import WARPS
from halfstep.kernels.gpu.launch import KINDS, bits, functions, halves, launch, lies_plain, plain
from halfstep.quant import Quantizer
from halfstep.quant.quantizer import layout
from halfstep.quant.rounding import Seed


_SIDE = 128  # of the square that a program takes
_STRIP = 32  # rows that it holds at a time
_CHOICE = 16  # and where it forms two scales a tile: with more, registers would spill
_ALONG = (0, 16, 32, 128)
_SQUARES = (0, 16, 32, 128)
_UNIT = 16

Tensors = dict[str, Tensor]
"""What is kept of one copy: `codes`, `scale` ..."""


def takes(x: Tensor, quantizer: Quantizer, given: bool = False) -> bool:
    """Whether `run` can write both copies of `x`, wherever it is: a dense contiguous matrix, in tiles along rows,
    squares, whole rows or one scale, which is `given` or not. By a seed only where both copies have the same codes."""
    if not (lies_plain(x) and x.dim() == 2 and x.numel() and quantizer.scales is not None):
        return False
    tile = quantizer.scales.tile
    shared = tile.rows == tile.columns
    if shared and tile.rows not in _SQUARES:
        return False
    if not shared and (tile.rows != 1 or tile.columns not in _ALONG or quantizer.rounding == "stochastic"):
        return False
    every = {4: 2, 6: 4}.get(quantizer.format.bits, 1)  # codes that fill their bytes
    if any(size % every for size in x.shape):
        return False
    if given:
        coded = quantizers.element(quantizer.format, quantizer.rounding)
        return (
            coded is not None
            and coded.rounding is not None
            and quantizer.format.has_nan
            and tile.rows == tile.columns == 0
        )
    told = quantizers.known(quantizer)
    if told is None or told[1].bins is not None or (told[0].second is not None and tile.columns != _CHOICE):
        return False  # of a tile that is read strip by strip, no sum is formed
    return told[0].kind != "two_level" or bool(tile.rows and tile.columns)


def supports(x: Tensor, quantizer: Quantizer, given: bool = False) -> bool:
    """Whether `run` can write both copies of `x`: a contiguous CUDA matrix."""
    return plain(x) and takes(x, quantizer, given)


def empty(x: Tensor, quantizer: Quantizer, form: str = "stored", outer: bool = False) -> tuple[Tensors, Tensors]:
    """Memory for both copies of a matrix (rows, columns), the second of which is transposed.

    Args:
        form: `stored`, scales as the quantizer keeps them; `number`, in float32 what elements are multiplied by;
            `swizzled`, as stored, in the order of `kernels.scale_layouts.swizzled`, the rest 0.
        outer: scales with the stride 1 from row to row: as Hopper's units take those of tiles of 1x128.
    """
    both = []
    for shape in (tuple(x.shape), tuple(x.shape)[::-1]):
        sizes: Any = layout(quantizer, shape, x.dtype)
        made = {name: torch.empty(size, dtype=dtype, device=x.device) for name, (dtype, size) in sizes.items()}
        (down, across), dtype = made["scale"].shape, torch.float32 if form == "number" else made["scale"].dtype
        if form == "swizzled":
            made["scale"] = x.new_zeros(-(-down // 128) * -(-across // 4) * 512, dtype=dtype)
        else:
            strides = (1, down) if outer else (across, 1)
            made["scale"] = torch.empty_strided((down, across), strides, dtype=dtype, device=x.device)
        both.append(made)
    return both[0], both[1]


def codes(
    x: Tensor, quantizer: Quantizer, seed: Seed | None, factor: Tensor, amax: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The codes of a matrix times `factor`, a float32 scalar, saturating, and the same transposed; `amax`, another, is
    raised to max |x|."""
    unscaled = replace(quantizer, scales=None)
    shapes = tuple(x.shape), tuple(x.shape)[::-1]
    sizes: list[Any] = [layout(unscaled, shape, x.dtype)["codes"] for shape in shapes]
    one, other = (torch.empty(size, dtype=dtype, device=x.device) for dtype, size in sizes)
    run(x, quantizer, {"codes": one}, {"codes": other}, seed, factor, amax)
    return one, other


def run(
    x: Tensor,
    quantizer: Quantizer,
    along: Tensors,
    turned: Tensors,
    seed: Seed | None = None,
    factor: Tensor | None = None,
    amax: Tensor | None = None,
) -> None:
    """Write what `quantizer.quantize(x)` keeps to `along`, and what it makes of the transpose to `turned`: both of
    `empty`, or with scales of any strides.

    With a `factor`, a float32 scalar, x times it is rounded and saturates, scales are left to the caller, and
    `amax`, another, is raised to max |x|.
    """
    scales, (rows, columns) = quantizer.scales, x.shape
    assert scales is not None
    tile = scales.tile
    told: Any = quantizers.known(quantizer)
    element = quantizers.element(quantizer.format, quantizer.rounding)
    rule = quantizers.Rule("given", 0) if factor is not None else told[0]
    found = turned_found = None
    if factor is None:
        found = largest(x, quantizer)
        turned_found = found if tile.rows == tile.columns else largest(x, quantizer.down)
    form = "stored"
    if factor is None:
        stored = layout(quantizer, tuple(x.shape), x.dtype)["scale"][0]
        form = "swizzled" if along["scale"].dim() == 1 else "stored" if along["scale"].dtype == stored else "number"
    flat = (0, 0)
    strides = [flat if form == "swizzled" or factor is not None else t["scale"].stride() for t in (along, turned)]
    units = [_UNIT if size % _UNIT == 0 else 1 for size in (rows, columns)]
    two_level = rule.kind == "two_level"  # with as many elements a thread as others, registers would spill
    coded = quantizers.e4m3() if two_level else None
    launch(
        functions("layouts").both, -(-rows // _SIDE) * -(-columns // _SIDE),
        bits(x), *_handed(along, factor), found, *_handed(turned, factor), turned_found, _cell(factor), _cell(amax),
        rows // units[0], columns // units[1], *halves(seed), *strides[0], *strides[1],
        device=x.device, warps=2 * WARPS if two_level and rule.second is None else WARPS, R=rule, Q=element, E=coded,
        SOURCE=KINDS[x.dtype], FORM=form, NOISY=seed is not None, H=tile.rows, W=tile.columns,
        ROW_UNIT=units[0], UNIT=units[1], TALL=_SIDE, ROWS=_STRIP if rule.second is None else _CHOICE, COLUMNS=_SIDE,
    )  # fmt: skip


def _handed(copy: Tensors, factor: Tensor | None) -> tuple[Any, Any, Any]:
    """Codes, scales and the tensor's scale of one copy, as a kernel takes them."""
    scale = None if factor is not None else _memory(copy["scale"])
    return bits(copy["codes"]), scale, _cell(copy.get("tensor_scale"))


def _memory(scale: Tensor) -> Tensor:
    """Scales of any strides, from where they start."""
    return bits(scale.as_strided((1,), (1,)))


def _cell(number: Tensor | None) -> Tensor | None:
    """The memory of one number."""
    return None if number is None else bits(number)
