"""What training loops do around optimizer.step(): closures, SAM, clipping, schedulers, 16-bit weights, audits."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from ways import (
    Stock,
    StockFailsToo,
    assert_near_fp32,
    both,
    prepare,
    relative_distance,
    sgd,
    start_of,
    step,
    steps,
    tolerance,
    values,
    way,
)  # fmt: skip

import halfstep
from halfstep.auditing import Watch, running
from halfstep.recipe import get_recipe
from tiny import adamw, assert_same, batch


@way()
def test_closure(name):
    """Closures: `optimizer.step(closure)` or `scaler.step(optimizer, closure)`, where the loss is not scaled."""
    finals, losses = [], []
    for how in ("none", "optimizer", "scaler"):
        model, optimizer, scaler = prepare(name, start_of(name))
        if scaler.is_enabled() and how != "none":
            check_refusal(model, scaler, optimizer)
        torch.manual_seed(7)
        for seed in range(3):
            x, y = batch(seed)

            def closure(model=model, optimizer=optimizer, scaler=scaler, x=x, y=y):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                scaler.scale(loss).backward()
                return loss

            if how == "none":
                losses.append(closure())
                scaler.step(optimizer, None)  # as accelerate calls it
            else:
                losses.append(optimizer.step(closure) if how == "optimizer" else scaler.step(optimizer, closure))
            scaler.update()
        finals.append(values(model))
    assert_same(finals[1], finals[0])
    assert_same(finals[2], finals[0])
    assert losses[0:3] == losses[3:6] == losses[6:9]


class Several:
    """Several of torch's optimizers as one, for a stock loop."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def muon_and_sgd(model, combine):
    parameters = list(model.parameters())
    matrices, others = ([p for p in parameters if (p.dim() == 2) is those] for those in (True, False))
    return combine(torch.optim.Muon(matrices, lr=0.02), torch.optim.SGD(others, lr=0.1, momentum=0.9))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 brings it")
@way()
def test_muon_beside_another(name):
    """Muon, and another optimizer for what are no matrices: `halfstep.optim.Combined(Muon(...), SGD(...))`."""
    stock = start_of(name)
    model, start = copy.deepcopy(stock), values(stock)
    steps(*prepare(name, model, muon_and_sgd(model, halfstep.optim.Combined)))
    steps(stock, muon_and_sgd(stock, Several), Stock())
    assert_near_fp32(name, start, values(model), values(stock), slack=2)


def check_refusal(model, scaler, optimizer):
    """Closures are refused, as by torch's GradScaler."""
    stock = torch.nn.Linear(2, 1)
    stock_optimizer, stock_scaler = sgd(stock), torch.amp.GradScaler("cpu")
    stock_scaler.scale(stock(torch.ones(1, 2)).sum()).backward()
    with pytest.raises(RuntimeError) as seen:
        stock_scaler.step(stock_optimizer, closure=lambda: None)
    scaler.scale(model(batch()[0]).sum()).backward()
    with pytest.raises(halfstep.HalfstepError, match="closure"):
        scaler.step(optimizer, lambda: None)
    raise StockFailsToo(str(seen.value))


@way()
def test_other_optimizers(name):
    """Optimizers without a counterpart, LBFGS among them: refused in `prepare`, by name, and nothing was changed."""
    model = start_of(name)
    before, kinds = values(model), [type(module) for module in model.modules()]
    with pytest.raises(halfstep.HalfstepError, match=r"LBFGS.*AdamW"):
        halfstep.prepare(model, torch.optim.LBFGS(model.parameters()), recipe=name)
    assert [type(module) for module in model.modules()] == kinds
    assert_same(values(model), before)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def sharpness_aware(model, optimizer, scaler, restore):
    for seed in range(4):
        x, y = batch(seed)
        scaler.scale(F.mse_loss(model(x), y)).backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.float().norm() for p in model.parameters()]).norm()
            backup = {p: p.detach().clone() for p in model.parameters()}
            for parameter in model.parameters():
                parameter.add_((parameter.grad.float() / norm * 0.3).to(parameter.dtype))
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(x), y)).backward()
        for parameter, value in backup.items():
            restore(parameter, value)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def in_place(parameter, value):
    with torch.no_grad():
        parameter.copy_(value)


def by_data(parameter, value):
    parameter.data = value


@way()
def test_sharpness_aware(name):
    """SAM: climb under no_grad, take the gradient there, put the weights back (`copy_` or `.data =`), then step."""
    for restore in (in_place, by_data):

        def loop(model, optimizer, scaler, restore=restore):
            sharpness_aware(model, optimizer, scaler, restore)

        start, found, expected = both(name, loop)
        assert_near_fp32(name, start, found, expected, slack=3)
    _, _, plain = both(name, steps)
    assert relative_distance(found, plain, start) > relative_distance(found, expected, start)


def descent(model):
    return sgd(
        model, lr=1.0, momentum=0.0
    )  # clipped gradients are small, and the rounding of stored weights hides small updates


