"""Faulty or differing ranks: every other rank's error names the rank, and none waits forever."""

import os
import signal
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep.distributed import Reduction, compress, fp8_hook, reduce_gradients
from halfstep.recipe import FP4, FP8, get_recipe
from ranks import on_ranks


pytestmark = pytest.mark.slow
SHORT = timedelta(seconds=2)
IN_FP8 = replace(get_recipe("bf16-mixed"), name="bf16-fp8-wire", communication=FP8)


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 64), nn.GELU(), nn.Linear(64, 40))


def prepared(recipe, seed=0):
    model = model_of(seed)
    return halfstep.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe)


def error_of(work):
    try:
        return work() or ""
    except halfstep.HalfstepError as error:
        return str(error)


def backward(model):
    model(torch.ones(2, 40)).square().mean().backward()


def killed(rank, kind):
    from torch.distributed.fsdp import fully_shard

    if kind == "fsdp":
        model = model_of()
        halfstep.apply(model, "bf16-mixed")
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
        wrapped = compress(model, replace(FP8, weights=FP8.gradients)) and model
        optimizer, _ = halfstep.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    else:
        model, optimizer, _ = prepared("bf16-mixed")
        wrapped = model if kind == "own" else DistributedDataParallel(model, bucket_cap_mb=0.001)
    if kind == "ddp":
        compress(wrapped, FP8)

    def work():
        for step in range(4):
            if rank == 1 and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            backward(wrapped)
            if kind == "own":
                reduce_gradients(model)
            optimizer.step()
            optimizer.zero_grad()

    return error_of(work)


def others(rank):
    """Each rank's error when ranks differ in one thing."""
    found = {}
    recipe = IN_FP8 if rank else replace(IN_FP8, compute="fp16")
    ddp = DistributedDataParallel(prepared(recipe)[0])
    found["recipe"] = error_of(lambda: compress(ddp) and None)
    ddp = DistributedDataParallel(prepared(IN_FP8)[0])
    found["communication"] = error_of(lambda: compress(ddp, FP4 if rank else FP8) and None)
    model = prepared("bf16-mixed", seed=rank)[0]  # no DDP, which would have copied rank 0's weights
    backward(model)
    found["weights"] = error_of(lambda: reduce_gradients(model))
    ddp = DistributedDataParallel(prepared(IN_FP8)[0])
    found["absent"] = error_of(lambda: compress(ddp, limit=SHORT) and None) if rank else ""
    dist.barrier()
    return found


def forgotten(rank):
    """Errors when gradients were not sent as the recipe states."""
    found = {}
    model, optimizer, scaler = prepared(IN_FP8)
    ddp = DistributedDataParallel(model)
    backward(ddp)
    before = model[0].weight.clone()
    found["ddp alone"] = error_of(lambda: scaler.step(optimizer))
    found["moved"] = not torch.equal(before, model[0].weight)
    compress(ddp)
    backward(ddp)
    found["compressed"] = error_of(lambda: scaler.step(optimizer))
    with ddp.no_sync():
        backward(ddp)
    found["accumulated alone"] = error_of(lambda: scaler.step(optimizer))
    model, optimizer, scaler = prepared("bf16-megatron")
    found["under ddp"] = error_of(lambda: backward(DistributedDataParallel(model)))
    backward(model)
    found["not reduced"] = error_of(lambda: scaler.step(optimizer))
    reduce_gradients(model)
    found["reduced"] = error_of(lambda: scaler.step(optimizer))
    found["dtypes"] = str(model[0].weight.dtype), str(model[0].weight.grad.dtype)
    found["no ddp"] = error_of(lambda: compress(model) and None)
    found["no communication"] = error_of(lambda: compress(DistributedDataParallel(prepared("bf16-mixed")[0])) and None)
    scaled = DistributedDataParallel(prepared("fp16-mixed")[0])
    found["no scaler"] = error_of(lambda: compress(scaled, FP4) and None)
    found["hook twice"] = error_of(lambda: compress(ddp) and None)
    return found


