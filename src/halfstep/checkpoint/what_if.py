"""What would a cast cost? Every matrix of a checkpoint through candidate quantizers, in pieces of bounded size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from halfstep.checkpoint.pieces import castable, needs_largest, pieces, with_largest
from halfstep.checkpoint.report import Cast, TensorReport, WhatIf
from halfstep.checkpoint.scan import Progress
from halfstep.checkpoint.stored import Checkpoint, StoredTensor
from halfstep.errors import QuantizationError, unknown
from halfstep.kernels.cpu import operators
from halfstep.kernels.cpu.errors import Errors, compare
from halfstep.quant import Quantizer, get_quantizer
from halfstep.quant.quantizer import layout
from halfstep.quant.tile import ROW, TENSOR


_E4M3 = get_quantizer("fp8_128x128")
CANDIDATES: Mapping[str, Quantizer] = {
    "fp16": get_quantizer("fp16", overflow="ieee"),
    "bf16": get_quantizer("bf16", overflow="ieee"),
    "e4m3fn_tensor": replace(_E4M3, tile=TENSOR),
    "e4m3fn_row": replace(_E4M3, tile=ROW),
    "e4m3fn_128x128": _E4M3,
    "mxfp8": get_quantizer("mxfp8"),
    "int8": get_quantizer("int8_row"),
    "mxfp4": get_quantizer("mxfp4"),
    "nvfp4": get_quantizer("nvfp4"),
    "nf4": get_quantizer("nf4"),
}
"""What a cast is tried to, by name. Scales of FP8 and int8: the tile's amax on the format's largest value."""

WORST = 10
"""Tensors that a table names for each format."""


def candidates(names: Sequence[str]) -> dict[str, Quantizer]:
    """The candidates of those names; all of them for "all".

    Raises:
        QuantizationError: an unknown name.
    """
    if list(names) == ["all"]:
        return dict(CANDIDATES)
    for name in names:
        if name not in CANDIDATES:
            raise QuantizationError(unknown("format to try", name, (*CANDIDATES, "all")))
    return {name: CANDIDATES[name] for name in names}


def what_if(
    checkpoint: Checkpoint, reports: Sequence[TensorReport], names: Sequence[str], progress: Progress | None = None
) -> tuple[WhatIf, ...]:
    """What casts of a checkpoint's matrices to each of the named formats would cost.

    Args:
        reports: what an inspection found of each tensor (the tensors' largest magnitudes are needed).

    Raises:
        QuantizationError: an unknown name.
        CheckpointError: the file was changed meanwhile.
    """
    quantizers = candidates(names)
    found: dict[str, list[tuple[str, Cast, Errors]]] = {name: [] for name in quantizers}
    for tensor, report in zip(checkpoint.tensors, reports, strict=True):
        if report.statistics is None or report.tied_to is not None or not castable(tensor):
            continue
        errors = _errors(checkpoint, tensor, report.statistics.amax, quantizers, progress)
        for name, quantizer in quantizers.items():
            size = nbytes(quantizer, tensor.shape)
            # Errors of tensors add up in the units of the values.
            cast = _cast(name, errors[name], tensor.numel, size, tensor.nbytes - size)
            scale = report.statistics.amax**2 if report.statistics.amax > 2.0**-120 else 1.0
            absolute = errors[name]._replace(signal=errors[name].signal * scale, noise=errors[name].noise * scale)
            found[name].append((tensor.name, cast, absolute))
    return tuple(_together(name, casts) for name, casts in found.items() if casts)


def nbytes(quantizer: Quantizer, shape: tuple[int, ...]) -> int:
    """Bytes of codes and scales of a tensor."""
    parts = layout(quantizer, shape, torch.float32).values()
    return sum(dtype.itemsize * math.prod(size or 0 for size in sizes) for dtype, sizes in parts)


def _errors(
    checkpoint: Checkpoint,
    tensor: StoredTensor,
    amax: float,
    quantizers: Mapping[str, Quantizer],
    progress: Progress | None,
) -> dict[str, Errors]:
    sums = {name: Errors(0.0, 0.0, 0, 0, 0.0) for name in quantizers}
    buffer = torch.empty(0)  # kept, for fresh memory costs as much as a cast
    for rows in pieces(checkpoint, tensor, progress):
        for name, quantizer in quantizers.items():
            x = with_largest(rows, amax) if needs_largest(quantizer) else rows
            if x.numel() > buffer.numel():
                buffer = torch.empty(x.numel())
            y = buffer[: x.numel()].view(x.shape)
            _values(x, y, quantizer)
            size = rows.numel()
            one = compare(x.view(-1)[:size].numpy(), y.view(-1)[:size].numpy(), amax)
            was = sums[name]
            sums[name] = Errors(
                was.signal + one.signal,
                was.noise + one.noise,
                was.zeroed + one.zeroed,
                was.infinite + one.infinite,
                max(was.largest, one.largest),
            )
    return sums


def _values(x: Tensor, out: Tensor, quantizer: Quantizer) -> None:
    """The values that a quantizer makes of x, into `out`."""
    if quantizer.scaling is None:
        operators.round_into(x, out, quantizer.format, quantizer.rounding, quantizer.overflow, None)
    else:
        operators.round_tiles_into(x, out, quantizer, None)


def _cast(name: str, errors: Errors, values: int, size: int, saved: int) -> Cast:
    sqnr = None if not errors.noise else 10 * math.log10(errors.signal / errors.noise) if errors.signal else None
    return Cast(name, sqnr, errors.infinite, errors.zeroed, errors.largest, values, size, saved)


def _together(name: str, casts: list[tuple[str, Cast, Errors]]) -> WhatIf:
    columns = list(zip(*(errors for _, _, errors in casts), strict=True))
    errors = Errors(sum(columns[0]), sum(columns[1]), sum(columns[2]), sum(columns[3]), max(columns[4]))
    every = [cast for _, cast, _ in casts]
    total = _cast(name, errors, sum(c.values for c in every), sum(c.nbytes for c in every), sum(c.saved for c in every))
    hurt = sorted(((tensor, cast) for tensor, cast, _ in casts), key=lambda item: _badness(item[1]))
    return WhatIf(total, tuple(hurt[:WORST]))


def _badness(cast: Cast) -> tuple[int, float]:
    """Overflowing tensors first, then by SQNR."""
    return (-cast.overflowing, math.inf if cast.sqnr is None else cast.sqnr)
