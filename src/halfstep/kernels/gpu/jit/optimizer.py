"""An optimizer step over many tensors: one launch computes each tensor's scalars, then one per kind updates tensors.

For rules that take norms of whole tensors, two launches per kind compute them in between.
"""

from types import SimpleNamespace

import triton
import triton.language as tl

from halfstep.kernels import arithmetic
from halfstep.kernels.gpu import table
from halfstep.kernels.gpu.jit.masters import kept_after, nearest, whole
from halfstep.kernels.gpu.jit.moments import address, close, codes, is_lost, keep_scale, new_scale, note, opened, values
from halfstep.kernels.gpu.jit.numbers import as_bits, as_float, noise, noise_anywhere, read, splitmix, widened


T: tl.constexpr = tl.constexpr(SimpleNamespace(**{key: at for key, at in vars(table).items() if key.isupper()}))
"""The columns of `kernels.gpu.table`, as one constant on which Triton's kernel cache depends."""
SQUARES: tl.constexpr = tl.constexpr(arithmetic.SQUARES)
HALVINGS: tl.constexpr = tl.constexpr(arithmetic.SQUARES.bit_length() - 1)


@triton.jit
def put_aside(row, COLUMN: tl.constexpr, place, inside):
    """Copy a tensor's scale as it is before the step to `place`; for a scale per tile, the first."""
    scale = tl.load(row + COLUMN, mask=inside, other=0).to(tl.pointer_type(tl.float32))
    tl.store(place, tl.load(scale, mask=inside & (tl.load(row + COLUMN, mask=inside, other=0) != 0)), mask=inside)


