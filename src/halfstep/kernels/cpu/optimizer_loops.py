"""Optimizer steps in loops over the elements of a chunk or tile, and the kernels that loop over all chunks.

Moments stored as one-byte codes with a scale per tile are decoded in the loop that updates the weight, and written as
soon as the tile's amax is known. A tile stays in registers and the L1 cache, and memory is read while other tiles are
computed. Decoding a whole chunk, updating it, then encoding it (`coded.opened`, `coded.closed`) would leave memory idle
in two of three loops, and wait for it in the other.
"""

import numpy as np
from llvmlite import ir
from numba import prange, types

from halfstep.kernels.arithmetic import SQUARES
from halfstep.kernels.cpu.coded import closed, opened
from halfstep.kernels.cpu.compiled import CHUNK, Kernel, ends, inner, none, specialized, specialized_inlined
from halfstep.kernels.cpu.dequantize import half_scale, larger_code
from halfstep.kernels.cpu.divided import encode_block, rounded, scaled
from halfstep.kernels.cpu.lanes import as_bits, emitted, lanes
from halfstep.kernels.cpu.noise import chunk_keys
from halfstep.kernels.cpu.optimizer_lanes import advance, foresee, note_results
from halfstep.kernels.cpu.optimizer_types import bare, placed, readable, zeros
from halfstep.kernels.cpu.scales import absmax_scale


# ---- decoding ------------------------------------------------------------------------------------------------------


@lanes(types.float32)
def _from_table(value, scale):
    return scaled(value, scale, types.uint32)


@specialized_inlined
def open_tile(kept, start, tile, times, decoding, values, place):
    """In kernels: for codebooks, write the tile's values to `values` from `place` on, in a loop of its own; else
    nothing."""
    size = 1 << len(tile)

    def looked_up(kept, start, tile, times, decoding, values, place):
        for i in range(size):
            values[place + i] = decoding[kept[start + i]]
        for i in range(size):
            values[place + i] = _from_table(values[place + i], times)

    def nothing(kept, start, tile, times, decoding, values, place):
        pass

    return nothing if isinstance(decoding, types.BaseTuple) else looked_up


@specialized_inlined
def multiplier(kept, start, tile, scale, decoding):
    """In kernels: the factor on the codes of a tile; NaN where it would not give their exact values."""
    size = 1 << len(tile)

    def of_halves(kept, start, tile, scale, decoding):
        most = np.uint8(0)
        for i in range(size):
            most = larger_code(most, kept[start + i], decoding)
        times = half_scale(scale, most, decoding)
        return times if times > 0 else np.float32(np.nan)

    def own(kept, start, tile, scale, decoding):
        return scale

    return of_halves if isinstance(decoding, types.BaseTuple) else own


# ---- encoding ------------------------------------------------------------------------------------------------------


@specialized_inlined
def encode_tile(values, place, scale, kept, start, tile, numbers, codes):
    """In kernels: write the codes of a tile's values, from `place` on, to `kept` from `start` on. Values before `place`
    may be overwritten."""
    size = 1 << len(tile)

    def floats(values, place, scale, kept, start, tile, numbers, codes):
        if scale > 0:
            for i in range(size):
                kept[start + i] = rounded(
                    values[place + i], scale, None, None, numbers, codes, None, None, i, kept[start + i]
                )
        else:  # the tile is all zeros, or not finite
            for i in range(size):
                kept[start + i] = 0

    def places(values, place, scale, kept, start, tile, numbers, codes):
        encode_block(values, place, size, scale, as_bits(values), codes, kept, start)

    return places if isinstance(numbers, types.NoneType) else floats


# ---- moments, one after the other ------------------------------------------------------------------------------------
# A moment is (floats or codes, scale, levels, decoding, scale_of, numbers, codes, residual).


def _are_numbers(moments):
    return all(isinstance(moment[1], types.NoneType) for moment in moments)


