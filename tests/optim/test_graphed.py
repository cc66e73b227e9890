"""`halfstep.GraphedStep`: which calls run, capture and replay; CUDA graphs are stand-ins that run the step.

That replays of a captured step equal eager steps bit for bit was measured on a GPU (docs/gpu.md), not here."""

import contextlib
import copy
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep.errors import ModelError, OptimizerError
from halfstep.kernels.gpu import optimizer as launches, table
from halfstep.optim import graphed
from tiny import assert_same


@pytest.fixture
def patched(monkeypatch):
    """GraphedStep on a CPU as if on a GPU, and its events in order: a capture changes nothing, a replay runs the
    step."""
    events, captured = [], {}

    class Graph:
        def replay(self):
            events.append("replay")
            made, (given, named) = captured["step"], captured["arguments"]
            made._found.copy_(made.step(*given, **named))

    @contextlib.contextmanager
    def capture(graph):
        made = captured["step"]
        events.append("capture")
        held = [p for group in made._optimizer.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in held], copy.deepcopy(made._optimizer.state_dict())
        captured["arguments"] = torch.utils._pytree.tree_unflatten(made._leaves, made._form)
        yield
        for parameter, value in zip(held, before[0], strict=True):
            parameter.data.copy_(value)
        made._optimizer.load_state_dict(before[1])

    class Watched(halfstep.GraphedStep):
        def __init__(self, step, optimizer, **options):
            super().__init__(step, optimizer, **options)
            captured["step"] = self

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(graphed, "CUDAGraph", Graph)
    monkeypatch.setattr(graphed, "_has_graphs", lambda device: True)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda own: contextlib.nullcontext())
    monkeypatch.setattr(halfstep.optim.LowBit, "steps_all_together", True)
    return SimpleNamespace(events=events, GraphedStep=Watched)


def training(recipe="bf16-mixed"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    model, optimizer, scaler = halfstep.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), recipe)

    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return model, optimizer, step


def batches(count, size=12):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(size, 8, generator=generator), torch.arange(size) % 4) for _ in range(count)]


def test_graphed_steps_equal_eager_steps(patched):
    model, optimizer, step = training()
    own, own_optimizer, eager = training()
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer, own_optimizer)]
    made, losses, expected = patched.GraphedStep(step, optimizer, warmup=2), [], []
    for x, y in batches(6):
        losses.append(made(x, y=y))
        expected.append(eager(x, y))
        for schedule in schedules:
            schedule.step()
    assert patched.events == ["capture", *["replay"] * 4]
    assert_same(losses, expected)
    assert_same(model.state_dict(), own.state_dict())


def test_a_call_with_other_arguments_is_refused_without_changes(patched):
    model, optimizer, step = training()
    made = patched.GraphedStep(step, optimizer, warmup=1)
    for x, y in batches(2):
        made(x, y)
    before = copy.deepcopy(model.state_dict())
    ((x, y),) = batches(1, size=5)
    with pytest.raises(
        ModelError, match=r"has a torch.float32 of shape \(5, 8\), expected .*\(12, 8\).*drop_last=True"
    ):
        made(x, y)
    with pytest.raises(ModelError, match="another structure"):
        made(x=x, y=y)
    assert_same(model.state_dict(), before)
    made.step(x, y)
    assert not torch.equal(model[0].weight, before["0.weight"])


def test_steps_that_cannot_be_captured_are_refused(patched, monkeypatch):
    model, optimizer, step = training()
    with pytest.raises(OptimizerError, match=r"AdamW, expected the one that halfstep\.prepare returns"):
        halfstep.GraphedStep(step, torch.optim.AdamW(model.parameters()))
    with pytest.raises(OptimizerError, match="warmup=0: expected at least 1"):
        halfstep.GraphedStep(step, optimizer, warmup=0)
    monkeypatch.setattr(halfstep.optim.LowBit, "steps_all_together", False)
    made, (one, other) = patched.GraphedStep(step, optimizer, warmup=1), batches(2)
    made(*one)
    with pytest.raises(OptimizerError, match="capturable=True"):
        made(*other)


def test_a_step_that_returns_an_unknown_object_is_refused(patched):
    _, optimizer, step = training()
    made = patched.GraphedStep(lambda x, y: SimpleNamespace(loss=step(x, y)), optimizer)
    with pytest.raises(ModelError, match=r"the step returns a SimpleNamespace, .* as loss\.detach\(\)"):
        made(*batches(1)[0])
    assert patched.events == []


@pytest.mark.parametrize("hidden", [SimpleNamespace, UserDict])
def test_arguments_that_hide_tensors_are_refused(patched, hidden):
    model, optimizer, step = training()
    made = patched.GraphedStep(lambda batch: step(*vars(batch).get("data", vars(batch)).values()), optimizer, warmup=1)
    one, other = (dict(zip("xy", batch, strict=True)) for batch in batches(2))
    made(hidden(**one))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ModelError, match=rf"argument of the step is a {hidden.__name__}, .* dict\(batch\)"):
        made(hidden(**other))
    assert_same(model.state_dict(), before)


def test_on_a_cpu_graphed_steps_run_eagerly():
    model, optimizer, step = training()
    own, _, eager = training()
    made = halfstep.GraphedStep(step, optimizer)
    assert_same([made(*batch) for batch in batches(5)], [eager(*batch) for batch in batches(5)])
    assert_same(model.state_dict(), own.state_dict())


def test_a_captured_step_reads_the_current_lr_and_refuses_other_betas(monkeypatch):
    functions = SimpleNamespace(prepare="prepare", update="update", made=lambda source, *program: id(program))
    monkeypatch.setattr(launches, "functions", lambda name: functions)
    monkeypatch.setattr(launches, "prepared", lambda kernel, *_, **__: lambda *rest: None)
    weight = nn.Parameter(torch.ones(2000))
    _, optimizer, _ = halfstep.prepare(nn.ParameterList([weight]), torch.optim.AdamW([weight], lr=0.1), "fp32")
    optimizer._together = halfstep.optim.stepping.StepPlan(anywhere=True)
    weight.grad = torch.ones(2000)
    optimizer.step()
    assert optimizer.steps_all_together
    (steps,) = optimizer._together._steps.values()
    steps.held = True
    (group,) = optimizer.param_groups
    column = table.GIVEN + [*numeric_options(optimizer)].index(0.1)
    group["lr"] = 0.05
    optimizer.follow_options()
    assert steps._table[0, column] == 0.05
    group["betas"] = (0.5, 0.6)
    with pytest.raises(OptimizerError, match=r"betas of a parameter group.*restore them"):
        optimizer.follow_options()
    steps.held = False
    optimizer.follow_options()


def numeric_options(optimizer):
    """The numeric options of an optimizer's first group."""
    return optimizer.rule.options(optimizer.param_groups[0]).numbers
