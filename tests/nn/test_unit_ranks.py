"""Unit-scaled models on two ranks: DDP and FSDP2 equal one process, and different batches are refused."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import halfstep
from halfstep.errors import ModelError
from ranks import on_ranks
from tiny import assert_same


pytestmark = pytest.mark.slow


class Block(nn.Module):
    """A layer and a residual branch."""

    def __init__(self):
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = self.first(x)
        return self.last(x + F.gelu(self.branch(x)))


def rows(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)


def unit_scaled():
    torch.manual_seed(0)
    model = Block()
    halfstep.unit_scale(model, rows(0)[0], loss=lambda y: F.mse_loss(y, rows(0)[1]))
    return model


def scaled():
    model = unit_scaled()
    return halfstep.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), recipe="unit-fp8")


WAYS = {
    "plain": ({}, 1),
    "buckets": ({"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005}, 1),
    "static": ({"static_graph": True}, 1),
    "unused": ({"find_unused_parameters": True}, 1),
    "micro-batches": ({}, 3),
}
"""DDP's options and micro-batches per step; gradients are reduced with the last one."""


def under_ddp(rank, options, micro):
    model, optimizer, scaler = scaled()
    wrapped = nn.parallel.DistributedDataParallel(model, **options)
    for step in range(3):
        for i in range(micro):
            x, y = rows(100 * i + 10 * step + rank)
            with nullcontext() if i == micro - 1 else wrapped.no_sync():
                F.mse_loss(wrapped(x), y).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def under_fsdp(rank):
    """The weights after three steps under FSDP2."""
    mesh = init_device_mesh("cpu", (2,))
    model = unit_scaled()
    halfstep.apply(model, "unit-fp8")
    fully_shard(model, mesh=mesh)
    optimizer, scaler = halfstep.optimize(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    for step in range(3):
        x, y = rows(10 * step + rank)
        F.mse_loss(model(x), y).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [p.full_tensor().detach() for p in model.parameters()]


def refusal(rank):
    model = Block()
    before = [p.detach().clone() for p in model.parameters()]
    try:
        halfstep.unit_scale(model, rows(rank)[0])
    except ModelError as error:
        assert_same(before, [p.detach() for p in model.parameters()])
        return str(error)
    return ""


def in_one_process(micro):
    model, optimizer, scaler = scaled()
    for step in range(3):
        both = []
        for rank in (0, 1):
            for i in range(micro):
                x, y = rows(100 * i + 10 * step + rank)
                F.mse_loss(model(x), y).backward()
            both.append([p.grad for p in model.parameters()])
            model.zero_grad()
        for parameter, *grads in zip(model.parameters(), *both, strict=True):
            parameter.grad = grads[0] / 2 + grads[1] / 2
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def results(rank):
    return {name: under_ddp(rank, *way) for name, way in WAYS.items()}, under_fsdp(rank), refusal(rank)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_ranks(results, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", WAYS)
def test_ddp_equals_one_process(ranks, name):
    expected = in_one_process(WAYS[name][1])
    for weights, *_ in ranks:
        assert_same(weights[name], expected)


def test_fsdp_equals_one_process(ranks):
    expected = in_one_process(1)
    for _, weights, _ in ranks:
        assert_same(weights, expected)


def test_different_batches_are_refused_on_all_ranks(ranks):
    for *_, words in ranks:
        assert "each rank traced a batch of its own" in words
