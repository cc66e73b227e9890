"""Gradient clipping: for every order of calls, the same results as torch's GradScaler and clip_grad_norm_."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

import halfstep
from families import in_turn, slow_unless
from halfstep import LossScaler, ops
from halfstep.errors import LossScaleError
from halfstep.recipe import get_recipe
from tiny import (
    EVERY,
    FAST,
    SCALED,
    SMOOTH,
    adamw,
    assert_same,
    batch,
    copied,
    grads,
    mlp,
    model_for,
    mostly_slow,
    prepared,
)


S = 2.0**16
SIZES = [(4, 3), (4,), (2, 4)]


def values(seed, scale):
    """The gradients of a batch times the loss scale, exact in fp16 and bf16."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-8, 9, size, generator=generator) * 2.0**-16 * scale for size in SIZES]


class Ours:
    """A scaler and an optimizer, driven with given gradients."""

    def __init__(self, parameters, optimizer, scaler, full=torch.Tensor.detach):
        self.parameters, self.optimizer, self.scaler, self.full = parameters, optimizer, scaler, full

    def backward(self, seed, factor=1.0):
        self.scaler.scale(torch.zeros(()))  # torch creates its scale on first use; ours checks for dropped gradients
        for p, value in zip(self.parameters, values(seed, self.scaler.get_scale()), strict=True):
            p.grad = (value * factor).to(p.grad_dtype or p.dtype)

    def clip(self, max_norm):
        return self.scaler.clip_grad_norm_(self.optimizer, max_norm)

    def step(self):
        self.scaler.step(self.optimizer)

    def update(self):
        self.scaler.update()
        self.optimizer.zero_grad()


class Torchs(Ours):
    """The same with torch.amp.GradScaler and torch's clip."""

    unscaled = False

    def clip(self, max_norm):
        if not self.unscaled:
            self.scaler.unscale_(self.optimizer)
        self.unscaled = True
        return clip_grad_norm_(self.parameters, max_norm)

    def update(self):
        super().update()
        self.unscaled = False


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.9)


def stack():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2, bias=False))


def reference(start):
    parameters = [torch.nn.Parameter(value.clone()) for value in start]
    return Torchs(parameters, sgd(parameters), torch.amp.GradScaler("cpu", init_scale=S))


def driver_of(kind):
    """A driver over one kind of optimizer, and the float32 values that it starts from."""
    model = stack()
    start = [p.detach().clone() for p in model.parameters()]
    parameters = list(model.parameters())
    if kind == "stock":
        return Ours(parameters, sgd(parameters), LossScaler(init_scale=S)), start
    if kind == "fused":
        return Ours(parameters, torch.optim.SGD(parameters, lr=1.0, momentum=0.9, fused=True), LossScaler()), start
    model, optimizer, _ = halfstep.prepare(model, sgd(parameters), recipe=kind)
    return Ours(parameters, optimizer, LossScaler(init_scale=S), optimizer.full), start


def clip_and_step(driver):
    yield driver.clip(1e-4)
    driver.step()


def clip_and_step_past_the_scaler(driver):
    yield driver.clip(1e-4)
    driver.optimizer.step()


def clip_then_measure(driver):
    yield driver.clip(1e-4)
    yield driver.clip(math.inf)
    driver.step()


def measure_then_clip(driver):
    yield driver.clip(math.inf)
    yield driver.clip(1e-4)
    driver.step()


def clip_twice(driver):
    yield driver.clip(1e-3)
    yield driver.clip(1e-5)
    driver.step()


def clip_to_zero(driver):
    yield driver.clip(0.0)
    driver.step()


def drop_the_batch(driver):
    yield driver.clip(1e-4)


def overflow(driver):
    for p in driver.parameters:
        p.grad.view(-1)[0] = math.inf
    driver.clip(1e-4)
    driver.step()
    yield torch.zeros(())


SEQUENCES = [
    clip_and_step, clip_and_step_past_the_scaler, clip_then_measure, measure_then_clip, clip_twice, clip_to_zero,
    drop_the_batch, overflow,
]  # fmt: skip


