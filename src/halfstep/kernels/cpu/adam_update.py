"""Adam's update in loops over the elements of a chunk, or of a tile, and the kernels that go over all of them."""

from __future__ import annotations

import numba
import numpy as np

from halfstep.kernels.cpu.adam_lanes import (
    as_bf16,
    bf16_difference,
    bf16_sum,
    decode,
    encode,
    encode_stochastic,
    first_moment,
    joined,
    kept_moment,
    lower_half,
    moved_weight,
    nearest_bf16_value,
    second_moment,
    upper_half,
)
from halfstep.kernels.cpu.coded import closed, opened
from halfstep.kernels.cpu.compiled import CHUNK, Kernel, inner, inner_inlined, piece
from halfstep.kernels.cpu.masters import beside, image_or_own
from halfstep.kernels.cpu.noise import chunk_keys
from halfstep.kernels.cpu.runs import widest_registers
from halfstep.kernels.cpu.scales import absmax_scale, larger
from halfstep.kernels.cpu.tiled import encode_tile, keep_number, multiplier, number, open_tile


@inner_inlined
def _advance(
    weight, master, low, compensation, residual, grad,
    exp_avg, times1, decoding1, values1, exp_avg_sq, times2, decoding2, values2, exp_avg_sq_residual,
    grad_scale, beta1, rest1, beta2, rest2, l2, keep, step_size, rescale, eps,
    keys, noise_start, start, count, coded1, coded2, coded,
):  # fmt: skip
    """`count` elements from `start` on. numba drops the branches on what is None when it compiles. The moments are
    written in place; where there are `values`, to those, and the bits of their largest magnitudes come back.

    `coded1` and `coded2` are None where that moment is not codes, and `coded` where neither is: else an element whose
    new moments are not finite keeps its old ones, since their scale is others' too."""
    most1, most2 = np.uint32(0), np.uint32(0)
    for k in range(count):
        i = start + k
        if master is not None:
            full = image_or_own(weight[i], master[i])
        elif low is not None:
            full = joined(weight[i], low[i])
        else:
            full = decode(weight[i])
            if residual is not None:
                rest = decode(beside(weight[i], residual[i]))
                full = full + rest
        g = decode(grad[i]) * grad_scale
        if l2 is not None:
            g = g + full * l2
        old1, old2 = (
            number(exp_avg, i, values1, k, times1, decoding1),
            number(exp_avg_sq, i, values2, k, times2, decoding2),
        )
        if exp_avg_sq_residual is not None:
            old2 = old2 + decode(exp_avg_sq_residual[i])
        m, v = first_moment(old1, g, beta1, rest1), second_moment(old2, g, beta2, rest2)
        w = moved_weight(full, m, v, keep, step_size, rescale, eps)
        most = np.uint32(0)
        if coded1 is not None:
            most = larger(most, m)
        if coded2 is not None:
            most = larger(most, v)
        if coded is not None:
            m, v = kept_moment(m, old1, most), kept_moment(v, old2, most)
        most1, most2 = larger(most1, m), larger(most2, v)
        keep_number(exp_avg, i, values1, k, m)
        keep_number(exp_avg_sq, i, values2, k, v)
        if exp_avg_sq_residual is not None:
            exp_avg_sq_residual[i] = encode(v - decode(exp_avg_sq[i]), exp_avg_sq_residual[i])
        if low is not None:
            low[i] = lower_half(w)
            weight[i] = upper_half(w)
        elif compensation is not None:
            c = bf16_sum(decode(beside(weight[i], compensation[i])), nearest_bf16_value(w - full))
            moved = bf16_sum(full, c)
            compensation[i] = as_bf16(bf16_sum(c, bf16_difference(full, moved)))
            weight[i] = as_bf16(moved)
        elif residual is not None:
            high = decode(weight[i])
            u = nearest_bf16_value(w - full)
            total = bf16_sum(high, u)
            rest = bf16_sum(rest, bf16_difference(u, bf16_difference(total, high)))
            grown = bf16_sum(total, rest)
            residual[i] = as_bf16(bf16_difference(rest, bf16_difference(grown, total)))
            weight[i] = as_bf16(grown)
        else:
            if master is not None:
                master[i] = w
            if keys is None:
                weight[i] = encode(w, weight[i])
            else:
                weight[i] = encode_stochastic(w, i + noise_start, keys)
    return most1, most2


@inner
def update(
    weight, master, low, compensation, residual, grad, exp_avg, exp_avg_sq, exp_avg_sq_residual,
    grad_scale, beta1, rest1, beta2, rest2, l2, keep, step_size, rescale, eps,
    keys, noise_start, coded1, coded2, coded,
):  # fmt: skip
    """A chunk, or its end, whose moments are arrays of numbers."""
    widest_registers()
    _advance(
        weight, master, low, compensation, residual, grad,
        exp_avg, None, None, None, exp_avg_sq, None, None, None, exp_avg_sq_residual,
        grad_scale, beta1, rest1, beta2, rest2, l2, keep, step_size, rescale, eps,
        keys, noise_start, 0, weight.size, coded1, coded2, coded,
    )  # fmt: skip


