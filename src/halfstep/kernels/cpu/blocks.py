"""Tiles of a row that share a scale, to packed codes and scales or to values: `quant.Quantizer`, bit for bit.

One pass, piece by piece: the largest magnitudes, scales (`rules`), then every element over its scale, rounded
(`divided`). Only NVFP4 reads its tensor twice, as the scale of the whole comes first (`two_level`). Where there are
signs a piece is rotated first, and rounded while it is near: nothing is written in float32.
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
"""What is not rotated."""


def numbers_of(quantizer: Quantizer, columns: int) -> Any:
    """The `element_numbers` of blocks of rows of that many columns. None where the kernels here do not encode what this
    quantizer makes of them: they take whole blocks."""
    if quantizer.scales is None or quantizer.outliers is not None:
        return None
    tile = quantizer.scales.tile
    if tile.rows != 1 or tile.columns not in LEVELS or columns % tile.columns:
        return None
    return element_numbers(quantizer.format, quantizer.rounding, quantizer.scales.rule)


def values_of(quantizer: Quantizer, columns: int) -> Any:
    """What elements are rounded to values by: the numbers of a format, and a codebook's cuts. None where the kernels
    here do not make the values at once: they take blocks, and whole rows under a power of two each."""
    scales, format = quantizer.scales, quantizer.format
    if scales is None or scales.tile != ROW:
        wide = isinstance(format, Codebook) and format.bits == 8
        found = None if wide else numbers_of(quantizer, columns)
    else:
        known = quantizer.rounding == "nearest_even" and quantizer.outliers is None and scales.rule.exact
        found = element_numbers(format, quantizer.rounding, scales.rule) if known else None
    return None if found is None else (found[0], element_codes.cut_points(format, True))


def run(x: Tensor, tensors: dict[str, Tensor], quantizer: Quantizer, seed: Seed | None) -> bool:
    """Write what x is in these blocks to `tensors` (`codes`, `scale` ...), of their layout. False where that is not
    done here: it takes contiguous CPU tensors (fp32, bf16, fp16) whose rows are whole blocks."""
    format, scales = quantizer.format, quantizer.scales
    numbers = numbers_of(quantizer, x.shape[-1]) if plain(x) and x.dim() else None
    if numbers is None or not all(map(Tensor.is_contiguous, tensors.values())):
        return False
    assert scales is not None
    rule, scale, codes = scales.rule, tensors["scale"], array(tensors["codes"])
    stored = array(scale) if rule.narrow else scale.view(-1).numpy()
    coding = None
    if rule.two_level:
        ruled, coding = rules.rule_of(x, format, scales, tensors.get("tensor_scale")), rules.E4M3[1]
    else:
        ruled = ruled_by(format, rule)
    target = codes, *numbers, cuts_of(format), shifts(format)
    found = np.zeros(-(-x.numel() // CHUNK), np.uint32)
    tile = CHUNK, scales.tile.columns, levels(scales.tile)
    _tiles(x.numel(), array(x), *tile, *UPRIGHT, *ruled, None, coding, stored, found, *target, seed_keys(seed))
    return True


def takes_values(x: Tensor, out: Tensor) -> bool:
    """Whether values of `x` can be written to `out`: both plain, and apart in memory."""
    out_fits = plain(out, torch.float32, torch.bfloat16)
    return plain(x) and out_fits and x.data_ptr() != out.data_ptr() and separate(x, out)


def run_values(
    x: Tensor, out: Tensor, quantizer: Quantizer, seed: Seed | None, tensor_scale: Tensor | None = None
) -> bool | None:
    """Write what x, rounded in these blocks or rows, stands for to `out`, without making its codes.

    Returns whether some may be below 2^-126, but not 0: True where that was not checked. None where it is not done
    here: it takes contiguous CPU tensors of one shape, apart in memory. Of two levels of scales, a `tensor_scale`
    (float32 scalar) becomes the tensor's, and is left out of the values.
    """
    scales, numbers = quantizer.scales, values_of(quantizer, x.shape[-1]) if plain(x) and x.dim() else None
    if numbers is None or x.shape != out.shape or not takes_values(x, out):
        return None
    assert scales is not None
    tile, rule = scales.tile, scales.rule
    stored: Any = None if rule.exact or rule.two_level else np.empty(
        x.numel() // tile.columns, np.float32 if rule.quotient else np.uint16
    )  # fmt: skip
    sides = sides_of(tile, matrix_shape(tuple(x.shape))[1])
    how = *ruled_of(x, out, quantizer, seed, tensor_scale), stored, *numbers
    return round_values(array(x), array(out), sides, *how, seed_keys(seed)) or not rule.exact


def round_values(
    x: Any, out: Any, sides: Any, ruled: Any, apart: Any, stored: Any, numbers: Any, cuts: Any, keys: Any = None,
    rotation: Any = UPRIGHT,
) -> bool:  # fmt: skip
    """The same of `array`s, by what the functions here give of a tile, a rule and a format."""
    run, above = sides
    size = NEAR if rotation[0] is not None else max(CHUNK // run, 1) * run
    found = np.zeros(-(-x.size // size), np.uint32)
    target = stored, found, out, numbers, None, cuts, None
    _tiles(x.size, x, size, run, above, *rotation, *ruled, apart, None, *target, keys)
    return bool((found & rules.TINY).any())


def sides_of(tile: Tile, columns: int) -> Any:
    """A tile's length, and `levels` of it, None of a whole row."""
    return (max(columns, 1), None) if tile == ROW else (tile.columns, levels(tile))


def ruled_by(format: Format, rule: Scaling, values: bool = False) -> Any:
    """What `rules` takes of a rule that needs no look at the tensor."""
    if rule.exact:
        return power_scalars(format, rule), None, None, rules.steps_scalars(format) if values else None
    return None, np.float32(format.max), None, None


def ruled_of(
    x: Tensor, out: Tensor, quantizer: Quantizer, seed: Seed | None, tensor_scale: Tensor | None
) -> tuple[Any, Any]:
    """What `rules` takes for values of x in `out`, and `rules.apart` of them."""
    format, scales = quantizer.format, quantizer.scales
    assert scales is not None
    if not scales.rule.two_level:
        return ruled_by(format, scales.rule, values=True), None
    apart = rules.apart(format, seed, out.dtype, tensor_scale is not None)
    return rules.rule_of(x, format, scales, tensor_scale), apart


def cuts_of(format: Format) -> Any:
    """What codes of a codebook are found by; None of other formats."""
    by_place = isinstance(format, Codebook) and format.bits == 8
    return search(format) if by_place else element_codes.cut_points(format, False)


def levels(tile: Tile) -> tuple[np.uint32, ...]:
    """The binary logarithm of a block's size, as the length of a tuple: kernels know it when they are compiled."""
    return (np.uint32(0),) * LEVELS[tile.columns]


@cache
def element_numbers(format: Format, rounding: str, rule: Scaling) -> tuple[Any, Any] | None:
    """What elements under scales of that rule are rounded and coded by: `element_codes.scalars`; of a codebook None,
    and where its codes of 4 bits do not count up the codes by place. None in place of both where no kernel does it."""
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
    """Round whole tiles to `out`; what `rules.note` noted of them."""
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