@specialized_inlined
def open_chunk(moments, a, b):
    """In kernels: the moments, with codes replaced by their values a to b."""
    if _are_numbers(moments):
        return lambda moments, a, b: bare(moments)

    def codes(moments, a, b):
        kept, scale, levels, decoding, _, _, _, _ = moments[0]
        return ((opened(kept, scale, levels, decoding, a, b),), *open_chunk(moments[1:], a, b))

    def numbers(moments, a, b):
        return (moments[0], *open_chunk(moments[1:], a, b))

    return numbers if isinstance(moments[0][1], types.NoneType) else codes


@specialized_inlined
def close_chunk(moments, chunk, a, b):
    """In kernels: encode the values that `open_chunk` decoded, after the update."""
    if _are_numbers(moments):
        return lambda moments, chunk, a, b: None

    def each(moments, chunk, a, b):
        kept, scale, levels, _, scale_of, numbers, codes, _ = moments[0]
        closed(kept, scale, levels, scale_of, numbers, codes, chunk[0][0], a, b)
        close_chunk(moments[1:], chunk[1:], a, b)

    return each


@specialized_inlined
def open_tiles(moments, t, tile, values, place):
    """In kernels: tile `t` of each moment, for `advance`; decoded to `values` from `place` on where it is looked up."""
    size = 1 << len(tile)
    if not len(moments):
        return lambda moments, t, tile, values, place: ()

    def each(moments, t, tile, values, place):
        kept, scale, _, decoding, _, _, _, _ = moments[0]
        times = multiplier(kept, t * size, tile, scale[t], decoding)
        open_tile(kept, t * size, tile, times, decoding, values, place)
        return ((kept, times, decoding, place), *open_tiles(moments[1:], t, tile, values, place + size))

    return each


@specialized_inlined
def close_tiles(moments, t, tile, values, place, most):
    """In kernels: encode the values of each moment's tile, with scales computed from the amaxes `most`."""
    size = 1 << len(tile)
    if not len(moments):
        return lambda moments, t, tile, values, place, most: None

    def each(moments, t, tile, values, place, most):
        kept, scale, _, _, scale_of, numbers, codes, _ = moments[0]
        scale[t] = absmax_scale(most[0], scale_of)
        encode_tile(values, place, scale[t], kept, t * size, tile, numbers, codes)
        close_tiles(moments[1:], t, tile, values, place + size, most[1:])

    return each


# ---- chunks ----------------------------------------------------------------------------------------------------------


@inner
def step_chunk(rule, weight, kept, grad, chunk, numbers, keys, begin, at, size):
    """Step `size` elements from `at` on, of the chunk that begins at `begin`; no moment is decoded by the tile."""
    for k in range(size):
        advance(rule, weight, kept, grad, chunk, None, numbers, keys, begin, at, k, ())


