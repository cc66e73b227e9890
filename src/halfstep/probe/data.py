"""The records of a probe as plain data, for JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from halfstep.probe.cast import CastTrial
from halfstep.probe.ranges import Range
from halfstep.probe.trial import Trial


def range_data(found: Range) -> dict[str, Any]:
    """One tensor's range."""
    return {
        **asdict(found.site),
        "residual": found.block,
        "largest": found.counts.largest,
        "headroom_bits": finite(found.headroom),
        "beyond": found.share_beyond,
        "subnormal": found.share_subnormal,
        "vanished": found.share_vanished,
        "lost": found.lost,
    }


def trial_data(trial: Trial) -> dict[str, Any]:
    """How a recipe did."""
    failure = trial.failure
    return {
        "recipe": trial.recipe.name,
        "float32_modules": list(trial.recipe.float32_modules),
        "passed": trial.passed,
        "crashed": failure is not None and failure.crashed,
        "failure": None if failure is None else f"{failure.site}: {failure.what}",
        "loss_scale": trial.loss_scale,
        "output_error": finite(trial.output_error),
        "errors": {path: finite(error) for path, error in trial.errors.items()},
    }


def cast_data(trial: CastTrial) -> dict[str, Any]:
    """How the whole model did, cast."""
    failure = trial.failure
    return {
        "dtype": str(trial.dtype).removeprefix("torch."),
        "passed": trial.passed,
        "crashed": failure is not None and failure.crashed,
        "failure": None if failure is None else f"{failure.site}: {failure.what}",
        "output_error": finite(trial.output_error),
        "errors": {path: finite(error) for path, error in trial.errors.items()},
    }


def finite(value: float) -> float | None:
    """The number; None if it is infinite or NaN, which JSON has no word for."""
    return value if math.isfinite(value) else None
