"""What a cast would cost is what quantising the tensor as a whole, by the reference, costs."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

import halfstep
from halfstep.checkpoint import open_checkpoint
from halfstep.checkpoint.what_if import CANDIDATES
from halfstep.checkpoint.write import write
from halfstep.errors import QuantizationError


def matrices(kind):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(700, 512, generator=generator) * torch.randn(700, 1, generator=generator).mul(3).exp2()
    if kind == "plain":
        return {
            "wide": wide.repeat(3, 1),  # more than one piece: a scale of the whole tensor must be that of all pieces
            "odd": torch.randn(3, 5, 7, generator=generator).bfloat16(),
            "large": torch.randn(32, 64, generator=generator) * 40000,
            "narrow": torch.randn(2100, 512, generator=generator).mul(0.02).bfloat16(),  # enough to go by its codes
            "bias": torch.randn(64, generator=generator),
        }
    if kind == "half":
        return {"half": wide.half(), "small": torch.randn(40, 96, generator=generator).half(), "wide": wide}
    return {
        "tiny": torch.randn(64, 128, generator=generator) * 1e-42,  # scales and values are subnormal
        "sparse": torch.randn(128, 256, generator=generator) * (torch.arange(256) < 64),
        "highest": torch.randn(16, 64, generator=generator).sign() * torch.finfo(torch.float32).max,
        "broken": broken(generator),
        "narrow and broken": broken(generator, 4096).bfloat16(),
        "nothing": torch.zeros(32, 32),
        "steep": torch.randn(64, 256, generator=generator) * torch.logspace(-44, 3, 256),
    }


def broken(generator, rows=32):
    x = torch.randn(rows, 128, generator=generator)
    x[3, 5], x[9, 70] = math.inf, math.nan
    return x


@pytest.fixture(scope="module", params=["plain", "hard", pytest.param("half", marks=pytest.mark.slow)])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def path(tmp_path_factory, kind):
    file = tmp_path_factory.mktemp("what_if") / "model.safetensors"
    save_file(matrices(kind), file)
    return file


@pytest.fixture(scope="module")
def found(path):
    return {one.total.format: one for one in halfstep.inspect(path, casts=["all"]).casts}


def expected(x, quantized):
    """Signal, noise, zeroed, overflowing and the largest relative error, in float64, from the reference."""
    x, given = x.float(), x.isfinite()
    y = quantized.dequantize().double()[given]
    x = x.double()[given]
    kept = y.isfinite()
    noise = (y - x)[kept].square().sum()
    relative = ((y - x).abs() / x.abs())[kept & (y != 0)]
    largest = float(relative.max()) if relative.numel() else 0.0
    return x.square().sum(), noise, int(((y == 0) & (x != 0)).sum()), int((~kept).sum()), largest


@pytest.mark.parametrize("name", CANDIDATES)
def test_every_candidate_is_the_reference(found, name, kind):
    one, given = found[name], {key: x for key, x in matrices(kind).items() if x.dim() > 1}
    casts = dict(one.worst)
    assert set(casts) == set(given)
    quantized = {key: CANDIDATES[name].quantize(x.float()) for key, x in given.items()}
    sums = {key: expected(x, quantized[key]) for key, x in given.items()}
    for key, (signal, noise, zeroed, overflowing, largest) in sums.items():
        cast = casts[key]
        assert (cast.zeroed, cast.overflowing) == (zeroed, overflowing), key
        assert cast.largest_error == pytest.approx(largest, rel=1e-5), key
        if noise:
            assert cast.sqnr == pytest.approx(10 * math.log10(signal / noise), abs=1e-3), key
        else:
            assert cast.sqnr is None
        assert cast.nbytes == quantized[key].nbytes
        assert cast.saved == given[key].nbytes - quantized[key].nbytes
    signal, noise = (sum(float(one[i]) for one in sums.values()) for i in (0, 1))
    assert one.total.sqnr == pytest.approx(10 * math.log10(signal / noise), abs=1e-3)
    assert one.total.values == sum(x.numel() for x in given.values())


@pytest.mark.parametrize("kind", ["plain"], indirect=True)
def test_the_worst_come_first(found):
    assert found["fp16"].worst[0][0] == "large"
    assert found["fp16"].total.overflowing > 0
    ratios = [cast.sqnr for _, cast in found["nf4"].worst]
    assert ratios == sorted(ratios)


@pytest.mark.parametrize("kind", ["plain"], indirect=True)
def test_only_what_is_asked_for(path):
    assert [one.total.format for one in halfstep.inspect(path, casts=["nf4", "fp16"]).casts] == ["nf4", "fp16"]
    assert halfstep.inspect(path).casts == ()
    with pytest.raises(QuantizationError, match=r"unknown format to try 'mxfp9'; nearest: mxfp8"):
        halfstep.inspect(path, casts=["mxfp9"])


def test_what_overflows_is_not_called_exact(tmp_path):
    save_file({"w": torch.full((4, 32), 3e38)}, tmp_path / "model.safetensors")
    one = halfstep.inspect(tmp_path, casts=["fp16", "bf16"]).casts[0]
    assert (one.total.sqnr, one.total.decibels, one.total.harm) == (None, "-", "100% overflows")
    save_file({"w": torch.ones(4, 32)}, tmp_path / "model.safetensors")
    one = halfstep.inspect(tmp_path, casts=["fp16"]).casts[0]
    assert (one.total.decibels, one.total.harm) == ("exact", None)


def test_scales_of_codes_are_neither_tried_nor_cast(tmp_path):
    tensors = {
        "h.0.mlp.weight": torch.randn(256, 256).to(torch.float8_e4m3fn),
        "h.0.mlp.weight_scale_inv": torch.rand(2, 2),
        "h.0.attn.weight": torch.randn(32, 32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path / "model.safetensors")
    report = halfstep.inspect(checkpoint, casts=["bf16"])
    assert [name for name, _ in report.casts[0].worst] == ["h.0.attn.weight"]
    write(checkpoint, report.tensors, "bf16", tmp_path / "new.safetensors", lambda described: {})
    written = load_file(tmp_path / "new.safetensors")
    assert {name: x.dtype for name, x in written.items()} == {
        "h.0.mlp.weight": torch.float8_e4m3fn,
        "h.0.mlp.weight_scale_inv": torch.float32,
        "h.0.attn.weight": torch.bfloat16,
    }
    assert torch.equal(written["h.0.mlp.weight_scale_inv"], tensors["h.0.mlp.weight_scale_inv"])
