"""A matrix quantized twice in one pass, as it is and transposed: codes and scales of both, bit for bit.

FP8 and FP4 matmuls need both, in the forward and in the backward pass.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.cpu.elements import float_bits
from halfstep.kernels.gpu import KINDS, UNIT, functions, halves, is_dense, prepared, quantizers
from halfstep.kernels.gpu.blocks import Largest
from halfstep.kernels.units_mm import swizzled_size
from halfstep.quant import Quantizer
from halfstep.quant.quantizer import layout
from halfstep.quant.rounding import Seed
from halfstep.quant.tile import TENSOR


_SIDE = 128  # rows and columns of the square that a program quantizes
_STRIP = 32, 8
"""Rows that a program holds at a time, and its warps: with more rows, or fewer warps, registers would spill."""
_TWO_LEVELS, _CHOICE = (32, 16), (16, 8)
"""The same for two levels of scales, and for two levels where each tile has a choice of two scales."""
_CONVERTED = {"whole": (32, 8), "square": (64, 8), "along": (32, 4)}
"""The same where the GPU's own conversion makes the codes and rows are 16-byte aligned: the fastest of five on an H100.
A strip has at least as many rows as a row tile has columns, or that tile is as wide as the program's square."""
_PASSES = 64, 8
"""The same for `jit.layouts.both_by_passes`, whose pass along rows goes by strips: 64 registers a thread, for 32 warps
on each of Hopper's multiprocessors."""
_BY_PASSES = ((1, 32), (1, 128), (1, 0))
"""The tiles for that kernel. For squares of 128 it was no faster on an H200."""
_ALONG = _SQUARES = (0, 16, 32, 128)

_VARYING = 0, 4, 8, 9, 10
"""The kernel arguments that may be None, or of another alignment, from call to call: `x`, `found`, `turned_found`,
`factor` and `amax`. Outputs are freshly allocated, so always aligned."""

Tensors = dict[str, Tensor]
"""The tensors of one quantized copy: `codes`, `scale` ..."""


def constants(
    x: Tensor, quantizer: Quantizer, scale_given: bool = False
) -> tuple[quantizers.Rule, quantizers.Element] | None:
    """The constants with which kernels quantize x in both layouts. None where they do not support it, on any device: x
    must be a dense contiguous matrix, in tiles along rows, squares, whole rows, or with one scale per tensor, computed
    before (`scale_given`) or by the kernels. Stochastic rounding only where both copies have the same codes."""
    every = {4: 2, 6: 4}.get(quantizer.format.bits, 1)  # rows and columns must fill whole bytes
    if not is_dense(x) or x.dim() != 2 or not x.numel() or any(size % every for size in x.shape):
        return None
    return _constants(quantizer, scale_given)


@cache
def _constants(quantizer: Quantizer, scale_given: bool) -> tuple[quantizers.Rule, quantizers.Element] | None:
    if quantizer.scales is None:
        return None
    tile = quantizer.scales.tile
    along = tile.rows == 1 and tile.columns in _ALONG and quantizer.rounding != "stochastic"
    if not along and (tile.rows != tile.columns or tile.rows not in _SQUARES):
        return None
    if scale_given:
        coded = quantizers.element(quantizer.format, quantizer.rounding)
        if coded is None or coded.rounding is None or not quantizer.format.has_nan or tile != TENSOR:
            return None
        return quantizers.Rule("reciprocal", float_bits(quantizer.format.max)), coded
    found = quantizers.constants(quantizer)
    if found is None or found[1].bins is not None or (found[0].second is not None and tile.columns != _CHOICE[0]):
        return None  # the errors of a tile that is read in several strips are not summed
    return found if found[0].kind != "two_level" or (tile.rows and tile.columns) else None


def empty(x: Tensor, quantizer: Quantizer, form: str = "stored", outer: bool = False) -> tuple[Tensors, Tensors]:
    """Empty tensors for both quantized copies of a matrix (rows, columns); the second copy is transposed.

    Args:
        form: of scales: `stored`, as the quantizer keeps them; `number`, the float32 multiplier of elements;
            `swizzled`, as stored, in the order of `kernels.units_mm.swizzled`, padded with 0, with one for each row of
            a tile.
        outer: scales have stride 1 from row to row, as Hopper's tensor cores take those of 1x128 tiles.
    """
    both, tile = [], quantizer.tiling.tile
    for shape in (tuple(x.shape), tuple(x.shape)[::-1]):
        sizes: Any = layout(quantizer, shape, x.dtype)
        made = {name: torch.empty(size, dtype=dtype, device=x.device) for name, (dtype, size) in sizes.items()}
        (down, across), dtype = made["scale"].shape, torch.float32 if form == "number" else made["scale"].dtype
        if form == "swizzled":
            made["scale"] = x.new_zeros(swizzled_size(shape[0] if tile.rows else down, across), dtype=dtype)
        else:
            strides = (1, down) if outer else (across, 1)
            made["scale"] = torch.empty_strided((down, across), strides, dtype=dtype, device=x.device)
        both.append(made)
    return both[0], both[1]


