"""Is this model safe in fp16, or another format? Measured forward and backward, then run; `probe_model`."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from halfstep.errors import DataError, FormatError, RecipeError
from halfstep.nn.codes import rounded
from halfstep.probe.batch import Batch, Loss, copied, moved, unchanged_generators
from halfstep.probe.cast import Buffers, Target, cast_trial, keeping, rounded_buffers, suggest, target
from halfstep.probe.mismatch import Mismatch, mismatch
from halfstep.probe.observe import Window, window
from halfstep.probe.report import LOST, Conditions, ProbeReport
from halfstep.probe.spread import Scales, Spread, scales
from halfstep.probe.trial import FLOAT32, Failure, Meter, Trial, reference, sensitivity, train, trial
from halfstep.recipe import Recipe, get_recipe, get_storage
from halfstep.tracking.nonfinite import tensors_in


__all__ = [
    "Conditions",
    "Failure",
    "Mismatch",
    "ProbeReport",
    "Scales",
    "Spread",
    "Target",
    "Trial",
    "Window",
    "mismatch",
    "probe_model",
    "scales",
    "target",
]


def probe_model(
    model: nn.Module,
    to: object = "fp16",
    *,
    data: Sequence[Batch],
    loss: Loss | None = None,
    loss_scale: float | None = None,
    train_steps: int = 0,
    learning_rate: float = 1e-4,
    cast_as: str | Recipe | None = None,
    described: str = "the batches given",
    progress: Callable[[str], None] = lambda stage: None,
) -> ProbeReport:
    """Whether a model is safe in a number format, forward and backward, on that data.

    Runs copies of the model: in float32, to measure the range of every activation, gradient and weight; then under the
    format's recipe, to compare; then, if that is not safe, under other recipes, until one passes. All of it in
    evaluation mode, without dropout. The model and the random generators do not change.

    Args:
        to: a format's name, a `Format` or a `torch.dtype`; `target` says what it means for a model.
        data: batches; a mapping gives the model's arguments by name, a tuple by position, a tensor is the only one.
        loss: loss(model, batch) to differentiate; None takes the model's own, or a stand-in (`batch.loss_of`).
        loss_scale: a constant one; None takes the recipe's, for fp16 a dynamic one from 2^16.
        train_steps: steps of AdamW in float32 at `learning_rate` after which to measure again. Ranges are those of
            before and after; recipes are run after.
        cast_as: what running the model in the format means. None: both the format's recipe and, if torch has the
            dtype, `model.to(dtype)`; the model is safe if both are. "half": `model.to(dtype)`, forward. "recipe": the
            format's recipe; or the name of another, or a `Recipe`.
        described: a description of the data, for the report.
        progress: called with the name of each stage.

    Raises:
        FormatError: unknown format, or one for blocks or without negative values.
        RecipeError: a recipe with stages: only the first would be tried.
        DataError: no batches.
        ModelError: the model has no parameters, cannot be copied, does not take the data, returns nothing
            differentiable, or is not finite in float32 either.
    """
    goal = target(to, loss_scale)
    decides = ("cast",) if cast_as == "half" else ("recipe",) if cast_as is not None else ("recipe", "cast")
    if decides == ("recipe",) and cast_as != "recipe":
        assert cast_as is not None
        goal = replace(goal, recipe=get_recipe(cast_as))
    _check_stages(goal.recipe)
    dtype = get_storage(goal.format.name).dtype if goal.stored and decides != ("recipe",) else None
    if decides == ("cast",) and dtype in (None, torch.float32):
        raise FormatError(f"torch casts no model to {goal.format.name}: expected fp16 or bf16 with cast_as='half'")
    if not data:
        raise DataError("no batches to run the model on; expected at least one")
    own, frozen = copied(model).float().eval(), not any(p.requires_grad for p in model.parameters())
    if frozen:
        for parameter in own.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
    device = next(own.parameters()).device
    batches = [moved(batch, device) for batch in data]
    with unchanged_generators(device):
        meter = Meter(goal.limits)
        progress("measuring ranges in float32")
        meter.run(own, batches, loss)
        if train_steps:
            train(own, batches, loss, train_steps, learning_rate, progress)
            progress("measuring ranges after training")
            meter.run(own, batches, loss)
        found = meter.measured(own)
        scales = window((r for r in found.ranges if r.site.backward), found.histograms, goal.limits, LOST)
        expected = reference(own, batches[0], loss)
        progress("perturbing weights in float32")
        rounding = 2.0**-goal.format.significant_bits
        expected = replace(expected, noise=sensitivity(own, batches[0], loss, expected, FLOAT32).unstable)
        own_error = sensitivity(own, batches[0], loss, expected, rounding)

        def run(recipe: Recipe) -> Trial:
            progress(f"running {recipe.name}")
            scale = recipe.loss_scale
            start = max(1.0, min(scale.init, scales.largest)) if scale is not None else 1.0
            return trial(own, batches, recipe, loss, expected, start)

        report = ProbeReport(
            goal,
            Conditions(
                model=type(model).__name__,
                parameters=sum(p.numel() for p in own.parameters()),
                data=described,
                batches=len(batches),
                examples=sum(len(t[0]) for batch in batches if (t := tensors_in(batch)) and t[0].dim()),
                tokens=_tokens(batches),
                loss=found.loss,
                train_steps=train_steps,
                learning_rate=learning_rate,
                unreached=found.unreached,
                frozen=frozen,
            ),
            found.ranges,
            scales,
            run(goal.recipe),
            own_error,
            tuple(sorted(expected.noise)),
        )
        if dtype not in (None, torch.float32):
            assert dtype is not None
            progress(f"running model.to({dtype})")
            cast = cast_trial(own, batches, dtype, expected)
            changed = rounded_buffers(own, batches[0], dtype, expected)
            buffers = Buffers(changed, own_error.output_error, rounding, tuple(rounded(model)))
            report = replace(report, cast=cast, decides=decides, buffers=buffers)
        if report.safe:
            return report
        tried = (report.trial,) if report.recipe_safe else _search(own, report, goal, run)
        if tried and tried[-1].passed and (harmful := report.buffers.harmful):
            recipe = keeping(tried[-1].recipe, buffers=tuple(one.name for one in harmful))
            tried = (*tried[:-1], replace(tried[-1], recipe=recipe))
        return replace(report, tried=tried)


def _check_stages(recipe: Recipe) -> None:
    if recipe.stages:
        later = ", ".join(repr(stage.recipe.name) for stage in recipe.stages)
        raise RecipeError(
            f"recipe {recipe.name!r} has {len(recipe.by_stage)} stages, but a probe runs a model under one recipe: "
            f"expected one without stages. Probe each separately: the first stage, then {later}"
        )


def _search(own: nn.Module, report: ProbeReport, goal: Target, run: Callable[[Recipe], Trial]) -> tuple[Trial, ...]:
    """Trials of other recipes; modules that lose values without any infinity are in float32 from the start."""
    leaves = {path for path, module in own.named_modules() if not any(module.children())}
    lossy = [
        found.site
        for found in report.findings
        if not found.counts.beyond and found.site.role != "input" and found.site.module in leaves
    ]
    return suggest(own, (goal.recipe, *goal.others) if goal.stored else goal.others, lossy, run, report.trial)


def _tokens(batches: Sequence[Batch]) -> int | None:
    counts = [found[0].numel() for b in batches if (found := [t for t in tensors_in(b) if not t.is_floating_point()])]
    return sum(counts) if counts else None
