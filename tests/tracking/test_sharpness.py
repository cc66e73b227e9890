"""Sharpness in the logits equals the maximum over the box that an optimizer finds."""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import log_softmax

from halfstep.errors import QuantizationError, RunError
from halfstep.lab.compare import open_experiment
from halfstep.lab.experiment import Experiment
from halfstep.lab.models import build_model
from halfstep.lab.tasks import experiment_for
from halfstep.tracking import logit_sharpness


def logits(rows=4, classes=9, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    z = scale * torch.randn(rows, classes, generator=generator, dtype=torch.float64, device="cpu")
    return z, torch.randint(classes, (rows,), generator=generator, dtype=torch.int64, device="cpu")


@pytest.mark.parametrize("epsilon", [5e-4, 1e-3, 0.1])
def test_sharpness_equals_l_bfgs_b_maximum(epsilon):
    z, y = logits()
    found = logit_sharpness(z, y, epsilon)
    for row, target, sharpness in zip(z.numpy(), y.tolist(), found.tolist(), strict=True):

        def negative(delta, row=row, target=target):
            log_p = log_softmax(row + delta)
            gradient = np.exp(log_p)
            gradient[target] -= 1
            return log_p[target], -gradient

        width = epsilon * (np.abs(row) + 1)
        ended = minimize(
            negative, np.zeros_like(row), jac=True, method="L-BFGS-B", bounds=list(zip(-width, width, strict=True)),
            options={"ftol": 1e-15, "gtol": 1e-12},
        )  # fmt: skip
        loss = -log_softmax(row)[target]
        assert sharpness == pytest.approx(100 * (-ended.fun - loss) / (1 + loss), rel=1e-4)


def test_no_random_point_of_the_box_is_higher():
    z, y = logits(seed=1)
    rise = logit_sharpness(z, y, 0.05)
    before = torch.nn.functional.cross_entropy(z, y, reduction="none")
    generator = torch.Generator().manual_seed(2)
    for _ in range(200):
        delta = (
            (2 * torch.rand(z.shape, generator=generator, dtype=torch.float64, device="cpu") - 1) * 0.05 * (z.abs() + 1)
        )
        after = torch.nn.functional.cross_entropy(z + delta, y, reduction="none")
        assert (100 * (after - before) / (1 + before) <= rise).all()


def test_sharpness_is_0_for_epsilon_0_and_grows_with_it():
    z, y = logits()
    values = [logit_sharpness(z, y, epsilon) for epsilon in (0.0, 1e-4, 1e-3, 1e-2)]
    assert torch.equal(values[0], torch.zeros(4, dtype=torch.float64, device="cpu"))
    assert all((small < large).all() for small, large in itertools.pairwise(values))


def test_shapes_and_dtypes_of_logits():
    z, y = logits(rows=6)
    whole = logit_sharpness(z, y)
    assert torch.equal(logit_sharpness(z.view(2, 3, 9), y.view(2, 3)), whole.view(2, 3))
    half = z.bfloat16()
    assert torch.equal(logit_sharpness(half, y), logit_sharpness(half.double(), y))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            (torch.zeros(2, 3, device="cpu"), torch.zeros(3, dtype=torch.int64, device="cpu")),
            r"logits \(2, 3\) .* \(3,\)",
        ),
        ((torch.zeros(1, 3, device="cpu"), torch.zeros(1, dtype=torch.int64, device="cpu"), -1.0), "epsilon = -1.0"),
    ],
)
def test_invalid_sharpness_arguments_raise(given, said):
    with pytest.raises(QuantizationError, match=said):
        logit_sharpness(*given)


def test_sharpness_is_recorded_if_enabled(tmp_path):
    (tmp_path / "text.txt").write_text("some text to learn from\n" * 400)
    fields = {
        "seeds": 1,
        "steps": 4,
        "batch": 2,
        "context": 16,
        "warmup": 1,
        "statistics": 1,
        "validations": 2,
        "data": str(tmp_path / "text.txt"),
        "model": "gpt-nano",
        "baseline_seeds": 1,
    }
    with_it, without = (
        open_experiment(Experiment(recipes=("fp32",), sharpness=box, **fields), tmp_path / f"{box}" / "run", False)
        for box in (1e-3, 0.0)
    )
    rows = []
    for comparison in (with_it, without):
        comparison.run()
        rows.append([row for row in comparison.folder.metrics("fp32", 0) if row["kind"] == "step"])
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]
    assert not any("sharpness" in row for row in rows[1])
    batch = with_it.task.batch(0, 1)
    model = build_model("gpt-nano", with_it.task.models(), 0)
    expected = logit_sharpness(model(batch["tokens"]), batch["targets"], 1e-3).mean()
    assert rows[0][0]["sharpness"] == pytest.approx(float(expected), rel=1e-6)
    assert len({row["sharpness"] for row in rows[0]}) == 4
    other = experiment_for("mlm", recipes=("fp32",), sharpness=1e-3, data=fields["data"], context=16, batch=2)
    with pytest.raises(RunError, match=r"sharpness = 0.001 with task 'mlm', whose loss is not a cross-entropy"):
        open_experiment(other, tmp_path / "other", False)
    with pytest.raises(RunError, match="sharpness = -1 given; expected a box of 0"):
        Experiment(recipes=("fp32",), sharpness=-1)
