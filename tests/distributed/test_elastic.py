"""examples/elastic.py: a run whose ranks are killed, and restarted by torchrun, ends as an undisturbed one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tiny import assert_same


pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = "bf16-stochastic", "fp16-mixed", "fp8-delayed"
KILLED = 6
"""The step in which a rank is killed, between two checkpoints; another rank for each recipe."""
RUN = """
import os, signal, sys, torch, torch.distributed as dist
from pathlib import Path
import elastic

def rows(step, rank):
    if kills and restarts == number and step == {killed} and rank == number % dist.get_world_size():
        os.kill(os.getpid(), signal.SIGKILL)
    return elastic.batch(step, rank) * (1e6 if step in (2, 5) and rank == 0 else 1.0)  # beyond fp16, before and after

folder, kills, restarts = Path(sys.argv[1]), sys.argv[2] == "killed", int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.set_num_threads(1)
elastic.start()
for number, recipe in enumerate({recipes}):
    elastic.train(folder / recipe, recipe, steps=10, rows=rows)
if dist.get_rank() == 0:
    (folder / "restarts").write_text(str(restarts))
dist.destroy_process_group()
"""


def run(folder, how, ranks=2):
    folder.mkdir()
    program = folder / "run.py"
    program.write_text(RUN.format(killed=KILLED, recipes=RECIPES))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    path = os.pathsep.join([str(EXAMPLES), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    given = ["--max-restarts", "6", str(program), str(folder), how]
    subprocess.run([*command, *given], env=environment, check=True, timeout=300, capture_output=True)
    found = {name: torch.load(folder / name / "checkpoint.pt") for name in RECIPES}
    return int((folder / "restarts").read_text()), found


def test_a_run_whose_ranks_are_killed_ends_as_an_undisturbed_one(tmp_path):
    none, expected = run(tmp_path / "undisturbed", "whole")
    restarts, found = run(tmp_path / "disturbed", "killed")
    assert none == 0
    assert restarts == len(RECIPES)
    for name in RECIPES:
        assert_same(found[name], expected[name])
    step, _, _, scaler = found["fp16-mixed"]
    assert step == 10
    assert scaler["scale"] == 2.0**14  # after two skipped steps, one on each side of a checkpoint
