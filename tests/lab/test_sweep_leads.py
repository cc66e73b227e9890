"""Alarms ahead of divergence, on series with planted rises."""

import random

import pytest

from halfstep.errors import RunError
from halfstep.lab.sweep.leads import leads, series_of


NAMES = ("loss", "grad_norm", "sharpness")
ONSET = 90


def run(seed, rises=None):
    """Series of 120 steps of noise; `rises` gives the step from which a series is high."""
    noise = random.Random(seed)
    rises = rises or {}
    return {
        name: [5.0 * (place >= rises.get(name, 120)) + noise.gauss(1.0, 0.1) for place in range(120)] for name in NAMES
    }


def test_lead_equals_the_steps_between_planted_rises():
    stable = [run(seed) for seed in range(20)]
    lost = [(run(100 + seed, {"sharpness": ONSET - 12, "loss": ONSET - 4}), ONSET) for seed in range(6)]
    found = leads(stable, lost, NAMES)
    assert found["sharpness"].steps == (12,) * 6
    assert found["loss"].steps == (4,) * 6
    assert found["sharpness"].caught["hits"] == found["loss"].caught["hits"] == 6
    mean, interval = found["sharpness"].ahead_of["loss"]
    assert mean == 8
    assert interval.low == interval.high == 8
    assert found["loss"].ahead_of["sharpness"][0] == -8
    # The gradient norm never rises: no more alarms than in the stable runs that set its threshold.
    assert found["grad_norm"].caught["hits"] <= 1
    assert set(found["grad_norm"].ahead_of) == {"loss", "sharpness"}


def test_stable_runs_give_no_leads():
    """Negative control: runs labelled as diverging that are like the stable ones."""
    found = leads([run(seed) for seed in range(40)], [(run(500 + seed), ONSET) for seed in range(20)], NAMES)
    for lead in found.values():
        assert lead.false_alarms["runs"] == 20
        assert lead.false_alarms["hits"] <= 5  # of 20 at 5%: more has a probability of 3 in 10,000
        assert lead.caught["hits"] <= 5
        assert all(interval.low <= 0 <= interval.high for _, interval in lead.ahead_of.values())


def test_alarms_after_the_onset_do_not_count():
    late = [(run(100 + seed, {"sharpness": ONSET + 1}), ONSET) for seed in range(6)]
    found = leads([run(seed) for seed in range(20)], late, NAMES)["sharpness"]
    assert found.steps == (0,) * 6
    assert found.caught["hits"] == 0


def test_too_few_runs_or_missing_series_raise():
    with pytest.raises(RunError, match=r"19 stable runs and 3 that diverge; expected 20 and 3 at least: more --seeds"):
        leads([run(0)] * 19, [(run(1), ONSET)] * 3, NAMES)
    with pytest.raises(RunError, match=r"20 stable runs and 2 that diverge"):
        leads([run(0)] * 20, [(run(1), ONSET)] * 2, NAMES)
    wild = [{name: [0.0, 1.0] * 20 + [1e300 * 10**place for place in range(4)] for name in NAMES}] * 20
    with pytest.raises(RunError, match=r"more than 5% of the stable runs raise an alarm even .*: they are not stable"):
        leads(wild, [(run(1), ONSET)] * 3, NAMES)
    with pytest.raises(RunError, match=r"a run has no sharpness at each step; .*--grid sharpness=5e-4"):
        series_of([{"kind": "step", "step": 1, "loss": 1.0, "grad_norm": 1.0}], NAMES)
