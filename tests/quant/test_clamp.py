"""Clamps: quantiles against numpy's, the histogram's stated error, and published figures on outliers."""

import numpy as np
import pytest
import torch

from families import slow_unless
from halfstep import formats
from halfstep.errors import QuantizationError
from halfstep.kernels.cpu import clamp_operators
from halfstep.quant import Clamp, Quantizer, Scales
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import ROW, TENSOR


FP4 = formats.get("fp4")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
every_dtype = pytest.mark.parametrize(
    "dtype", slow_unless(lambda dtype: dtype != torch.float16, DTYPES)
)  # compiled anew
SHAPES = ((64, 96), (1, 1), (3, 1), (1, 7), (130, 257), (257, 1024))


def sample(shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))
    return x.to(dtype)


def expected_bounds(x, quantile, tile):
    tiles = x.double().numpy() if tile == "row" else x.double().numpy().reshape(1, -1)
    return np.quantile(tiles, [1 - quantile, quantile], axis=1)


@pytest.mark.quick(
    "tensor-shape1-dtype3",
    "tensor-shape2-dtype3",
    "tensor-shape3-dtype3",
    "row-shape1-dtype3",
    "row-shape2-dtype0",
    "row-shape2-dtype3",
    "row-shape3-dtype3",
)
@every_dtype
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tile", ["tensor", "row"])
def test_exact_quantiles_equal_numpys(dtype, shape, tile):
    for quantile in (0.99, 0.999, 0.97, 0.6):
        x = sample(shape, dtype)
        found = clamp_operators.bounds(x, Clamp(quantile, tile))
        torch.testing.assert_close(
            found.double(), torch.tensor(expected_bounds(x, quantile, tile)), rtol=1e-6, atol=1e-30
        )
        assert torch.equal(found, Clamp(quantile, tile).bounds(x))  # a kernel's bits are the reference's


@pytest.mark.quick(
    "tensor-shape1-dtype3",
    "tensor-shape2-dtype3",
    "tensor-shape3-dtype3",
    "row-shape1-dtype3",
    "row-shape2-dtype3",
    "row-shape3-dtype3",
)
@every_dtype
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tile", ["tensor", "row"])
def test_histogram_quantiles_are_within_the_stated_error(dtype, shape, tile):
    for quantile in (0.99, 0.97, 0.6):
        x = sample(shape, dtype)
        clamp = Clamp(quantile, tile, "histogram")
        found, exact = clamp_operators.bounds(x, clamp), Clamp(quantile, tile).bounds(x)
        assert torch.equal(found, clamp.bounds(x))
        if dtype == torch.bfloat16:
            assert torch.equal(found, exact)
            continue
        if shape[1] > 1:
            assert not torch.equal(found, exact)
        # Each order statistic moves towards zero by at most 2^-7 of it.
        largest = x.double().abs().amax() if tile == "tensor" else x.double().abs().amax(1)
        assert ((found - exact).abs() <= 2**-7 * torch.maximum(exact.abs(), largest * 2**-7)).all()


