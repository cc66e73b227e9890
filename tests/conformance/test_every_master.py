"""Properties of every kind of master weight, under every way of writing to the weights."""

import copy
import io
import itertools

import pytest
import torch
from torch import nn

import halfstep
from families import for_each, in_turn, slow_unless
from halfstep.recipe import get_recipe
from tiny import EVERY, assert_same, copied, mostly_slow, prepared, train


BESIDE = [name for name in EVERY if get_recipe(name).master]
every_master = pytest.mark.parametrize("name", BESIDE)
every_recipe = pytest.mark.parametrize("name", EVERY)
KINDS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "lion": lambda ps: halfstep.optim.Lion(ps, lr=0.01),
}
every_rule = pytest.mark.parametrize("kind", KINDS)
FAST_PAIRS = in_turn(BESIDE, ["lion", "adamw", "sgd"])
"""Pairs of master and update rule for the fast tests; each pair compiles a kernel."""
in_turns = pytest.mark.parametrize(
    ("name", "kind"), slow_unless(FAST_PAIRS.__contains__, itertools.product(BESIDE, KINDS))
)
SIZE = 4096
NOTHING = 2.0**-134
"""Half of the smallest bfloat16: the most that a lower half adds to a zero."""


class Weights(nn.Module):
    """A module with one parameter; tests set its gradients."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(value.clone())


def start(name, kind="adamw", value=None):
    if value is None:
        value = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    model = Weights(value)
    _, optimizer, _ = halfstep.prepare(model, KINDS[kind](model.parameters()), name)
    optimizer.awaits_scaler = False  # gradients are set by hand
    return model.weight, optimizer


def step(weight, optimizer, seed):
    grad = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))
    weight.grad = grad.to(weight.grad_dtype or weight.dtype)
    optimizer.step()


def weight_and_master(weight, optimizer):
    return copied([weight.detach(), optimizer.full(weight)])


def through_data(weight, mask):
    weight.data.mul_(mask)


@torch.no_grad()
def in_place(weight, mask):
    weight.mul_(mask)


@torch.no_grad()
def by_foreach(weight, mask):
    torch._foreach_mul_([weight], [mask.to(weight.dtype)])


WRITES = [through_data, in_place, by_foreach]


@pytest.mark.parametrize(
    ("name", "kind", "apply"),
    slow_unless(
        [(*turn, write) for turn, write in in_turn(FAST_PAIRS, WRITES)].__contains__,
        itertools.product(BESIDE, KINDS, WRITES),
    ),
)
def test_masking_after_each_step_leaves_other_weights_unchanged(name, kind, apply):
    """Unmasked elements equal those of a run without a mask bit for bit; masked ones are zero."""
    mask = torch.rand(SIZE, generator=torch.Generator().manual_seed(2)) < 0.5
    weight, optimizer = start(name, kind)
    free, other = start(name, kind)
    for seed in range(12):
        step(weight, optimizer, seed)
        apply(weight, mask)
        step(free, other, seed)
        for masked, plain in zip(weight_and_master(weight, optimizer), weight_and_master(free, other), strict=True):
            assert_same(masked[mask], plain[mask])
            assert (masked[~mask].abs() <= NOTHING).all()


@in_turns
def test_weights_zeroed_by_hand_keep_training(name, kind):
    """A step never leaves a zero whose lower half is negative, which once became NaN."""
    weight, optimizer = start(name, kind)
    step(weight, optimizer, 1)
    weight.data.zero_()
    assert (optimizer.full(weight).abs() <= NOTHING).all()
    step(weight, optimizer, 2)
    assert weight.isfinite().all()
    assert optimizer.full(weight).isfinite().all()
    assert (weight != 0).float().mean() > 0.99


def test_split_weight_rounds_ties_away_from_zero():
    value = torch.tensor([1 + 2.0**-8, -1 - 2.0**-8])
    weight, optimizer = start("bf16-split", value=value)
    assert weight.tolist() == [1 + 2.0**-7, -1 - 2.0**-7]
    assert torch.equal(optimizer.full(weight), value)


def new_storage(weight, value):
    weight.data = value.to(weight.dtype)


def vector(weight, value):
    nn.utils.vector_to_parameters(value.to(weight.dtype), [weight])


def through_numpy(weight, value):
    weight.data.view(torch.int16).numpy()[:] = value.to(weight.dtype).view(torch.int16).numpy()


def load(weight, value):
    model = Weights(torch.ones(SIZE))
    model.weight = weight
    model.load_state_dict({"weight": value})


@torch.no_grad()
def copy_over(weight, value):
    weight.copy_(value)


@torch.no_grad()
def by_index(weight, value):
    weight[torch.arange(SIZE)] = value.to(weight.dtype)


WRITES = [new_storage, vector, through_numpy, load, copy_over, by_index]


@pytest.mark.quick(
    "lion-bf16-megatron",
    "sgd-bf16-collage-plus",
    "adamw-bf16-master",
    "lion-bf16-collage-light",
    "sgd-fp16-master",
    "adamw-bf16-7byte",
)
@every_master
@every_rule
@for_each("write", WRITES, ids=lambda write: write.__name__)
@for_each("steps", [0, 2])
def test_master_follows_every_kind_of_write(name, kind, write, steps):
    """The weight stays as written, and the master represents it, up to an ulp for masters that are a sum of two."""
    weight, optimizer = start(name, kind)
    for seed in range(steps):
        step(weight, optimizer, seed)
    value = torch.randn(SIZE, generator=torch.Generator().manual_seed(9))
    write(weight, value)
    written = weight.detach().clone()
    exact = get_recipe(name).master in ("fp32", "split")
    for group in optimizer.param_groups:
        group.update(lr=0.0)
    for _ in range(3):
        full = optimizer.full(weight)
        torch.testing.assert_close(full, written.float(), rtol=2.0**-7, atol=0)
        torch.testing.assert_close(weight.detach(), written, rtol=0 if exact else 2.0**-6, atol=0)
        if get_recipe(name).master == "fp32":
            assert_same(full.to(weight.dtype), written)
        step(weight, optimizer, 5)


@in_turns
@pytest.mark.parametrize("how", ["swapped storage", "SAM"])
def test_weights_written_and_restored_lose_nothing(name, kind, how):
    weight, optimizer = start(name, kind)
    twin, other = start(name, kind)
    for seed in range(8):
        for w, o in ((weight, optimizer), (twin, other)):
            step(w, o, seed)
        before = weight.data
        if how == "SAM":
            saved = before.clone()
            weight.data.add_(0.1)
            weight.data.copy_(saved)
        else:
            weight.data = torch.zeros_like(before)
            optimizer.full(weight)
            weight.data = before
        assert_same(weight_and_master(weight, optimizer), weight_and_master(twin, other))


@pytest.mark.parametrize("name", mostly_slow(EVERY))
def test_reloading_the_state_before_the_first_step_changes_nothing(name):
    """accelerate does this with every optimizer; it once made Adam's bias correction start at step 1."""
    found = []
    for reload in (False, True):
        model, optimizer, scaler = prepared(name)
        if reload:
            optimizer.load_state_dict(optimizer.state_dict())
        losses = train(model, optimizer, scaler)
        found.append((losses, copied(model.state_dict()), copied(optimizer.state_dict())))
    assert_same(*found)


