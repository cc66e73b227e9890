"""The result of a probe: the verdict, its evidence, and its limits."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from halfstep.probe.cast import NONE, Buffers, CastTrial, Target
from halfstep.probe.observe import Range, Window, number
from halfstep.probe.trial import FLOAT32, OUTPUT_ERROR, Sensitivity, Trial
from halfstep.recipe import to_data
from halfstep.text import holding, some


LOST = 0.01
"""The largest share of a tensor's sum of magnitudes that may vanish or saturate."""


_LISTED = 5  # the most unfitting tensors listed in the text


@dataclass(frozen=True)
class Conditions:
    """The conditions that a verdict holds for."""

    model: str
    parameters: int
    data: str
    batches: int
    examples: int
    tokens: int | None
    """The number of values of the integer inputs; None if there are none."""
    loss: str
    train_steps: int
    learning_rate: float
    unreached: tuple[str, ...] = ()
    """Where experts, or other members of lists, got no gradient, so that they were not measured."""
    frozen: bool = False
    """Whether no parameter of the model requires a gradient (those of the probe's copy do)."""


@dataclass(frozen=True)
class ProbeReport:
    """Whether a model is safe in a format, forward and backward. `print(report)` shows it."""

    target: Target
    conditions: Conditions
    ranges: tuple[Range, ...]
    """Every tensor's range, in the order of execution."""
    window: Window
    trial: Trial
    """The run under the format's recipe."""
    sensitivity: Sensitivity
    """The change of float32's results when its weights change by up to the format's relative rounding error."""
    noise: tuple[str, ...] = ()
    """Parameters whose gradients are only float32's rounding errors, so that they were not compared."""
    tried: tuple[Trial, ...] = ()
    """Other recipes, if that one is not safe; only the last can have passed."""
    cast: CastTrial | None = None
    """The model cast as a whole, as by `model.to(dtype)`; None if torch has no such dtype, or only a recipe was asked
    for."""
    decides: tuple[str, ...] = ("recipe", "cast")
    """Which of the two decide the verdict."""
    buffers: Buffers = NONE
    """The effect of rounding buffers as that cast does."""

    @property
    def verdict(self) -> str:
        """ "safe"; "UNSAFE"; or "cannot tell" if the only problem is that torch could not run what was asked."""
        crashes: list[bool] = []
        if "recipe" in self.decides and not self.recipe_safe:
            crashes.append(self.trial.failure is not None and self.trial.failure.crashed and not self.findings)
        if "cast" in self.decides and self.cast is not None and self.cast.failure is not None:
            crashes.append(self.cast.failure.crashed)
        return "safe" if not crashes else "cannot tell" if all(crashes) else "UNSAFE"

    @property
    def safe(self) -> bool:
        """Whether the verdict is safe."""
        return self.verdict == "safe"

    @property
    def recipe_safe(self) -> bool:
        """Whether nothing that matters overflows or vanishes, and the recipe's run agrees with float32."""
        return self.trial.passed and not self.findings and self.scale_found

    @property
    def scale_found(self) -> bool:
        """Whether the recipe's loss scale (any of at least 1, if it is dynamic; 1, if it has none) lies in the
        window."""
        if not self.target.stored:
            return True  # the trial decides on the loss scale of operands
        scale = self.trial.recipe.loss_scale
        if scale is not None and scale.dynamic:
            return not self.window.empty and self.window.largest >= 1.0
        return self.window.holds(1.0 if scale is None else scale.init)

    @property
    def findings(self) -> tuple[Range, ...]:
        """The tensors of the forward pass, weights too, that do not fit the format, in the order of execution.

        A tensor does not fit if any value overflows, or if it loses more than 1% of its sum of magnitudes. For a format
        that only operands are rounded to, these are the inputs and weights of the rounded layers.
        """
        return tuple(found for found in self.ranges if not found.site.backward and self._unfit(found))

    @property
    def gradient_findings(self) -> tuple[Range, ...]:
        """The gradients that overflow without any loss scale, in the order of execution."""
        return tuple(f for f in self.ranges if f.site.backward and f.limits.overflows and f.counts.beyond)

    @property
    def first_failure(self) -> str | None:
        """The first tensor that does not fit, in the order of execution, forward before backward."""
        if "recipe" not in self.decides or self.recipe_safe:
            return None if self.cast is None or self.cast.failure is None else str(self.cast.failure.site)
        failed = [] if self.trial.failure is None else [self.trial.failure.site]
        forward = [found.site for found in self.findings] + [site for site in failed if not site.backward]
        backward = [found.site for found in self.gradient_findings] + failed
        first = next(iter(forward + backward), None if self.safe else self.window.first_to_overflow)
        return None if first is None else str(first)

    @property
    def headroom(self) -> Range | None:
        """The forward's tensor nearest to the format's largest value, or furthest beyond it."""
        forward = (found for found in self.ranges if not found.site.backward)
        return min(forward, key=lambda found: found.headroom, default=None)

    @property
    def residual(self) -> tuple[Range, ...]:
        """The inputs and outputs of repeated blocks, and their gradients: the residual stream."""
        return tuple(found for found in self.ranges if found.block)

    @property
    def suggestion(self) -> Trial | None:
        """The recipe that was tried and passed; None if the target is safe, or none passed."""
        return self.tried[-1] if self.tried and self.tried[-1].passed else None

    def __str__(self) -> str:
        """The verdict, its evidence and its limits, one statement per line."""
        format = self.target.format.name
        how = ", forward and backward" if "recipe" in self.decides or self.cast is None else f" as {self.cast.name}"
        same = [self.alike(found) for found in self.ranges if str(found.site) == self.first_failure]
        first = _names(same[0]) if same else self.first_failure
        return "\n".join(
            [
                f"{self.verdict}: {self.conditions.model} in {format}{how}",
                f"{format} here: {self.trial.recipe.summary}",
                *([] if first is None else [f"first to fail: {first}"]),
                *_forward(self),
                _backward(self),
                f"run for real: {_outcome(self.trial)}",
                *_cast(self),
                *_sensitivity(self),
                *self.buffers.lines(format),
                *_suggested(self),
                *_limits(self),
            ]
        )

    def worst(self) -> list[Range]:
        """All ranges: those that do not fit first, then those nearest to the format's largest value."""
        unfit = {found.site for found in (*self.findings, *self.gradient_findings)}
        return sorted(
            self.ranges, key=lambda found: (found.site not in unfit, found.headroom, -found.lost, found.order)
        )

    def alike(self, found: Range) -> tuple[Range, ...]:
        """All ranges with the same counts, in the order of execution: a tensor that modules pass on unchanged."""
        return tuple(r for r in self.ranges if r.counts == found.counts and r.site.backward == found.site.backward)

    def _unfit(self, found: Range) -> bool:
        rounded = found.site.module in self.trial.rounded and found.site.role in ("input", "weight")
        if not (self.target.stored or rounded):
            return False
        return (found.limits.overflows and found.counts.beyond > 0) or found.lost > LOST

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data; infinite values and NaN are None."""
        near, unfit = self.headroom, {found.site for found in (*self.findings, *self.gradient_findings)}
        suggestion = self.suggestion
        return {
            "safe": self.safe,
            "verdict": self.verdict,
            "format": self.target.format.name,
            "recipe": self.trial.recipe.name,
            "first_failure": self.first_failure,
            "conditions": asdict(self.conditions),
            "headroom_bits": None if near is None else number(near.headroom),
            "loss_scales": {
                "smallest": self.window.smallest,
                "largest": number(self.window.largest),
                "first_to_vanish": _text(self.window.first_to_vanish),
                "first_to_overflow": _text(self.window.first_to_overflow),
            },
            "trial": self.trial.to_dict(),
            "cast": None if self.cast is None else self.cast.to_dict(),
            "sensitivity": {
                "size": self.sensitivity.size,
                "output_error": number(self.sensitivity.output_error),
                "noise": list(self.noise),
            },
            "buffers": [{**asdict(one), "error": number(one.error)} for one in self.buffers.found],
            "tried": [trial.to_dict() for trial in self.tried],
            "suggestion": None if suggestion is None else to_data(suggestion.recipe),
            "ranges": [{**found.to_dict(), "fits": found.site not in unfit} for found in self.ranges],
        }


def _text(value: object) -> str | None:
    return None if value is None else str(value)


# ---- in words ----------------------------------------------------------------------------------------------------


def _forward(report: ProbeReport) -> list[str]:
    near = report.headroom
    if near is None:
        return []
    format = report.target.format
    tail = f"of {format.name}'s {format.max:g}"
    left = f"{near.headroom:.1f} bits left" if near.headroom >= 0 else f"{-near.headroom:.1f} bits beyond"
    distinct = list({found.counts: found for found in reversed(report.findings)}.values())[::-1]
    return [
        f"forward: largest {near.counts.largest:.6g} {tail}, {left}: {near.site}",
        *(f"  does not fit: {_names(report.alike(found))}: {_why(found)}" for found in distinct[:_LISTED]),
        *([f"  and {len(distinct) - _LISTED} more"] if len(distinct) > _LISTED else []),
    ]


def _names(same: Sequence[Range]) -> str:
    """A tensor's name: the module that has it first, and the one that reads it last."""
    takers = [found.site for found in same[1:] if found.site.role == "input"]
    return f"{same[0].site}" + (f", which is the {takers[-1]}" if takers else "")