def differing(rank):
    """Gradients of a model of which each rank uses another part, and the error for a sparse gradient."""
    model = nn.ModuleDict({"both": nn.Linear(4, 4), "first": nn.Linear(4, 4), "none": nn.Linear(4, 4)})
    for p in model.parameters():
        nn.init.ones_(p)
    used = model["both"](torch.ones(2, 4)) if rank else model["first"](model["both"](torch.ones(2, 4)))
    used.sum().backward()
    reduce_gradients(model)
    sparse = nn.Embedding(10, 4, sparse=True)
    nn.init.ones_(sparse.weight)
    sparse(torch.tensor([1])).sum().backward()
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return grads, error_of(lambda: reduce_gradients(sparse))


def by_hand(rank):
    """The hook registered without `compress`; a backward pass that stopped between two buckets."""
    model = model_of()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    state = Reduction(FP8)
    ddp.register_comm_hook(state, fp8_hook)
    backward(ddp)
    times = state.times
    state._under_way.append((iter(()), None, print))  # as left by a backward pass that raised
    return times, error_of(lambda: backward(ddp))


@pytest.mark.parametrize("kind", ["ddp", "own", "fsdp"])
def test_errors_name_a_killed_rank(kind, tmp_path):
    found = on_ranks(killed, tmp_path, kind, world=3, killed=(1,))
    for rank in (0, 2):
        assert f"rank {rank} of 3: the all-" in found[rank]
        assert "rank 1 reported nothing since" in found[rank]


def test_errors_name_ranks_that_differ(tmp_path):
    first, second = on_ranks(others, tmp_path)
    for said_by in (first, second):
        assert "rank 1 is going to send" in said_by["recipe"] or "rank 0 is going to send" in said_by["recipe"]
        assert "'bf16-fp8-wire'" in said_by["recipe"]
        assert "float4_e2m1fn" in said_by["communication"]
        assert "Nothing was sent" in said_by["weights"]
    assert "rank 0 made no such call" in second["absent"]
    assert "in 0:00:02" in second["absent"]


def test_stepping_on_gradients_not_sent_as_the_recipe_states_raises(tmp_path):
    for found in on_ranks(forgotten, tmp_path):
        assert "call halfstep.distributed.compress(ddp)" in found["ddp alone"]
        assert not found["moved"]
        assert found["compressed"] == found["reduced"] == ""
        assert "did not run since the last step" in found["accumulated alone"]
        assert "without DDP" in found["under ddp"]
        assert "halfstep.distributed.reduce_gradients(model)" in found["not reduced"]
        assert found["dtypes"] == ("torch.bfloat16", "torch.float32")
        assert "neither under DDP nor sharded" in found["no ddp"]
        assert "has no communication, and none was given" in found["no communication"]
        assert "scaler=scaler" in found["no scaler"]
        assert "has a communication hook already" in found["hook twice"]


def test_gradients_missing_on_some_ranks_count_as_zeros(tmp_path):
    (first, said_by), (second, _) = on_ranks(differing, tmp_path)
    assert first["none.weight"] is second["none.weight"] is None
    assert torch.equal(first["first.weight"], second["first.weight"])
    assert torch.equal(first["first.weight"], torch.full((4, 4), 2 * 5 / 2))  # of rank 0 alone, over two ranks
    assert torch.equal(first["both.bias"], torch.full((4,), (2 * 4 + 2) / 2))
    assert "sparse" in said_by


def test_the_hook_works_without_compress_and_reports_a_stopped_backward(tmp_path):
    for times, said_by in on_ranks(by_hand, tmp_path):
        assert times == 1
        assert "stopped between two buckets" in said_by


def silent(rank):
    """A rank that does something else for longer than the group's timeout."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    model, _, _ = prepared("bf16-mixed")
    backward(model)
    reduce_gradients(model, process_group=group)
    if rank == 1:
        time.sleep(20)
        return ""
    backward(model)
    return error_of(lambda: reduce_gradients(model, process_group=group))


def test_errors_name_a_silent_rank_after_the_groups_timeout(tmp_path):
    first, _ = on_ranks(silent, tmp_path)
    assert "rank 0 of 2: the all-gather of gradients failed" in first
    assert "rank 1 reported nothing since" in first
