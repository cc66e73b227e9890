"""Rounds values to values: `quant.round_to` onto floats and integers, in fp32, bf16 and fp16, at the speed of a copy.

bfloat16 to bfloat16, to nearest even, uses 16-bit lanes (`Narrow`): twice as many per register as `elements` has, and
nothing is widened. Rounding is on the bits, below the format's smallest normal value too: there one more bit is dropped
per binade, so that the step stays the same. A carry out of the significand moves to the next binade.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import prange, types
from numpy.typing import NDArray
from torch import Tensor

from halfstep.formats import Float, Format
from halfstep.kernels.cpu import element_codes, elements
from halfstep.kernels.cpu.amax import largest_magnitude
from halfstep.kernels.cpu.arrays import array, plain, separate
from halfstep.kernels.cpu.codes import encode_piece
from halfstep.kernels.cpu.compiled import CHUNK, Kernel, ends, inner, piece
from halfstep.kernels.cpu.lanes import Lane, bits_of, lanes, stored_as
from halfstep.kernels.cpu.noise import chunk_keys, noise, seed_keys
from halfstep.kernels.cpu.runs import elementwise
from halfstep.kernels.cpu.scales import raised, raised_by, stored_bits
from halfstep.quant.rounding import Seed
from halfstep.quant.scaling import Scaling, StatefulScaling


_FINITE = float(np.finfo(np.float32).max)
_MAGNITUDE = 0x7FFF
_FRACTION = 7


class Narrow(NamedTuple):
    """The constants of one rounding of bfloat16: uint16 as a kernel's arguments, lanes inside it. Values are bfloat16
    bits."""

    stop: Any
    """The exponent field from which on the number of dropped bits is constant."""
    base: Any
    """The number of dropped bits plus the exponent field, below `stop`."""
    step: Any
    """The smallest value above zero; 0 where that is bfloat16's own smallest value, which needs no special case."""
    half_step: Any
    largest: Any
    over: Any
    nan_above: Any
    largest_negative: Any = None
    over_negative: Any = None
    infinite: Any = None
    infinite_negative: Any = None
    zero_sign: Any = None


@cache
def narrow_scalars(format: Format, overflow: str) -> tuple[np.uint16, ...]:
    """The `Narrow` of a format that `elements.scalars` supports."""
    wide = elements.scalars(format, "nearest_even", overflow, torch.bfloat16)
    p = elements.Rounding(*(int(number) >> 16 for number in wide))  # only fields that bfloat16 holds exactly are used
    step = format.min_exponent - format.mantissa_bits if isinstance(format, Float) else -format.fraction_bits
    base = step + 127 + _FRACTION
    smallest_normal = format.min_exponent + 127 if isinstance(format, Float) else base
    own = smallest_normal == 1  # bfloat16's subnormals are the format's, down to its last bit
    numbers = Narrow(
        stop=0 if own else min(smallest_normal, base),
        base=max(base - 1, 0) if own else base,
        step=0 if own else elements.float_bits(2.0**step) >> 16,
        half_step=0 if own else elements.float_bits(2.0 ** (step - 1)) >> 16,
        largest=p.largest,
        over=p.over,
        nan_above=p.nan_above,
        largest_negative=p.largest_negative,
        over_negative=p.over_negative,
        infinite=p.infinite,
        infinite_negative=p.infinite_negative,
        zero_sign=p.zero_sign,
    )
    return tuple(np.uint16(number) for number in numbers if number is not None)


def rounded_narrow(bits: Lane, p: Narrow) -> Lane:
    """The bits of a bfloat16 rounded to nearest, ties to even."""
    magnitude = bits & _MAGNITUDE
    value = magnitude.below(p.step).pick(magnitude.above(p.half_step).pick(p.step, 0), _cut(magnitude, p))
    return elements.finish(bits, magnitude, value, p)


def _cut(magnitude: Lane, p: Narrow) -> Lane:
    cut = (p.base - (magnitude >> _FRACTION).min(p.stop)).min(_FRACTION)
    one = magnitude.constant(1) << cut
    # The bit above the fraction is the implicit leading 1, whatever the exponent's last bit is, so it counts as odd.
    odd = ((magnitude | 1 << _FRACTION) >> cut) & 1
    return (magnitude + ((one - 1 + odd) >> 1)) & (one.constant(0) - one)


