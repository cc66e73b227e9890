"""Quotients by a reciprocal and corrections (`jit.tiles.over_scale`), in numpy, against the division.

No interpreter rounds these like a GPU: products and sums are computed with 64-bit mantissas and rounded once."""

import numpy as np
import pytest
import torch

from halfstep import formats, get_quantizer, quant
from halfstep.kernels.gpu import cast, quantizers
from halfstep.quant import Quantizer, Scales
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import block


E4M3 = formats.get("float8_e4m3fn")
pytestmark = pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="no long doubles of 64 bits here")


def fma(a, b, c):
    wide = np.longdouble
    return (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(np.float32)


def quotient(x, scale, corrections):
    """Bit for bit what the kernel computes, for scales other than NaN and 0."""
    power = ((254 - np.maximum(scale.view(np.uint32) >> 23, 1)) << 23).astype(np.uint32).view(np.float32)
    divisor, negative = scale * power, x * -power
    inverse = np.float32(-1) / divisor
    found = negative * inverse
    for _ in range(corrections):
        found = fma(fma(found, divisor, negative), inverse, found)
    return found


def drawn(seed, count, ties):
    """Numbers and scales: of any size (subnormal scales included), or with quotients near the midpoint of two codes."""
    rng = np.random.default_rng(seed)
    scale = rng.integers(1, 0x7B000000, count, dtype=np.uint32).view(np.float32)
    if ties:
        values = np.array(sorted({abs(v) for v in E4M3.values()}))
        middles = (values[1:] + values[:-1]) / 2
        times = rng.choice(middles, count) * (1 + rng.integers(-3, 4, count) * 2.0**-24) * rng.choice([-1, 1], count)
        scale = np.ldexp(1 + rng.random(count), rng.integers(-40, 40, count)).astype(np.float32)
    else:
        times = np.clip(rng.standard_normal(count) * 10.0 ** rng.integers(-4, 3, count), -448, 448)
    x = (scale.astype(np.float64) * times).astype(np.float32)
    x[:8] = [0.0, -0.0] * 4
    return x, scale


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("dtype", "corrections"), [(torch.float32, 2), (torch.bfloat16, 1), (torch.float16, 1)])
def test_corrected_quotients_give_the_codes_of_the_division(dtype, corrections, ties):
    """With two corrections also its bits, unless the quotient is near 2^-126 or below."""
    x, scale = drawn(corrections, 1 << 17, ties)
    x = torch.from_numpy(x).to(dtype).float().clamp(-3e38, 3e38).numpy()
    with np.errstate(all="ignore"):
        found, expected = quotient(x, scale, corrections), x / scale
    known = np.isfinite(expected) & (np.abs(expected) <= 464)
    codes = [quant.encode(torch.from_numpy(q[known].copy()), E4M3) for q in (found, expected)]
    assert torch.equal(*codes)
    if corrections == 2:
        usual = known & (np.abs(expected) > 2.0**-100)
        assert np.array_equal(found[usual].view(np.uint32), expected[usual].view(np.uint32))


def test_uncorrected_quotients_differ_from_the_division():
    """Without one, codes differ beside the middles: the test sees it."""
    x, scale = drawn(1, 1 << 17, True)
    x = torch.from_numpy(x).bfloat16().float().numpy()
    with np.errstate(all="ignore"):
        found, expected = quotient(x, scale, 0), x / scale
    assert not np.array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.fixture
def hopper(monkeypatch):
    """This CPU as a GPU with conversion instructions."""
    monkeypatch.setattr(cast, "capability", lambda device: (9, 0))
    quantizers.constants_on.cache_clear()
    yield torch.device("cpu")
    quantizers.constants_on.cache_clear()


def test_quotients_are_corrected_only_for_codes_by_instruction(hopper):
    """Noise, cut points and values of other formats need every bit of a quotient."""
    noisy = Quantizer(E4M3, "stochastic", scales=Scales(block(128), get_scaling("absmax")))
    for quantizer in (get_quantizer("nf4"), noisy, get_quantizer("nvfp4"), get_quantizer("mxfp8_e4m3")):
        assert quantizers.constants_on(quantizer, hopper, torch.bfloat16)[0].corrections == 0
    for dtype, corrections in ((torch.bfloat16, 1), (torch.float16, 1), (torch.float32, 2)):
        assert quantizers.constants_on(get_quantizer("fp8_1x128"), hopper, dtype)[0].corrections == corrections