def _why(found: Range) -> str:
    if found.counts.beyond and found.limits.overflows:
        return f"{100 * found.share_beyond:.2g}% of its values overflow, largest {found.counts.largest:.6g}"
    return f"{found.lost:.1%} of its magnitude vanishes or saturates"


def _backward(report: ProbeReport) -> str:
    window = report.window
    if math.isinf(window.largest):
        return "backward: all gradients are zero"
    low = "any small one" if window.smallest == 0 else _power(window.smallest)
    over = f"from {_power(2 * window.largest)} on {window.first_to_overflow} overflows"
    under = f"below {low} {window.first_to_vanish} vanishes" if window.first_to_vanish else "nothing vanishes"
    if window.empty:
        return f"backward: no loss scale works: {over}, {under}"
    verdict = "" if report.scale_found else "; none of them is one that the recipe uses"
    return f"backward: loss scales from {low} to {_power(window.largest)} work: {over}, {under}{verdict}"


def _outcome(trial: Trial) -> str:
    """A trial's result, in words."""
    scaled = trial.recipe.loss_scale is not None and trial.loss_scale is not None
    at = f" at loss scale {trial.loss_scale:g}" if scaled else ""
    return f"{trial.recipe.name} {_ran(trial, f'passes: finite{at},', 'fails')}"


