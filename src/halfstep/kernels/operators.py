"""Rounding, quantizing and decoding by a kernel where one supports the call, else by the reference; also as operators.

Under `torch.compile` an operator is one opaque node: formats are passed by their keys, and tensors' strides and
addresses are inspected when it runs, not while it is traced. Where several layers round one tensor alike, a graph calls
an operator that returns its result (ROUNDED_SCALED, QUANTIZED), so that the calls are one: for roundings that draw no
seed themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from halfstep import formats, quant
from halfstep.formats import Format, Posit
from halfstep.kernels.cpu import (
    accumulate,
    blocks,
    cast,
    codes,
    dequantize,
    history as on_cpu,
    panels,
    posit,
    rotated,
    tiles,
)
from halfstep.kernels.gpu import (
    blocks as gpu_blocks,
    cast as gpu_cast,
    here,
    history as on_gpu,
    missing,
    rotated as gpu_rotated,
)
from halfstep.kernels.operator import Operator, amax_of, blank, seed_in
from halfstep.quant import Accumulator, Quantized, Quantizer, Scales, Tile, layout
from halfstep.quant.cast import no_code_for_nan, no_such_code, pack, unpack
from halfstep.quant.quantizer import matrix_shape
from halfstep.quant.rounding import Seed, capturing
from halfstep.quant.scaling import StatefulScaling, from_text
from halfstep.quant.scaling.delayed import Delayed


# ---- a kernel, else the reference ------------------------------------------------------------------------------------


def round_into(x: Tensor, out: Tensor, format: Format, rounding: str, overflow: str, seed: Seed | None) -> None:
    """`quant.round_to`, written to `out`."""
    if not (
        (isinstance(format, Posit) and posit.run(x, out, format, rounding))
        or cast.run(x, out, format, rounding, overflow, seed)
        or (here(x) and isinstance(format, Posit) and gpu_cast.run_posit(x, out, format, rounding))
        or (here(x) and gpu_cast.run(x, out, format, rounding, overflow, seed))
        or blank(x, out)
    ):
        quant.round_to(x, format, rounding, overflow, seed, out)


def round_scaled_into(
    x: Tensor, factor: Tensor, out: Tensor, format: Format, rounding: str, seed: Seed | None, amax: Tensor | None = None
) -> None:
    """x * factor in float32 (float64 for float64), rounded and saturated, written to `out`; `amax` is raised to max
    |x|.

    An `out` of one byte per element has torch's dtype of the format, and gets its codes.
    """
    if cast.run(x, out, format, rounding, "saturate", seed, factor, amax):
        return
    if here(x):
        how = format, rounding, "saturate", seed, factor, amax
        if gpu_cast.run(x, out, *how):
            return
        if out.itemsize == 1 and gpu_cast.run_codes(x, out.view(torch.uint8), *how) is not None:
            return
    if out.itemsize == 1:
        rounded = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        round_scaled_into(x, factor, rounded, format, rounding, seed, amax)
        if not blank(rounded, out):
            out.copy_(rounded)
    else:
        if amax is not None:
            amax.copy_(torch.maximum(amax, amax_of(x)))
        wide = torch.promote_types(x.dtype, torch.float32)
        if blank(x, out):
            return
        quant.round_to(x.to(wide) * factor.to(wide), format, rounding, "saturate", seed, out)


def encode_into(x: Tensor, out: Tensor, format: Format, rounding: str, overflow: str, seed: Seed | None) -> None:
    """`quant.encode`, written to `out`."""
    if not (
        (isinstance(format, Posit) and posit.run(x, out, format, rounding))
        or (here(x) and isinstance(format, Posit) and gpu_cast.run_posit(x, out, format, rounding))
        or _codes_into(x, out, format, rounding, overflow, seed)
        or blank(x, out)
    ):
        out.copy_(quant.encode(x, format, rounding, overflow, seed))


def _codes_into(
    x: Tensor, out: Tensor, format: Format, rounding: str, overflow: str, seed: Seed | None, packed: bool = False
) -> bool:
    """Write the codes of x to `out` by a kernel. False where none supports it."""
    coded = codes.run(x, out, format, rounding, overflow, seed, packed)
    if coded is None and here(x):
        coded = gpu_cast.run_codes(x, out, format, rounding, overflow, seed, packed=packed)
    if coded is False:
        raise no_code_for_nan(x, format)
    return bool(coded)


def decode_into(stored: Tensor, out: Tensor, format: Format) -> None:
    """`quant.decode`, written to `out`."""
    if not _values_into(stored, out, format) and not blank(stored, out):
        out.copy_(quant.decode(stored, format, out.dtype))


def _values_into(stored: Tensor, out: Tensor, format: Format, packed: bool = False) -> bool:
    """Write the values of the codes `stored` to `out` by a kernel. False where none supports it."""
    known = codes.run_decode(stored, out, format, packed)
    if known is None and here(out):
        known = gpu_cast.run_decode(stored, out, format, packed)
    if known is False:
        raise no_such_code(stored, format)
    return bool(known)


def round_tiles_into(
    x: Tensor, out: Tensor, quantizer: Quantizer, seed: Seed | None, tensor_scale: Tensor | None = None
) -> bool:
    """`quantizer.quantize(x).dequantize()`, written to `out`.

    With two levels of scales, if `tensor_scale` is given the tensor's scale is written to it and not applied to the
    values. Returns whether nonzero values below 2^-126, bfloat16's smallest normal number, may occur: True where that
    was not checked.
    """
    if quantizer.scales is not None:
        if not x.is_contiguous() and (small := panels.run_view(x, out, quantizer)) is not None:
            return small
        x = x.contiguous()
        if (small := blocks.run_values(x, out, quantizer, seed, tensor_scale)) is not None:
            return small
        if (small := panels.run_values(x, out, quantizer, seed, tensor_scale)) is not None:
            return small
        if (small := tiles.run(x, out, quantizer, seed)) is not None:
            return small
        if here(x) and gpu_blocks.run_values(x, out, quantizer, seed, tensor_scale):
            return True
    if tensor_scale is not None:
        if not blank(x, out, tensor_scale):
            quantized = quantizer.quantize(x, seed)
            tensor_scale.copy_(quantized.tensors["tensor_scale"])
            dequantize_into(replace(quantized, tensors=without_tensor_scale(quantized.tensors)), out)
    elif not blank(x, out):
        dequantize_into(quantizer.quantize(x, seed), out)
    return True


def quantize_into(x: Tensor, tensors: dict[str, Tensor], quantizer: Quantizer, seed: Seed | None) -> None:
    """The tensors of `quantizer.quantize(x)`, written to `tensors`, which have its layout."""
    format, stored = quantizer.format, tensors["codes"]
    if quantizer.scales is None:
        if _codes_into(x, stored, format, quantizer.rounding, quantizer.overflow, seed, packed=True):
            return
        packed = format.bits in (4, 6) or not stored.is_contiguous()
        whole = torch.empty(x.shape, dtype=stored.dtype, device=x.device) if packed else stored.view(x.shape)
        encode_into(x, whole, format, quantizer.rounding, quantizer.overflow, seed)
        if packed:
            stored.copy_(pack(whole.view(matrix_shape(tuple(x.shape))), format.bits, format.high_nibble_first))
        return
    if not (
        blocks.run(x, tensors, quantizer, seed)
        or (here(x) and gpu_blocks.run(x, tensors, quantizer, seed))
        or blank(x, *tensors.values())
    ):
        for name, tensor in quantizer.quantize(x, seed).tensors.items():
            tensors[name].copy_(tensor)


def dequantize_into(quantized: Quantized, out: Tensor) -> None:
    """`quantized.dequantize()`, written to `out`."""
    format, scales = quantized.quantizer.format, quantized.quantizer.scales
    if scales is None and _values_into(quantized.codes, out, format, packed=True):
        return
    if scales is None and out.is_contiguous():
        stored = unpack(quantized.codes, format.bits, quantized.matrix_shape[1], format.high_nibble_first)
        decode_into(stored.contiguous().view(out.shape), out, format)
        return
    if not (
        dequantize.run(quantized.tensors, out, quantized.quantizer)
        or (scales is not None and tiles.run_decode(quantized, out, scales))
        or (here(out) and gpu_blocks.run_dequantize(quantized.tensors, out, quantized.quantizer))
        or blank(quantized.codes, out)
    ):
        quant.Quantized.dequantize(quantized, out.dtype, out)


def without_tensor_scale(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The stored tensors of two levels of scales, with 1 for the tensor's scale."""
    return tensors | {"tensor_scale": torch.ones_like(tensors["tensor_scale"])}


