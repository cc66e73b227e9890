"""`Watch` on running optimizers: lost updates equal those found by comparing copies of the weights."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW

import halfstep
from families import in_turn
from halfstep.auditing import Watch, running
from halfstep.auditing.watch import MEASURED
from halfstep.errors import RunError
from tiny import adamw, batch, mlp


KEPT = Path(__file__).parents[2] / "benchmarks" / "results" / "which_bf16_finetune.json"


def backward(model, seed=0):
    x, y = batch(seed)
    loss = F.mse_loss(model(x.to(next(model.parameters()).dtype)).float(), y)
    loss.backward()


def watched(model, *optimizers, steps=3, **watch):
    """The loop's only report, and (lost, wanted) updates of its last step, counted from copies of the weights."""
    with Watch(**watch) as seen:
        for seed in range(steps):
            backward(model, seed)
            before = [p.detach().clone() for p in model.parameters()]
            wanted = [p.grad != 0 for p in model.parameters()]
            for optimizer in optimizers:
                optimizer.step()
            still = [(old == p) & w for old, p, w in zip(before, model.parameters(), wanted, strict=True)]
            model.zero_grad()
    (report,) = running(seen)
    return report, (sum(int(s.sum()) for s in still), sum(int(w.sum()) for w in wanted))


MAKERS = {
    "adamw": lambda parameters: AdamW(parameters, lr=1e-5),
    "adamw fused": lambda parameters: AdamW(parameters, lr=1e-5, fused=True),
    "sgd": lambda parameters: SGD(parameters, lr=1e-3, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-4),
}


@pytest.mark.parametrize(("maker", "dtype"), in_turn([*MAKERS], [torch.bfloat16, torch.float16, torch.float32]))
def test_lost_updates_equal_those_of_copied_weights(maker, dtype):
    model = mlp().to(dtype)
    report, (lost, wanted) = watched(model, MAKERS[maker](model.parameters()))
    assert [(one.lost, one.looked) for one in report.updates] == [(lost, wanted)]
    assert report.loses is (lost >= 0.01 * wanted)
    assert dtype == torch.float32 or (report.loses and report.mend is not None)
    assert report.audit.model == "Sequential"


def test_large_tensors_are_sampled_evenly(monkeypatch):
    monkeypatch.setattr("halfstep.auditing.watch.SAMPLE", 100)
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False).bfloat16()
    optimizer = AdamW(model.parameters(), lr=1e-4)
    with Watch() as seen:
        model(torch.randn(8, 64).bfloat16()).square().sum().backward()
        before = model.weight.detach().clone()
        optimizer.step()
    (report,) = running(seen)
    (updates,) = report.updates
    assert 50 <= updates.looked <= 100
    assert abs(updates.share - float((before == model.weight).float().mean())) < 0.15


@pytest.mark.quick("bf16-nomaster-alone-True", "bf16-kahan-master-False", "bf16-stochastic-stochastic-False")
@pytest.mark.filterwarnings("ignore:.*arrive in 16 bits")
@pytest.mark.parametrize(
    ("recipe", "kept", "loses"),
    [
        ("bf16-nomaster", "alone", True),
        ("bf16-master", "master", False),
        ("bf16-kahan", "master", False),
        ("bf16-split", "master", False),
        ("bf16-stochastic", "stochastic", False),
        ("bf16-mixed", "alone", False),
    ],
)
def test_masters_and_stochastic_rounding_lose_no_updates(recipe, kept, loses):
    model, optimizer, _ = halfstep.prepare(m := mlp().bfloat16(), AdamW(m.parameters(), lr=1e-5), recipe)
    report, _ = watched(model, optimizer)
    assert [(one.kept, one.harmful) for one in report.updates] == [(kept, loses)]
    assert ("being lost" in str(report)) is loses
    if not loses and kept == "master":
        assert report.updates[0].share < 0.01


def test_report_is_of_a_step_near_the_peak_rate():
    model = mlp().bfloat16()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [0.0, 0.4, 0.3, 0.1][step])
    with Watch() as seen:
        for seed in range(4):
            backward(model, seed)
            optimizer.step()
            if seed < 3:
                schedule.step()
    (report,) = running(seen)
    (updates,) = report.updates
    assert (updates.step, updates.rate, updates.peak) == (3, pytest.approx(3e-4), 1e-3)
    assert "a schedule reaches 0.001" in re.sub(r"\s+", " ", str(report))


