"""The loss scaler on two ranks: they skip and raise together, and clip to one norm."""

import os
import subprocess
import sys

import pytest

from halfstep import get_recipe
from halfstep.errors import ModelError
from halfstep.nn.ranks import check_ranks
from tiny import EVERY, mlp


START = """
import sys, torch, torch.distributed as dist, torch.nn.functional as F
import halfstep
from tiny import adamw, batch, mlp, prepared
rank, file, argument = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)

def half(seed):
    x, y = batch(seed)
    return x[rank::2], y[rank::2]
"""
END = """
dist.destroy_process_group()
"""


def run(tmp_path, program, argument=""):
    """The lines that each of two ranks prints."""
    command = [sys.executable, "-c", START + program + END]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), argument],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # where `tiny` is
        )
        for rank in (0, 1)
    ]
    lines = [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return lines


OVERFLOW = """
model = torch.nn.Linear(2, 1, bias=False)
torch.nn.init.ones_(model.weight)
model, optimizer, scaler = halfstep.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), recipe="fp16-master")
scaler.update(4.0)
for overflow in (False, rank == 1, False):
    model.weight.grad = torch.full((1, 2), float("inf") if overflow else 1.0, dtype=torch.float16)
    scaler.step(optimizer)
    scaler.update()
    print(model.weight.tolist(), scaler.get_scale(), scaler.skipped_steps, scaler.overflowed)
"""


@pytest.mark.slow
def test_an_overflow_on_one_rank_skips_on_both(tmp_path):
    first, second = run(tmp_path, OVERFLOW)
    assert first == [
        "[[0.75, 0.75]] 4.0 0 ()",
        "[[0.75, 0.75]] 2.0 1 ()",
        "[[0.25, 0.25]] 2.0 1 ()",
    ]
    assert second[0] == first[0]
    assert second[1] == "[[0.75, 0.75]] 2.0 1 ('weight',)"


MISSING = """
model, optimizer, scaler = prepared("fp16-mixed")
if rank == 0:
    scaler.scale(F.mse_loss(model(batch()[0]), batch()[1])).backward()
for _ in range(2):
    try:
        getattr(scaler, argument)(optimizer)
    except halfstep.errors.LossScaleError as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("call", ["step", "unscale_"])
def test_a_rank_without_gradients_is_an_error_on_all_ranks(tmp_path, call):
    first, second = run(tmp_path, MISSING, call)
    assert [line.partition(";")[0] for line in first] == [
        "on another rank no parameter of the optimizer has a gradient"
    ] * 2
    assert [line.partition(";")[0] for line in second] == ["no parameter of the optimizer has a gradient"] * 2


GROUP = """
own = [dist.new_group([r]) for r in (0, 1)][rank]
weight = torch.nn.Parameter(torch.ones(2))
optimizer, scaler = torch.optim.SGD([weight], lr=1.0), halfstep.LossScaler(process_group=own)
weight.grad = torch.full((2,), float("inf") if rank else 1.0)
scaler.step(optimizer)
scaler.update()
print(scaler.skipped_steps)
"""


@pytest.mark.slow
def test_overflow_flags_are_reduced_over_the_scalers_group(tmp_path):
    assert run(tmp_path, GROUP) == [["0"], ["1"]]


REPLICATED = """
model, optimizer, scaler = prepared(argument)
wrapped = torch.nn.parallel.DistributedDataParallel(model)
for step in range(6):
    x, y = half(step)
    scaler.scale(F.mse_loss(wrapped(x), y)).backward()
    assert {p.grad.dtype for p in model.parameters()} == {p.dtype for p in model.parameters()}
    norm = scaler.clip_grad_norm_(optimizer, 0.1)
    scaler.step(optimizer)
    scaler.update()
    (optimizer if step % 2 else model).zero_grad(set_to_none=step % 3 > 0)
    print(float(norm), [p.float().sum().item() for p in model.parameters()])
"""
BARE = """
model, optimizer, scaler = prepared(argument)
wrapped = torch.nn.parallel.DistributedDataParallel(model)
for step in range(4):
    x, y = half(step)
    F.mse_loss(wrapped(x), y).backward()
    scaler.clip_grad_norm_(optimizer, 0.1)
    optimizer.step()
    model.zero_grad(set_to_none=step % 2 > 0)
    print([p.float().sum().item() for p in model.parameters()])
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp16-master", "bf16-master"])
def test_gradients_return_to_ddps_buckets_after_clipping(tmp_path, name):
    """DDP's buckets have the parameters' dtype, and clipped 16-bit gradients are float32."""
    first, second = run(tmp_path, REPLICATED, name)
    assert first == second
    assert len(first) == 6


@pytest.mark.slow
def test_gradients_return_to_ddps_buckets_without_a_scaled_loss(tmp_path):
    first, second = run(tmp_path, BARE, "bf16-master")
    assert first == second
    assert len(first) == 4


SHARDED = """
from torch.distributed.fsdp import fully_shard
from halfstep.optim import convert

ends = []
for sharded in (True, False):
    model = mlp()
    halfstep.apply(model, argument)
    if sharded:
        fully_shard(model[0])
        fully_shard(model)
    optimizer = convert(adamw(model), halfstep.get_recipe(argument), {}, 3)
    scaler = halfstep.LossScaler(init_scale=1024.0, enabled=argument.startswith("fp16"))
    found = []
    for step in range(4):
        x, y = half(step)
        scaler.scale(F.mse_loss(model(x), y)).backward()
        if not sharded:
            for p in model.parameters():
                dist.all_reduce(p.grad, dist.ReduceOp.SUM)
                p.grad /= 2
        norm = scaler.clip_grad_norm_(optimizer, 0.1)
        assert type(norm) is torch.Tensor
        scaler.step(optimizer)
        scaler.update()
        (optimizer if step == 1 else model).zero_grad()
        found.append(norm)
    whole = [p.full_tensor() if sharded else p for p in model.parameters()]
    ends.append((torch.stack(found), [p.detach().float() for p in whole]))
print(ends[0][0].tolist())
torch.testing.assert_close(*ends, rtol=2e-2, atol=1e-3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp32", "bf16-master", "fp16-master"])
def test_the_norm_of_sharded_gradients_is_a_plain_tensor(tmp_path, name):
    """FSDP2 in its documented order, compared with the same ranks with unsharded gradients."""
    first, second = run(tmp_path, SHARDED, name)
    assert first == second


@pytest.mark.parametrize("name", EVERY)
def test_gradients_that_fsdp2_would_round_are_refused(name):
    """With advice. Parameters that are not sharded are accepted."""
    recipe, model = get_recipe(name), mlp()
    check_ranks(recipe, model.parameters())
    model[0].weight.device_mesh = "a mesh"
    if recipe.grads is None:
        check_ranks(recipe, model.parameters())
        return
    words = r"bf16 weights in fp32, and FSDP2.*reduce_dtype=torch.float32.*distributed.reduce_gradients"
    with pytest.raises(ModelError, match=words):
        check_ranks(recipe, model.parameters())
