"""What a cast would cost is what quantising the tensor as a whole, by the reference, costs."""

import math

import pytest
import torch
from safetensors.torch import save_file

import halfstep
from halfstep.checkpoint.what_if import CANDIDATES
from halfstep.errors import QuantizationError


def matrices():
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(700, 512, generator=generator) * torch.randn(700, 1, generator=generator).mul(3).exp2()
    return {
        "wide": wide,  # more than one piece: a scale of the whole tensor must be that of all pieces
        "half": torch.randn(40, 96, generator=generator).half(),
        "odd": torch.randn(3, 5, 7, generator=generator).bfloat16(),
        "large": torch.randn(32, 64, generator=generator) * 40000,
        "bias": torch.randn(64, generator=generator),
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("what_if") / "model.safetensors"
    save_file(matrices(), file)
    return file


@pytest.fixture(scope="module")
def found(path):
    return {one.total.format: one for one in halfstep.inspect(path, casts=["all"]).casts}


def expected(x, quantizer):
    """Signal, noise, zeroed, overflowing and the largest relative error, in float64, from the reference."""
    x = x.float()
    y = quantizer(x).double()
    x = x.double()
    kept = y.isfinite()
    noise = (y - x)[kept].square().sum()
    relative = ((y - x).abs() / x.abs())[kept & (y != 0)].max()
    return x.square().sum(), noise, int(((y == 0) & (x != 0)).sum()), int((~kept).sum()), float(relative)


@pytest.mark.parametrize("name", CANDIDATES)
def test_every_candidate_is_the_reference(found, name):
    one = found[name]
    casts = dict(one.worst)
    assert set(casts) == set(matrices()) - {"bias"}
    sums = {key: expected(x, CANDIDATES[name]) for key, x in matrices().items() if key in casts}
    for key, (signal, noise, zeroed, overflowing, largest) in sums.items():
        cast = casts[key]
        assert (cast.zeroed, cast.overflowing) == (zeroed, overflowing)
        assert cast.largest_error == pytest.approx(largest, rel=1e-5)
        if noise:
            assert cast.sqnr == pytest.approx(10 * math.log10(signal / noise), abs=1e-3)
        else:
            assert cast.sqnr is None
        quantized = CANDIDATES[name].quantize(matrices()[key])
        assert cast.nbytes == quantized.nbytes
        assert cast.saved == matrices()[key].nbytes - quantized.nbytes
    signal, noise = (sum(float(one[i]) for one in sums.values()) for i in (0, 1))
    assert one.total.sqnr == pytest.approx(10 * math.log10(signal / noise), abs=1e-3)
    assert one.total.values == sum(x.numel() for key, x in matrices().items() if key != "bias")


def test_the_worst_come_first(found):
    assert found["fp16"].worst[0][0] == "large"
    assert found["fp16"].total.overflowing > 0
    ratios = [cast.sqnr for _, cast in found["nf4"].worst]
    assert ratios == sorted(ratios)


def test_only_what_is_asked_for(path):
    assert [one.total.format for one in halfstep.inspect(path, casts=["nf4", "fp16"]).casts] == ["nf4", "fp16"]
    assert halfstep.inspect(path).casts == ()
    with pytest.raises(QuantizationError, match=r"unknown format to try 'mxfp9'; nearest: mxfp8"):
        halfstep.inspect(path, casts=["mxfp9"])