@inner
def _step_tiles(rule, weight, kept, grad, moments, numbers, keys, begin, end, tile):
    """Step a chunk whose moments are codes, tile by tile, up to the first tile that this cannot decode exactly; returns
    where that, or the end, is."""
    size = 1 << len(tile)
    pointers = bare(moments)  # raw pointers, since arrays would be reference-counted for every tile
    values = np.empty(len(moments) * size, np.float32)
    for t in range(begin // size, end // size):
        tiles = open_tiles(pointers, t, tile, values, 0)
        if not readable(tiles):
            return t * size
        most = zeros(moments)
        for k in range(size):
            most = advance(rule, weight, kept, grad, tiles, values, numbers, keys, begin, t * size, k, most)
        close_tiles(pointers, t, tile, values, 0, most)
    return end


@specialized
def _seed_at(seeds, n):
    """In kernels: the seed of tensor n, or None."""
    return (lambda seeds, n: None) if none(seeds) else lambda seeds, n: (seeds[n, 0], seeds[n, 1])


@inner
def _tensor_at(starts, place):
    """The tensor that a chunk belongs to. `np.searchsorted` would take a quarter second to compile in every process."""
    low, high = 0, starts.size - 1
    while high - low > 1:
        middle = (low + high) // 2
        if starts[middle] <= place:
            low = middle
        else:
            high = middle
    return low


@emitted()
def _count(context, builder, address):
    """In kernels: add 1 to the float32 at an address."""
    number = builder.inttoptr(address.value, ir.FloatType().as_pointer())
    builder.store(builder.fadd(builder.load(number), ir.Constant(ir.FloatType(), 1)), number)


@Kernel
def step(starts, rows, counts, like, numbers, seeds, tile):
    """Step tensors of the types `like` (rule, gradient, weight, master's tensors, moments), whose addresses are in
    `rows`; `starts` holds the number of the first chunk of each, `counts` the addresses of their step counts, or 0."""
    for place in prange(starts[-1]):
        n = _tensor_at(starts, place)
        chunk = place - starts[n]
        if chunk == 0 and counts[n]:
            _count(counts[n])
        begin, end = ends(chunk, rows[n, 1])
        keys = chunk_keys(_seed_at(seeds, n), chunk)
        rule, grad, weight, kept, moments = placed(like, rows, n)
        at = begin
        if tile is not None:
            at = _step_tiles(rule, weight, kept, grad, moments, numbers, keys, begin, end, tile)
        if at < end:
            decoded = open_chunk(moments, at, end)
            step_chunk(rule, weight, kept, grad, decoded, numbers, keys, begin, at, end - at)
            close_chunk(moments, decoded, at, end)


@inner
def _largest(rule, weight, grad, chunk, numbers, at, size):
    """The bits of the amaxes of the new moments."""
    most = zeros(chunk)
    for k in range(size):
        most = foresee(rule, weight, (None, None, None, None, None), grad, chunk, None, numbers, at, k, most)
    return most


@Kernel
def note_largest(rows, like, numbers, found):
    for chunk in prange(found.shape[0]):
        rule, grad, weight, _, moments = placed(like, rows, 0)
        a, b = ends(chunk, weight.size)
        most = _largest(rule, weight, grad, open_chunk(moments, a, b), numbers, a, b - a)
        for n in range(len(most)):
            found[chunk, n] = most[n]


@inner
def _note_results(rule, weight, kept, grad, chunk, numbers, at, start, size, results):
    """Write the values whose norms are taken, for elements from `start` on of a chunk that begins at `at`."""
    for k in range(start, start + size):
        note_results(rule, weight, kept, grad, chunk, None, numbers, at, k, results, k - start)


@inner
def _square(one, other, sums):
    for k in range(sums.size):
        x, y = np.float64(one[k]), np.float64(other[k])
        sums[k] = x * x + y * y


@inner
def _add(sums, others):
    for k in range(sums.size):
        sums[k] += others[k]


@inner
def _pairwise_sum(numbers):
    """The sum of an array, in the order of `arithmetic.norm`; the array is overwritten."""
    half = numbers.size // 2
    while half:
        _add(numbers[:half], numbers[half : 2 * half])
        half //= 2
    return numbers[0]


@Kernel
def find_norms(rows, like, numbers, found):
    """Write `arithmetic.norm` of each of the formula's results to `found`."""
    count, size = found.size, rows[0, 1]
    sums = np.empty((count, (size + SQUARES - 1) // SQUARES))
    for chunk in prange((size + CHUNK - 1) // CHUNK):
        begin, end = ends(chunk, size)
        rule, grad, weight, kept, moments = placed(like, rows, 0)
        decoded = open_chunk(moments, begin, end)
        results, squares = np.zeros(count * SQUARES, np.float32), np.empty(SQUARES // 2)
        for a in range(begin, end, SQUARES):
            length = min(SQUARES, end - a)
            if length < SQUARES:
                results[:] = 0
            _note_results(rule, weight, kept, grad, decoded, numbers, begin, a - begin, length, results)
            for n in range(count):
                own = results[n * SQUARES : (n + 1) * SQUARES]
                _square(own[: SQUARES // 2], own[SQUARES // 2 :], squares)
                sums[n, a // SQUARES] = _pairwise_sum(squares)
    for n in range(count):
        total = np.zeros(SQUARES)
        for block in range(sums.shape[1]):
            total[block % SQUARES] += sums[n, block]
        found[n] = np.sqrt(_pairwise_sum(total))
