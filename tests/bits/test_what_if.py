"""Predicted costs of casts equal those of quantizing whole tensors by the reference."""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch

from families import slow_unless
from halfstep.bits import what_if as pieces
from halfstep.bits.scan import scan
from halfstep.bits.values import InMemory, even
from halfstep.bits.what_if import CANDIDATES, Trials
from halfstep.errors import QuantizationError


@pytest.fixture(scope="module", autouse=True)
def short_pieces():
    """Quantize a quarter of the usual piece at a time, so that smaller matrices still span several pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE", pieces.PIECE // 4)
        yield


def matrices(kind):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(700, 512, generator=generator) * torch.randn(700, 1, generator=generator).mul(3).exp2()
    if kind == "plain":
        return {
            "wide": wide,  # several pieces: a per-tensor scale must cover all of them
            "odd": torch.randn(3, 5, 7, generator=generator).bfloat16(),
            "large": torch.randn(32, 64, generator=generator) * 40000,
            "narrow": torch.randn(520, 512, generator=generator).mul(0.02).bfloat16(),  # enough to be tried by codes
            "bias": torch.randn(64, generator=generator),
        }
    if kind == "half":
        return {"half": wide.half(), "small": torch.randn(40, 96, generator=generator).half(), "wide": wide}
    return {
        "tiny": torch.randn(64, 128, generator=generator) * 1e-42,  # scales and values are subnormal
        "sparse": torch.randn(128, 256, generator=generator) * (torch.arange(256) < 64),
        "highest": torch.randn(16, 64, generator=generator).sign() * torch.finfo(torch.float32).max,
        "broken": broken(generator),
        "narrow and broken": broken(generator, 2100).bfloat16(),  # likewise
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


@dataclass(frozen=True)
class Ragged(InMemory):
    """A source that sometimes yields shorter pieces, as at the end of a file map."""

    def chunks(self, nbytes):
        for piece in super().chunks(nbytes):
            third = piece.size // 3
            yield from (some for some in (piece[:third], piece[third:]) if some.size)


@pytest.mark.slow
def test_costs_do_not_depend_on_piece_boundaries():
    x = torch.randn(400, 1000, generator=torch.Generator().manual_seed(1))
    found = []
    for source in (InMemory(x), Ragged(x)):
        trials = Trials(["bf16", "mxfp8", "e4m3fn_128x128"])
        trials.add("x", source, scan(source))
        found.append(trials.found())
    assert found[0] == found[1]
    runs = list(even(Ragged(x), 7001))
    assert {run.size for run in runs[:-1]} == {7001}
    assert np.array_equal(np.concatenate(runs), x.numpy().view(np.uint32).ravel())


def tried(tensors, formats):
    trials = Trials(formats)
    for name, tensor in tensors.items():
        trials.add(name, InMemory(tensor), scan(InMemory(tensor)))
    return {one.total.format: one for one in trials.found()}


@pytest.fixture(scope="module")
def found(kind):
    @cache
    def of(name):
        return tried(matrices(kind), [name])[name]

    return of


@pytest.mark.slow
def test_all_selects_every_candidate():
    assert tried({"x": torch.randn(8, 128)}, ["all"]).keys() == set(CANDIDATES)


def expected(x, quantized):
    """Signal, noise, zeroed and overflowing counts and the largest relative error of the reference, in float64."""
    x, given = x.float(), x.isfinite()
    y = quantized.dequantize().double()[given]
    x = x.double()[given]
    kept = y.isfinite()
    noise = (y - x)[kept].square().sum()
    relative = ((y - x).abs() / x.abs())[kept & (y != 0)]
    largest = float(relative.max()) if relative.numel() else 0.0
    return x.square().sum(), noise, int(((y == 0) & (x != 0)).sum()), int((~kept).sum()), largest


@pytest.mark.quick("plain-fp16", "hard-e4m3fn_128x128")
@pytest.mark.parametrize("name", slow_unless({"fp16", "e4m3fn_128x128", "nf4"}.__contains__, CANDIDATES))
def test_costs_of_every_candidate_equal_the_reference(found, name, kind):
    one, given = found(name), {key: x for key, x in matrices(kind).items() if x.dim() > 1}
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
def test_worst_tensors_come_first(found):
    assert found("fp16").worst[0][0] == "large"
    assert found("fp16").total.overflowing > 0
    ratios = [cast.sqnr for _, cast in found("nf4").worst]
    assert ratios == sorted(ratios)


def test_only_requested_formats_are_tried():
    assert list(tried(matrices("plain"), ["nf4", "fp16"])) == ["nf4", "fp16"]
    assert tried(matrices("plain"), []) == {}
    with pytest.raises(QuantizationError, match=r"unknown format to try 'mxfp9'; nearest: mxfp8"):
        Trials(["mxfp9"])


def test_overflowing_casts_are_not_exact():
    one = tried({"w": torch.full((4, 32), 3e38)}, ["fp16", "bf16"])["fp16"]
    assert (one.total.sqnr, one.total.decibels, one.total.harm) == (None, "-", "100% overflows")
    one = tried({"w": torch.ones(4, 32)}, ["fp16"])["fp16"]
    assert (one.total.decibels, one.total.harm) == ("exact", None)
