"""Delayed scaling at the end of an optimizer step (`quant.scaling.delayed.Delayed.advance`)."""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit.elements import scales


@triton.jit
def advance(
    places, skipped, H: tl.constexpr, R: tl.constexpr, WARMUP: tl.constexpr, RECENT: tl.constexpr,
    RESTART: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Advance one state in place: its factor, the amax of the step that ends, and the earlier amaxes, oldest first.
    Where the step was `skipped`, only reset that amax."""
    state = tl.load(places + tl.program_id(0)).to(tl.pointer_type(tl.int32))
    place = tl.arange(0, B)
    inside = place < H
    factor = tl.load(state)
    latest = tl.load(state + 1)
    kept = tl.load(state + 1 + place, mask=inside, other=0)
    # Each entry is replaced by the next one; the last by this step's amax; the first, the amax of the next step, by 0.
    following = tl.load(state + 2 + place, mask=place < H - 1, other=0)
    tl.debug_barrier()  # before any of them is written
    left_out = False if skipped is None else tl.load(skipped).to(tl.float32, bitcast=True) > 0.0
    usual = (latest & 0x7FFFFFFF) < 0x7F800000
    current = tl.where(usual, latest, 0)
    history = tl.where((kept & 0x7FFFFFFF) < 0x7F800000, kept, 0)
    following = tl.where((following & 0x7FFFFFFF) < 0x7F800000, following, 0)
    following = tl.where(place == H - 1, current, following)
    following = tl.where(place == 0, 0, following)
    amax = current if RECENT else tl.max(history)
    warm = (tl.sum(((history & 0x7FFFFFFF) != 0).to(tl.int32)) >= WARMUP) | ((factor & 0x7FFFFFFF) != 0)
    _, _, formed, _ = scales(amax.to(tl.uint32, bitcast=True), None, R, None)
    formed = formed.to(tl.int32, bitcast=True)
    factor_after = tl.where(warm & (amax > 0), formed, factor)
    after = tl.where((current & 0x7FFFFFFF) != 0, following, history)
    if RESTART:
        factor_after = tl.where(usual, factor_after, 0)
        after = tl.where(usual, after, 0)
    after = tl.where(left_out, tl.where(place == 0, 0, kept), after)
    tl.store(state, tl.where(left_out, factor, factor_after))
    tl.store(state + 1 + place, after, mask=inside)
