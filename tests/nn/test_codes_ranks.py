"""FP8-LM on two ranks: under DDP weights are float32 values rounded as codes would be, bit-equal to one process."""

import pytest
import torch
import torch.nn.functional as F

from halfstep import ops
from halfstep.recipe import MASTER
from ranks import on_ranks
from tiny import SCALED, assert_same, mlp, prepared


pytestmark = pytest.mark.slow


def rows_of(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)


def loss_of(model, step, rank):
    x, y = rows_of(step, rank)
    return F.mse_loss(model(x), y)


def seen(model, optimizer):
    masters = [s[MASTER].clone() for s in optimizer.state.values() if MASTER in s]
    return {key: value.clone() for key, value in model.state_dict().items()}, masters


def under_ddp(name, rank):
    model, optimizer, scaler = prepared(name)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    for step in range(4):
        loss_of(wrapped, step, rank).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return seen(model, optimizer)


def under_fsdp(name):
    """The error of the first step: fully_shard replaces the parameters that the optimizer has."""
    from torch.distributed.fsdp import fully_shard

    model, optimizer, scaler = prepared(name)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    fully_shard(model[3], mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss_of(model, 0, 0).backward()
    try:
        scaler.step(optimizer)
    except ValueError as error:
        return str(error)
    return ""


def in_one_process(name):
    """The gradients of both ranks' rows as torch.autograd.grad has them, unrounded; the optimizer rounds their mean."""
    model, optimizer, scaler = prepared(name)
    for step in range(4):
        parameters = list(model.parameters())
        both = [torch.autograd.grad(loss_of(model, step, rank), parameters) for rank in (0, 1)]
        for parameter, *grads in zip(parameters, *both, strict=True):
            parameter.grad = grads[0] / 2 + grads[1] / 2
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return seen(model, optimizer)


def results(rank):
    return {name: (under_ddp(name, rank), under_fsdp(name)) for name in SCALED}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_ranks(results, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", SCALED)
def test_ddp_on_two_ranks_equals_one_process(ranks, name):
    expected = in_one_process(name)
    for rank in ranks:
        assert_same(rank[name][0], expected)
    weight = expected[0]["0.weight"]
    assert not torch.equal(weight, mlp()[0].weight.detach())
    for format in (torch.float8_e4m3fn, torch.float16):
        on_grid = torch.equal(ops.decode_scaled(*ops.encode_scaled(weight, format)), weight)
        assert on_grid == (format == torch.float16 or name == "fp8lm-o3")


@pytest.mark.parametrize("name", SCALED)
def test_a_step_after_fully_shard_is_refused(ranks, name):
    for rank in ranks:
        assert "parameters no longer belong to the model" in rank[name][1]
        assert "then fully_shard" in rank[name][1]
