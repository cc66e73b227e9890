"""RMSprop and NAdam under every recipe: they train, resume bit for bit, store moments like Adam, and return to
torch."""

import copy
import itertools

import pytest
import torch

import halfstep
from families import for_each, in_turn
from halfstep.optim import convert
from halfstep.recipe import get_recipe
from tiny import BREAKS, EVERY, FAST, assert_same, batch, mlp, model_for, prepared, train


BROUGHT = {
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=3e-3, momentum=0.5),
    "centered": lambda model: torch.optim.RMSprop(model.parameters(), lr=3e-3, centered=True),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=1e-2, weight_decay=0.1),
}
FIRST = in_turn(sorted({*EVERY} & FAST), [*BROUGHT])  # a recipe and an optimizer


def started(name, kind, seed=0):
    model = model_for(name)
    if seed:
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
    return prepared(name, model, BROUGHT[kind](model), generator=3 + seed)


def check_training_and_resuming(name, kind):
    whole = started(name, kind)
    losses = train(*whole, 3)
    losses += train(*whole, 3)
    assert torch.tensor(losses).isfinite().all()
    if name not in BREAKS:
        assert losses[-1] < losses[0], losses
    first = started(name, kind)
    train(*first, 3)
    saved = copy.deepcopy([part.state_dict() for part in first])
    second = started(name, kind, seed=1)
    for part, state in zip(second, saved, strict=True):
        part.load_state_dict(state)
    train(*second, 3)
    assert_same(dict(second[0].state_dict()), dict(whole[0].state_dict()))


@pytest.mark.slow
@for_each("name, kind", FIRST)
def test_rmsprop_and_nadam_train_and_resume(name, kind):
    check_training_and_resuming(name, kind)


@pytest.mark.slow
@for_each("name, kind", sorted({*itertools.product(EVERY, BROUGHT)} - {*FIRST}))
def test_rmsprop_and_nadam_train_and_resume_under_other_recipes(name, kind):
    check_training_and_resuming(name, kind)


def state_dtypes(name, kind):
    torch.manual_seed(0)
    model = torch.nn.Linear(96, 64)
    model, optimizer, scaler = prepared(name, model, BROUGHT[kind](model))
    x, y = torch.randn(4, 96), torch.randn(4, 64)
    train(model, optimizer, scaler, 1, (x, y))
    return {name: tensor.dtype for name, tensor in optimizer.state[model.weight].items() if tensor.dim()}


@pytest.mark.slow
def test_moments_are_stored_in_the_recipes_format_for_adam():
    assert state_dtypes("bf16-pure", "rmsprop")["square_avg"] is torch.bfloat16
    codes = state_dtypes("adamw-8bit", "rmsprop")
    assert codes["square_avg"] is codes["momentum_buffer"] is torch.uint8
    assert state_dtypes("adamw-8bit", "nadam")["exp_avg"] is torch.uint8


def test_moments_that_are_subtracted_and_momentum_products_stay_in_float32():
    """Else rounding errors would dominate a centered variance. NAdam's product of momenta is a scalar."""
    found = state_dtypes("adamw-8bit", "centered")
    assert found["square_avg"] is found["grad_avg"] is torch.float32
    model = torch.nn.Linear(96, 64)
    _, optimizer, _ = prepared("bf16-pure", model, BROUGHT["nadam"](model))
    product = optimizer.state[model.weight]["mu_product"]
    assert (product.dtype, product.shape) == (torch.float32, ())


@pytest.mark.parametrize("kind", BROUGHT)
def test_float32_state_loads_into_torchs_optimizer(kind):
    """torch's optimizer then takes the same steps."""
    model, twin = mlp(), mlp()
    ours = convert(BROUGHT[kind](model), get_recipe("fp32"), {})
    theirs = BROUGHT[kind](twin)
    x, y = batch()

    def steps(which, optimizer, times):
        for _ in range(times):
            torch.nn.functional.mse_loss(which(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(model, ours, 3)
    twin.load_state_dict(model.state_dict())
    theirs.load_state_dict(copy.deepcopy(ours.float32_state_dict()))
    steps(model, ours, 3)
    steps(twin, theirs, 3)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_nadam_under_galore_trains_with_one_momentum_product():
    """GaLore of full rank turns the gradient, steps, and turns back: the weight's decay and the momenta are whole."""
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 130, bias=False)
    projected = prepared("galore", model, BROUGHT["nadam"](model))
    state = projected[1].state[model.weight]
    assert state["mu_product"].shape == ()
    x, y = torch.randn(32, 256), torch.randn(32, 130)
    losses = train(*projected, 4, (x, y))
    assert losses[-1] < losses[0]
    assert 0 < float(state["mu_product"]) < 1


def test_nadams_momentum_product_follows_a_schedule_of_betas():
    """OneCycleLR changes betas, so the product cannot be computed from the present ones."""
    found = []
    for ours in (False, True):
        model = mlp()
        optimizer = torch.optim.NAdam(model.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=12)
        if ours:
            model, optimizer, _ = halfstep.prepare(model, optimizer, "fp32")
        x, y = batch()
        for _ in range(10):
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        found.append([p.detach() for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