def test_one_report_per_model_for_several_optimizers():
    model, other = mlp().bfloat16(), mlp(1)
    first, second = AdamW([*model.parameters()][:2], lr=1e-5), SGD([*model.parameters()][2:], lr=1e-5)
    third = adamw(other)
    with Watch() as seen:
        for each in (model, other):
            backward(each)
        for optimizer in (first, second, third):
            optimizer.step()
    one, two = running(seen)
    assert (one.audit.optimizer, two.audit.optimizer) == ("AdamW and SGD", "AdamW")
    assert not [f for f in one.audit.findings if f.what == "not in the optimizer"]
    assert one.mend.recipes == {}
    assert "Without halfstep" in str(one)
    assert two.mend is None
    assert "Your updates arrive" in str(two)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's first compilation
def test_compiled_models_and_steps_are_watched():
    model = mlp().bfloat16()
    compiled = torch.compile(model, backend="eager")
    optimizer = AdamW(model.parameters(), lr=1e-5)
    step = torch.compile(optimizer.step, backend="eager")
    with Watch() as seen:
        for seed in range(2):
            backward(compiled, seed)
            step()
    (report,) = running(seen)
    assert report.audit.model == "Sequential"
    assert report.loses


def test_skipped_steps_and_infinities_count_no_updates():
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    with Watch() as seen:
        x, y = batch(0)
        scaler.scale(F.mse_loss(model(x), y) * 1e30).backward()
        scaler.step(optimizer)
        scaler.update()
    (report,) = running(seen)
    assert report.updates == ()
    model = mlp().half()
    with Watch() as seen:
        backward(model)
        AdamW(model.parameters(), lr=1e30).step()
    (report,) = running(seen)
    assert report.updates[0].looked == 0
    assert "No update to compare" in str(report)


def test_runs_without_steps_or_with_flat_copies_raise():
    with Watch() as seen:
        pass
    with pytest.raises(RunError, match="no torch optimizer took a step"):
        running(seen)
    flat = torch.zeros(8, requires_grad=True)
    with Watch() as seen:
        flat.grad = torch.ones(8)
        SGD([flat], lr=1.0).step()
    with pytest.raises(RunError, match="SGD steps no parameter of a module"):
        running(seen)


def test_printed_remedy_stops_the_loss():
    """The printed lines are executed."""
    model = mlp().bfloat16()
    report, _ = watched(model, AdamW(model.parameters(), lr=1e-5))
    assert report.mend.recipes == {"bf16-6byte": 6.03125, "bf16-master": 16}
    assert report.mend.now == pytest.approx(report.audit.nbytes / report.audit.trained)
    fresh = mlp().bfloat16()
    names = {"model": fresh, "optimizer": AdamW(fresh.parameters(), lr=1e-5)}
    exec("\n".join(report.mend.lines), names)
    mended, _ = watched(names["model"], names["optimizer"])
    assert not mended.loses


def test_measured_figures_equal_benchmark_results():
    rates = json.loads(KEPT.read_text())["rates"]
    recipes = {"bfloat16": "bf16-nomaster", "float16": "fp16-nomaster"}
    for dtype, shares in MEASURED.items():
        found = {float(rate): one["shares"][recipes[dtype]]["mean"] for rate, one in rates.items()}
        assert shares == {rate: pytest.approx(mean, abs=0.005) for rate, mean in found.items()}
    for cure in ("bf16-6byte", "bf16-7byte", "bf16-stochastic", "bf16-master"):
        assert all(one["shares"][cure]["mean"] > 0.985 for one in rates.values())
    cures = [
        one["shares"][name]["mean"]
        for one in rates.values()
        for name in ("bf16-stochastic", "bf16-master", "fp16-master")
    ]
    assert min(cures) > 0.985  # "99% or more"


def test_reports_convert_to_json(tmp_path):
    model = mlp().bfloat16()
    report, _ = watched(model, AdamW(model.parameters(), lr=1e-5))
    data = json.loads(json.dumps(report.to_dict()))
    assert data["loses"]
    assert data["updates"][0]["share"] == report.updates[0].share
    assert max(map(len, str(report).splitlines())) <= 100


def test_callback_runs_after_the_given_number_of_steps():
    model, ended = mlp(), []
    optimizer = adamw(model)
    with Watch(2, lambda: ended.append(seen.steps)) as seen:
        for seed in range(3):
            backward(model, seed)
            optimizer.step()
    assert ended == [2]


def test_trainer_is_found_by_its_stepping_optimizer():
    """Trainers that are idle or hold another optimizer do not count."""
    trainer = type("Trainer", (), {"__module__": "transformers.trainer", "optimizer": None})
    weight, (other, idle) = nn.Parameter(torch.ones(3)), (trainer(), trainer())
    optimizer = torch.optim.SGD([weight], lr=0.1)
    idle.optimizer = torch.optim.SGD([weight], lr=0.1)
    for wrapped, expected in ((None, None), (SimpleNamespace(optimizer=optimizer), trainer)):
        other.optimizer = wrapped
        with Watch() as seen:
            weight.grad = torch.ones(3)
            optimizer.step()
        assert seen.trainer is expected