@pytest.mark.quick("stock-drop_the_batch", "fused-drop_the_batch", "fused-overflow")
@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("kind", ["stock", "fused", "fp32", "fp16-master", "bf16-master", "bf16-megatron"])
def test_every_order_of_calls_matches_torch(kind, sequence):
    """The sequence is that of the second of three batches. Gradients are exact in 16 bits, so that only the calls
    matter."""
    driver, start = driver_of(kind)
    theirs = reference(start)
    for seed, this in enumerate([clip_and_step, sequence, clip_and_step]):
        found = []
        for one in (driver, theirs):
            one.backward(seed)
            found.append(list(this(one)))
            one.update()
        torch.testing.assert_close(*found, rtol=1e-5, atol=0)
        assert driver.scaler.get_scale() == theirs.scaler.get_scale()
    for p, expected in zip(driver.parameters, theirs.parameters, strict=True):
        assert not expected.isnan().any()
        torch.testing.assert_close(driver.full(p), expected.detach(), rtol=1e-6, atol=1e-9)


def test_the_sequences_lead_to_three_different_weights():
    """So the test above distinguishes them."""
    ends = []
    for sequence in SEQUENCES:
        theirs = reference([p.detach() for p in stack().parameters()])
        theirs.backward(0)
        list(sequence(theirs))
        theirs.update()
        ends.append(torch.cat([p.detach().flatten() for p in theirs.parameters]))
    groups = {tuple(end.tolist()) for end in ends}
    assert len(groups) == 3  # clipped to 1e-4, to 1e-5, and not stepped


@pytest.mark.parametrize("kind", ["stock", "fused", "fp32", "fp16-master", "bf16-master"])
@pytest.mark.parametrize("zero", ["optimizer", "set_to_zero", "by_hand"])
def test_a_batch_dropped_without_an_update_does_not_affect_the_next(kind, zero):
    """torch's scaler raises at the next unscale_."""
    (driver, start), parameters = driver_of(kind), None
    theirs = reference(start)
    parameters = driver.parameters
    driver.backward(0)
    driver.clip(1e-7)
    if zero == "optimizer":
        driver.optimizer.zero_grad()
    elif zero == "set_to_zero":
        driver.optimizer.zero_grad(set_to_none=False)
    else:
        for p in parameters:
            p.grad = None
    for one in (driver, theirs):
        one.backward(1)
        list(clip_and_step(one))
        one.update()
    for p, expected in zip(parameters, theirs.parameters, strict=True):
        torch.testing.assert_close(driver.full(p), expected.detach(), rtol=1e-6, atol=1e-9)


def test_dropping_an_overflowed_batch_without_an_update_is_refused():
    driver, _ = driver_of("fp16-master")
    driver.backward(0, math.inf)
    driver.clip(1.0)
    driver.optimizer.zero_grad()
    driver.backward(1)
    with pytest.raises(LossScaleError, match=r"overflowed and were dropped before scaler.update\(\).*even one whose"):
        driver.clip(1.0)
    driver.scaler.update()
    assert driver.scaler.get_scale() == S / 2


def test_gradients_removed_and_restored_do_not_count_as_dropped():
    driver, start = driver_of("fp32")
    theirs = reference(start)
    for one in (driver, theirs):
        one.backward(0)
        list(drop_the_batch(one))
        aside = [p.grad for p in one.parameters]
        for p in one.parameters:
            p.grad = None
        one.scaler.scale(torch.zeros(()))
        for p, grad in zip(one.parameters, aside, strict=True):
            p.grad = grad
        one.step()
    for p, expected in zip(driver.parameters, theirs.parameters, strict=True):
        torch.testing.assert_close(driver.full(p), expected.detach(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["stock", "fp32", "fp16-master"])
def test_two_optimizers_of_one_scaler_match_torch(kind):
    first, start = driver_of(kind)
    second, _ = driver_of(kind)
    second.scaler = first.scaler
    pair, twins = (first, second), (reference(start), reference(start))
    twins[1].scaler = twins[0].scaler
    for both in (pair, twins):
        for seed, one in enumerate(both):
            one.backward(seed)
        both[0].clip(1e-4)
        both[1].clip(1e-5)
        both[1].step()
        both[0].optimizer.step()
        both[0].scaler.update()
    for one, twin in zip(pair, twins, strict=True):
        for p, expected in zip(one.parameters, twin.parameters, strict=True):
            torch.testing.assert_close(one.full(p), expected.detach(), rtol=1e-6, atol=1e-9)


def test_a_nan_norm_without_a_loss_scale_affects_one_batch_only():
    """As in torch, gradients become NaN."""
    results = []
    for ours_ in (True, False):
        model = mlp()
        model, optimizer, scaler = prepared("fp32", model)
        for factor in (math.nan, 1.0):
            (F.mse_loss(model(batch()[0]), batch()[1]) * factor).backward()
            if ours_:
                scaler.clip_grad_norm_(optimizer, 0.1)
            else:
                clip_grad_norm_(model.parameters(), 0.1)
            if factor != 1.0:
                assert all(p.grad.isnan().all() for p in model.parameters())
                optimizer.zero_grad()
        optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-9)


