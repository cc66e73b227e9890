"""Skipped steps of the loss scaler, and how they are reported."""

import pytest
import torch
import torch.nn.functional as F

from halfstep import LossScaler
from tiny import assert_same, batch, copied, mlp, prepared, train


def backward(model, scaler, factor=1.0):
    x, y = batch()
    scaler.scale(F.mse_loss(model(x), y) * factor).backward()


def test_skipped_steps_and_overflowed_names_are_reported():
    model, optimizer, scaler = prepared("fp16-master")
    train(model, optimizer, scaler, 1)
    backward(model, scaler)
    model[0].bias.grad[3], model[3].weight.grad[1, 1] = float("inf"), float("nan")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.skipped_steps == 1
    assert scaler.overflowed == ("0.bias", "3.weight")


@pytest.mark.parametrize("name", ["fp16-mixed", "fp16-master", "fp16-pure", "bf16-pure"])
def test_a_skipped_step_changes_no_weight_and_no_state(name):
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler, 3)
    before = copied(model.state_dict()), copied(optimizer.state_dict())
    backward(model, scaler, float("inf"))
    assert scaler.step(optimizer) is None
    scaler.update()
    assert_same(dict(model.state_dict()), dict(before[0]))
    assert_same(optimizer.state_dict(), before[1])


def test_optimizers_of_one_scaler_skip_separately_and_back_off_together():
    first, second, scaler = mlp(), mlp(1), LossScaler()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    for model in (first, second):
        backward(model, scaler)
    first[0].weight.grad[0, 0] = float("inf")
    before = copied(first.state_dict()), copied(second.state_dict())
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert_same(dict(first.state_dict()), dict(before[0]))
    assert not torch.equal(second[0].weight, before[1]["0.weight"])
    assert scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("fine", [True, False])
def test_sparse_gradients_are_unscaled_or_skipped(fine):
    model = torch.nn.Embedding(5, 2, sparse=True)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), LossScaler()
    before = model.weight.detach().clone()
    scaler.scale(model(torch.tensor([1, 3])).sum() * (1.0 if fine else float("inf"))).backward()
    scaler.step(optimizer)
    scaler.update()
    expected = torch.zeros(5, 2)
    expected[[1, 3]] = float(fine)
    torch.testing.assert_close(before - model.weight.detach(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_overflow_is_found_at_any_position(dtype):
    for bad in (float("inf"), float("-inf"), float("nan")):
        for where in (0, 500, 999):
            weight = torch.nn.Parameter(torch.zeros(1000, dtype=dtype))
            empty = torch.nn.Parameter(torch.zeros(0, dtype=dtype))
            weight.grad, empty.grad = torch.ones_like(weight), torch.ones_like(empty)
            weight.grad[where] = bad
            optimizer, scaler = torch.optim.SGD([empty, weight], lr=1.0, fused=True), LossScaler()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.overflowed == ("parameter 1 of group 0",)
            assert (weight == 0).all()
