"""Quantization in tiles of a row, to packed codes and scales or to values: `quant.Quantizer`, bit for bit.

One pass, piece by piece: amaxes, scales (`rules`), then every element divided by its scale and rounded (`divided`).
Only NVFP4 reads its tensor twice, as the tensor's scale is needed first (`two_level`). If signs are given, a piece is
rotated first and rounded while it is in the cache: no float32 result is written.
"""

from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from halfstep.formats import Codebook, Format
from halfstep.kernels.cpu import element_codes, rules
from halfstep.kernels.cpu.arrays import array, plain, separate
from halfstep.kernels.cpu.codes import pack, place, shifts
from halfstep.kernels.cpu.compiled import CHUNK, Kernel, inner_inlined, piece
from halfstep.kernels.cpu.divided import divided, search
from halfstep.kernels.cpu.noise import keys_at, seed_keys
from halfstep.kernels.cpu.rotated import NEAR, opened_piece
from halfstep.kernels.cpu.scales import largest_of, power_scalars
from halfstep.quant.quantizer import Quantizer, matrix_shape
from halfstep.quant.rounding import Seed
from halfstep.quant.scaling import Scaling
from halfstep.quant.tile import ROW, Tile


LEVELS = {16: 4, 32: 5, 64: 6, 128: 7, 256: 8}
UPRIGHT = (None,) * 4
"""The arguments of a rotation, for tiles that are not rotated."""


def code_constants(quantizer: Quantizer, columns: int) -> Any:
    """The `element_numbers` for rows of that many columns. None where no kernel here encodes for this quantizer: rows
    must be whole blocks."""
    if quantizer.scales is None or quantizer.outliers is not None:
        return None
    tile = quantizer.scales.tile
    if tile.rows != 1 or tile.columns not in LEVELS or columns % tile.columns:
        return None
    return element_numbers(quantizer.format, quantizer.rounding, quantizer.scales.rule)


def value_constants(quantizer: Quantizer, columns: int) -> Any:
    """The constants with which elements are rounded to values, and a codebook's cut points. None where no kernel here
    supports it: quantization must be in blocks, or in whole rows with one power of two each."""
    scales, format = quantizer.scales, quantizer.format
    if scales is None or scales.tile != ROW:
        wide = isinstance(format, Codebook) and format.bits == 8
        found = None if wide else code_constants(quantizer, columns)
    else:
        known = quantizer.rounding == "nearest_even" and quantizer.outliers is None and scales.rule.exact
        found = element_numbers(format, quantizer.rounding, scales.rule) if known else None
    return None if found is None else (found[0], element_codes.cut_points(format, True))


