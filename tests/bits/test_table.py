"""Tables of exponents and significant bits, counted from raw bits, equal exact arithmetic on every value."""

import functools
import math
import operator
from collections import Counter
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from families import for_each
from halfstep import formats
from halfstep.bits.table import EMPTY, Table, from_kernel, from_values, tells
from halfstep.formats import Float
from halfstep.kernels.cpu import bits as kernel


DTYPES = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
}


def hard(size=5000, seed=0):
    """Random bit patterns, subnormals, normal values, low-precision values and special values."""
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 1 << 32, size, dtype=np.uint32).view(np.float32)
    small = rng.integers(0, 1 << 23, size // 4, dtype=np.uint32).view(np.float32)
    normal = rng.standard_normal(size).astype(np.float32)
    few = (normal.view(np.uint32) >> 20 << 20).view(np.float32)
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1, -2, 448, 480, 464, 65504, 65520, 1e-45, 2.0**-126], "f4")
    return np.concatenate([patterns, small, normal, few, special])


def wide(values):
    """The values as float64, without the floating-point flag that signalling NaNs raise."""
    with np.errstate(invalid="ignore"):
        return values.astype(np.float64)


def significant_bits(x):
    """The significant bits of x, exactly: the bit length of its numerator's odd part."""
    whole = Fraction(x).numerator
    return (whole // (whole & -whole)).bit_length()


def exactly_counted(values):
    """(exponent, significant bits) of each finite nonzero value, counted one by one."""
    finite = [abs(float(v)) for v in values if math.isfinite(v) and v != 0]
    return Counter((math.frexp(x)[1] - 1, significant_bits(x)) for x in finite)


def as_counter(table):
    rows, columns = np.nonzero(table.counts)
    return Counter(
        {(int(r) + table.lowest, int(c)): int(table.counts[r, c]) for r, c in zip(rows, columns, strict=True)}
    )


def kernel_table(values):
    found, ends = np.zeros((kernel.ROWS, kernel.COLUMNS), np.int64), np.full(1, 0xFFFFFFFF, np.uint32)
    kernel.add_float32(values.view(np.uint32), found, ends)
    return from_kernel(found), ends


def test_float32_table_equals_exact_arithmetic():
    values = hard()
    table, ends = kernel_table(values)
    assert as_counter(table) == exactly_counted(values)
    assert (table.zeros, table.infinities) == (int((values == 0).sum()), int(np.isinf(values).sum()))
    assert table.nans == int(np.isnan(values).sum())
    finite = np.abs(values[np.isfinite(values) & (values != 0)])
    assert ends.view(np.float32)[0] == finite.min()
    assert int(table.fifteens.sum()) == sum(math.frexp(v)[0] == 15 / 16 for v in finite.tolist())


@for_each("size", [0, 1, 40, 5000])
def test_sorted_float32_table_equals_exact_arithmetic(size):
    values = np.concatenate([hard(size), hard(size)[::2], -hard(size)[::3]])[: 4 * size]
    starts = np.array([0, 7, 7, 7 + values.size])  # an earlier segment, and an empty one
    bits = np.concatenate([hard()[:7], values]).view(np.uint32)
    rows, counts, fifteens, (*_, found) = kernel.sorted_float32(bits, starts)
    counts, fifteens, seen = counts[rows[2] :], fifteens[rows[2] :], found._asdict()
    table, ends = kernel_table(values)
    finite = wide(values[np.isfinite(values) & (values != 0)])
    telling = finite[tells(finite)]
    assert as_counter(Table(seen["lowest"], counts, fifteens)) == exactly_counted(values)
    assert np.array_equal(fifteens, table.fifteens)
    assert (seen["zeros"], seen["infinities"], seen["nans"]) == (table.zeros, table.infinities, table.nans)
    assert not finite.size or seen["smallest"] == ends[0]
    assert seen["magnitudes"] == len(set(map(abs, finite.tolist())))
    assert seen["telling"] == len(set(telling.tolist()))
    assert seen["telling_magnitudes"] == len(set(map(abs, telling.tolist())))


def test_float64_values_are_counted_exactly():
    values = np.concatenate([wide(hard(500)), np.random.default_rng(1).standard_normal(300), [5e-324, 1e308]])
    assert as_counter(from_values(values)) == exactly_counted(values)
    times = np.arange(values.size) % 50
    assert as_counter(from_values(values, times)) == exactly_counted(np.repeat(values, times))


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [0, 1, 3, 1023, (1 << 20) + 7])
def test_tables_for_all_sizes_and_thread_counts(size, threads):
    values = np.resize(hard(), size)
    torch.set_num_threads(threads)
    try:
        table, _ = kernel_table(values)
        codes, half = np.zeros(1 << 16, np.int64), (values.view(np.uint32) >> 16).astype(np.uint16)
        kernel.add_codes(half, codes)
    finally:
        torch.set_num_threads(1)
    assert as_counter(table) == as_counter(from_values(wide(values)))
    np.testing.assert_array_equal(codes, np.bincount(half, minlength=1 << 16))