@triton.jit(do_not_specialize=["count"])
def prepare(
    rows, which, groups, by_step, numbers, most, grad_scale, found_inf, count, FIND: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """For the tensors of one rule, listed in `which`: count a step, unless `found_inf` says that a gradient overflowed,
    and compute the step's scalars. `most` is None where no tensor is stored as codes under one scale."""
    place = tl.program_id(0) * B + tl.arange(0, B)
    inside = place < count
    go = inside if found_inf is None else place < tl.where(tl.load(found_inf) == 0.0, count, 0)
    t = tl.load(which + place, mask=inside, other=0).to(tl.int64)
    row, out = rows + t * T.value.COLUMNS, numbers + t * T.value.NUMBERS
    taken = tl.load(row + T.value.STEP, mask=inside, other=0).to(tl.pointer_type(tl.float32))
    steps = tl.load(taken, mask=inside, other=0.0)
    tl.store(taken, steps + 1.0, mask=go)
    number = steps.to(tl.int64) + 1
    tl.store(out + T.value.GO, tl.where(go, 1.0, 0.0), mask=inside)

    seed = tl.load(row + T.value.SEED, mask=inside, other=0).to(tl.uint64, bitcast=True)
    seed = splitmix(splitmix(seed ^ seed, seed), number.to(tl.uint64, bitcast=True))
    seed = splitmix(seed, tl.load(row + T.value.INDEX, mask=inside, other=0).to(tl.uint64, bitcast=True))
    tl.store(out + T.value.LOW, as_float(seed.to(tl.uint32)), mask=inside)
    tl.store(out + T.value.HIGH, as_float((seed >> 32).to(tl.uint32)), mask=inside)

    group = groups + tl.load(row + T.value.GROUP, mask=inside, other=0) * T.value.OPTIONS
    scale = tl.load(group + T.value.SIGN, mask=inside, other=1.0).to(tl.float32)
    if grad_scale is not None:
        scale = scale * tl.div_rn(1.0, tl.load(grad_scale))
    tl.store(out + T.value.SCALE, scale, mask=inside)
    first = tl.load(group + T.value.AT, mask=inside, other=0.0).to(tl.int64)
    rest = tl.load(group + T.value.COUNT, mask=inside, other=1.0).to(tl.int64)
    settled = tl.where(number < rest, number, rest) - 1
    shared = tl.load(row + T.value.SHARED, mask=inside, other=0).to(tl.pointer_type(tl.float32))
    FIND(group + T.value.GIVEN, by_step + first, settled, number, shared, out + T.value.TAKEN, inside, go)
    if most is not None:
        put_aside(row, T.value.WEIGHT_SCALE, out + T.value.WEIGHT_OLD, inside)
        put_aside(row, T.value.GRAD_SCALE, out + T.value.GRAD_OLD, inside)
        put_aside(row, T.value.KEPT_SCALE, out + T.value.KEPT_OLD, inside)
        put_aside(row, T.value.FIRST_SCALE, out + T.value.FIRST_OLD, inside)
        put_aside(row, T.value.SECOND_SCALE, out + T.value.SECOND_OLD, inside)
        tl.store(most + t * T.value.MOST + T.value.FIRST_MOST, 0, mask=inside)
        tl.store(most + t * T.value.MOST + T.value.SECOND_MOST, 0, mask=inside)
        tl.store(most + t * T.value.MOST + T.value.WEIGHT_MOST, 0, mask=inside)


@triton.jit(do_not_specialize=["count"])
def update(
    rows, blocks, numbers, most, elements1, elements2, count,
    K: tl.constexpr, W: tl.constexpr, X: tl.constexpr, G: tl.constexpr, M1: tl.constexpr, M2: tl.constexpr,
    MOVED: tl.constexpr, HALF: tl.constexpr, FORESEES: tl.constexpr, EACH: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Update the tensors of one kind: each program EACH of the `count` blocks listed in `blocks`. FORESEES: write
    nothing but the new amaxes of tensors stored under one scale."""
    for place in range(EACH):
        number = tl.program_id(0) * EACH + place
        if number < count:
            update_block(
                rows, blocks + 2 * number, numbers, most, elements1, elements2,
                K, W, X, G, M1, M2, MOVED, HALF, FORESEES, B,
            )  # fmt: skip


@triton.jit
def update_block(
    rows, which, numbers, most, elements1, elements2,
    K: tl.constexpr, W: tl.constexpr, X: tl.constexpr, G: tl.constexpr, M1: tl.constexpr, M2: tl.constexpr,
    MOVED: tl.constexpr, HALF: tl.constexpr, FORESEES: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Update one block, or find its amaxes."""
    t, block = tl.load(which).to(tl.int64), tl.load(which + 1).to(tl.int64)
    row, step = rows + t * T.value.COLUMNS, numbers + t * T.value.NUMBERS
    if most is not None:
        most += t * T.value.MOST
    size = tl.load(row + T.value.SIZE)
    if tl.load(step + T.value.GO) != 0.0:
        if (block + 1) * B <= size:
            advance(
                row, step, most, block, size, None, elements1, elements2, K, W, X, G, M1, M2, MOVED, HALF, FORESEES, B
            )
        else:
            advance(
                row, step, most, block, size, block * B + tl.arange(0, B) < size, elements1, elements2,
                K, W, X, G, M1, M2, MOVED, HALF, FORESEES, B,
            )  # fmt: skip


@triton.jit
def load_block(
    row, step, block, size, inside, elements1, elements2,
    K: tl.constexpr, W: tl.constexpr, X: tl.constexpr, G: tl.constexpr, M1: tl.constexpr, M2: tl.constexpr,
    HALF: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """A block before the step: the stored weight and master, and the float32 weight, scaled gradient and moments."""
    # triton 3.6 passes a tuple's field on only as a constant of its own.
    KIND: tl.constexpr = K.weight
    GRAD_KIND: tl.constexpr = K.grad
    KEPT_KIND: tl.constexpr = K.kept
    MASTER: tl.constexpr = K.master
    index = tl.arange(0, B)
    stored = read(address(row, T.value.WEIGHT, block * B, KIND, K.aligned) + index, inside)
    kept = stored
    if KEPT_KIND is not None:
        kept = read(address(row, T.value.KEPT, block * B, KEPT_KIND, K.aligned) + index, inside)
    if X is not None:
        full = values(kept, tl.load(step + T.value.KEPT_OLD), X)
    elif W is None:
        full = whole(stored, kept, MASTER, KIND, HALF)
    elif KEPT_KIND is not None:
        full = as_float(widened(kept, KEPT_KIND))
    else:
        full = values(stored, tl.load(step + T.value.WEIGHT_OLD), W)
    grad = read(address(row, T.value.GRAD, block * B, GRAD_KIND, K.aligned) + index, inside)
    grad = as_float(widened(grad, GRAD_KIND)) if G is None else values(grad, tl.load(step + T.value.GRAD_OLD), G)
    first, second = grad, grad
    if M1 is not None:
        first = opened(
            row, T.value.FIRST, step + T.value.FIRST_OLD, block, index, inside, size, elements1, M1, K.aligned, B
        )
    if M2 is not None:
        second = opened(
            row, T.value.SECOND, step + T.value.SECOND_OLD, block, index, inside, size, elements2, M2, K.aligned, B
        )
    if K.residual:
        KIND2: tl.constexpr = M2.kind
        rest = address(row, T.value.RESIDUAL, block * B, KIND2, K.aligned) + index
        second = second + as_float(widened(read(rest, inside), KIND2))
    return stored, kept, full, grad * tl.load(step + T.value.SCALE), first, second


@triton.jit
def advance(
    row, step, most, block, size, inside, elements1, elements2,
    K: tl.constexpr, W: tl.constexpr, X: tl.constexpr, G: tl.constexpr, M1: tl.constexpr, M2: tl.constexpr,
    MOVED: tl.constexpr, HALF: tl.constexpr, FORESEES: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Load one block, update it, and write it or its amaxes."""
    KIND: tl.constexpr = K.weight
    KEPT_KIND: tl.constexpr = K.kept
    MASTER: tl.constexpr = K.master
    index = tl.arange(0, B)
    weight = address(row, T.value.WEIGHT, block * B, KIND, K.aligned) + index
    stored, kept, full, grad, first, second = load_block(
        row, step, block, size, inside, elements1, elements2, K, W, X, G, M1, M2, HALF, B
    )
    first_old, second_old = first, second
    updated, first, second = MOVED(full, grad, first, second, step + T.value.TAKEN)
    if M1 is not None:
        lost = is_lost(first, M1)
        if M2 is not None:
            lost = lost | is_lost(second, M2)
            second = tl.where(lost, second_old, second)
        first = tl.where(lost, first_old, first)

    if FORESEES:
        if M1 is not None and M1.rule is not None:
            note(most + T.value.FIRST_MOST, first, inside)
        if M2 is not None and M2.rule is not None:
            note(most + T.value.SECOND_MOST, second, inside)
        if W is not None:
            note(most + T.value.WEIGHT_MOST, updated, inside)
    else:
        if W is not None:
            write_codes(row, most, block, index, inside, updated, weight, K, W, X, HALF, B)
        else:
            random_bits = None
            if K.noisy:
                low = tl.load(step + T.value.LOW).to(tl.int32, bitcast=True)
                high = tl.load(step + T.value.HIGH).to(tl.int32, bitcast=True)
                if K.spread:
                    run, own = tl.load(row + T.value.RUN), block * B + index
                    place = tl.load(row + T.value.START) + own // run * tl.load(row + T.value.STRIDE) + own % run
                    random_bits = noise_anywhere(low, high, place)
                else:
                    random_bits = noise(low, high, block * B, index)
            stored, kept = kept_after(updated, full, stored, kept, random_bits, MASTER, KIND, K.noisy, HALF)
            tl.store(weight, stored, mask=inside)
            if KEPT_KIND is not None:
                tl.store(address(row, T.value.KEPT, block * B, KEPT_KIND, K.aligned) + index, kept, mask=inside)
        if M1 is not None:
            close(
                row, T.value.FIRST, most, T.value.FIRST_MOST, block, index, inside, size, elements1, first, M1, HALF,
                K.aligned, B,
            )  # fmt: skip
        if M2 is not None:
            close(
                row, T.value.SECOND, most, T.value.SECOND_MOST, block, index, inside, size, elements2, second, M2, HALF,
                K.aligned, B,
            )  # fmt: skip
        if K.residual:
            KIND2: tl.constexpr = M2.kind
            rest = address(row, T.value.RESIDUAL, block * B, KIND2, K.aligned) + index
            # The rounding error of the second moment, itself rounded.
            left = second - as_float(widened(nearest(second, KIND2, HALF), KIND2))
            tl.store(rest, nearest(left, KIND2, HALF), mask=inside)


@triton.jit
def write_codes(
    row, most, block, index, inside, updated, weight, K: tl.constexpr, W: tl.constexpr, X: tl.constexpr,
    HALF: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Write a weight stored as codes; with a master, write the updated master, and the weight as its rounding."""
    KEPT_KIND: tl.constexpr = K.kept
    largest = tl.load(most + T.value.WEIGHT_MOST)
    if KEPT_KIND is not None:
        # Rounding is monotonic, so the largest value stays the largest.
        top = as_float(largest.to(tl.uint32, bitcast=True))
        if X is not None:
            scale, element_scale, keep = new_scale(largest, X)
            kept = codes(updated, element_scale, keep, X, HALF)
            keep_scale(row, T.value.KEPT_SCALE, block, scale)
            updated = values(kept, scale, X)
            top = values(codes(top, element_scale, keep, X, HALF), scale, X)
        else:
            kept = nearest(updated, KEPT_KIND, HALF)
            updated = as_float(widened(kept, KEPT_KIND))
            top = as_float(widened(nearest(top, KEPT_KIND, HALF), KEPT_KIND))
        tl.store(address(row, T.value.KEPT, block * B, KEPT_KIND, K.aligned) + index, kept, mask=inside)
        largest = as_bits(top).to(tl.int32, bitcast=True)
    scale, element_scale, keep = new_scale(largest, W)
    tl.store(weight, codes(updated, element_scale, keep, W, HALF), mask=inside)
    keep_scale(row, T.value.WEIGHT_SCALE, block, scale)


# ---- norms -----------------------------------------------------------------------------------------------------------


@triton.jit
def halved(numbers):
    """The sum of SQUARES values in the order of `arithmetic.norm`; each `tl.sum` adds two values, so its order is
    fixed."""
    for n in tl.static_range(HALVINGS):
        numbers = tl.sum(tl.reshape(numbers, (2, SQUARES >> (n + 1))), 0)
    return tl.sum(numbers, 0)


@triton.jit
def square(
    rows, blocks, numbers, sums, elements1, elements2,
    K: tl.constexpr, W: tl.constexpr, X: tl.constexpr, G: tl.constexpr, M1: tl.constexpr, M2: tl.constexpr,
    NORMED: tl.constexpr, COUNT: tl.constexpr, HALF: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Store the sum of squares of one block, for each value of which the rule takes the norm."""
    which = blocks + 2 * tl.program_id(0)
    t, block = tl.load(which).to(tl.int64), tl.load(which + 1).to(tl.int64)
    row, step = rows + t * T.value.COLUMNS, numbers + t * T.value.NUMBERS
    sums += tl.program_id(0).to(tl.int64) * COUNT
    size = tl.load(row + T.value.SIZE)
    if tl.load(step + T.value.GO) != 0.0:
        if (block + 1) * B <= size:
            note_squares(row, step, sums, block, size, None, elements1, elements2, K, W, X, G, M1, M2, NORMED, HALF, B)
        else:
            inside = block * B + tl.arange(0, B) < size
            note_squares(
                row, step, sums, block, size, inside, elements1, elements2, K, W, X, G, M1, M2, NORMED, HALF, B
            )


@triton.jit
def note_squares(
    row, step, sums, block, size, inside, elements1, elements2,
    K: tl.constexpr, W: tl.constexpr, X: tl.constexpr, G: tl.constexpr, M1: tl.constexpr, M2: tl.constexpr,
    NORMED: tl.constexpr, HALF: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Store one block's sums of squares."""
    _, _, full, grad, first, second = load_block(
        row, step, block, size, inside, elements1, elements2, K, W, X, G, M1, M2, HALF, B
    )
    results = NORMED(full, grad, first, second, step + T.value.TAKEN)
    for n in tl.static_range(len(results)):
        wide = (results[n] if inside is None else tl.where(inside, results[n], 0.0)).to(tl.float64)
        tl.store(sums + n, halved(wide * wide))


@triton.jit
def norm(rows, places, sums, numbers, FIRST_NORM: tl.constexpr, COUNT: tl.constexpr, B: tl.constexpr):
    """Store the norms of one tensor per program: `places` lists tensors and where the sums of their blocks begin."""
    t = tl.load(places + 2 * tl.program_id(0)).to(tl.int64)
    start = tl.load(places + 2 * tl.program_id(0) + 1).to(tl.int64)
    blocks = (tl.load(rows + t * T.value.COLUMNS + T.value.SIZE) + B - 1) // B
    for n in tl.static_range(COUNT):
        total, first = tl.zeros((B,), tl.float64), blocks * 0
        while first < blocks:  # triton 3.6's interpreter takes no tensor as the end of a range
            block = first + tl.arange(0, B)
            total += tl.load(sums + (start + block) * COUNT + n, mask=block < blocks, other=0.0)
            first += B
        tl.store(numbers + t * T.value.NUMBERS + FIRST_NORM + n, tl.sqrt(halved(total)).to(tl.float32))