@pytest.mark.parametrize("tile", ["tensor", "row"])
@pytest.mark.parametrize("estimate", ["exact", "histogram"])
def test_bounds_of_ties_and_zeros_and_of_the_negated_tensor(tile, estimate):
    x = torch.tensor([[0.0, -0.0, 0.0, 5.0], [-2.0, -2.0, -2.0, -2.0], [1.0, 1.0, -1.0, -1.0]])
    clamp = Clamp(0.75, tile, estimate)
    torch.testing.assert_close(clamp_operators.bounds(x, clamp).double(), torch.tensor(expected_bounds(x, 0.75, tile)))
    mirrored = clamp_operators.bounds(-x, clamp)
    assert torch.equal(mirrored, -clamp_operators.bounds(x, clamp).flip(0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("estimate", ["exact", "histogram"])
def test_nan_or_infinity_makes_the_bounds_nan(bad, estimate):
    x = sample((8, 64))
    x[3, 5] = bad
    rows = clamp_operators.bounds(x, Clamp(0.99, "row", estimate))
    assert rows.isnan().all(0).tolist() == [row == 3 for row in range(8)]
    assert clamp_operators.bounds(x, Clamp(0.99, "tensor", estimate)).isnan().all()
    quantizer = Quantizer(FP4, scales=Scales(ROW, get_scaling("current")), clamp=Clamp(0.99, "row", estimate))
    assert quantizer(x).isnan().any(1).tolist() == [row == 3 for row in range(8)]


def test_empty_tensors_have_bounds_of_zero():
    assert clamp_operators.bounds(torch.empty(0, 5), Clamp()).tolist() == [[0], [0]]
    assert clamp_operators.bounds(torch.empty(3, 0), Clamp(tile="row")).tolist() == [[0, 0, 0]] * 2


@every_dtype
@pytest.mark.parametrize("tile", ["tensor", "row"])
def test_a_quantizer_clamps_rounds_and_adds_the_remainder(dtype, tile):
    """Against the equation in torch: Q(clamp(x)) + (x - clamp(x))."""
    x = sample((40, 64), dtype)
    low, high = (torch.tensor(b)[:, None] for b in expected_bounds(x, 0.95, tile))
    clamped = torch.minimum(torch.maximum(x.double(), low), high).float()
    scale = clamped.abs().amax(1, keepdim=True) / 6
    grid = torch.tensor(FP4.values())
    ratio = clamped / scale
    rounded = grid[(ratio[..., None] - grid).abs().argmin(-1)] * scale
    plain = Quantizer(FP4, scales=Scales(ROW, get_scaling("current")))
    for compensation in (True, False):
        quantizer = Quantizer(FP4, scales=plain.scales, clamp=Clamp(0.95, tile, compensation=compensation))
        wanted = rounded + (x.float() - clamped if compensation else 0)
        near = (ratio[..., None] - (grid[1:] + grid[:-1]) / 2).abs().amin(-1) < 1e-4  # ties may fall either way
        error = (quantizer(x).float() - wanted).abs() / (wanted.abs() + scale)
        assert (error[~near] < (2**-7 if dtype == torch.bfloat16 else 2**-10)).all()
        made = quantizer.quantize(x)
        assert ("remainder" in made.tensors) == compensation
        if compensation:
            assert 0.09 <= len(made.tensors["remainder"]) / x.numel() <= 0.13


def signal_to_noise(x, quantizer):
    return float(10 * torch.log10(x.square().sum() / (quantizer(x) - x).square().sum()))


@pytest.mark.slow  # bounds are compared with numpy above
def test_compensation_raises_the_published_signal_to_noise_ratio():
    """Student's t with 2.5 degrees of freedom, one channel in a hundred times 8, a scale per token: compensation raises
    the signal-to-noise ratio with the share of clamped elements; clamping alone lowers it on such data."""
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.standard_t(2.5, size=(1024, 1024))).float()
    x[:, rng.choice(1024, 10, replace=False)] *= 8
    row = Scales(ROW, get_scaling("current"))
    plain = signal_to_noise(x, Quantizer(FP4, scales=row))
    assert plain == pytest.approx(10.25, abs=0.3)
    ratios, alone = [], []
    for quantile, share, ratio in ((0.999, 0.002, 15.4), (0.99, 0.02, 23.4), (0.97, 0.06, 26.4)):
        quantizer = Quantizer(FP4, scales=row, clamp=Clamp(quantile))
        made = quantizer.quantize(x)
        assert len(made.tensors["remainder"]) / x.numel() == pytest.approx(share, rel=0.01)
        ratios.append(signal_to_noise(x, quantizer))
        assert ratios[-1] == pytest.approx(ratio, abs=0.3)
        alone.append(signal_to_noise(x, Quantizer(FP4, scales=row, clamp=Clamp(quantile, compensation=False))))
    assert plain < ratios[0] < ratios[1] < ratios[2]
    assert plain > alone[0] > alone[1] > alone[2]


def test_a_large_token_underflows_the_others_under_a_tensor_scale():
    """With scales per token 10.8% of the other tokens' elements become 0; with one scale of the tensor all of them
    do."""
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    x[17] *= 50
    others = torch.arange(256) != 17
    zeros = [
        float((Quantizer(FP4, scales=Scales(tile, get_scaling("current")))(x)[others] == 0).double().mean())
        for tile in (ROW, TENSOR)
    ]
    assert zeros[0] == pytest.approx(0.108, abs=0.006)
    assert zeros[1] > 0.995


def test_values_of_the_released_quantizers_unit_test():
    """A power-of-two scale of the whole tensor, ties up."""
    x = torch.tensor([[0.001, 0.048, 0.0997], [0.1503, 0.2002, 0.2497], [0.2974, 0.30699, 0.4001]])
    quantizer = Quantizer(FP4, "nearest_up", scales=Scales(TENSOR, get_scaling("rceil")))
    expected = [[0.0, 0.0625, 0.125], [0.125, 0.1875, 0.25], [0.25, 0.25, 0.375]]
    assert quantizer(x).tolist() == expected


def test_ties_go_up():
    ties = torch.tensor([-5, -3.5, -2.5, -1.75, -1.25, -0.75, -0.25, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6])
    upper = [-4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6, 6]
    assert Quantizer(FP4, "nearest_up", scales=Scales(ROW, get_scaling("current")))(ties).tolist() == upper


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"quantile": 0.5}, "quantile 0.5; expected a number between 0.5 and 1"),
        ({"quantile": 1.0}, "quantile 1.0; expected"),
        ({"tile": "token"}, "unknown tile of a clamp 'token'.*Known: row, tensor"),
        ({"estimate": "histogramm"}, "unknown estimate of a clamp 'histogramm'; nearest: histogram"),
    ],
)
def test_invalid_clamps_raise(fields, words):
    with pytest.raises(QuantizationError, match=words):
        Clamp(**fields)


def test_a_clamp_needs_scales_and_excludes_outliers():
    with pytest.raises(QuantizationError, match=r"clamp 0\.99, compensated with scales = None"):
        Quantizer(FP4, clamp=Clamp())
    with pytest.raises(QuantizationError, match="one way of keeping outliers"):
        Quantizer(FP4, scales=Scales(ROW, get_scaling("current")), outliers=6.0, clamp=Clamp())
