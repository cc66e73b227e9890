"""What holds of every way of keeping more of a weight than the weight: whoever writes to the weight, and however."""

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
TURNS = in_turn(BESIDE, ["lion", "adamw", "sgd"])
"""Masters and rules of the fast tests: each pair is a kernel."""
in_turns = pytest.mark.parametrize(("name", "kind"), slow_unless(TURNS.__contains__, itertools.product(BESIDE, KINDS)))
SIZE = 4096
NOTHING = 2.0**-134
"""Half of the smallest bfloat16: what a lower half may leave beside a zero."""


class Weights(nn.Module):
    """One parameter, whose gradients the test sets."""

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


def kept(weight, optimizer):
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
        [(*turn, write) for turn, write in in_turn(TURNS, WRITES)].__contains__,
        itertools.product(BESIDE, KINDS, WRITES),
    ),
)
def test_a_mask_after_every_step_keeps_all_of_the_others(name, kind, apply):
    """Beside a run without the mask, bit for bit; of what is masked nothing is left."""
    mask = torch.rand(SIZE, generator=torch.Generator().manual_seed(2)) < 0.5
    weight, optimizer = start(name, kind)
    free, other = start(name, kind)
    for seed in range(12):
        step(weight, optimizer, seed)
        apply(weight, mask)
        step(free, other, seed)
        for masked, plain in zip(kept(weight, optimizer), kept(free, other), strict=True):
            assert_same(masked[mask], plain[mask])
            assert (masked[~mask].abs() <= NOTHING).all()


@in_turns
def test_zeros_written_are_zeros_and_move_on(name, kind):
    """The lower half of a split weight made a NaN of a zero, which no step ever left."""
    weight, optimizer = start(name, kind)
    step(weight, optimizer, 1)
    weight.data.zero_()
    assert (optimizer.full(weight).abs() <= NOTHING).all()
    step(weight, optimizer, 2)
    assert weight.isfinite().all()
    assert optimizer.full(weight).isfinite().all()
    assert (weight != 0).float().mean() > 0.99


def test_a_split_weight_half_way_between_two_is_the_one_away_from_zero():
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
def test_what_is_kept_follows_every_kind_of_write(name, kind, write, steps):
    """The weight stays what was written, and what is kept means that weight, except for an ulp of a sum of two."""
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
def test_what_is_written_and_written_back_has_lost_nothing(name, kind, how):
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
        assert_same(kept(weight, optimizer), kept(twin, other))


@pytest.mark.parametrize("name", mostly_slow(EVERY))
def test_loading_its_own_state_before_the_first_step_changes_nothing(name):
    """accelerate does it to every optimizer; Adam's bias correction started at step 1."""
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
def test_it_resumes_bit_for_bit(name, kind, steps, order):
    """Of 4096 weights a dozen do not equal the sum of themselves and a fresh compensation, rounded."""
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
    assert_same(kept(resumed, again), kept(weight, optimizer))
    for seed in range(3):
        step(weight, optimizer, 10 + seed)
        step(resumed, again, 10 + seed)
        assert_same(kept(resumed, again), kept(weight, optimizer))


@in_turns
def test_an_untouched_run_never_loses_a_bit(name, kind):
    """Asking for all that is stored, at any time, moves nothing: beside a run that nobody looks at."""
    weight, optimizer = start(name, kind)
    twin, other = start(name, kind)
    for seed in range(8):
        step(weight, optimizer, seed)
        optimizer.full(weight)
        copy.deepcopy(optimizer)
        step(twin, other, seed)
    assert_same(copied(optimizer.state_dict()), copied(other.state_dict()))


@every_master
def test_nan_and_infinities_show_and_can_be_repaired(name):
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
