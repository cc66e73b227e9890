"""Accelerate on two ranks with gradients in FP8: the model that it wraps in DDP is compressed like any DDP model."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep.distributed import compress
from halfstep.recipe import FP8
from ranks import on_ranks
from tiny import assert_same, mlp


pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow


def trained(model, ddp, backward, optimizer, update, rank):
    state = compress(ddp, FP8)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x, y = torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)
        backward(F.mse_loss(ddp(x), y))
        optimizer.step()
        update()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, state.exchange.sent


def train_by_both(rank):
    """Results with Accelerate, and with DDP alone."""
    from accelerate import Accelerator

    from halfstep.integrations.accelerate import prepare

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 29613}
    os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1")
    model = mlp()
    accelerator = Accelerator(cpu=True)
    ddp, optimizer = prepare(
        accelerator, model, torch.optim.AdamW(model.parameters(), lr=0.01), recipe="bf16-stochastic", generator=3
    )
    assert isinstance(ddp, DistributedDataParallel)
    found = trained(model, ddp, accelerator.backward, optimizer, lambda: None, rank)
    model = mlp()
    given = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, scaler = halfstep.prepare(model, given, "bf16-stochastic", generator=3)
    ddp = DistributedDataParallel(model)
    return found, trained(model, ddp, lambda loss: loss.backward(), optimizer, scaler.update, rank)


def test_accelerates_model_trains_like_ddp_with_fp8_gradients(tmp_path):
    (first, own), (second, _) = on_ranks(train_by_both, tmp_path)
    assert_same(first, second)
    assert_same(first, own)
    assert first[1] > 0