def run(x: Tensor, tensors: dict[str, Tensor], quantizer: Quantizer, seed: Seed | None) -> bool:
    """Write the tensors of `quantizer.quantize(x)` to `tensors` (`codes`, `scale` ...), which have its layout. False
    where no kernel supports it: all must be contiguous CPU tensors, x fp32, bf16 or fp16 with rows of whole blocks."""
    format, scales = quantizer.format, quantizer.scales
    numbers = code_constants(quantizer, x.shape[-1]) if plain(x) and x.dim() else None
    if numbers is None or not all(map(Tensor.is_contiguous, tensors.values())):
        return False
    assert scales is not None
    rule, scale, codes = scales.rule, tensors["scale"], array(tensors["codes"])
    stored = array(scale) if rule.narrow else scale.view(-1).numpy()
    coding = None
    if rule.two_level:
        ruled, coding = rules.rule_of(x, format, scales, tensors.get("tensor_scale")), rules.E4M3[1]
    else:
        ruled = rule_arguments(format, rule)
    target = codes, *numbers, cuts_of(format), shifts(format)
    found = np.zeros(-(-x.numel() // CHUNK), np.uint32)
    tile = CHUNK, scales.tile.columns, levels(scales.tile)
    _tiles(x.numel(), array(x), *tile, *UPRIGHT, *ruled, None, coding, stored, found, *target, seed_keys(seed))
    return True


def takes_values(x: Tensor, out: Tensor) -> bool:
    """Whether x and `out` are plain tensors of different storages, so that kernels can write values of x to `out`."""
    out_fits = plain(out, torch.float32, torch.bfloat16)
    return plain(x) and out_fits and x.data_ptr() != out.data_ptr() and separate(x, out)


def run_values(
    x: Tensor, out: Tensor, quantizer: Quantizer, seed: Seed | None, tensor_scale: Tensor | None = None
) -> bool | None:
    """Write x, quantized and dequantized, to `out`, without making codes.

    Returns whether nonzero values below 2^-126 may occur: True where that was not checked. None where no kernel
    supports it: x and out must be contiguous CPU tensors of one shape and different storages. With two levels of
    scales, if `tensor_scale` (float32 scalar) is given the tensor's scale is written to it and not applied to the
    values.
    """
    scales, numbers = quantizer.scales, value_constants(quantizer, x.shape[-1]) if plain(x) and x.dim() else None
    if numbers is None or x.shape != out.shape or not takes_values(x, out):
        return None
    assert scales is not None
    tile, rule = scales.tile, scales.rule
    stored: Any = None if rule.exact or rule.two_level else np.empty(
        x.numel() // tile.columns, np.float32 if rule.quotient else np.uint16
    )  # fmt: skip
    sides = sides_of(tile, matrix_shape(tuple(x.shape))[1])
    how = *tensor_rule_arguments(x, out, quantizer, seed, tensor_scale), stored, *numbers
    return round_values(array(x), array(out), sides, *how, seed_keys(seed)) or not rule.exact


def round_values(
    x: Any, out: Any, sides: Any, ruled: Any, apart: Any, stored: Any, numbers: Any, cuts: Any, keys: Any = None,
    rotation: Any = UPRIGHT,
) -> bool:  # fmt: skip
    """`run_values` on `array`s, with the constants that this file computes for a tile, a rule and a format."""
    run, above = sides
    size = NEAR if rotation[0] is not None else max(CHUNK // run, 1) * run
    found = np.zeros(-(-x.size // size), np.uint32)
    target = stored, found, out, numbers, None, cuts, None
    _tiles(x.size, x, size, run, above, *rotation, *ruled, apart, None, *target, keys)
    return bool((found & rules.TINY).any())


def sides_of(tile: Tile, columns: int) -> Any:
    """A tile's length, and its `levels`, or None for a whole row."""
    return (max(columns, 1), None) if tile == ROW else (tile.columns, levels(tile))


def rule_arguments(format: Format, rule: Scaling, values: bool = False) -> Any:
    """The arguments of `rules` for a rule that needs nothing of the tensor."""
    if rule.exact:
        return power_scalars(format, rule), None, None, rules.steps_scalars(format) if values else None
    return None, np.float32(format.max), None, None


def tensor_rule_arguments(
    x: Tensor, out: Tensor, quantizer: Quantizer, seed: Seed | None, tensor_scale: Tensor | None
) -> tuple[Any, Any]:
    """The arguments of `rules` for rounding x to values in `out`, and the `rules.apart` of them."""
    format, scales = quantizer.format, quantizer.scales
    assert scales is not None
    if not scales.rule.two_level:
        return rule_arguments(format, scales.rule, values=True), None
    apart = rules.apart(format, seed, out.dtype, tensor_scale is not None)
    return rules.rule_of(x, format, scales, tensor_scale), apart


def cuts_of(format: Format) -> Any:
    """The lookup table or cut points of a codebook; None for other formats."""
    by_place = isinstance(format, Codebook) and format.bits == 8
    return search(format) if by_place else element_codes.cut_points(format, False)


def levels(tile: Tile) -> tuple[np.uint32, ...]:
    """The binary logarithm of a block's size, as the length of a tuple, so that kernels are compiled for it."""
    return (np.uint32(0),) * LEVELS[tile.columns]


@cache
def element_numbers(format: Format, rounding: str, rule: Scaling) -> tuple[Any, Any] | None:
    """The constants with which elements are rounded and encoded, for scales of that rule: `element_codes.scalars`; for
    a codebook None, and its codes in order of value where 4-bit codes do not count up. None where no kernel supports
    it."""
    ruled = rule.quotient or rule.two_level or power_scalars(format, rule) is not None
    if not isinstance(format, Codebook):
        known = rounding in ("nearest_even", "stochastic") and (rule.narrow or ruled)
        return element_codes.in_bytes(format, rounding) if known else None
    if rounding != "nearest_even" or format.ties != "lower" or rule.exact:
        return None
    if format.bits == 8:
        return (None, None) if rule.quotient and search(format) is not None else None
    if format.bits != 4 or not ruled:
        return None
    order = element_codes.order_of(format)
    return None, order and tuple(map(np.uint32, order))


# ---- a piece -------------------------------------------------------------------------------------------------------


@inner_inlined
def round_piece(x, run, levels, rule, whole, up, steps, apart, coding, stored, out, numbers, codes, cuts, keys, at):
    """Quantize whole tiles to `out`; returns the flags of `rules.note`."""
    largest = largest_of(x, run, levels)
    divisor, beside = rules.room(largest.size, whole, stored)
    noted = rules.note(largest, rule, whole, up, steps, coding, stored, divisor, beside)
    if apart is not None:
        divided(x, divisor, beside, rules.steps_of(apart), run, levels, out, numbers, codes, cuts, keys, at)
    elif steps is None or keys is not None or noted & rules.FAR:
        divided(x, divisor, None, None, run, levels, out, numbers, codes, cuts, keys, at)
    else:
        divided(x, beside, None, steps, run, levels, out, numbers, codes, cuts, keys, at)
    return noted


@Kernel
def _tiles(
    x, size, run, levels, signs, norm, width, part, rule, whole, up, steps, apart, coding, stored, found, out, numbers,
    codes, cuts, shifts, seed,
):  # fmt: skip
    for i in numba.prange(found.size):
        a = i * size
        b = min(a + size, x.size)
        keys, kept, to = keys_at(seed, a), piece(stored, a // run, b // run), place(out, a, b, shifts)
        source = opened_piece(x[a:b], signs, norm, width, part)
        found[i] = round_piece(
            source, run, levels, rule, whole, up, steps, apart, coding, kept, to, numbers, codes, cuts, keys, None
        )
        pack(to, out, a, b, shifts)
