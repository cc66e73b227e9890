"""Ranks skip together: an overflow on one is an overflow on all."""

import subprocess
import sys

import pytest


RANK = """
import sys, torch, torch.distributed as dist
import halfstep
rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
model = torch.nn.Linear(2, 1, bias=False)
torch.nn.init.ones_(model.weight)
model, optimizer, scaler = halfstep.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), recipe="fp16-master")
scaler.update(4.0)
for overflow in (False, rank == 1, False):
    model.weight.grad = torch.full((1, 2), float("inf") if overflow else 1.0, dtype=torch.float16)
    scaler.step(optimizer)
    scaler.update()
    print(model.weight.tolist(), scaler.get_scale(), scaler.skipped_steps, scaler.overflowed)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_an_overflow_on_one_rank_skips_on_both(tmp_path):
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    first, second = (rank.communicate(timeout=120)[0].splitlines() for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert first == [
        "[[0.75, 0.75]] 4.0 0 ()",
        "[[0.75, 0.75]] 2.0 1 ()",
        "[[0.25, 0.25]] 2.0 1 ()",
    ]
    assert second[0] == first[0]
    assert second[1] == "[[0.75, 0.75]] 2.0 1 ('weight',)"
