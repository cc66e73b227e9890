"""Every recipe gives the same bits under another torch seed and process: resumed, recomputed, and in two threads."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfstep
from families import for_each
from tiny import ALL, UNIT, assert_same, batch, copied, grads, mlp, model_for, prepared, train


QUICK = ["coat", "fp8-smooth-swiglu", "mxfp4-rht", "nvfp4"]
"""Recipes that draw noise, random signs, or both, or save activations in few bits; each takes half a second."""


def body(name):
    """A model that the recipe supports."""
    if name not in UNIT:
        return model_for(name)
    model = mlp()
    halfstep.unit_scale(model, batch()[0])
    return model


def states(setup):
    return [copied(each.state_dict()) for each in setup]


class Checkpointed(nn.Module):
    """A body that is recomputed in the backward pass, by reentrant or non-reentrant checkpointing."""

    def __init__(self, name, reentrant=None):
        super().__init__()
        self.body, self.reentrant = body(name), reentrant

    def forward(self, x):
        if self.reentrant is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


def gradients(name, reentrant):
    model, _, scaler = prepared(name, Checkpointed(name, reentrant))
    x, y = batch()
    scaler.scale(F.mse_loss(model(x.requires_grad_()), y)).backward()
    return grads(model), x.grad


def train_in_thread(setup, seed, data, found):
    found[seed] = train(*setup, 3, data), states(setup)


def assert_resumes(name, saved, expected):
    """Resume a run that another process saved, and check that it, recomputation and threads change no bit."""
    model = body(name)
    torch.default_generator.manual_seed(99)
    fresh = prepared(name, model, generator=None)
    for each, state in zip(fresh, saved, strict=True):
        each.load_state_dict(state)
    train(*fresh, 3)
    assert_same(states(fresh), expected)
    plain = gradients(name, None)
    for reentrant in (True, False):
        assert_same(gradients(name, reentrant), plain)
    alone, together = {}, {}
    for seed in (1, 2):
        train_in_thread(prepared(name, body(name)), seed, batch(seed), alone)
    setups = {seed: prepared(name, body(name)) for seed in alone}
    generator = torch.get_rng_state()
    threads = [
        threading.Thread(target=train_in_thread, args=(setups[seed], seed, batch(seed), together)) for seed in setups
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same([together[seed] for seed in alone], list(alone.values()))
    assert torch.equal(torch.get_rng_state(), generator), "training drew from torch's generator"


def run(name):
    """The states of a run after three steps and after six."""
    setup = prepared(name, body(name))
    train(*setup, 3)
    saved = states(setup)
    generator = torch.get_rng_state()
    train(*setup, 3)
    assert torch.equal(torch.get_rng_state(), generator), "training drew from torch's generator"
    return saved, states(setup)


@for_each("name", QUICK)
def test_resumes_under_another_seed(name):
    assert_resumes(name, *run(name))


@pytest.mark.slow
def test_every_recipe_resumes_in_another_process(tmp_path):
    torch.save({name: run(name) for name in ALL}, tmp_path / "runs.pt")
    made = subprocess.run(
        [sys.executable, __file__, str(tmp_path / "runs.pt")],
        env={"PYTHONPATH": ":".join(sys.path), "HOME": str(Path.home()), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stdout + made.stderr


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each, runs in torch.load(sys.argv[1], weights_only=False).items():
        assert_resumes(each, *runs)