def clipping(clip, max_norm=0.05):
    def loop(model, optimizer, scaler):
        for seed in range(4):
            x, y = batch(seed)
            scaler.scale(F.mse_loss(model(x), y)).backward()
            norms.append(float(clip(model, optimizer, scaler, max_norm)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    norms = loop.norms = []
    return loop


def by_scaler(model, optimizer, scaler, max_norm):
    return scaler.clip_grad_norm_(optimizer, max_norm)


def by_torch(model, optimizer, scaler, max_norm):
    scaler.unscale_(optimizer)
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


@way()
def test_clip_by_scaler(name):
    """Clipping: `scaler.clip_grad_norm_(optimizer, max_norm)`, for every recipe."""
    loop = clipping(by_scaler)
    start, found, expected = both(name, loop, optimizer=descent)
    assert_near_fp32(name, start, found, expected, slack=4)  # the updates are small
    assert loop.norms[0] == pytest.approx(loop.norms[4], rel=max(tolerance(name), 1e-5))
    assert loop.norms[0] > 0.1  # so that clipping has an effect


@way()
def test_clip_by_torch(name):
    """Clipping by torch: `scaler.unscale_(optimizer)`, then `torch.nn.utils.clip_grad_norm_(parameters, 1.0)`."""
    loop, ours = clipping(by_torch), clipping(by_scaler)
    start, found, expected = both(name, loop, optimizer=descent)
    assert_near_fp32(name, start, found, expected, slack=4)
    _, clipped, _ = both(name, ours, optimizer=descent)
    assert loop.norms[:4] == pytest.approx(ours.norms[:4], rel=0.02, abs=0)
    assert relative_distance(found, clipped, start) <= max(
        2 * tolerance(name), 1e-5
    )  # torch rounds clipped gradients to 16 bits


@way()
def test_without_a_scaler(name):
    """Steps without the scaler: `optimizer.step()`, `halfstep.advance(model)`; a recipe that scales its loss warns."""
    ours, twin = prepare(name, start_of(name)), prepare(name, start_of(name))
    if ours[2].get_scale() > 1:
        check_warning(*ours)
        return
    for model, optimizer, scaler in (ours, twin):
        torch.manual_seed(7)
        for seed in range(4):
            x, y = batch(seed)
            if scaler is twin[2]:
                step(model, optimizer, scaler, x, y)
            else:
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                halfstep.advance(model)
                optimizer.zero_grad()
    assert_same(values(ours[0]), values(twin[0]))


def check_warning(model, optimizer, scaler):
    """A recipe that scales its loss warns at the first step without its scaler."""
    F.mse_loss(model(batch()[0]), batch()[1]).backward()
    with pytest.warns(UserWarning, match="scaler"):
        optimizer.step()


@way()
def test_schedulers(name):
    """Schedulers: built before `prepare` on the optimizer given, or after on the one returned; or by hand."""
    runs = []
    for how in ("before", "after", "by hand"):
        model = start_of(name)
        optimizer = adamw(model)
        build = torch.optim.lr_scheduler.CosineAnnealingLR
        scheduler = build(optimizer, 4) if how == "before" else None
        model, optimizer, scaler = prepare(name, model, optimizer)
        scheduler = build(optimizer, 4) if how == "after" else scheduler
        torch.manual_seed(7)
        rates = copy.deepcopy([0.01 * (1 + torch.tensor(torch.pi * i / 4).cos().item()) / 2 for i in range(5)])
        for seed in range(4):
            step(model, optimizer, scaler, *batch(seed))
            if scheduler is None:
                for group in optimizer.param_groups:
                    group["lr"] = rates[seed + 1]
            else:
                scheduler.step()
            assert optimizer.param_groups[0]["lr"] == pytest.approx(rates[seed + 1], abs=1e-8)
        runs.append(values(model))
    assert_same(runs[0], runs[1])
    assert relative_distance(runs[2], runs[0], values(start_of(name))) < 0.05


@way()
def test_loaded_in_16_bits(name):
    """Weights loaded in 16 bits: `model.half()` or `dtype=` before `prepare`; a recipe that keeps more warns."""
    recipe = get_recipe(name)
    stock = start_of(name).half().float()
    start = values(stock)
    model = start_of(name).half()
    optimizer = sgd(model)
    if recipe.master in ("fp32", "split") or recipe.weights == "fp32":
        with pytest.warns(UserWarning, match=r"float16"):
            trained = prepare(name, model, optimizer)
    else:
        trained = prepare(name, model, optimizer)
    steps(*trained)
    steps(stock, sgd(stock), Stock())
    assert_near_fp32(name, start, values(model), values(stock), slack=2)


@way()
def test_audited(name):
    """Audited while it runs: `halfstep audit train.py`, or `with halfstep.auditing.Watch():` around the loop; no bit
    changes."""
    finals = []
    for watch in (nullcontext(), Watch()):
        model, optimizer, scaler = prepare(name, start_of(name))
        with watch:
            steps(model, optimizer, scaler)
        finals.append(values(model))
    assert_same(finals[1], finals[0])
    (report,) = running(watch)
    recipe = get_recipe(name)
    narrow = recipe.weights != "fp32" and recipe.codes is None
    loses = narrow and recipe.master is None and recipe.update_rounding == "nearest_even"
    assert loses or not [one for one in report.updates if one.dtype != "float32" and one.harmful]