@inner
def _update_tiles(
    weight, master, low, compensation, residual, grad,
    exp_avg, scale1, decoding1, scale_of1, numbers1, codes1, exp_avg_sq, scale2, decoding2, scale_of2, numbers2, codes2,
    grad_scale, beta1, rest1, beta2, rest2, l2, keep, step_size, rescale, eps,
    keys, tile,
):  # fmt: skip
    """One chunk whose moments are codes, a tile at a time (`tiled`), up to the first that this cannot read exactly.
    How many elements were updated."""
    size = 1 << len(tile)
    values1, values2 = np.empty(size, np.float32), np.empty(size, np.float32)
    for t in range(scale1.size):
        start = t * size
        times1 = multiplier(exp_avg, start, tile, scale1[t], decoding1)
        times2 = multiplier(exp_avg_sq, start, tile, scale2[t], decoding2)
        if np.isnan(times1) or np.isnan(times2):
            return start
        open_tile(exp_avg, start, tile, times1, decoding1, values1)
        open_tile(exp_avg_sq, start, tile, times2, decoding2, values2)
        most1, most2 = _advance(
            weight, master, low, compensation, residual, grad,
            exp_avg, times1, decoding1, values1, exp_avg_sq, times2, decoding2, values2, None,
            grad_scale, beta1, rest1, beta2, rest2, l2, keep, step_size, rescale, eps,
            keys, 0, start, size, True, True, True,
        )  # fmt: skip
        scale1[t], scale2[t] = absmax_scale(most1, scale_of1), absmax_scale(most2, scale_of2)
        encode_tile(values1, scale1[t], exp_avg, start, tile, numbers1, codes1)
        encode_tile(values2, scale2[t], exp_avg_sq, start, tile, numbers2, codes2)
    return weight.size


@Kernel
def step(
    weight, kept, grad,
    exp_avg, scale1, levels1, decoding1, scale_of1, numbers1, codes1,
    exp_avg_sq, scale2, levels2, decoding2, scale_of2, numbers2, codes2, exp_avg_sq_residual,
    grad_scale, beta1, rest1, beta2, rest2, l2, keep, step_size, rescale, eps,
    seed, tile,
):  # fmt: skip
    master, low, compensation, residual = kept
    for chunk in numba.prange((weight.size + CHUNK - 1) // CHUNK):
        a = chunk * CHUNK
        b = min(a + CHUNK, weight.size)
        keys = chunk_keys(seed, chunk)
        done = 0
        if tile is not None:
            c, d = a >> len(tile), b >> len(tile)
            done = _update_tiles(
                weight[a:b], piece(master, a, b), piece(low, a, b), piece(compensation, a, b), piece(residual, a, b),
                grad[a:b], exp_avg[a:b], scale1[c:d], decoding1, scale_of1, numbers1, codes1,
                exp_avg_sq[a:b], scale2[c:d], decoding2, scale_of2, numbers2, codes2,
                grad_scale, beta1, rest1, beta2, rest2, l2, keep, step_size, rescale, eps,
                keys, tile,
            )  # fmt: skip
            a += done
        if a < b:
            first = opened(exp_avg, scale1, levels1, decoding1, a, b)
            second = opened(exp_avg_sq, scale2, levels2, decoding2, a, b)
            update(
                weight[a:b], piece(master, a, b), piece(low, a, b), piece(compensation, a, b), piece(residual, a, b),
                grad[a:b], first, second, piece(exp_avg_sq_residual, a, b),
                grad_scale, beta1, rest1, beta2, rest2, l2, keep, step_size, rescale, eps,
                keys, done, scale1, scale2, scale2 if scale1 is None else scale1,
            )  # fmt: skip
            closed(exp_avg, scale1, levels1, scale_of1, numbers1, codes1, first, a, b)
            closed(exp_avg_sq, scale2, levels2, scale_of2, numbers2, codes2, second, a, b)


@inner
def _largest(weight, grad, exp_avg, exp_avg_sq, grad_scale, beta1, rest1, beta2, rest2, l2, found):
    """The bits of the largest magnitudes of the new moments."""
    first, second = np.uint32(0), np.uint32(0)
    for i in range(weight.size):
        g = decode(grad[i]) * grad_scale
        if l2 is not None:
            g = g + decode(weight[i]) * l2
        first = larger(first, first_moment(decode(exp_avg[i]), g, beta1, rest1))
        second = larger(second, second_moment(decode(exp_avg_sq[i]), g, beta2, rest2))
    found[0], found[1] = first, second


@Kernel
def note_largest(
    weight, grad,
    exp_avg, scale1, levels1, decoding1, scale_of1, numbers1, codes1,
    exp_avg_sq, scale2, levels2, decoding2, scale_of2, numbers2, codes2,
    grad_scale, beta1, rest1, beta2, rest2, l2, found,
):  # fmt: skip
    for chunk in numba.prange((weight.size + CHUNK - 1) // CHUNK):
        a = chunk * CHUNK
        b = min(a + CHUNK, weight.size)
        first = opened(exp_avg, scale1, levels1, decoding1, a, b)
        second = opened(exp_avg_sq, scale2, levels2, decoding2, a, b)
        _largest(weight[a:b], grad[a:b], first, second, grad_scale, beta1, rest1, beta2, rest2, l2, found[chunk])
