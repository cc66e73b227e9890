"""Causes of loss spikes: planted causes are named, and noise is not."""

import json
import random

import pytest

from halfstep.errors import RunError
from halfstep.lab.compare import open_experiment
from halfstep.lab.experiment import Experiment
from halfstep.lab.models import build_model
from halfstep.lab.sweep.folder import Sweep, SweepFolder
from halfstep.lab.sweep.leads import Moved, causes, moved


TENSORS = ("input of a", "weight of a", "input of b", "weight of b")


def rows(steps=100, plant=None, seed=0):
    """Rows of tensors without spikes; `plant` maps (measure, tensor, step) to a value."""
    noise, made = random.Random(seed), []
    for step in range(1, steps + 1):
        row = {
            "kind": "tensors",
            "step": step,
            "amaxes": {name: noise.uniform(1.0, 2.0) for name in TENSORS},
            "saturated": {name: noise.choice([0.0, 0.002]) for name in TENSORS},
            "updates": {name: noise.uniform(0.001, 0.002) for name in TENSORS[1::2]},
        }
        for (measure, tensor, at), value in (plant or {}).items():
            if at == step:
                row[measure][tensor] = value
        made.append(row)
    return made


def test_causes_are_ordered_by_step():
    plant = {
        ("amaxes", "input of b", 80): 64.0,
        ("saturated", "input of b", 80): 0.5,
        ("amaxes", "weight of a", 78): 20.0,
        ("updates", "weight of b", 77): 0.1,
    }
    found = moved(rows(plant=plant), 80)
    assert [(one.step, one.tensor, one.measure) for one in found] == [
        (77, "weight of b", "updates"),
        (78, "weight of a", "amaxes"),
        (80, "input of b", "saturated"),
        (80, "input of b", "amaxes"),
    ]
    assert 10 < found[1].times < 20
    assert moved(rows(plant=plant), 84)[0].step == 80
    assert not moved(rows(plant=plant), 86)


def test_causes_within_a_step_follow_the_pass_order():
    plant = {("amaxes", "input of b", 80): 64.0, ("amaxes", "weight of a", 80): 64.0}
    plant |= {("updates", "weight of a", 80): 1.0}
    assert [one.tensor for one in moved(rows(plant=plant), 81)] == ["weight of a", "input of b", "weight of a"]
    # A step's update comes after its loss.
    assert [one.measure for one in moved(rows(plant=plant), 80)] == ["amaxes", "amaxes"]


def test_noise_has_no_causes():
    """Negative control: runs without spikes, for several seeds and steps."""
    for seed in range(5):
        quiet = rows(seed=seed)
        assert not [one for step in range(25, 101, 5) for one in moved(quiet, step)]
    assert not moved([], 10)
    assert not moved(rows(steps=15, plant={("amaxes", "input of a", 15): 1e9}), 15)  # too short a history


def test_nonfinite_amax_is_a_cause_but_a_small_share_is_not():
    found = moved(rows(plant={("amaxes", "input of a", 90): None}), 90)
    assert found == [Moved(90, "input of a", "amaxes", float("inf"))]
    assert not moved(rows(plant={("saturated", "input of a", 90): 0.009}), 90)