def run(
    x: Tensor,
    out: Tensor,
    format: Format,
    rounding: str,
    overflow: str,
    seed: Seed | None,
    factor: Tensor | None = None,
    amax: Tensor | None = None,
) -> bool:
    """Write x, rounded, to `out`. `seed` keys the noise of stochastic rounding (`quant.noise_bits`). False where no
    kernel supports it: both must be contiguous CPU tensors of one shape, either the same tensor or of different
    storages.

    With a `factor`, a float32 scalar, x * factor in float32 is rounded, and saturated. `amax`, a float32 scalar, is
    raised to max |x|, NaN where x has a NaN, in the same pass.
    """
    if not plain(x) or not plain(out) or x.shape != out.shape:
        return False
    numbers = elements.scalars(format, rounding, overflow, out.dtype, x.dtype if factor is None else torch.float32)
    if numbers is None or (x.numel() and not separate(x, out)):
        return False
    if not x.numel():
        return True
    if rounding == "nearest_even" and x.dtype == out.dtype == torch.bfloat16 and factor is None:
        numbers = narrow_scalars(format, overflow)
    given = None if x.data_ptr() == out.data_ptr() and amax is None else array(x)
    times = None if factor is None else array(factor)[0]
    found = None if amax is None else np.empty(-(-x.numel() // CHUNK), np.uint32)
    _values(x.numel(), given, array(out), numbers, seed_keys(seed) if rounding == "stochastic" else None, times, found)
    if amax is not None and found is not None:
        noted = array(amax)
        noted[0] = max(noted[0], found.max())  # bits of magnitudes order like the magnitudes, with NaN above all
    return True


def run_whole(
    x: Tensor,
    dtype: torch.dtype,
    format: Format,
    rounding: str,
    rule: Scaling,
    state: Tensor | None,
    record: bool,
    coded: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """x times one factor for the tensor, rounded, in `dtype`; 1 / factor; and if `coded`, the values' codes, where the
    kernel can write them. The factor is the one in use in `state`, else max / amax of x. `record` raises the state's
    amax. None where no kernel supports it.

    Supported are tensors and formats as in `run`, roundings without noise, plain float32 states, and rules whose own
    factor is max / amax (`Current`, and `Delayed` until its state has been advanced).
    """
    if rounding == "stochastic" or not x.numel() or (state is not None and state.dtype != torch.float32):
        return None
    numbers = elements.scalars(format, rounding, "saturate", dtype, torch.float32)
    if numbers is None or not plain(x):
        return None
    cells = None if state is None else array(state)
    if cells is None or not cells[0]:
        first = rule.first if isinstance(rule, StatefulScaling) else rule
        if first is None or not first.reciprocal:
            return None
    out = torch.empty(x.shape, dtype=dtype, device="cpu")
    coding = element_codes.scalars(format, "nearest_even", "saturate") if coded and format.bits == 8 else None
    codes, into = None, (None, None, None)
    if coding is not None and format.has_nan:
        codes = torch.empty(x.shape, dtype=torch.uint8, device="cpu")
        into = array(codes), *coding
    scale = _whole(x.numel(), array(x), array(out), numbers, format.max, cells, record, *into)
    return out, torch.scalar_tensor(scale, dtype=torch.float32, device="cpu"), codes


def round_whole(x: NDArray[Any], format: Format, out: NDArray[Any], numbers: Any) -> float:
    """Write x, an `array`, times max / amax of x to out, rounded with the format's `elements.scalars` for out's dtype.
    Returns 1 / factor, a float32."""
    return _whole(x.size, x, out, numbers, format.max, None, False, None, None, None)


def _rounded_value(out, value, numbers, keys, index, like, factor):
    value = out if value is None else value
    if numbers[0].stored == types.uint16:
        return rounded_narrow(value, Narrow(*numbers))
    bits = bits_of(value)
    if factor is not None:
        bits = (bits.float() * factor.float()).bits()
    return stored_as(elements.rounded(bits, elements.Rounding(*numbers), noise(keys, index)), like)


_rounded, _piece = lanes("like")(_rounded_value), elementwise(_rounded_value)


@inner
def _noting(x, out, numbers, keys, factor):
    largest = x.dtype.type(0)
    for i in range(x.size):
        largest = raised(largest, x[i])
        out[i] = _rounded(None, x[i], numbers, keys, i, out[i], factor)
    return stored_bits(largest)


@Kernel
def _values(x, out, numbers, seed, factor, found):
    for chunk in prange((out.size + CHUNK - 1) // CHUNK):
        a, b = ends(chunk, out.size)
        if found is None:  # x is None when rounding in place: given x, the loop assumes that arrays do not overlap
            _piece(out[a:b], piece(x, a, b), numbers, chunk_keys(seed, chunk), factor)
        else:
            found[chunk] = _noting(x[a:b], out[a:b], numbers, chunk_keys(seed, chunk), factor)


@lanes(types.float32)
def _number(bits):
    return bits.float()


@inner
def _factor(amax, largest):
    """`quant.scaling.delayed.number_of` as a float32."""
    if amax == 0:
        return np.float32(1)
    return np.float32(min(largest / amax, _FINITE) if amax <= _FINITE else np.nan)


@Kernel
def _whole(x, out, numbers, largest, state, record, codes, code_numbers, coding):
    """Write x * factor, rounded, to out, and its codes if `codes` is given. The factor is the state's, or else largest
    / amax of x; with `record` the state's amax is raised. Returns 1 / factor."""
    chunks, used = (x.size + CHUNK - 1) // CHUNK, np.uint32(0) if state is None else state[0]
    found, noting = np.zeros(chunks, np.uint32), record and used != 0
    if used == 0:
        for chunk in prange(chunks):
            found[chunk] = largest_magnitude(x[chunk * CHUNK : min((chunk + 1) * CHUNK, x.size)])
        used = stored_bits(_factor(np.float64(_number(raised_by(np.uint32(0), found))), largest))
    for chunk in prange(chunks):
        a, b = ends(chunk, x.size)
        if noting:
            found[chunk] = _noting(x[a:b], out[a:b], numbers, None, used)
        else:
            _piece(out[a:b], x[a:b], numbers, None, used)
        if codes is not None:
            encode_piece(out[a:b], codes[a:b], code_numbers, coding, None, None)
    if state is not None and record:
        state[1] = raised_by(state[1], found)  # bits of magnitudes order like the magnitudes, with NaN above all
    return np.float32(1) / _number(used)
