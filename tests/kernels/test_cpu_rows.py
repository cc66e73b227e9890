"""CPU kernels for rows, quantiles, clamp remainders and estimator slopes equal torch's reference, bit for bit."""

from itertools import product

import pytest
import torch

from families import in_turn, slow_unless
from halfstep import formats
from halfstep.kernels.cpu import clamp_operators, quantiles, rows, slopes, whole_mm
from halfstep.ops.operand import Operand
from halfstep.quant import Clamp, Estimator, Quantizer, Scales, Tile, round_to
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import ROW, TENSOR


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
each_dtype = pytest.mark.parametrize("dtype", slow_unless(lambda dtype: dtype != torch.float16, DTYPES))
SHAPES = ((1, 1), (5, 1), (1, 5), (33, 65), (40, 512), (300, 129))
FORMATS = ("fp4", "e3m2fn", "int4", "e2m3fn", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz")
ROUNDINGS = ("nearest_even", "nearest_up", "nearest_away", "toward_zero", "up", "down")


def same(one, two):
    """Equal values, with equal NaN positions; zeros may differ in sign."""
    assert one.dtype == two.dtype
    assert torch.equal(one.isnan(), two.isnan())
    assert torch.equal(one.nan_to_num(0), two.nan_to_num(0))


def drawn(shape, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * torch.exp(2 * torch.randn(shape, generator=g))).to(dtype)


def ties(shape, format, factor):
    """Values of the format and midpoints between them, divided by the factor."""
    values = torch.tensor(format.values())
    near = torch.cat([values, (values[1:] + values[:-1]) / 2])
    return near[torch.arange(shape[0] * shape[1]) % len(near)].view(shape) / factor


@pytest.mark.quick("0-shape3-dtype0", "1-shape0-dtype1", "1-shape2-dtype0")
@each_dtype
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dim", [0, 1])
def test_clamped_amaxes_equal_torch(dtype, shape, dim):
    x = drawn(shape, dtype)
    for bounds in (None, torch.tensor([[-0.5], [2.0]]), torch.stack([-torch.rand(shape[0]), torch.rand(shape[0])])):
        wide = x.float() if bounds is None else x.float().clamp(bounds[0][:, None], bounds[1][:, None])
        same(rows.run_amax(x, bounds, dim), wide.abs().amax(dim, keepdim=True))
    x[0, 0] = float("nan")
    assert clamp_operators.amax(x, None, dim).isnan().any()


PATHS = [*product(DTYPES, (True, False), (torch.int8, torch.bfloat16), (True, False))]
SOME_PATHS = [
    (torch.float32, True, torch.int8, False),
    (torch.bfloat16, False, torch.int8, True),
    (torch.float32, True, torch.bfloat16, True),
    (torch.bfloat16, True, torch.bfloat16, False),
    (torch.float32, False, torch.bfloat16, False),
]
TRAINED = "fp4", "nearest_up"
"""What recipes round by these kernels. Each path, kind of format and rounding is another compilation."""


def some_paths(name, rounding):
    """All paths but float16's for TRAINED; for others, paths that cover each option once."""
    return [path for path in PATHS if path[0] != torch.float16] if (name, rounding) == TRAINED else SOME_PATHS


@pytest.mark.quick("float8_e4m3fn-up-some", "float8_e5m2-down-some")
@pytest.mark.parametrize(
    "paths", [some_paths, pytest.param(lambda name, rounding: PATHS, marks=pytest.mark.slow)], ids=["some", "all"]
)
@pytest.mark.parametrize(
    ("name", "rounding"),  # each kind of format and each rounding is another compilation
    slow_unless(lambda case: case == TRAINED or case in in_turn(FORMATS, ROUNDINGS)[1:-1], product(FORMATS, ROUNDINGS)),
)
def test_rounded_rows_and_columns_equal_the_reference(name, rounding, paths):
    format = formats.get(name)
    for shape, (dtype, by_row, into, bounded) in product(SHAPES, paths(name, rounding)):
        if into == torch.int8 and format.max > 63:
            continue
        powers = torch.exp2(torch.randint(-3, 4, (shape[0], 1) if by_row else (1, shape[1])).float())
        x = drawn(shape, dtype) if bounded else ties(shape, format, powers).to(dtype)
        bounds = torch.tensor([[-1.25], [0.75]]) if bounded else None
        out = torch.empty(shape, dtype=into)
        assert rows.run(x, out, bounds, powers, format, rounding, 2)
        wide = x.float() if bounds is None else x.float().clamp(*bounds)
        wanted = round_to(wide * powers, format, rounding)
        same(out, (wanted * 2 if into == torch.int8 else wanted / powers).to(into))


@each_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_remainders_beyond_the_bounds_equal_the_reference(dtype, shape):
    x = drawn(shape, dtype)
    for tile, quantile in product(("tensor", "row"), (0.51, 0.6, 0.99)):
        clamp = Clamp(quantile, tile)
        bounds = clamp.bounds(x)
        found, wanted = rows.run_beyond(x, bounds), clamp_operators.sparse(clamp.parts(x, bounds)[1])
        for one, two in zip(found, wanted, strict=True):
            assert torch.equal(one, two)
        whole = clamp_operators.whole(*found, shape[1])
        assert torch.equal(whole, clamp.parts(x, bounds)[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_sparse_matmuls_equal_dense_ones(dtype, down, scaled):
    """With integers, whose sums do not depend on the order."""
    g = torch.Generator().manual_seed(0)
    matrix = torch.randint(-4, 5, (33, 65), generator=g).float() * (torch.rand(33, 65, generator=g) < 0.1)
    other = torch.randint(-9, 10, (33 if down else 65, 20), generator=g).to(dtype)
    scale = torch.exp2(torch.randint(-3, 4, (1, 20), generator=g).float()) if scaled else None
    parts, out = clamp_operators.sparse(matrix), torch.empty(65 if down else 33, 20)
    assert rows.run_sparse(*parts, 65, down, other, scale, out)
    found = clamp_operators.sparse_product(*parts, 65, down, other, scale)
    wanted = (matrix.t() if down else matrix) @ other.float()
    assert torch.equal(found, wanted if scale is None else wanted * scale)
    assert torch.equal(found, out)
    assert torch.equal(found, clamp_operators.sparse_product(matrix, None, None, 65, down, other, scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sparse_matmuls_sum_in_order(dtype):
    """Each product and each sum is rounded to float32, for any number of elements per row."""
    g = torch.Generator().manual_seed(1)
    matrix = torch.randn(12, 40, generator=g) * (torch.arange(40) < torch.arange(12)[:, None])  # 0 to 11 of them
    other = torch.randn(40, 70, generator=g).to(dtype)
    wanted = torch.zeros(12, 70)
    for i in range(40):
        wanted += matrix[:, i : i + 1] * other[i].float()
    assert torch.equal(clamp_operators.sparse_product(*clamp_operators.sparse(matrix), 40, False, other, None), wanted)


SLOPED = [name for name in FORMATS if slopes.scalars(formats.get(name)) is not None]
TILES = [ROW, ROW.transposed, TENSOR, Tile(1, 32), Tile(16, 16)]


@pytest.mark.quick("fp4-1xall")
@pytest.mark.parametrize(
    ("name", "tile"),
    slow_unless(lambda case: case in in_turn(SLOPED, TILES) or case[0] == "fp4", product(SLOPED, TILES)),
    ids=str,
)
def test_estimator_slopes_equal_the_reference(name, tile):
    format = formats.get(name)
    for shape, dtype, rule in product(SHAPES, DTYPES, ("current", "rceil")):
        for k, cap in ((5.0, 3.0), (3.0, None), (1.0, 3.0)):
            quantizer = Quantizer(format, scales=Scales(tile, get_scaling(rule)), estimator=Estimator(k, cap))
            x, grad = drawn(shape, dtype), torch.randn(shape)
            found = clamp_operators.estimate(grad.clone(), x, quantizer, None)
            same(found, grad * quantizer.derivative(x))


def test_formats_supported_by_the_slope_kernel():
    assert set(SLOPED) >= {"fp4", "e2m3fn", "float8_e4m3fn"}
    assert slopes.scalars(formats.get("int4")) is None
    quantizer = Quantizer(formats.get("int4"), scales=Scales(ROW, get_scaling("current")), estimator=Estimator())
    x, grad = drawn((5, 33)), torch.randn(5, 33)
    same(clamp_operators.estimate(grad.clone(), x, quantizer, None), grad * quantizer.derivative(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bias", "more"), list(product((False, True), repeat=2)))
def test_int8_matmuls_with_scales_bias_and_addend_are_exact(dtype, bias, more):
    for shape in ((1, 1, 1), (5, 7, 3), (33, 300, 65)):
        g = torch.Generator().manual_seed(1)
        draw = lambda *size: torch.randint(-12, 13, size, dtype=torch.int8, generator=g)  # noqa: B023, E731
        lhs = Operand(draw(shape[0], shape[1]), torch.rand(shape[0], 1, generator=g))
        rhs = Operand(draw(shape[2], shape[1]), torch.rand(shape[2], 1, generator=g)).t()
        added = torch.randn(shape[2], generator=g) if bias else None
        beside = torch.randn(shape[0], shape[2], generator=g) if more else None
        found = whole_mm.run(lhs, rhs, added, dtype, None, beside)
        wanted = (lhs.values.double() @ rhs.values.double()).float() * (lhs.scale * rhs.scale)
        wanted = wanted if beside is None else wanted + beside
        assert torch.equal(found, (wanted if added is None else wanted + added).to(dtype))


@each_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_fold_multiplies_and_rounds_an_output_gradient(dtype, shape):
    x, e5m2 = drawn(shape, dtype), formats.get("e5m2")
    for size in ((shape[0], 1), (1, shape[1])):
        scale = torch.rand(size, generator=torch.Generator().manual_seed(2)) + 0.1
        rule = get_scaling("current")
        values, back = clamp_operators.fold(x, scale, e5m2, "nearest_even", rule, torch.bfloat16)
        factor = rule.factor((x.float() * scale).abs().max(), e5m2)
        assert torch.equal(back, factor.reciprocal())
        assert torch.equal(values.float(), round_to(x.float() * scale * factor, e5m2))


def test_quantiles_of_large_tensors_equal_the_reference():
    x = drawn((1025, 513))
    for tile, estimate in product(("tensor", "row"), ("exact", "histogram")):
        clamp = Clamp(0.99, tile, estimate)
        found = torch.empty(2, 1025 if tile == "row" else 1)
        assert quantiles.run(x, found, clamp)
        assert torch.equal(found, clamp.bounds(x))
