"""`operand`: a matrix rounded for a matmul, as values in a dtype that a GEMM takes exactly, and a scale beside them.

Also the factor that scales a whole tensor before rounding, which may come from a state, and `decoded`: operands of
matrices that are stored as codes.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halfstep import formats
from halfstep.errors import RecipeError
from halfstep.formats import Format
from halfstep.kernels import carried, scaled_mm
from halfstep.kernels.cpu import cast, clamp_operators as operators, rotated_tiles
from halfstep.kernels.gpu import here, rotated as gpu_rotated
from halfstep.kernels.operator import amax_of
from halfstep.kernels.operators import draw_signs, rotate, without_tensor_scale
from halfstep.ops.casts import (
    E4M3_BITS,
    Quantized,
    carrier,
    has_subnormals,
    quantize,
    round_scaled,
    seed_of,
    tile_carrier,
    values,
    values_noted,
)
from halfstep.ops.remainder import Remainder, bounds_of, remainder
from halfstep.quant import ROW, TENSOR, Clamp, Quantizer, Scales, Scaling, Tile, get_scaling
from halfstep.quant.hadamard import RANDOM
from halfstep.quant.rounding import Seed, number
from halfstep.quant.scaling import StatefulScaling
from halfstep.quant.tracing import has_memory
from halfstep.recipe import Matmul


# ---- the scale of the whole tensor -----------------------------------------------------------------------------------


def factor_of(
    x: Tensor, format: Format, rule: Scaling, state: Tensor | None, record: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The factor that all of x is multiplied by before it is rounded; and the state's amax of this step if the rounding
    pass must still raise it, else None.

    On a GPU and in a traced graph the rounding pass always raises it, since whether the factor depends on max |x| is
    known only at run time.
    """
    if not (held := has_memory(x)):
        format = formats.as_constant(format.key)
    if not isinstance(rule, StatefulScaling):
        amax = amax_of(x) if rule.reads else x.new_zeros((), dtype=torch.float32)
        return rule.factor(amax, format), None
    if state is None or state.dtype != torch.float32:
        raise _unusable(rule, state)
    if not rule.waits(state):
        return rule.in_use(state, None, format), state[1] if record else None
    amax = amax_of(x, unless=state[0])
    factor = rule.in_use(state, amax, format)  # a copy: later changes of the state do not move it
    if record and (x.is_cuda or not held):
        return factor, state[1]
    if record:
        rule.record(state, amax)
    return factor, None