@pytest.mark.quick(
    "lion-bf16-megatron",
    "adamw-bf16-split",
    "sgd-bf16-collage-plus",
    "lion-bf16-kahan",
    "adamw-bf16-7byte",
)
@every_master
@every_rule
@for_each("steps", [0, 1, 6])
@for_each("order", ["weights first", "optimizer first"])
def test_resumes_bit_for_bit(name, kind, steps, order):
    """A dozen of 4096 weights differ from their own sum with a fresh compensation, rounded."""
    weight, optimizer = start(name, kind)
    for seed in range(steps):
        step(weight, optimizer, seed)
    file = io.BytesIO()
    torch.save([weight.detach(), optimizer.state_dict()], file)
    file.seek(0)
    value, state = torch.load(file)
    resumed, again = start(name, kind, torch.randn(SIZE))
    for what in ("weights first", "optimizer first")[:: 1 if order == "weights first" else -1]:
        if what == "optimizer first":
            again.load_state_dict(state)
        else:
            resumed.data.copy_(value)
    assert_same(weight_and_master(resumed, again), weight_and_master(weight, optimizer))
    for seed in range(3):
        step(weight, optimizer, 10 + seed)
        step(resumed, again, 10 + seed)
        assert_same(weight_and_master(resumed, again), weight_and_master(weight, optimizer))


@in_turns
def test_reading_full_weights_changes_no_bit(name, kind):
    """Reading the full-precision weights or copying the optimizer at any time changes nothing."""
    weight, optimizer = start(name, kind)
    twin, other = start(name, kind)
    for seed in range(8):
        step(weight, optimizer, seed)
        optimizer.full(weight)
        copy.deepcopy(optimizer)
        step(twin, other, seed)
    assert_same(copied(optimizer.state_dict()), copied(other.state_dict()))


@every_master
def test_nan_and_infinite_weights_can_be_overwritten(name):
    weight, optimizer = start(name)
    step(weight, optimizer, 1)
    weight.data[:2] = torch.tensor([torch.nan, torch.inf])
    found = optimizer.full(weight)
    assert found[0].isnan()
    assert found[1].isinf()
    assert found[2:].isfinite().all()
    step(weight, optimizer, 2)
    assert not weight[:2].isfinite().any()
    assert weight[2:].isfinite().all()
    weight.data[:2] = 0.0
    optimizer.state[weight]["exp_avg"].zero_()
    step(weight, optimizer, 3)
    assert weight.isfinite().all()
    assert optimizer.full(weight).isfinite().all()