def accumulate_into(lhs: Tensor, rhs: Tensor, out: Tensor, accumulator: Accumulator) -> None:
    """`quant.accumulator.accumulate`, written to `out`, which holds zeros."""
    if not accumulate.run(lhs, rhs, out, accumulator) and not blank(lhs, out):
        out.copy_(quant.accumulator.accumulate(lhs, rhs, accumulator))


# ---- the same as operators, for torch.compile -----------------------------------------------------------------------


def _terms(scales: Scales | None) -> tuple[int, int, str | None]:
    return (0, 0, None) if scales is None else (scales.tile.rows, scales.tile.columns, scales.rule.text)


def _scales(rows: int, columns: int, rule: str | None) -> Scales | None:
    return None if rule is None else Scales(Tile(rows, columns), from_text(rule))


def _round(x: Tensor, out: Tensor, key: str, rounding: str, overflow: str, seed: Tensor | None) -> None:
    round_into(x.contiguous(), out, formats.from_key(key), rounding, overflow, seed_in(rounding, seed, x.device))


def _round_scaled(
    x: Tensor, factor: Tensor, out: Tensor, key: str, rounding: str, seed: Tensor | None, amax: Tensor | None
) -> None:
    noise = seed_in(rounding, seed, x.device)
    round_scaled_into(x.contiguous(), factor, out, formats.from_key(key), rounding, noise, amax)