def _cast(report: ProbeReport) -> list[str]:
    """The result of the cast of the whole model, in words."""
    found = report.cast
    return [] if found is None else [f"run for real: {found.name} {_ran(found, 'passes, forward:', 'fails, forward')}"]


def _ran(found: Trial | CastTrial, passes: str, fails: str) -> str:
    if found.failure is None:
        return f"{passes} its output is off by {found.output_error:.2g} from fp32"
    how, raised = ("cannot be told", "torch raised: ") if found.failure.crashed else (fails, "")
    return f"{how}: {found.failure.site}: {raised}{found.failure.what}"


def _sensitivity(report: ProbeReport) -> list[str]:
    """Which part of a difference comes from the model's own sensitivity, in words."""
    found, format = report.sensitivity, report.target.format.name
    shaken = sorted(found.unstable)
    what = f"the gradient of {some(shaken, 1)}" if found.output_is_stable else "the output"
    itself = not report.safe and report.suggestion is None and (shaken or not found.output_is_stable)
    said = {
        # a codebook has no relative rounding error
        f"sensitivity: in fp32, weights moved by up to {_power(found.size)} of themselves, {format}'s rounding, change "
        f"the output by {found.output_error:.2g}": found.size > FLOAT32 / 4,
        f"  not compared: the gradient of {some(report.noise, 1)}: nothing but fp32's own rounding errors, which a "
        f"change of the weights by {_power(FLOAT32)} replaces by others": report.noise,
        f"  the model itself is that sensitive: {what} changes by more than passes, so a recipe that rounds to "
        f"{format} anywhere can hardly agree with fp32": itself,
    }
    return holding(said)


def _suggested(report: ProbeReport) -> list[str]:
    if report.safe:
        return []
    passed = report.suggestion
    if passed is None:
        return [
            f"suggestion: none; {len(report.tried)} recipes were run and none passed",
            *[f"  {_recipe(trial)}: {_outcome(trial)}" for trial in report.tried],
        ]
    return [f"suggestion: {_recipe(passed)}; run for real: {_outcome(passed)}"]


def _recipe(trial: Trial) -> str:
    kept = (*trial.recipe.float32_modules, *trial.recipe.float32_buffers)
    return trial.recipe.name.removesuffix("-kept") + (f", with {', '.join(kept)} in float32" if kept else "")


def _limits(report: ProbeReport) -> list[str]:
    held = report.conditions
    tokens = f", {held.tokens:,} tokens" if held.tokens is not None else ""
    steps = (
        f"before and after {held.train_steps} steps of AdamW at {held.learning_rate:g} in fp32"
        if held.train_steps
        else "0 training steps"
    )
    return [
        f"measured in fp32, evaluation mode: {held.data}; {held.batches} batch{'es' * (held.batches != 1)}, "
        f"{held.examples} example{'s' * (held.examples != 1)}{tokens}; {steps}",
        *([f"no gradient from this data reached {', '.join(held.unreached)}"] if held.unreached else []),
        *(["all parameters are frozen; the gradients are those that they would have"] if held.frozen else []),
        f"loss sent back: {held.loss}",
        f"limits: other data, longer inputs or further training may reach further; an output off by {OUTPUT_ERROR:.0%} "
        "passes",
    ]


def _power(value: float) -> str:
    """A power of two as text: 2^10."""
    return f"2^{math.frexp(value)[1] - 1}"
