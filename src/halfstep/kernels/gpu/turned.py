"""A matrix in codes as it lies, and its rotated columns in codes as its transpose lies, from one pass.

Each is what `quant.Quantizer` makes of it, and of `quant.rotate`, bit for bit: what products in FP4 take of a tensor
whose second product is rotated. With two levels of scales there is a pass before, for the largest numbers of both.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.cpu.elements import float_bits
from halfstep.kernels.cpu.rotated import LEVELS
from halfstep.kernels.gpu import quantizers
from halfstep.kernels.gpu.launch import KINDS, bits, functions, halves, launch, lies_plain
from halfstep.kernels.gpu.layouts import Tensors
from halfstep.kernels.gpu.quantizers import Element, Rule
from halfstep.quant import Quantizer
from halfstep.quant.rounding import Seed


_STRIP, _LONGEST = 1 << 10, 32  # elements of a program, a warp that waits for no other, and the most rows of it
_UNIT = 16  # with rows and columns of any number, registers would spill


def told(x: Tensor, quantizer: Quantizer, signs: Tensor) -> tuple[Rule, Element] | None:
    """What kernels are told of the quantizer. None where `run` does not write both copies of `x`: it takes a dense
    contiguous matrix of multiples of 16, whose rows fill blocks of the rotation, in tiles along its rows that are no
    longer than these."""
    size, scales, found = len(signs), quantizer.scales, quantizers.known(quantizer)
    if not (lies_plain(x) and lies_plain(signs, torch.float32) and x.dim() == 2 and x.numel()):
        return None
    if found is None or scales is None or found[0].second is not None or found[1].bins is not None:
        return None
    if scales.tile.rows != 1 or scales.tile.columns not in LEVELS or scales.tile.columns > size:
        return None
    whole = size in LEVELS and size <= _LONGEST and x.shape[0] % size == 0 and not any(n % _UNIT for n in x.shape)
    return found if whole else None


def run(
    x: Tensor,
    quantizer: Quantizer,
    told: tuple[Rule, Element],
    signs: Tensor,
    along: Tensors,
    turned: Tensors,
    seed: Seed | None = None,
    turned_seed: Seed | None = None,
) -> None:
    """Write what `quantizer.quantize(x)` keeps to `along`, and to `turned` what it makes of the transpose of
    `quant.rotate(x, signs, 0)`: both of `layouts.empty`, as they are stored. As kernels are `told`, by a seed each."""
    (rows, columns), size = x.shape, len(signs)
    scales = quantizer.scales
    assert scales is not None
    rule, element = told
    two_level = rule.kind == "two_level"
    high = max(size, _UNIT)
    grid = -(-rows // high) * -(-columns // (_STRIP // high))
    given: Any = (
        signs, rows // _UNIT, columns // _UNIT, *halves(seed), *halves(turned_seed), *along["scale"].stride(),
        *turned["scale"].stride(),
    )  # fmt: skip
    constants: dict[str, Any] = {
        "device": x.device, "warps": 1, "R": rule, "Q": element, "E": quantizers.e4m3() if two_level else None,
        "SOURCE": KINDS[x.dtype], "FORM": "stored", "NOISY": seed is not None,
        "FACTOR": float_bits(math.sqrt(1 / size)), "LEVELS": LEVELS[size], "W": scales.tile.columns,
        "UNIT": _UNIT, "ROWS": high, "COLUMNS": _STRIP // high,
    }  # fmt: skip
    kernel, found = functions("turned").both_turned, None
    if two_level:
        found = torch.zeros(2, dtype=torch.int32, device=x.device)
        nothing = {"Q": None, "E": None, "NOISY": False}
        launch(kernel, grid, bits(x), *[None] * 7, found, *given, **(constants | nothing))
    cells = [_cell(made.get(name)) for made in (along, turned) for name in ("codes", "scale", "tensor_scale")]
    launch(kernel, grid, bits(x), *cells, found, None, *given, **constants)


def _cell(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else bits(tensor)