@pytest.mark.parametrize("columns", [1, 7, 64, 1500])
@pytest.mark.parametrize("dtype", [np.uint32, np.uint16])
def test_largest_magnitude_of_each_column(columns, dtype):
    rng = np.random.default_rng(2)
    values = rng.integers(0, np.iinfo(dtype).max, 40 * columns + 5, dtype=dtype)
    infinity, first = np.iinfo(dtype).max // 2 - 40, 3 % columns
    found = np.zeros(columns, dtype)
    kernel.raise_amax(values, first, found, int(infinity))
    magnitude = values & dtype(np.iinfo(dtype).max >> 1)
    expected = np.zeros(columns, dtype)
    for i, m in enumerate(magnitude):
        if m < infinity:
            expected[(first + i) % columns] = max(expected[(first + i) % columns], m)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shift", [-20, -3, 0, 5])
@pytest.mark.parametrize("name", DTYPES)
def test_exact_counts_the_values_unchanged_by_a_cast(name, shift):
    values = hard()
    finite = values[np.isfinite(values) & (values != 0)].astype(np.float64)
    scaled = np.ldexp(finite, -shift)
    with np.errstate(over="ignore"):
        narrow = scaled.astype(np.float32)
        exactly = (narrow == scaled) & (narrow.astype(DTYPES[name]).astype(np.float64) == scaled)
    assert kernel_table(values)[0].exact(formats.get(name, Float), shift) == int(exactly.sum())


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("shift", [-9, 0, 4])
def test_best_shift_finds_the_scale_of_a_scaled_cast(name, shift):
    normal = np.random.default_rng(3).standard_normal(4000) * 30
    values = np.ldexp(normal.astype(np.float32).astype(DTYPES[name]).astype(np.float64), shift)
    table = from_values(values)
    found, count = table.best_shift(formats.get(name, Float))
    assert count == table.nonzero
    assert table.exact(formats.get(name, Float), shift) == table.nonzero
    assert table.exact(formats.get(name, Float), found) == table.nonzero
    largest = np.ldexp(np.abs(values).max(), -found)
    assert formats.get(name).max / 2 < largest * 1.15 <= formats.get(name).max * 1.15
    assert EMPTY.best_shift(formats.get(name, Float)) is None


def test_sum_of_tables_is_the_table_of_both():
    one, other = wide(hard(300)), wide(hard(300, seed=5)) * 1e30
    both = from_values(one) + from_values(other)
    whole = from_values(np.concatenate([one, other]))
    assert as_counter(both) == as_counter(whole)
    assert (both.zeros, both.nans, both.infinities) == (whole.zeros, whole.nans, whole.infinities)
    np.testing.assert_array_equal(both.fifteens, whole.fifteens)


@pytest.mark.parametrize("make", [lambda x: kernel_table(x)[0], lambda x: from_values(wide(x))])
def test_tables_have_no_empty_rows(make):
    zeros, values = np.zeros(9, np.float32), np.array([2.0**-20, 3 * 2.0**-19, np.inf, 0], np.float32)
    assert (make(zeros).zeros, make(zeros).rows.size, make(zeros).nonzero) == (9, 0, 0)
    for both in (make(zeros) + make(values), make(values) + make(zeros), EMPTY + make(values)):
        assert both.rows.tolist() == [-20, -19, -18]
        assert (both.exponents.tolist(), both.infinities) == ([1, 0, 1], 1)
    assert (make(zeros) + make(zeros)).zeros == 18


def test_values_and_tables_agree_on_evidence():
    values = np.unique(np.abs(wide(hard())[np.isfinite(hard())]))
    values = np.concatenate([values[values > 0], np.arange(1, 300), 2.0**24 + np.arange(-9, 9), 1e25 + np.arange(3)])
    expected = sum(
        as_fraction.denominator > 1 or as_fraction >= 2**24
        for as_fraction in map(Fraction, values)
        if significant_bits(as_fraction) > 1
    )
    assert int(tells(values).sum()) == int(from_values(values).telling.sum()) == expected


@pytest.mark.parametrize("size", [0, 5, 3000])
@pytest.mark.parametrize(("dtype", "smallest"), [(np.uint32, 1 << 23), (np.uint16, 1 << 10)])
def test_or_of_all_but_subnormal_values(size, dtype, smallest):
    values = np.random.default_rng(4).integers(0, np.iinfo(dtype).max, size, dtype=dtype)
    values[::2] &= dtype(np.iinfo(dtype).max >> 1) % smallest
    values[1::2] &= ~dtype(5)
    normal = [int(v) for v in values if (v & (np.iinfo(dtype).max >> 1)) >= smallest]
    assert kernel.any_bits(values, smallest) == functools.reduce(operator.or_, normal, 0)
    assert size < 3000 or kernel.any_bits(values, 0) & 5
