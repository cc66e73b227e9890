"""DDP and FSDP2 on two ranks. One pair of processes runs every way, for all recipes of a test."""

import subprocess
import sys
import tempfile
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from ways import Stock, assert_near_fp32, prepare, sgd, start_of, under, values, way

import halfstep
from halfstep.recipe import FP8, get_recipe
from tiny import EVERY, assert_same, batch


FEW = ("fp16-master", "fp8-delayed")  # recipes of the fast tests
REST = tuple(name for name in EVERY if name not in FEW)

RANKS = """
import os, sys, warnings
folder, here, names = sys.argv[1], sys.argv[2], sys.argv[3].split(",")
sys.path[:0] = [here, here + "/.."]
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from test_ranks import KINDS, on_a_rank
torch.set_num_threads(1)
other = os.fork()  # rank 1, which then need not import everything again
rank = 0 if other else 1
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
found = {(name, kind): on_a_rank(KINDS[kind], name, rank) for name in names for kind in KINDS}
torch.save(found, f"{folder}/{rank}.pt")
dist.destroy_process_group()
if other and os.waitpid(other, 0)[1]:
    sys.exit("rank 1 has failed")
"""


def micro_batches(step, rank):
    for i in range(2):
        yield tuple(part[6 * rank : 6 * rank + 6] for part in batch(10 * step + i))


def train(model, parts, syncs, times=3):
    """The documented loop with two micro-batches per step; `syncs(last)` is the context in which gradients are reduced
    or not."""
    _, optimizer, scaler = parts
    for step in range(times):
        for i, (x, y) in enumerate(micro_batches(step, torch.distributed.get_rank())):
            with syncs(i == 1):
                scaler.scale(F.mse_loss(model(x), y) / 2).backward()
        scaler.clip_grad_norm_(optimizer, 10.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


class Syncs:
    """FSDP2's set_requires_gradient_sync as a context, like DDP's no_sync."""

    def __init__(self, model, last):
        model.set_requires_gradient_sync(last)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def distributed(name, rank):
    torch.manual_seed(0)
    model = start_of(name)
    torch.manual_seed(1000 + rank)  # the usual advice: different data, dropout and seed on each rank
    ours = prepare(name, model, generator=None)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    train(wrapped, ours, lambda last: nullcontext() if last else wrapped.no_sync())
    return values(model)


def wrapped_too_early(name, rank):
    torch.manual_seed(0)
    model = start_of(name)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(1000 + rank)
    try:
        ours = prepare(name, model, generator=None)
    except halfstep.HalfstepError as error:
        return str(error)
    train(wrapped, ours, lambda last: nullcontext() if last else wrapped.no_sync())
    return values(model)


def compressed(name, rank):
    torch.manual_seed(0)
    model = start_of(name)
    ours = prepare(name, model, generator=None)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    halfstep.distributed.compress(wrapped, FP8)
    train(wrapped, ours, lambda last: nullcontext() if last else wrapped.no_sync())
    return values(model)


def reduced(name, rank):
    torch.manual_seed(0)
    model = start_of(name)
    _, optimizer, scaler = prepare(name, model, generator=None)
    for step in range(3):
        for x, y in micro_batches(step, rank):
            scaler.scale(F.mse_loss(model(x), y) / 2).backward()
        halfstep.distributed.reduce_gradients(model)
        scaler.clip_grad_norm_(optimizer, 10.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return values(model)


def sharded(name, rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model = start_of(name)
    torch.manual_seed(1000 + rank)
    mesh = init_device_mesh("cpu", (2,))
    halfstep.apply(model, under(name))
    recipe = get_recipe(name)
    wide = recipe.grad_format == "fp32" != recipe.weights
    options = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)} if wide else {}
    fully_shard(model[3], mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    optimizer, scaler = halfstep.optimize(model, sgd(model))
    if scaler.is_enabled():
        scaler.update(2.0**10)
    train(model, (model, optimizer, scaler), lambda last: Syncs(model, last))
    return {key: p.full_tensor().detach().float() for key, p in model.named_parameters()}


def sharded_too_late(name, rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = start_of(name)
    ours = prepare(name, model)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        train(model, ours, lambda last: Syncs(model, last), times=1)
    except halfstep.HalfstepError as error:
        return str(error)
    return None


KINDS = {
    "ddp": distributed, "early": wrapped_too_early, "fp8": compressed, "own": reduced, "fsdp": sharded,
    "late": sharded_too_late,
}  # fmt: skip


def on_a_rank(kind, name, rank):
    """A rank's result, or the error it raised. Both ranks raise alike, or they would wait for each other forever."""
    try:
        return kind(name, rank)
    except Exception as error:
        return error if isinstance(error, halfstep.HalfstepError) else f"{type(error).__name__}: {error}"


@cache
def ranks(names):
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", RANKS, folder, str(Path(__file__).parent), ",".join(names)]
        subprocess.run(command, check=True, timeout=120 + 15 * len(names))
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in (0, 1)]


def results(name, kind):
    """The results of both ranks."""
    found = [rank[name, kind] for rank in ranks(FEW if name in FEW else REST)]
    for each in found:
        if isinstance(each, halfstep.HalfstepError):
            raise each
        assert not isinstance(each, str) or kind in ("early", "late"), each
    return found


def in_one_process(name):
    """Stock fp32 with the rows of both ranks."""
    model = start_of(name)
    optimizer, scaler = sgd(model), Stock()
    for step in range(3):
        for i in range(2):
            x, y = batch(10 * step + i)
            (F.mse_loss(model(x), y) / 2).backward()
        scaler.clip_grad_norm_(optimizer, 10.0)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def compared(name, kind):
    found = results(name, kind)
    assert_same(found[0], found[1])
    torch.manual_seed(0)
    start, expected = values(start_of(name)), in_one_process(name)
    rounds = "bf16-mixed" if (name, kind) == ("fp32", "fp8") else name  # gradients sent in FP8 are rounded
    assert_near_fp32(rounds, start, found[0], expected, slack=2)


@way(core=FEW)
def test_ddp(name):
    """DDP: `prepare` first, then `DistributedDataParallel(model)`; seeds may differ by rank; `no_sync` as always."""
    compared(name, "ddp")


@way(core=FEW)
def test_ddp_too_early(name):
    """DDP before `prepare`: the same where weights stay in float32; else an error that names the right order."""
    found = results(name, "early")
    if isinstance(found[0], str):
        assert all("Call halfstep first, and then DistributedDataParallel(model)" in message for message in found)
    else:
        assert_same(found, results(name, "ddp"))


@way(core=FEW)
def test_ddp_in_fp8(name):
    """DDP with gradients sent in FP8: `halfstep.distributed.compress(ddp, halfstep.recipe.FP8)` after it."""
    compared(name, "fp8")


@way(core=FEW)
def test_ranks_without_ddp(name):
    """Ranks without DDP: `halfstep.distributed.reduce_gradients(model)` before each clip or step."""
    compared(name, "own")


@way(core=FEW)
def test_fsdp2(name):
    """FSDP2: `halfstep.apply(model, recipe)`, `fully_shard`, then `halfstep.optimize(model, optimizer)`."""
    compared(name, "fsdp")


@way(core=FEW)
def test_fsdp2_too_late(name):
    """FSDP2 after `prepare`: an error, at once or at the first step, that names the right order."""
    for message in results(name, "late"):
        assert message is not None, "it raised no error"
        assert "halfstep.optimize" in message