def test_causes_of_spikes_in_a_sweep_with_their_chance_rate(tmp_path):
    folder = SweepFolder(tmp_path / "swept")
    folder.write(Sweep(Experiment(recipes=("fp32", "fp8-current"), seeds=1, baseline_seeds=1), {"lr": (1.0,)}))
    noise = random.Random(0)
    for recipe in ("fp32", "fp8-current"):
        plant = {("amaxes", "input of b", 79): 64.0} if recipe == "fp8-current" else {}
        losses = [noise.gauss(3.0, 0.1) + 3.0 * (step == 80 and bool(plant)) for step in range(1, 101)]
        written = [{"kind": "validation", "step": 0, "loss": 5.5}, *rows(plant=plant)]
        written += [
            {"kind": "step", "step": step, "loss": loss, "tokens": 1, "seconds": 0.1}
            for step, loss in enumerate(losses, 1)
        ]
        written += [
            {"kind": "validation", "step": 100, "loss": 3.0},
            {"kind": "end", "step": 100, "status": "finished"},
        ]
        path = folder.run(("lr-1", recipe, 0))
        path.mkdir(parents=True)
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    (spike,), quiet = causes(folder.path)
    assert (spike.recipe, spike.step) == ("fp8-current", 80)
    assert [(one.step, one.tensor, one.measure) for one in spike.moved] == [(79, "input of b", "amaxes")]
    # Windows of 6 steps, from step 26; one holds the spike.
    assert {recipe: (hits["hits"], hits["runs"]) for recipe, hits in quiet.items()} == {
        "fp32": (0, 13),
        "fp8-current": (0, 12),
    }
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written if row.get("step") != 50))
    assert causes(folder.path)[0]  # a step without a row is skipped
    kept = [row for row in written if (row["kind"], row["step"]) != ("tensors", 50)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    with pytest.raises(RunError, match=r"lr-1, fp8-current, seed 0 has no tensors at each step: --grid tensors=STEPS"):
        causes(folder.path)


FIELDS = {"seeds": 1, "baseline_seeds": 1, "batch": 2, "context": 16, "warmup": 1, "statistics": 1, "validations": 1}


def test_recording_tensors_changes_no_loss(tmp_path):
    (tmp_path / "text.txt").write_text("some text to learn from\n" * 400)
    fields = {**FIELDS, "data": str(tmp_path / "text.txt"), "model": "gpt-nano", "recipes": ("fp8-delayed-megatron",)}
    rows = {}
    for count in (4, 0):
        opened = open_experiment(Experiment(steps=4, tensors=count, **fields), tmp_path / f"{count}" / "run", False)
        opened.run()
        rows[count] = opened.folder.metrics("fp8-delayed-megatron", 0)
    plain = [
        {k: v for k, v in row.items() if k != "seconds"} for row in rows[0] if row["kind"] in ("step", "validation")
    ]
    assert plain == [
        {k: v for k, v in row.items() if k != "seconds"} for row in rows[4] if row["kind"] in ("step", "validation")
    ]
    written = [row for row in rows[4] if row["kind"] == "tensors"]
    assert [row["step"] for row in written] == [1, 2, 3, 4]
    assert not [row for row in rows[0] if row["kind"] == "tensors"]
    assert written[0]["amaxes"].keys() > written[0]["saturated"].keys()
    assert "input of blocks.0.attention.qkv" in written[0]["saturated"]
    assert "weight of head" not in written[0]["saturated"]  # kept unrounded
    with pytest.raises(RunError, match="tensors = -1 given; expected 0"):
        Experiment(recipes=("fp32",), tensors=-1)


def test_recorded_updates_are_relative_to_the_weight(tmp_path):
    (tmp_path / "text.txt").write_text("some text to learn from\n" * 400)
    fields = {**FIELDS, "data": str(tmp_path / "text.txt"), "model": "gpt-nano", "recipes": ("fp32",)}
    opened = open_experiment(Experiment(steps=1, tensors=1, checkpoints=1, **fields), tmp_path / "run", False)
    opened.run()
    (row,) = [row for row in opened.folder.metrics("fp32", 0) if row["kind"] == "tensors"]
    before = build_model("gpt-nano", opened.task.models(), 0).state_dict()
    after = opened.trainer("fp32", 0).trained().state_dict()
    expected = {
        "{2} of {0}".format(*name.rpartition(".")): float((after[name] - held).norm() / held.norm())
        for name, held in before.items()
        if held.norm()
    }
    assert {name: value for name, value in row["updates"].items() if name in expected} == pytest.approx(
        expected, rel=1e-3
    )
    assert len(row["updates"]) == len(before)
