"""Time and bytes of training a GPT of 10.9M parameters in 16 bits relative to float32, interleaved in one process.

    python benchmarks/sixteen_bits.py [--keep]

Time is CPU time of one thread, so that other load counts little; ratios are within a round, with a 95% interval over
rounds. Bytes are those of tensors saved for backward, and of tensors that stay from step to step.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import asdict
from typing import Any

import torch

from halfstep.lab.environment import environment
from halfstep.lab.interval import paired
from halfstep.memory import measure
from halfstep.tracking import saving
from harness import keep, keeps
from memory import Training


RECIPES = ("fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "bf16-pure")
BATCH, ROUNDS = 16, 12


def held(training: Training) -> dict[str, float]:
    """Bytes of tensors saved for backward, and persistent bytes per parameter."""
    training.backward()
    kept = measure(training.model, training.optimizer)
    with saving(training.model) as saved:
        loss = training.loss()
    activations = saved.now().total
    del loss
    return {"activations": activations, "a_parameter": kept.weights + kept.grads + kept.master + kept.states}


def race() -> dict[str, dict[str, Any]]:
    """By recipe: CPU seconds of a step, their ratio to fp32's, and bytes."""
    runs = {recipe: Training("gpt-small", recipe, BATCH) for recipe in RECIPES}
    seconds: dict[str, list[float]] = {recipe: [] for recipe in RECIPES}
    shuffle = random.Random(0).sample
    for number in range(ROUNDS + 2):  # the first two create states and compile kernels
        for recipe in shuffle(RECIPES, len(RECIPES)):
            started = time.process_time()
            runs[recipe].step()
            if number > 1:
                seconds[recipe].append(time.process_time() - started)
    found: dict[str, dict[str, Any]] = {}
    for recipe, training in runs.items():
        shares = [a / b for a, b in zip(seconds[recipe], seconds["fp32"], strict=True)]
        found[recipe] = {"seconds": statistics.median(seconds[recipe]), "time": statistics.fmean(shares)}
        found[recipe] |= asdict(paired(shares)) | held(training)
        found[recipe]["activations_share"] = found[recipe]["activations"] / found["fp32"]["activations"]
        print(recipe, found[recipe], flush=True)
    return found


def main() -> None:
    """Time, count, print, and with --keep write."""
    kept = keeps(__doc__)
    torch.set_num_threads(1)
    found = race()
    if kept:
        keep("sixteen_bits", {"machine": environment(), "batch": BATCH, "rounds": ROUNDS, "recipes": found})


if __name__ == "__main__":
    main()
