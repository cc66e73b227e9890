"""Ranks that cannot agree raise errors on all ranks at once, and process groups may start after `prepare`.

Cases: pipeline stages in one group, and batches that run out on one rank first."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import halfstep
from ranks import on_ranks
from tiny import assert_same


pytestmark = pytest.mark.slow
WAIT = ("fp16-mixed", "fp8-delayed", "fp8lm-o2")
ALONE = ("bf16-mixed", "mxfp8")


def layers(depth):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth)))


def error_of(work):
    try:
        work()
    except halfstep.HalfstepError as error:
        return str(error)
    return ""


def two_stages(rank, recipe):
    model = layers(1 + 2 * rank)
    model, optimizer, scaler = halfstep.prepare(model, torch.optim.AdamW(model.parameters()), recipe)

    def step():
        scaler.scale(model(torch.ones(2, 8)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    return error_of(step)


def uneven(rank):
    found = {}
    for recipe in (*WAIT, *ALONE):
        model = layers(2)
        model, optimizer, scaler = halfstep.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe)
        wrapped = DistributedDataParallel(model)

        def steps(wrapped=wrapped, optimizer=optimizer, scaler=scaler):
            with wrapped.join():
                for i in range(1 + rank):
                    scaler.scale(wrapped(torch.full((2, 8), float(i))).square().mean()).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()

        found[recipe] = error_of(steps), sum(float(p.detach().abs().sum()) for p in model.parameters())
    return found


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8lm-o2"])
def test_pipeline_stages_in_one_group_are_refused_with_advice_on_groups(recipe, tmp_path):
    said = on_ranks(two_stages, tmp_path, recipe)
    assert said[0] == said[1]
    assert "keep scaling states of other layers" in said[0]
    assert "amax_group=torch.distributed.new_group" in said[0]


def test_uneven_batches_are_refused_or_train_equally(tmp_path):
    first, second = on_ranks(uneven, tmp_path)
    for recipe in WAIT:
        for said, _ in (first[recipe], second[recipe]):
            assert "would wait for it. Give all ranks as many batches" in said
    for recipe in ALONE:
        assert first[recipe] == second[recipe]
        assert first[recipe][0] == ""


def begun_late(rank, recipe):
    """The weights after three steps, with the process group initialized before `prepare`, and after it."""
    found = []
    for late in (False, True):
        model = layers(2)
        if late:
            dist.destroy_process_group()
        model, optimizer, scaler = halfstep.prepare(model, torch.optim.AdamW(model.parameters()), recipe, generator=3)
        if late:
            dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=2)
        wrapped = DistributedDataParallel(model)
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            scaler.scale(wrapped(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append([optimizer.full(parameter) for parameter in model.parameters()])
    return found


@pytest.mark.parametrize("recipe", ["fp16-mixed", "fp8-delayed", "fp8lm-o2"])
def test_a_process_group_may_be_initialized_after_prepare(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("STORE", f"{tmp_path}/late")
    first, second = on_ranks(begun_late, tmp_path, recipe)
    assert_same(first[0], first[1])
    assert_same(first, second)
