"""What `halfstep audit` reports for fine-tuning in bf16 by learning rate, and the CPU cost of watching steps.

    python benchmarks/audit.py [--keep] [--rounds 30] [--out FOLDER]

The GPT of which_bf16_finetune.py is fine-tuned in bf16 and float32 by torch's AdamW. The share of lost updates that the
watch reports, from up to 65,536 values per tensor, is compared with the share over all values, from copies of the
weights. The cost is the CPU time of watched steps over that of unwatched steps, alternating in one process.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune import LEAN, loaded, pretrained, readmes
from halfstep.auditing import Watch, running
from halfstep.auditing.watch import models_of
from halfstep.lab.environment import environment
from halfstep.lab.tasks import experiment_for, get_task
from harness import keep


RATES, STEPS, TURN = (1e-6, 1e-5, 1e-4, 1e-3), 10, 3


class Loop:
    """A plain training loop that fine-tunes the model with AdamW."""

    def __init__(self, experiment: Any, weights: Path, rate: float, dtype: torch.dtype) -> None:
        self.model: nn.Module = loaded(experiment, weights).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, betas=(0.9, 0.95))
        self._data, self._step = get_task(experiment.task).open(experiment), 0

    def backward(self) -> None:
        """Compute the gradients of the next batch."""
        self._step += 1
        self.optimizer.zero_grad()
        self._data.loss(self.model, self._data.batch(0, self._step)).backward()


def shares(loop: Loop) -> dict[str, float]:
    """The share of lost updates after STEPS steps: as the watch reports it, and over all values in the last step."""
    lost = wanted = 0
    with Watch() as watch:
        for step in range(STEPS):
            loop.backward()
            before = [p.detach().clone() for p in loop.model.parameters()] if step == STEPS - 1 else []
            loop.optimizer.step()
        for old, p in zip(before, loop.model.parameters(), strict=True):
            assert p.grad is not None
            lost += int(((old == p) & (p.grad != 0)).sum())
            wanted += int((p.grad != 0).sum())
    (report,) = running(watch)
    return {"watch": report.updates[0].share, "all": lost / wanted}


def cost(loop: Loop, rounds: int) -> dict[str, float]:
    """The CPU time of watched steps relative to unwatched ones, as median and quartiles over rounds; and the seconds
    that one search for the model takes."""
    ratios, watched = [], Watch()
    for _ in range(rounds + 2):
        seconds = []
        for watch in (nullcontext(), watched):
            with watch:
                started = time.process_time()
                for _ in range(TURN):
                    loop.backward()
                    loop.optimizer.step()
                seconds.append(time.process_time() - started)
        ratios.append(seconds[1] / seconds[0])
    low, median, high = statistics.quantiles(ratios[2:], n=4)
    started = time.process_time()
    models_of([loop.optimizer], gc.get_objects())
    return {"median": median, "low": low, "high": high, "rounds": rounds, "search": time.process_time() - started}


def main() -> None:
    """Measure, print, and with --keep write results/audit.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("runs/which_bf16_finetune"))
    arguments = parser.parse_args()
    weights = pretrained(arguments.out / "pretrained")
    experiment = experiment_for("lm", recipes=("fp32",), data=str(readmes(arguments.out / "readmes")), seeds=1, **LEAN)
    data: dict[str, Any] = {"machine": environment(), "steps": STEPS, "shares": {}, "cost": {}}
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        data["shares"][name] = {f"{rate:g}": shares(Loop(experiment, weights, rate, dtype)) for rate in RATES}
        data["cost"][name] = cost(Loop(experiment, weights, 1e-5, dtype), arguments.rounds)
        for rate, found in data["shares"][name].items():
            print(f"{name} at {rate}: {found['watch']:.1%} lost by the watch, {found['all']:.1%} of all values")
        print(f"{name}: a watched step takes {data['cost'][name]['median']:.3f} of another's time")
        print(f"finding the model once takes {data['cost'][name]['search']:.2f} s")
    if arguments.keep:
        keep("audit", data)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