def test_a_norm_that_overflows_only_when_scaled_matches_torch():
    """1e15 unscaled is 6.6e19 scaled, whose square overflows float32."""
    for kind in ("fp32", "stock"):
        driver, start = driver_of(kind)
        theirs = reference(start)
        for one in (driver, theirs):
            one.backward(0, 2.0**60)
        torch.testing.assert_close(driver.clip(1e-4), theirs.clip(1e-4))
        torch.testing.assert_close([p.grad for p in driver.parameters], [p.grad for p in theirs.parameters])
        assert theirs.parameters[0].grad.norm() > 1e-6


RULES = {
    "adamw": adamw,
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1),
}


@pytest.mark.quick("fp32-sgd", "bf16-mixed-adamw", "fp16-mixed-adamw")
@pytest.mark.parametrize(
    ("name", "rule"), slow_unless(in_turn(sorted(FAST), [*RULES]).__contains__, itertools.product(EVERY, RULES))
)
def test_clipping_in_place_equals_dividing_in_the_update(name, rule):
    """One float32 multiplication by 1 / float32(S / coefficient), in the gradients or in the update: bit for bit."""
    ends = []
    for in_place in (True, False):
        model = model_for(name)
        model, optimizer, scaler = prepared(name, model, RULES[rule](model))
        for seed in range(3):
            x, y = batch(seed)
            scaler.scale(F.mse_loss(model(x), y)).backward()
            scale, max_norm = scaler.get_scale(), 0.3 if seed else 1e9
            if in_place:
                norm = scaler.clip_grad_norm_(optimizer, max_norm)
                scaler.step(optimizer)
                scaler.update()
            else:
                each = [torch.linalg.vector_norm(v, 2, dtype=torch.float32) for v in grads(model).values()]
                norm = torch.linalg.vector_norm(torch.stack(each), 2) / scale
                coefficient = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
                optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale / coefficient), torch.zeros(())
                optimizer.step()
                del optimizer.grad_scale, optimizer.found_inf
                scaler.update(scale)
            optimizer.zero_grad()
            ends.append((norm, copied(dict(model.state_dict())), copied(optimizer.state_dict())))
    assert_same(ends[:3], ends[3:])


@pytest.mark.parametrize("name", SCALED)
def test_clipping_multiplies_the_scale_of_gradients_stored_as_codes(name):
    model = model_for(name)
    model, optimizer, scaler = prepared(name, model)
    F.mse_loss(model(batch()[0]), batch()[1]).backward()
    before = grads(model)
    norm = scaler.clip_grad_norm_(optimizer, 0.01)
    factor = 1.0 / float(torch.tensor(1.0 / float(0.01 / (norm + 1e-6))))
    assert any(isinstance(p.grad, ops.CodeTensor) for p in model.parameters())
    assert_same(grads(model), {path: grad * factor for path, grad in before.items()})
    torch.testing.assert_close(scaler.clip_grad_norm_(optimizer, math.inf), torch.tensor(0.01))


@pytest.mark.quick("bf16-mixed", "fp16-mixed", "fp32")
@pytest.mark.parametrize("name", mostly_slow(sorted({*EVERY} - {*SMOOTH})))
def test_unscale_then_torchs_clip_equals_clip_grad_norm(name):
    """nanoGPT's loop, under every recipe. 16-bit gradients become float32 if the loss is scaled."""
    ends = []
    for own in (True, False):
        model, optimizer, scaler = prepared(name)
        for seed in range(2):
            x, y = batch(seed)
            scaler.scale(F.mse_loss(model(x), y) * 2.0**-12).backward()
            if own:
                scaler.clip_grad_norm_(optimizer, 2.0**-14)
            else:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 2.0**-14)
                assert not scaler.is_enabled() or {p.grad.dtype for p in model.parameters()} == {torch.float32}
            ends.append([p.grad.float() for p in model.parameters()])
            optimizer.zero_grad(set_to_none=True)
    half = get_recipe(name).grad_format == "bf16" and get_recipe(name).loss_scale is None
    # Without a loss scale unscale_ does nothing, and torch multiplies bf16 gradients in bf16.
    torch.testing.assert_close(ends[:2], ends[2:], rtol=2.0**-6 if half else 1e-5, atol=1e-12)