def factor_or_amax(
    x: Tensor, format: Format, rule: Scaling, state: Tensor | None, record: bool, zero: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(factor, amax, found) for a kernel that can compute the factor itself (`kernels.gpu.layouts.codes`).

    factor: the one in use, None or 0 if the kernel computes it from `found`. amax: the state's, for the kernel to
    raise, or None. found: max |x| where the factor may depend on it, stored as its bits in `zero` if given (`amax_of`).
    """
    if rule.reciprocal:
        return None, None, amax_of(x, found=zero)
    if not isinstance(rule, StatefulScaling) or rule.first is None or not rule.first.reciprocal:
        return *factor_of(x, format, rule, state, record), None
    if state is None or state.dtype != torch.float32 or state.device != x.device:
        raise _unusable(rule, state)
    return state[0], state[1] if record else None, amax_of(x, state[0], zero) if rule.waits(state) else None


def _unusable(rule: StatefulScaling, state: Tensor | None) -> RecipeError:
    if state is None:
        return RecipeError(
            f"{rule.name} scaling needs the state of its operand: halfstep.apply keeps one beside each layer, and "
            "`ops.linear` takes them as `states`"
        )
    if state.dtype != torch.float32:
        return RecipeError(
            f"the state of {rule.name} scaling is {state.dtype}, expected torch.float32: the model was cast after "
            "halfstep.apply (model.half(), model.to(dtype)); cast it first, then apply the recipe"
        )
    return RecipeError(
        f"the state of {rule.name} scaling is on {state.device}, its operand is not: move whole modules (module.to), "
        "whose buffers go with their weights"
    )


def factor_in_use(x: Tensor, quantizer: Quantizer, state: Tensor | None) -> Tensor | None:
    """The factor that the forward multiplied x by if the quantizer's scaling is stateful; else None."""
    return None if quantizer.stateful is None else factor_of(x, quantizer.format, quantizer.stateful, state, False)[0]


def state_or_current(x: Tensor, quantizer: Quantizer | None, state: Tensor | None) -> Tensor | None:
    """The given state; if None and the scaling is stateful, the state after one step of `x` alone."""
    if state is None and quantizer is not None and quantizer.stateful is not None:
        return quantizer.stateful.after(amax_of(x), quantizer.format)
    return state


# ---- operands --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Operand:
    """A matrix as `values` times `scale` (a float32 scalar, or one a row or column; None is 1), plus an unrounded,
    sparse `remainder`.

    Values of at most 8 significant bits fit bfloat16 exactly, also times a power of two. So operands in 8 bits and less
    are emulated in bf16, which matrix units multiply exactly, and the scale multiplies the result before its one
    rounding (`ops.matmul`). On a GPU with FP8 tensor cores they stay in 8 bits (`kernels.scaled_mm`). Rows of 4 bits
    with a scale each are integers in int8, whose GEMM is exact (`kernels.cpu.whole_mm`).
    """

    values: Tensor
    scale: Tensor | None = None
    remainder: Remainder | None = None
    codes: Tensor | None = None
    """The codes of the values, one a byte, if `operand` was asked for them and its kernel wrote them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns."""
        return tuple(self.values.shape)

    def t(self) -> "Operand":
        """The transposed matrix."""
        rest = None if self.remainder is None else self.remainder.t()
        return Operand(self.values.t(), None if self.scale is None else self.scale.t(), rest)

    def widened(self, dtype: torch.dtype) -> "Operand":
        """The same matrix for a GEMM in 16 or 32 bits: 8-bit values cast to `dtype` if it holds them, else to float32;
        a remainder is added in, in float32."""
        if self.remainder is not None:
            return Operand(Operand(self.values.float(), self.scale).scaled() + self.remainder.dense())
        if self.values.itemsize > 1:
            return self
        if self.scale is not None and self.scale.dim():
            return Operand(self.values.float() * self.scale)
        if self.values.dtype == torch.int8:
            return Operand(self.values.to(dtype), self.scale)
        return Operand(self.values.to(carrier(formats.get(self.values.dtype).key, dtype)), self.scale)

    def scaled(self) -> Tensor:
        """values * scale, in float32 or wider, without the remainder."""
        wide = self.values.to(torch.promote_types(self.values.dtype, torch.float32))
        return wide if self.scale is None else wide * self.scale

    def over(self, powers: Tensor | None, dtype: torch.dtype) -> "Operand":
        """The matrix with each column divided by its power of two, in a dtype that holds that; itself for None."""
        if powers is None:
            return self
        wide = self.widened(dtype)
        values = wide.values.float() if wide.values.dtype == torch.float16 else wide.values
        return Operand(values * powers.reciprocal().to(values.dtype), wide.scale)

    def times(self, factor: float | None, dtype: torch.dtype) -> "Operand":
        """The matrix times a factor (None is 1), where multiplying the result of the matmul would cost more."""
        if factor is None:
            return self
        wide = self.widened(dtype)
        if wide.scale is not None:
            return Operand(wide.values, wide.scale * factor)
        return Operand(wide.values.to(torch.promote_types(wide.values.dtype, torch.float32)) * factor)

    def __getitem__(self, rows: slice) -> "Operand":
        scale = self.scale
        if self.remainder is not None:
            return self.widened(torch.float32)[rows]
        return Operand(self.values[rows], scale[rows] if scale is not None and scale.dim() else scale)

    def split(self, rows: int) -> "tuple[Operand, ...]":
        """The matrix in pieces of `rows` rows each."""
        return tuple(self[start : start + rows] for start in range(0, len(self.values), rows))


def operand(
    x: Tensor,
    quantizer: Quantizer | None,
    dtype: torch.dtype,
    state: Tensor | None = None,
    record: bool = False,
    signs: Tensor | None = None,
    dim: int = 1,
    in_8_bits: bool = True,
    seed: Seed | None = None,
    coded: bool = False,
) -> Operand:
    """The matrix `x`, (rows, columns), rounded as one operand of a matmul with a result in `dtype`.

    Args:
        quantizer: how x is rounded; None casts it to `dtype` alone.
        dtype: the dtype of the GEMM if it holds the rounded values exactly; else they are float32.
        state: the state of a stateful scaling (`quant.scaling.delayed`).
        record: raise the state's amax to max |x|.
        signs: of a Hadamard transform (`quant.rotate`) of the shared dimension, `dim`, before rounding; or None.
        in_8_bits: FP8 tensor cores may compute the matmul: keep 8-bit values if they take one scale a tensor or a row.
        seed: of stochastic rounding; None draws it from torch's default generator.
        coded: also return the codes of the values, if a kernel writes both.
    """
    if signs is not None:
        made = None if quantizer is None else _rotated(x.contiguous(), quantizer, dtype, signs, dim, seed)
        if made is not None:
            return made
        x = rotate(x, signs, dim)
    if quantizer is None:
        return Operand(x.to(dtype))
    if quantizer.clamp is not None:
        return _clamped(x, quantizer, quantizer.clamp, dtype, state, record, seed)
    quantizer = quantizer.plain
    format, scales = quantizer.format, quantizer.scales
    if scales is None:
        return Operand(values(x, quantizer, seed, dtype=carrier(format.key, dtype)))
    if quantizer.inner is not None:
        part = x.to(torch.promote_types(x.dtype, torch.float32)) * scales.rule.part
        return over(operand(part, quantizer.inner, dtype, in_8_bits=False, seed=seed), scales.rule.part)
    if quantizer.by_rows:
        return Operand(*rounded_rows(x, quantizer, None, _row_dtype(quantizer, dtype, x.device), seed))
    native = scaled_mm.outer_dtype(quantizer, x.device) if in_8_bits else None
    if scales.tile == TENSOR:
        into = carrier(format.key, dtype) if native is None else native
        read = x if state is None else state
        if (state is None) == (quantizer.stateful is None) and x.is_cpu and read.is_cpu and has_memory(read):
            known = cast.run_whole(x, into, format, quantizer.rounding, scales.rule, state, record, coded)
            if known is not None:
                return Operand(known[0], known[1], codes=known[2])
        factor, amax = factor_of(x, format, scales.rule, state, record)
        if factor is not None:
            return Operand(round_scaled(x, factor, format, quantizer.rounding, into, seed, amax), factor.reciprocal())
    elif native is not None:
        return _rows(x, quantizer, scales, native, seed)
    if scales.rule.two_level:
        scale = torch.empty((), device=x.device, dtype=torch.float32)
        into = carrier(format.key, dtype, E4M3_BITS)
        return Operand(values_noted(x, quantizer, seed, dtype=into, tensor_scale=scale)[0], scale)
    return _blocks(x, quantizer, scales, dtype, seed)


def _rotated(
    x: Tensor, quantizer: Quantizer, dtype: torch.dtype, signs: Tensor, dim: int, given: Seed | None
) -> Operand | None:
    """`rotate` and then `operand` of a matrix, by one pass of a kernel; None if no kernel applies."""
    plain = quantizer.plain
    ruled = plain.inner or plain
    scales, format = ruled.scales, ruled.format
    if quantizer.scales is None or scales is None or quantizer.clamp is not None or not has_memory(x):
        return None
    two_level, share = scales.rule.two_level, 1.0 if plain.inner is None else quantizer.scales.rule.part
    narrow = carrier(format.key, dtype, E4M3_BITS) if two_level else tile_carrier(format, scales.rule, dtype, x.device)
    if here(x) and (constants := gpu_rotated.constants(x, signs, dim, ruled)) is not None:
        scale, seed = (
            torch.empty((), device=x.device, dtype=torch.float32) if two_level else None,
            seed_of(ruled.rounding, given, x.device),
        )
        values = gpu_rotated.run_values(x, signs, dim, ruled, constants, seed, narrow, share, scale)
        return Operand(values, scale) if plain.inner is None else over(Operand(values), share)
    numbers = rotated_tiles.constants(x, signs, dim, ruled, narrow)
    if numbers is None:
        return None
    if two_level:
        scale = rotated_tiles.tensor_scale(x, signs, ruled)
        if scale is None:
            return None
        seed = number(seed_of(ruled.rounding, given, x.device))
        return Operand(rotated_tiles.run_two_levels(x, signs, ruled, numbers, seed, scale, narrow), scale)
    seed = number(seed_of(ruled.rounding, given, x.device))
    made, may_be_subnormal = rotated_tiles.run_powers(x, signs, dim, ruled, numbers, seed, share, narrow)
    if narrow == dtype and may_be_subnormal and has_subnormals(made):
        made = _values_along_rows(rotate(x, signs, dim) * share, ruled, torch.float32, seed)[0]
    return Operand(made) if plain.inner is None else over(Operand(made), share)


def _clamped(
    x: Tensor,
    quantizer: Quantizer,
    clamp: Clamp,
    dtype: torch.dtype,
    state: Tensor | None,
    record: bool,
    seed: Seed | None,
) -> Operand:
    """The operand of x clamped to two of its quantiles; with compensation, what was clamped off is its remainder."""
    bounds, plain = bounds_of(x, clamp), quantizer.plain
    if plain.by_rows:
        made = Operand(*rounded_rows(x, plain, bounds, _row_dtype(plain, dtype, x.device), seed))
    else:
        made = operand(operators.clamped(x, bounds), plain, dtype, state, record, in_8_bits=False, seed=seed)
    return replace(made, remainder=remainder(x, clamp, bounds)) if clamp.compensation else made


def _row_dtype(quantizer: Quantizer, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    return tile_carrier(quantizer.format, quantizer.tiling.rule, dtype, device)


def signs_of(product: Matmul, lhs: Tensor, rhs: Tensor, seed: Seed | None = None) -> Tensor | None:
    """The signs of the Hadamard transform that rotates both operands of the matmul; None if it has none."""
    hadamard = product.hadamard
    if hadamard is None:
        return None
    if hadamard.seed != RANDOM or seed is not None:
        return hadamard.signs(lhs.device, seed)
    out = lhs.new_empty(hadamard.size, dtype=torch.float32)
    draw_signs(lhs, rhs, out)
    return out


def kept(
    used: Operand, x: Tensor, later: Quantizer | None, again: bool, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """The values and scale to save of x for its backward matmul; None for the values if these are x itself.

    Args:
        used: the forward's operand, saved unless the backward rounds x again.
        later: the quantizer of the backward matmul; None saves x cast to `dtype`.
        again: the backward rounds x again.
    """
    saved = used if not again else Operand(x.to(dtype)) if later is None else Operand(x)
    return None if saved.values is x else saved.values, saved.scale


def scale_of(lhs: Operand, rhs: Operand) -> Tensor | None:
    """The product of the two operands' scales; None if neither has one."""
    return lhs.scale if rhs.scale is None else rhs.scale if lhs.scale is None else lhs.scale * rhs.scale


def over(part: Operand, share: float) -> Operand:
    """`part` / share: the operand divides by the share in its scale."""
    scale = torch.full((), 1 / share, device=part.values.device, dtype=torch.float32)
    return Operand(part.values, scale if part.scale is None else part.scale * scale)


def runs_down_columns(tile: Tile) -> bool:
    """Whether a tile is one column, or a piece of one."""
    return tile.columns == 1 and tile.rows != 1


def _rows(x: Tensor, quantizer: Quantizer, scales: Scales, dtype: torch.dtype, seed: Seed | None) -> Operand:
    """8-bit values in `dtype` with a scale a row (or a column, if the tiles are columns)."""
    down = scales.tile != ROW
    made = quantize(x.t().contiguous() if down else x, quantizer.down if down else quantizer, generator=seed)
    rows = Operand(made.codes.view(dtype), scales.rule.multiplier(made.tensors, quantizer.format).float())
    return rows.t() if down else rows


def _blocks(x: Tensor, quantizer: Quantizer, scales: Scales, dtype: torch.dtype, seed: Seed | None) -> Operand:
    """The values times their tiles' scales: in bf16 if scales are powers of two, which change no bit, else in float32.

    CPUs' bf16 matrix units treat subnormals as zeros: if there are any, the values are float32.
    """
    narrow = tile_carrier(quantizer.format, scales.rule, dtype, x.device)
    seed = seed_of(quantizer.rounding, seed, x.device)  # drawn once, for both roundings below
    made, may_be_subnormal = _values_along_rows(x, quantizer, narrow, seed)
    if narrow == dtype and may_be_subnormal and has_subnormals(made):
        made = _values_along_rows(x, quantizer, torch.float32, seed)[0]
    return Operand(made)


def _values_along_rows(
    x: Tensor, quantizer: Quantizer, dtype: torch.dtype, seed: Seed | None
) -> tuple[Tensor, bool | None]:
    """`values_noted`; for tiles down the columns, of the transposed view, since kernels take tiles along rows."""
    if quantizer.scales is None or not runs_down_columns(quantizer.scales.tile):
        return values_noted(x, quantizer, seed, dtype=dtype)
    made, noted = values_noted(x.t(), quantizer.down, seed, dtype=dtype)
    return made.t(), noted


def is_whole(quantizer: Quantizer) -> bool:
    """Whether the quantizer has one scale for the whole tensor, which multiplies the result of a matmul instead of the
    values."""
    scales = quantizer.scales
    if scales is None or scales.tile != TENSOR:
        return False
    return scales.rule.factor(torch.ones((), dtype=torch.float32, device="cpu"), quantizer.format) is not None


# ---- matrices stored as codes ----------------------------------------------------------------------------------------


def stored(x: Tensor, quantizer: Quantizer, state: Tensor | None = None) -> Quantized:
    """The codes and scales of a matrix, such that `decoded` of them equals `operand` of the matrix.

    The factor of a stateful scaling is stored as a constant scale; without a state it follows from x's own amax.
    """
    if quantizer.clamp is not None:
        raise RecipeError(
            f"a weight rounded with a {quantizer.clamp}, to be stored for inference: the clamp's remainder cannot be "
            "stored with codes. Give the rule's weight no clamp, or keep these layers by module_filter"
        )
    quantizer = quantizer.plain
    if quantizer.stateful is None:
        return _known(quantize(x, replace(quantizer, outliers=None) if is_whole(quantizer) else quantizer))
    rounded = operand(x, quantizer, torch.float32, state_or_current(x, quantizer, state)).widened(torch.float32)
    codes = quantize(rounded.values, Quantizer(quantizer.format)).codes
    assert rounded.scale is not None
    tensors = {"codes": codes, "scale": rounded.scale.view(1, 1)}
    kept = replace(quantizer, scales=Scales(TENSOR, get_scaling("current")))
    return _known(Quantized(kept, tuple(x.shape), x.dtype, tensors))


def _known(made: Quantized) -> Quantized:
    """`made`, after evaluating the cached properties of its quantizer that `decoded` reads: a traced graph cannot take
    their lock."""
    _ = made.quantizer.steps, made.quantizer.inner, made.quantizer.factors
    return made


def decoded(quantized: Quantized, dtype: torch.dtype) -> Operand:
    """A stored matrix as an operand of a matmul with a result in `dtype`: bit for bit `operand` of the original."""
    quantizer = quantized.quantizer
    format, scales = quantizer.format, quantizer.scales
    if scales is None:
        return Operand(quantized.dequantize(carrier(format.key, dtype)))
    if quantizer.inner is not None:
        return over(decoded(replace(quantized, quantizer=quantizer.inner), dtype), scales.rule.part)
    if quantizer.steps is not None:
        unscaled = Quantized(Quantizer(format), quantized.shape, quantized.dtype, {"codes": quantized.codes})
        whole = unscaled.dequantize(torch.float32).mul_(quantizer.steps).to(torch.int8)
        return Operand(whole, scales.rule.multiplier(quantized.tensors, format).float() / quantizer.steps)
    native = scaled_mm.outer_dtype(quantizer, quantized.codes.device)
    if native is not None:
        scale = scales.rule.multiplier(quantized.tensors, format).float()
        return Operand(quantized.codes.view(native), scale.view(()) if is_whole(quantizer) else scale)
    if is_whole(quantizer):
        unscaled = Quantized(Quantizer(format), quantized.shape, quantized.dtype, {"codes": quantized.codes})
        scale = scales.rule.multiplier(quantized.tensors, format).view(())
        into = carrier(format.key, dtype)
        wide = carried.supports(into, quantized.codes.device)  # the matmul would widen them
        return Operand(unscaled.dequantize(torch.float32 if wide else into), scale)
    if scales.rule.two_level:
        blocks = _in_rows(replace(quantized, tensors=without_tensor_scale(quantized.tensors)), scales)
        return Operand(blocks.dequantize(carrier(format.key, dtype, E4M3_BITS)), quantized.tensors["tensor_scale"])
    narrow = tile_carrier(format, scales.rule, dtype, quantized.codes.device)
    result = quantized.dequantize(narrow)
    if narrow == dtype and _may_be_subnormal(quantized, scales.rule) and has_subnormals(result):
        result = quantized.dequantize(torch.float32)
    if runs_down_columns(scales.tile):  # the strides of `operand`: the order of a GEMM's sums depends on them
        result = result.t().contiguous().t()
    return Operand(result)


def _in_rows(quantized: Quantized, scales: Scales) -> Quantized:
    """The same matrix in tiles of one row each, which CPU kernels take: the scale (a byte) of a taller tile is repeated
    for each of its rows."""
    tile, rows = scales.tile, quantized.matrix_shape[0]
    if tile.rows == 1 or quantized.codes.device.type != "cpu":
        return quantized
    scale = quantized.scale.repeat_interleave(tile.rows or rows, 0)[:rows]
    quantizer = replace(quantized.quantizer, scales=replace(scales, tile=replace(tile, rows=1)))
    return replace(quantized, quantizer=quantizer, tensors=quantized.tensors | {"scale": scale})


def _may_be_subnormal(quantized: Quantized, rule: Scaling) -> bool:
    """Whether some value may be subnormal in bf16, judged by the scales alone; False off the CPU and in a traced
    graph."""
    if not quantized.codes.is_cpu or not has_memory(quantized.codes):
        return False
    format = quantized.quantizer.format
    multiplier = rule.multiplier(quantized.tensors, format)
    return not bool((multiplier * format.smallest >= torch.finfo(torch.bfloat16).smallest_normal).all())


# ---- matrices rounded row by row -------------------------------------------------------------------------------------


def rounded_rows(
    x: Tensor, quantizer: Quantizer, bounds: Tensor | None, dtype: torch.dtype, given: Seed | None
) -> tuple[Tensor, Tensor | None]:
    """(values, scale) of a matrix, clamped to `bounds` if given and rounded by a quantizer with `by_rows`.

    Integers in int8 with scales (rows, 1) or (1, columns). If scales are powers of two, the values are multiplied by
    them and the scale is None: in `dtype`, or float32 if some would be subnormal in bfloat16, which CPUs' matrix units
    treat as zeros.
    """
    scales, format, held = quantizer.tiling, quantizer.format, has_memory(x)
    if not held:
        format = formats.as_constant(format.key)
    amax = operators.amax(x.detach(), bounds, 1 if scales.tile == ROW else 0)
    factor = scales.rule.factor(amax, format)
    assert factor is not None
    steps = quantizer.steps
    if steps is None and dtype == torch.bfloat16 and x.is_cpu and held:
        tiny = bool(((factor > format.smallest * 2.0**126) & (amax > 0)).any())
        dtype = torch.float32 if tiny else dtype
    into = dtype if steps is None else torch.int8
    seed = seed_of(quantizer.rounding, given, x.device)
    made = operators.round_rows(x.detach(), bounds, factor, format, quantizer.rounding, seed, steps, into)
    return made, None if steps is None else factor.reciprocal() / steps