def _rounded_scaled(
    x: Tensor, factor: Tensor, dtype: torch.dtype, key: str, rounding: str, seed: Tensor | None
) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _round_scaled(x, factor, out, key, rounding, seed, None)
    return out


def _round_tiles(
    x: Tensor, out: Tensor, key: str, rows: int, columns: int, rule: str, outliers: float | None, rounding: str,
    seed: Tensor | None, tensor_scale: Tensor | None,
) -> None:  # fmt: skip
    quantizer = Quantizer(formats.from_key(key), rounding, scales=_scales(rows, columns, rule), outliers=outliers)
    round_tiles_into(x, out, quantizer, seed_in(rounding, seed, x.device), tensor_scale)


def _dequantize(
    tensors: list[Tensor], names: list[str], out: Tensor, key: str, rows: int, columns: int, rule: str | None,
    outliers: float | None, rounding: str,
) -> None:  # fmt: skip
    quantizer = Quantizer(formats.from_key(key), rounding, scales=_scales(rows, columns, rule), outliers=outliers)
    stored = dict(zip(names, tensors, strict=True))
    dequantize_into(Quantized(quantizer, tuple(out.shape), stored.get("outliers", out).dtype, stored), out)


def _quantize(
    x: Tensor, tensors: list[Tensor], names: list[str], key: str, rows: int, columns: int, rule: str | None,
    rounding: str, seed: Tensor | None,
) -> None:  # fmt: skip
    quantizer = Quantizer(formats.from_key(key), rounding, scales=_scales(rows, columns, rule))
    quantize_into(x.contiguous(), dict(zip(names, tensors, strict=True)), quantizer, seed_in(rounding, seed, x.device))


def _quantized(
    x: Tensor, key: str, rows: int, columns: int, rule: str, rounding: str, seed: Tensor | None
) -> list[Tensor]:
    tensors = _parts(x, key, rows, columns, rule)
    _quantize(x, [*tensors.values()], [*tensors], key, rows, columns, rule, rounding, seed)
    return [*tensors.values()]


