"""What a run writes down: one JSON object a line, in `metrics.jsonl`. This file imports no torch.

Every row has `kind` and `step` (0 before the first update). The kinds:

    memory      parameters, bytes {weights, grads, master, states, transient}: bytes a parameter, measured before step()
    step        loss, lr, loss_scale, skipped, grad_norm, tokens (what the batch holds, in the task's unit), seconds
                (the only timing; null in a baseline that an earlier experiment trained); sharpness (percent, where the
                experiment wants it: tracking.logit_sharpness)
    validation  loss; metric, where the task has one
    statistics  loss_scale; weights, gradients, activation_gradients: exponent histograms {counts, zeros, nonfinite},
                gradients as they are stored, so times loss_scale; zeroed {weights, gradients}: share by format that
                a cast makes zero, unscaled; lost {format: share}: wanted updates that would leave a weight stored in
                it where it is (0 of them in a skipped step); descent {quality, lost_share, layers {name: the same}}:
                how much of the step's updates arrived in what is stored, masters included (null: nothing was wanted)
    ranges      activation_gradients {module: [zeros, of]}, gradients {parameter: [zeros, of]}; after the update,
                states {parameter: {state: [zeros, of]}}, of the elements whose gradient was not zero, and largest
                {parameter: its largest update in learning rates}. With the statistics; and at powers of two, where
                in_float32 has the gradients' zeros of the same weights and batch in float32
    tensors     where the experiment wants it: amaxes {"input of LAYER": the largest magnitude}, saturated {the same, of
                what is rounded: the share beyond the format's largest value}, in the order of computing; updates
                {"weight of LAYER": |update| / |weight|}
    diverged    reason, tensor (the first that was not finite, or null); in_float32, where it can be asked: the
                largest magnitude of that tensor in float32, of the same weights and batch, and compute, the format
                that the recipe computes in
    end         status "finished" or "diverged"; the last row of a run

Numbers that are not finite are null.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from halfstep.errors import RunError


Row = dict[str, Any]
TIMINGS = frozenset({"seconds"})
"""The keys whose values depend on the machine's mood; all others are equal in a resumed run."""


class MetricsFile:
    """Appends rows, each on disk before the next step begins."""

    def __init__(self, path: Path, keep_to: int) -> None:
        """Open `path` and drop what it holds beyond step `keep_to`: a killed run's rows since its checkpoint."""
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_metrics(path) if row["step"] <= keep_to and row["kind"] != "end"]
        replacement = path.with_suffix(".partial")
        replacement.write_text("".join(_line(row) for row in kept))
        os.replace(replacement, path)
        self._file: TextIO = path.open("a")

    def write(self, row: Row) -> None:
        """Append a row."""
        self._file.write(_line(row))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[Row]:
    """The rows of a metrics file, [] where there is none; a last line cut short by a kill is dropped.

    Raises:
        RunError: a line in the middle is not a row: the file was edited.
    """
    return list(_rows(path)) if path.is_file() else []


def _rows(path: Path) -> Iterator[Row]:
    lines = path.read_text().split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            row = json.loads(line)
            if not isinstance(row["step"], int) or not isinstance(row["kind"], str):
                raise ValueError("no step or kind")
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                return
            raise RunError(
                f"{path}, line {number}: this is not a metrics row ({error}); the file was edited"
            ) from error
        yield row


def _line(row: Row) -> str:
    return json.dumps(_finite(row), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value
