"""The mean of ranks' gradients, with ranks in one process: against float64, and against explicit rounding."""

import copy

import pytest
import torch
from torch import nn

from families import for_each
from halfstep import formats
from halfstep.distributed.compress import _summary
from halfstep.distributed.mean import Message, mean_steps, run
from halfstep.errors import RecipeError
from halfstep.quant import Quantizer, Scales, Tile
from halfstep.quant.scaling import get_scaling
from halfstep.recipe import FP4, FP8, FP8_LM, Communication, get_storage


E4M3, E2M1 = FP8.gradients, FP4.gradients
ABSMAX = get_storage(Quantizer(formats.get("e5m2"), scales=Scales(Tile(1, 64), get_scaling("absmax"))), flat=True)
SENT = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}


def mean_over_ranks(gradients, storage=E4M3, residuals=None):
    """Each rank's result, and the bytes that it sent."""
    own = gradients.clone()
    ranks = len(own)
    found = run(
        lambda to: mean_steps(own[to.rank], storage, to, None if residuals is None else residuals[to.rank]), ranks
    )
    return own, found[0].sent


def heavy_tailed(ranks, size=2**16):
    """Gradients that share half of their variance, each element times a log-normal factor."""
    generator = torch.Generator().manual_seed(0)
    common, own = (torch.randn(n, size, generator=generator) for n in (1, ranks))
    return (common + own) * torch.exp(2 * torch.randn(size, generator=generator))


def decibels(found, exact):
    return float(10 * torch.log10(exact.square().sum() / (found - exact).square().sum()))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_representable_means_are_exact(ranks, dtype):
    codes = torch.randint(-8, 9, (1, 1000), generator=torch.Generator().manual_seed(0)).to(dtype)
    gradients = torch.cat([codes * factor for factor in (1, 3, 2)[:ranks]])
    exact = gradients.double().sum(0) / ranks
    for storage in (E4M3, get_storage("fp32")):
        found, _ = mean_over_ranks(gradients, storage)
        assert torch.equal(found, exact.to(dtype).expand_as(found))


@pytest.mark.parametrize("ranks", [2, 8])
def test_means_are_rounded_twice_for_any_number_of_ranks(ranks):
    gradients = heavy_tailed(ranks)
    exact = gradients.double().mean(0)
    found, _ = mean_over_ranks(gradients)
    assert torch.equal(found, found[:1].expand_as(found))
    assert decibels(found[0], exact) >= 28
    fewer, _ = mean_over_ranks(heavy_tailed(2))
    assert decibels(found[0], exact) >= decibels(fewer[0], heavy_tailed(2).double().mean(0))
    by_hand = E4M3.quantizer(gradients).double().sum(0).float() / ranks  # float32 sums of a few E4M3 values are exact
    assert torch.equal(found[0], E4M3.quantizer(by_hand[None])[0])


@pytest.mark.quick("float8_e5m2 (absmax, 1x64), laid out flat--inf", "bf16-inf", "bf16--inf", "bf16-nan")
@pytest.mark.parametrize("lost", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("storage", [E4M3, E2M1, ABSMAX, get_storage("bf16")], ids=str)
def test_nan_or_infinity_on_one_rank_reaches_all(lost, storage):
    gradients = heavy_tailed(3, 1000)
    gradients[1, 500] = lost
    found, _ = mean_over_ranks(gradients, storage)
    assert not found[:, 500].isfinite().any()
    assert found[:, :384].isfinite().all()
    assert found[:, 640:].isfinite().all()


@pytest.mark.parametrize("storage", [E4M3, E2M1], ids=str)
def test_a_power_of_two_loss_scale_changes_no_code(storage):
    gradients, message = heavy_tailed(2, 1024), Message(storage, 1024)
    sent = torch.zeros(2, message.bytes, dtype=torch.uint8)
    message.encode(gradients[0], sent[0])
    message.encode(gradients[0] * 2**16, sent[1])
    assert torch.equal(sent[0, : storage.quantizer.format.bits * 128], sent[1, : storage.quantizer.format.bits * 128])
    assert torch.equal(mean_over_ranks(gradients * 2**16, storage)[0], mean_over_ranks(gradients, storage)[0] * 2**16)


@pytest.mark.parametrize(("storage", "most"), [(E4M3, 1.05), (E2M1, 0.55), *SENT.items()], ids=str)
def test_bytes_sent_per_element_equal_the_storages(storage, most):
    storage, size = get_storage(storage), 2**18
    _, sent = mean_over_ranks(torch.zeros(2, size), storage)
    assert sent / size == storage.bytes <= most
    _, sent = mean_over_ranks(torch.zeros(8, size), storage)
    assert sent / size == 2 * 7 / 8 * storage.bytes


def test_error_feedback_sums_to_the_gradients():
    gradients = heavy_tailed(3, 1000)
    exact, sums = gradients.double().mean(0), {}
    for fed_back in (False, True):
        residuals = torch.zeros_like(gradients) if fed_back else None
        sums[fed_back] = sum(mean_over_ranks(gradients, E2M1, residuals)[0][0].double() for _ in range(64)) / 64
        if fed_back:
            # The means of 64 steps plus the remaining errors equal the gradients.
            kept = residuals.double().mean(0) / 64
            torch.testing.assert_close(sums[True] + kept, exact, rtol=0, atol=1e-5 * float(exact.abs().amax()))
    assert decibels(sums[False], exact) < 20
    assert decibels(sums[True], exact) > 40


def test_a_nonfinite_step_leaves_error_feedback_unchanged():
    gradients, residuals = heavy_tailed(2, 512), torch.zeros(2, 512)
    mean_over_ranks(gradients, E2M1, residuals)
    before = residuals.clone()
    gradients[1, 7] = float("nan")
    mean_over_ranks(gradients, E2M1, residuals)
    assert torch.equal(residuals, before)
    assert residuals.abs().sum() > 0


def test_invalid_communications_raise():
    for bad, said in (
        ({}, "neither gradients nor weights"),
        ({"gradients": get_storage("e4m3fn")}, "tiles laid out flat"),
        ({"gradients": get_storage("mxfp8_e4m3")}, "tiles laid out flat"),
        ({"gradients": get_storage("nvfp4")}, "tiles laid out flat"),
        ({"gradients": get_storage("bf16", residual=True)}, "leave residual"),
        ({"gradients": E4M3, "reduce": "ring"}, "all_to_all"),
        ({"gradients": E4M3, "reduce": "fp8lm"}, "one power of two a tensor"),
        ({"gradients": FP8_LM.gradients}, "tiles laid out flat"),
        ({"weights": E4M3, "error_feedback": True}, "leave it out"),
    ):
        with pytest.raises(RecipeError, match=said):
            Communication(**bad)


@for_each("dtype", [torch.uint8, torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.float64, torch.complex128])
def test_ranks_compare_frozen_weights_of_any_dtype(dtype):
    """Such as another library's packed codes."""
    model = nn.Linear(3, 1)
    model.packed = nn.Parameter(torch.tensor([1, 0, 1]).to(dtype), requires_grad=False)
    text = _summary(model, None, None)
    assert _summary(copy.deepcopy(model), None, None) == text
    model.packed.data = torch.tensor([1, 0, 0]).to(dtype)
    assert _summary(model, None, None) != text