def _parts(x: Tensor, key: str, rows: int, columns: int, rule: str) -> dict[str, Tensor]:
    """Empty tensors in the layout of x quantized."""
    sizes: Any = layout(Quantizer(formats.from_key(key), scales=_scales(rows, columns, rule)), tuple(x.shape), x.dtype)
    return {name: torch.empty(size, dtype=dtype, device=x.device) for name, (dtype, size) in sizes.items()}


def _accumulate(
    lhs: Tensor, rhs: Tensor, out: Tensor, key: str, block: int, aligned: bool, promote: int | None
) -> None:
    accumulator = Accumulator(formats.from_key(key), block, aligned, promote)
    accumulate_into(lhs.contiguous(), rhs.contiguous(), out.zero_(), accumulator)


ROUND = Operator(
    "round(Tensor x, Tensor(a!) out, str key, str rounding, str overflow, Tensor? seed) -> ()",
    round_into,
    _round,
    lambda x, out, format, *rest: (x, out, format.key, *rest),
)
ROUND_SCALED = Operator(
    "round_scaled(Tensor x, Tensor factor, Tensor(a!) out, str key, str rounding, Tensor? seed, "
    "Tensor(b!)? amax) -> ()",
    round_scaled_into,
    _round_scaled,
    lambda x, factor, out, format, *rest: (x, factor, out, format.key, *rest),
)
ROUNDED_SCALED = Operator(
    "rounded_scaled(Tensor x, Tensor factor, ScalarType dtype, str key, str rounding, Tensor? seed) -> Tensor",
    round_scaled_into,
    _rounded_scaled,
    lambda x, factor, out, format, rounding, seed: (x, factor, out.dtype, format.key, rounding, seed),
    lambda x, factor, dtype, *_: torch.empty(x.shape, dtype=dtype, device=x.device),
)
"""Under torch.compile it returns its result, and does not write to `out`."""
ROUND_TILES = Operator(
    "round_tiles(Tensor x, Tensor(a!) out, str key, int rows, int columns, str rule, float? outliers, str rounding, "
    "Tensor? seed, Tensor(b!)? tensor_scale) -> ()",
    round_tiles_into,
    _round_tiles,
    lambda x, out, q, seed, tensor_scale: (
        x, out, q.format.key, *_terms(q.scales), q.outliers, q.rounding, seed, tensor_scale
    ),
)  # fmt: skip
QUANTIZE = Operator(
    "quantize(Tensor x, Tensor(a!)[] tensors, str[] names, str key, int rows, int columns, str? rule, str rounding, "
    "Tensor? seed) -> ()",
    quantize_into,
    _quantize,
    lambda x, tensors, q, seed: (
        x, list(tensors.values()), list(tensors), q.format.key, *_terms(q.scales), q.rounding, seed
    ),
)  # fmt: skip
QUANTIZED = Operator(
    "quantized(Tensor x, str key, int rows, int columns, str rule, str rounding, Tensor? seed) -> Tensor[]",
    quantize_into,
    _quantized,
    lambda x, tensors, q, seed: (x, q.format.key, *_terms(q.scales), q.rounding, seed),
    lambda x, *terms: [*_parts(x, *terms[:4]).values()],
)
"""Under torch.compile it returns its results, and does not write to `tensors`."""
DEQUANTIZE = Operator(
    "dequantize(Tensor[] tensors, str[] names, Tensor(a!) out, str key, int rows, int columns, str? rule, "
    "float? outliers, str rounding) -> ()",
    dequantize_into,
    _dequantize,
    lambda quantized, out: (
        list(quantized.tensors.values()), list(quantized.tensors), out, quantized.quantizer.format.key,
        *_terms(quantized.quantizer.scales), quantized.quantizer.outliers, quantized.quantizer.rounding,
    ),
)  # fmt: skip
ACCUMULATE = Operator(
    "accumulate(Tensor lhs, Tensor rhs, Tensor(a!) out, str key, int block, bool aligned, int? promote) -> ()",
    accumulate_into,
    _accumulate,
    lambda lhs, rhs, out, a: (lhs, rhs, out, a.format.key, a.block, a.aligned, a.promote),
)


