"""The cost of `halfstep.track`: the CPU time of a GPT's training steps with the log and without.

Each pair runs the same number of steps of both in turn, in one process and one thread, and compares their CPU time; the
figure is the median of the ratios with its 95% interval (order statistics). `--every 1` records every step,
which measures the cost of one row more precisely: the default cadence costs a hundredth of it.

    python benchmarks/numerics_log.py [--keep] [--pairs 30] [--recipe fp8-current] [--every 100]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import halfstep
from halfstep.lab.models.gpt import GPT


KEPT = Path(__file__).parent / "results" / "numerics_log.json"


def run(recipe: str, every: int, folder: Path | None) -> Callable[[], float]:
    """A function that trains some steps, tracked if there is a folder, and returns their CPU time."""
    torch.manual_seed(0)
    model = GPT(vocabulary=128, context=64, layers=2, width=128, heads=4)
    model, optimizer, scaler = halfstep.prepare(model, torch.optim.AdamW(model.parameters()), recipe)
    log = None if folder is None else halfstep.track(model, optimizer, every, folder / "numerics.jsonl", scaler)
    tokens = torch.randint(128, (8, 64))

    def steps() -> float:
        start = time.process_time()
        for _ in range(max(every, 10)):
            logits = model(tokens)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            if log is not None:
                log.note(loss)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return time.process_time() - start

    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", action="store_true", help=f"write {KEPT.name}")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--recipe", default="fp8-current")
    parser.add_argument("--every", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        plain, tracked = (run(options.recipe, options.every, place) for place in (None, Path(folder)))
        plain(), tracked()
        ratios = []
        for pair in range(options.pairs):
            both = (plain, tracked) if pair % 2 else (tracked, plain)
            spent = {steps: steps() for steps in both}
            ratios.append(spent[tracked] / spent[plain])
    ratios.sort()
    count = len(ratios)
    low = max(0, int(count / 2 - 0.98 * count**0.5))
    found = {
        "recipe": options.recipe, "every": options.every, "pairs": count, "median": round(statistics.median(ratios), 4),
        "interval": [round(ratios[low], 4), round(ratios[count - 1 - low], 4)],
    }  # fmt: skip
    print(found)
    if options.keep:
        KEPT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