def codes(
    x: Tensor,
    quantizer: Quantizer,
    seed: Seed | None,
    factor: Tensor | None,
    amax: Tensor | None = None,
    found: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The codes of x * factor, saturating, those of its transpose, and 1 / factor.

    Args:
        factor: a float32 scalar. Where it is 0 or None, max / amax is used (`quant.scaling.delayed.current`).
        amax: a float32 scalar that is raised to max |x|.
        found: max |x|, needed to compute such a factor.
    """
    both = _both(quantizer, tuple(x.shape), x.dtype, x.device, "whole", ((0, 0), (0, 0)), seed is not None)
    one, other = (torch.empty(shape, dtype=torch.uint8, device=x.device) for shape in (x.shape, x.shape[::-1]))
    scale = torch.empty((), dtype=torch.float32, device=x.device)
    both(x, (one, scale, None), (other, scale, None), found, None, factor, amax, seed)
    return one, other, scale


def run(x: Tensor, quantizer: Quantizer, along: Tensors, turned: Tensors, seed: Seed | None = None) -> None:
    """Write the tensors of `quantizer.quantize(x)` to `along` and those of x's transpose to `turned`: both made by
    `empty`, or with scales of any strides."""
    form, strides, one, other = laid(quantizer, along, turned)
    both = _both(quantizer, tuple(x.shape), x.dtype, x.device, form, strides, seed is not None)
    largest = Largest(quantizer, tuple(x.shape), x.dtype, x.device, both=True)
    both(x, one, other, *largest(x), seed=seed)


Copy = tuple[Tensor, Tensor, Tensor | None]
"""Codes, scales and the tensor's scale of one copy."""


def laid(quantizer: Quantizer, along: Tensors, turned: Tensors) -> tuple[str, tuple[Any, Any], Copy, Copy]:
    """The `form` of the scales of copies made by `empty`, their strides, and the two copies as kernels take them."""
    scale, turned_scale = along["scale"], turned["scale"]
    stored = layout(quantizer, (1, 1), torch.float32)["scale"][0]
    form = "swizzled" if scale.dim() == 1 else "stored" if scale.dtype == stored else "number"
    strides = ((0, 0), (0, 0)) if form == "swizzled" else (scale.stride(), turned_scale.stride())
    one, other = ((made["codes"], made["scale"], made.get("tensor_scale")) for made in (along, turned))
    return form, strides, one, other


class Both:
    """The launch that writes both quantized copies of matrices of one shape and dtype.

    Args:
        form: of scales, as in `empty`; `whole`: one scale per tensor, 1 / factor.
        strides: those of the scales of both copies.
        noisy: rounded stochastically.
    """

    def __init__(
        self,
        quantizer: Quantizer,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        form: str,
        strides: Sequence[Sequence[int]] = ((0, 0), (0, 0)),
        noisy: bool = False,
    ) -> None:
        self.tile = tile = quantizer.tiling.tile
        found = _constants(quantizer, form == "whole")
        assert found is not None
        rule, element = quantizers.constants_on(quantizer, device, dtype, found)
        units = [UNIT if size % UNIT == 0 else 1 for size in shape]
        plain = 1 not in units and not noisy
        strip, warps = _STRIP
        if rule.kind == "two_level":
            strip, warps = _TWO_LEVELS if rule.second is None else _CHOICE
        elif plain and element.instruction is not None:
            strip, warps = _CONVERTED["whole" if form == "whole" else "along" if tile.rows == 1 else "square"]
        kernel: Any = functions("layouts").both
        others = {"E": quantizers.e4m3() if rule.kind == "two_level" else None, "NOISY": noisy, "H": tile.rows}
        one_byte = element.bits == 8 and form != "whole" and rule.kind != "two_level"
        if plain and one_byte and (tile.rows, tile.columns) in _BY_PASSES:
            kernel, others, (strip, warps) = functions("layouts").both_by_passes, {}, _PASSES
        self._sizes = shape[0] // units[0], shape[1] // units[1]
        self._strides, self._grid = (*strides[0], *strides[1]), -(-shape[0] // _SIDE) * -(-shape[1] // _SIDE)
        self._launch = prepared(
            kernel, device, warps, as_bits=True, varying=_VARYING,
            R=rule, Q=element, SOURCE=KINDS[dtype], FORM=form, W=tile.columns, ROW_UNIT=units[0],
            UNIT=units[1], TALL=_SIDE, ROWS=strip, COLUMNS=_SIDE, **others,
        )  # fmt: skip

    def __call__(
        self,
        x: Tensor,
        along: Copy,
        turned: Copy,
        found: Tensor | None = None,
        turned_found: Tensor | None = None,
        factor: Tensor | None = None,
        amax: Tensor | None = None,
        seed: Seed | None = None,
    ) -> None:
        """Write both copies. `found`: the result of `blocks.Largest`, or max |x| for the form `whole`."""
        self._launch(
            self._grid, x, *along, found, *turned, turned_found, factor, amax, *self._sizes, *halves(seed),
            *self._strides,
        )  # fmt: skip


_both = lru_cache(maxsize=1024)(Both)
