"""Gradient accumulation over several micro-batches."""

import warnings
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from ways import assert_near_fp32, both, prepare, relative_distance, start_of, tolerance, values, way

import halfstep
from tiny import assert_same, batch


def accumulated(model, optimizer, scaler, times=3, micro=4):
    for seed in range(times):
        x, y = batch(seed)
        for rows in range(0, 12, 12 // micro):
            part = slice(rows, rows + 12 // micro)
            scaler.scale(F.mse_loss(model(x[part]), y[part]) / micro).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def whole(model, optimizer, scaler, times=3):
    accumulated(model, optimizer, scaler, times, micro=1)


@way()
def test_accumulation(name):
    """Gradient accumulation: divide each micro-batch's loss by their count; step, update and zero_grad once a step."""
    start, found, expected = both(name, accumulated)
    assert_near_fp32(name, start, found, expected, slack=2)  # gradients are rounded once a micro-batch
    _, one, _ = both(name, whole)
    assert relative_distance(found, one, start) <= max(2 * tolerance(name), 1e-5)


@way()
def test_an_evaluation_between_micro_batches(name):
    """Evaluation in between: call the model under no_grad or in eval() mode between any two steps; no state changes."""
    runs = []
    for evaluates in (True, False):
        model, optimizer, scaler = prepare(name, start_of(name))
        for seed in range(4):
            x, y = batch(seed)
            scaler.scale(F.mse_loss(model(x), y)).backward()
            if evaluates:
                model.eval()
                large = (100 * x).requires_grad_()
                model(large).sum()  # a saliency map's forward: gradients on, in eval()
                with torch.no_grad():
                    model(large)
                model.train()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        runs.append(values(model))
    assert_same(*runs)


@way()
def test_weights_that_are_rounded_once(name):
    """Weights rounded once for several forwards: `with halfstep.cached_weights(model):` around micro-batches, an
    evaluation, or all of it; the same bits."""
    runs = []
    for cached in (True, False):
        model, optimizer, scaler = prepare(name, start_of(name))
        with warnings.catch_warnings(), halfstep.cached_weights(model) if cached else nullcontext():
            warnings.filterwarnings("ignore", "no weight was rounded within")
            accumulated(model, optimizer, scaler)
        runs.append(values(model))
    assert_same(*runs)