# ---- Hadamard transforms ---------------------------------------------------------------------------------------------


def rotate(x: Tensor, signs: Tensor, dim: int = -1) -> Tensor:
    """`quant.rotate` by a kernel, else by the reference."""
    return _ROTATE(x, signs, dim)  # type: ignore[no-any-return]


def _rotate(x: Tensor, signs: Tensor, dim: int) -> Tensor:
    x = x.contiguous()
    made = gpu_rotated.run(x, signs, dim) if here(x) else rotated.run(x, signs, dim)
    return quant.rotate(x, signs, dim) if made is None else made


def _rotated_like(x: Tensor, signs: Tensor, dim: int) -> Tensor:
    """An empty tensor of the result's shape and dtype: a graph's sizes are symbolic, and Dynamo may not compute with
    them."""
    shape = list(x.shape)
    shape[dim] = -(-shape[dim] // len(signs)) * len(signs)
    return x.new_empty(shape, dtype=torch.promote_types(x.dtype, torch.float32))


def _draw_signs(lhs: Tensor, rhs: Tensor, out: Tensor) -> None:
    """Draw signs of a Hadamard transform into `out`. Its arguments lhs and rhs tie it to one matmul, so that a graph
    draws them in that matmul's pass, and not once for two matmuls."""
    out.copy_(quant.Hadamard(len(out), "random").signs(out.device))


_ROTATE = Operator("rotate(Tensor x, Tensor signs, int dim) -> Tensor", _rotate, like=_rotated_like)
draw_signs = Operator("draw_signs(Tensor lhs, Tensor rhs, Tensor(a!) out) -> ()", _draw_signs)


# ---- states of delayed scaling ---------------------------------------------------------------------------------------

_LONGEST = 1 << 13
Group = tuple[Sequence[Tensor], StatefulScaling, Format]
"""States with one layout, their rule, and the format of their operands."""


def history_kernel(groups: Sequence[Group]) -> Histories | None:
    """The `Histories` that advances the states of all groups in place. None where a state is not a dense float32 tensor
    of a CPU or a GPU, where a rule needs more than amaxes, and on a GPU during CUDA graph capture, since it copies from
    the host."""
    kinds = set()
    for states, rule, _ in groups:
        if type(rule) is not Delayed or rule.first is None or rule.history > _LONGEST:
            return None
        for state in states:
            kinds.add((type(state), state.device.type, state.dtype, state.is_contiguous(), state.is_neg()))
    if kinds == {(Tensor, "cpu", torch.float32, True, False)}:
        return Histories(groups, on_cpu)
    on_a_gpu = kinds == {(Tensor, "cuda", torch.float32, True, False)} and missing() is None
    return Histories(groups, on_gpu) if on_a_gpu and not capturing() else None


class Histories:
    """States of delayed scaling, advanced by one kernel call per group."""

    def __init__(self, groups: Sequence[Group], kernel: Any) -> None:
        self._groups, self._kernel = groups, kernel
        self._states = list(chain.from_iterable(map(itemgetter(0), groups)))
        self._device, self._addresses = self._states[0].device, [0]

    def advance(self, skipped: bool | Tensor) -> None:
        """End an optimizer step for all states; after a `skipped` step they only drop the amaxes of that step."""
        now = list(map(Tensor.data_ptr, self._states))
        if now != self._addresses:
            places, start, self._places, self._addresses = self._kernel.places(now, self._device), 0, [], now
            for states, _, _ in self._groups:
                self._places.append(places[start : start + len(states)])
                start += len(states)
        says = None
        if isinstance(skipped, Tensor):
            says = skipped.to(self._device, torch.float32)
        elif skipped:
            says = torch.ones((), dtype=torch.float32, device=self._device)
        for (_, rule, element), places in zip(self._groups, self._places, strict=True):
            self._kernel.run(places, rule, element, says)
