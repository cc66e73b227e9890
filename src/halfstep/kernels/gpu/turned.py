"""A matrix quantized as it is, and its rotated transpose quantized, in one pass.

The first is `quantizer.quantize(x)`, the second that of the transpose of `quant.rotate(x, signs, 0)`, bit for bit: FP4
matmuls need both of a tensor whose second matmul is rotated. Two levels of scales take a pass before, for both amaxes.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.cpu.elements import float_bits
from halfstep.kernels.cpu.rotated import LEVELS
from halfstep.kernels.gpu import KINDS, UNIT, functions, halves, is_dense, layouts, prepared, quantizers
from halfstep.quant import Quantizer
from halfstep.quant.rounding import Seed


_STRIP, _LONGEST = 1 << 10, 32  # elements of a program (one warp, so it never synchronizes), and its most rows
_VARYING = 0, 7, 8
"""The arguments that differ between calls or may begin elsewhere: `x`, `found` and `raised`."""


def constants(x: Tensor, quantizer: Quantizer, signs: Tensor) -> tuple[quantizers.Rule, quantizers.Element] | None:
    """The constants with which kernels quantize x. None where `run` does not support it: x must be a dense contiguous
    matrix with sizes that are multiples of 16 and rows that fill blocks of the rotation, in tiles along its rows that
    are no longer than these blocks."""
    size, scales, found = len(signs), quantizer.scales, quantizers.constants(quantizer)
    if not (is_dense(x) and is_dense(signs, torch.float32) and x.dim() == 2 and x.numel()):
        return None
    if found is None or scales is None or found[0].second is not None or found[1].bins is not None:
        return None
    along = scales.tile.rows == 1 and scales.tile.columns in LEVELS and scales.tile.columns <= size
    whole = size in LEVELS and size <= _LONGEST and x.shape[0] % size == 0 and not any(n % UNIT for n in x.shape)
    return found if along and whole else None


def run(
    x: Tensor,
    quantizer: Quantizer,
    constants: tuple[quantizers.Rule, quantizers.Element],
    signs: Tensor,
    along: layouts.Tensors,
    turned: layouts.Tensors,
    seed: Seed | None = None,
    turned_seed: Seed | None = None,
) -> None:
    """Write the tensors of `quantizer.quantize(x)` to `along`, and those of the transpose of `quant.rotate(x, signs,
    0)` to `turned`, with a seed each: both made by `layouts.empty`, stored or swizzled. `constants`: the kernels'
    constants."""
    form, strides, one, other = layouts.laid(quantizer, along, turned)
    both = _both(quantizer, constants, len(signs), tuple(x.shape), x.dtype, x.device, form, strides, seed is not None)
    both(x, signs, one, other, None, seed, turned_seed)


class BothTurned:
    """The launches that write both copies of matrices of one shape and dtype.

    Args:
        constants: those that `constants` returns for the quantizer.
        size: of a block of the rotation.
        form, strides, noisy: as for `layouts.Both`.
    """

    def __init__(
        self,
        quantizer: Quantizer,
        constants: tuple[quantizers.Rule, quantizers.Element],
        size: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        form: str,
        strides: Sequence[Sequence[int]],
        noisy: bool,
    ) -> None:
        scales, (rows, columns) = quantizer.tiling, shape
        two_level, high = constants[0].kind == "two_level", max(size, UNIT)
        self._device, self.zeros = device, 2 if two_level else 0
        """The size of the zeros that a call may pass, to be raised by atomic max."""
        self._grid = -(-rows // high) * -(-columns // (_STRIP // high))
        self._sizes, self._strides = (rows // UNIT, columns // UNIT), (*strides[0], *strides[1])
        options: dict[str, Any] = {
            "R": constants[0], "SOURCE": KINDS[dtype], "FORM": form, "FACTOR": float_bits(math.sqrt(1 / size)),
            "LEVELS": LEVELS[size], "W": scales.tile.columns, "UNIT": UNIT, "ROWS": high, "COLUMNS": _STRIP // high,
        }  # fmt: skip
        kernel = functions("rotated").both_turned
        coded = {"Q": constants[1], "E": quantizers.e4m3() if two_level else None, "NOISY": noisy}
        self._write = prepared(kernel, device, 1, as_bits=True, varying=_VARYING, **coded, **options)
        self._note = None
        if two_level:
            nothing = {"Q": None, "E": None, "NOISY": False}
            self._note = prepared(kernel, device, 1, as_bits=True, varying=_VARYING, **nothing, **options)

    def __call__(
        self,
        x: Tensor,
        signs: Tensor,
        along: layouts.Copy,
        turned: layouts.Copy,
        zeros: Tensor | None = None,
        seed: Seed | None = None,
        turned_seed: Seed | None = None,
    ) -> None:
        """Write both copies."""
        found = None
        given = signs, *self._sizes, *halves(seed), *halves(turned_seed), *self._strides
        if self._note is not None:
            found = torch.zeros(self.zeros, dtype=torch.int32, device=self._device) if zeros is None else zeros
            self._note(self._grid, x, *_NO_COPIES, None, found, *given)
        self._write(self._grid, x, *along, *turned, found, None, *given)


_both = lru_cache(maxsize=1024)(BothTurned)
_NO_COPIES = (None,) * 6
