"""The numerics log: each figure against a separate computation, and no hooks between rows."""

import json
import math

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import HalfstepError
from halfstep.tracking import scalars


class Writer:
    """Records scalars like TensorBoard's SummaryWriter."""

    def __init__(self):
        self.seen = {}

    def add_scalar(self, name, value, step):
        self.seen[name, step] = value


def trained(recipe, steps, lr=1e-3, batches=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe)
    log = halfstep.track(model, optimizer, scaler=scaler, **options)
    for step in range(steps):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)) if batches is None else batches[step]
        loss = model(x).square().mean()
        log.note(loss)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model, log


def test_rows_come_at_the_first_and_every_nth_step(tmp_path):
    writer, rows = Writer(), []
    _, log = trained("fp8-current", 9, every=4, to=[tmp_path / "a.jsonl", writer, rows.append])
    assert [row["step"] for row in log.rows] == [1, 4, 8]
    assert rows == log.rows
    kept = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [row["step"] for row in kept] == [1, 4, 8]
    assert kept[1]["amax"] == rows[1]["amax"]
    assert writer.seen["numerics/amax/input", 8] == scalars(rows[2])["amax/input"]


def test_layers_have_no_hooks_between_rows():
    seen = []

    def look(model):
        seen.append(sum(len(m._forward_hooks) for m in model.modules()))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    model, optimizer, scaler = halfstep.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp8-current")
    log = halfstep.track(model, optimizer, every=3, to=lambda row: None)
    for _ in range(6):
        look(model)
        scaler.scale(model(torch.randn(2, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [bool(n) for n in seen] == [True, False, True, False, False, True]
    log.remove()
    look(model)
    assert seen[-1] == 0


def test_amaxes_and_shares_equal_the_tensors():
    x = torch.randn(8, 16) * 3
    x[0, 0] = 100.0
    _, log = trained("fp8-current", 1, every=1, to=lambda row: None, batches=[x])
    (row,) = log.rows
    assert row["amax"]["input of 0"] == 100.0
    factor = 448 / 100.0
    rounded = (x * factor).to(torch.float8_e4m3fn).float()
    expected = ((rounded == 0) & (x != 0)).sum() / (x != 0).sum()
    assert row["underflowed"].get("input of 0", 0.0) == pytest.approx(float(expected), abs=1e-6)


def test_lost_updates_are_those_that_do_not_change_the_weight():
    before = {}

    def note(row):
        before["row"] = row

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64))
    model, optimizer, scaler = halfstep.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0), "bf16-nomaster"
    )
    halfstep.track(model, optimizer, every=1, to=note)
    weights = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(8, 64)).square().mean().backward()
    wanted = sum(int((p.grad != 0).sum()) for p in model.parameters())
    scaler.step(optimizer)
    still = sum(
        int(((p.detach() == old) & (p.grad != 0)).sum()) for p, old in zip(model.parameters(), weights, strict=True)
    )
    assert before["row"]["lost_updates"] == pytest.approx(still / wanted, abs=1e-6)
    assert 0.1 < still / wanted < 1


def test_spikes_and_nonfinite_tensors_are_named():
    batches = [torch.ones(8, 16) for _ in range(4)]
    batches[2] = batches[2] * 50
    batches[3] = torch.full((8, 16), math.inf)
    _, log = trained("bf16-mixed", 4, every=4, to=lambda row: None, batches=batches)
    assert log.rows[0]["gradients"]["first_nonfinite"] is None
    assert log.rows[1]["gradients"]["first_nonfinite"] == "0.weight"
    assert log.rows[1]["first_nonfinite"] == "input of 0"
    assert len(log.rows[1]["spikes"]) == 2


def test_skipped_steps_are_counted_and_their_cause_is_named():
    batches = [torch.ones(8, 16) for _ in range(5)]
    batches[1] = torch.full((8, 16), math.inf)
    _, log = trained("fp16-mixed", 5, every=2, to=lambda row: None, batches=batches)
    assert [row["step"] for row in log.rows] == [1, 2, 4]
    assert [row["skipped"] for row in log.rows] == [0, 1, 0]
    assert [row["first_nonfinite"] for row in log.rows] == [None, "input of 0", None]
    assert scalars(log.rows[1])["nonfinite"] == 1
    assert log.rows[1]["gradients"]["first_nonfinite"] is None  # of the step that was not skipped


def test_unseen_figures_are_stated_for_stock_optimizers():
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halfstep.track(model, optimizer, every=1, to=lambda row: None) as log:
        torch.nn.functional.linear(torch.ones(2, 4), model[0].weight).sum().backward()  # calls no module
        optimizer.step()
    assert log.rows[0]["lost_updates"] is None
    assert "torch.compile" in log.rows[0]["unseen"]


def test_bad_input_raises(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(HalfstepError, match="every = 0; expected a number of optimizer steps from 1 on"):
        halfstep.track(model, optimizer, every=0)
    with pytest.raises(HalfstepError, match=r"to = 7: expected a path for JSON lines, a function of a row"):
        halfstep.track(model, optimizer, to=7)
    with pytest.raises(HalfstepError, match=r"model is a SGD; expected track\(model, optimizer\)"):
        halfstep.track(optimizer, model)
    with pytest.raises(HalfstepError, match="this SGD steps no parameter of this Linear"):
        halfstep.track(nn.Linear(2, 2), optimizer)
    with pytest.raises(HalfstepError, match="there is no folder"):
        halfstep.track(model, optimizer, to=tmp_path / "nowhere" / "x.jsonl")


def test_tracking_changes_no_bit():
    found = [
        trained("fp8-delayed", 6, every=2, to=lambda row: None)[0],
        trained("fp8-delayed", 6, every=100, to=print)[0],
    ]
    for ours, theirs in zip(*(m.parameters() for m in found), strict=True):
        assert torch.equal(ours, theirs)


def test_trainer_and_wrapped_optimizer_have_rows(tmp_path):
    from accelerate import Accelerator
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from halfstep.integrations.numerics import NumericsCallback

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    data = [{"input_ids": row, "labels": row} for row in torch.randint(32, (8, 6))]
    callback = NumericsCallback(every=2, to=tmp_path / "rows.jsonl")
    args = TrainingArguments(str(tmp_path), max_steps=4, use_cpu=True, report_to=[], logging_steps=1)
    Trainer(LlamaForCausalLM(config), args, train_dataset=data, callbacks=[callback]).train()
    assert [row["step"] for row in callback.log.rows] == [1, 2, 4]
    assert "input of model.layers.0.self_attn.q_proj" in callback.log.rows[1]["amax"]
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3
    model = nn.Linear(4, 4)
    model, optimizer = Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    log = halfstep.track(model, optimizer, every=1, to=lambda row: None)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    assert [row["step"] for row in log.rows] == [1]
