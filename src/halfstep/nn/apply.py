"""Make a model follow a recipe, in place, and undo it."""

from __future__ import annotations

from typing import Any

from torch import nn

from halfstep.errors import RecipeError
from halfstep.nn.adopt import is_covered
from halfstep.nn.applied import applied_to
from halfstep.nn.codes import let_go
from halfstep.nn.decision import decide, undo
from halfstep.nn.dtypes import store
from halfstep.nn.following import root_of
from halfstep.nn.layers import ModuleFilter
from halfstep.nn.paths import same_parameters
from halfstep.nn.plan import Plan
from halfstep.nn.stages import Steps
from halfstep.nn.stock_steps import watch
from halfstep.nn.unit.scale import is_unit_scaled, revert_unit
from halfstep.ops.part import part_of
from halfstep.quant.tracing import untraced
from halfstep.recipe import Recipe


def apply(model: nn.Module, recipe: str | Recipe, module_filter: ModuleFilter | None = None) -> Plan:
    """Make `model` follow `recipe`, in place; parameters, names, ties and state-dict keys stay.

    Parameters are stored in the recipe's dtype. The forward runs under torch.autocast where the recipe computes in 16
    bits, and autocast ends with the forward, also on an exception. Floating outputs leave in float32, nested ones too,
    and so do those of a part that is called outside the model's forward (see `halfstep.following`). Linear,
    convolutional and recurrent layers that a rule matches round the operands of their products. On a CPU without 16-bit
    matrix units the 16-bit products of the others are carried in float32 (`kernels.carried`). Parameters of norms with
    running statistics stay as they are (apex's keep_batchnorm_fp32), and so do buffers: a warning names those that
    arrive rounded to 16 bits where the recipe keeps float32.

    Args:
        model: any module with parameters; apply before wrapping it in DDP, FSDP or torch.compile.
        recipe: a name or a `Recipe`.
        module_filter: called with (module, path); layers for which it is false keep their stock products.

    Returns:
        What was done and what was not (`halfstep.plan` tells it beforehand).

    Raises:
        RecipeError: unknown recipe; the model already follows one; a rule or the filter selects no layer.
        ModelError: no parameters, float64 or complex ones, or a model that is already wrapped. Nothing was changed.
    """
    found = decide(model, recipe, module_filter)
    found.warn(model)
    made = found.lay(model)
    watch(model, found.recipe)
    return made


def plan_of(model: nn.Module) -> Plan:
    """What `apply`, `prepare` or `quantize_model` did to a model.

    Args:
        model: the model, or what wraps it (DDP, torch.compile, PEFT).

    Raises:
        RecipeError: it follows no recipe.
    """
    return applied_to(root_of(model)).plan


def revert(model: nn.Module) -> None:
    """Undo `apply`: every class, attribute and dtype is what it was. Bits that storing rounded away stay lost.

    (`halfstep.prepare` keeps the full weights in the optimizer's state, as `master`.) Of a model that is unit-scaled
    and follows no recipe, or no longer, it undoes `unit_scale`, whose weights come back within one rounding.

    Args:
        model: the model that `apply` was called on, or what wraps it (DDP, torch.compile, PEFT).

    Raises:
        RecipeError: the model follows no recipe, is quantised for inference, or has a part that was parametrized since.
    """
    model = root_of(model)
    if part_of(model).applied is None and is_unit_scaled(model):
        return revert_unit(model)
    applied = applied_to(model)
    if applied.quantized:
        raise RecipeError(
            f"this {type(model).__name__} is quantised for inference, and its full weights are gone: build it "
            "again and load them, or quantise a copy (copy.deepcopy) next time; halfstep.dequantize_model gives it the "
            "values of its codes"
        )
    for path, module in model.named_modules():
        if is_covered(module):
            raise RecipeError(
                f"{path or type(model).__name__} was given another class after the recipe was applied, such as by a "
                "parametrization: take that away first (torch.nn.utils.parametrize.remove_parametrizations), then "
                "revert"
            )
    let_go(model)
    undo(model)
    before = applied.dtypes | applied.adapters
    for parameter, name in same_parameters(model, before):
        store(parameter, before[name])
    return None


@untraced
def advance(model: nn.Module, *, skipped: bool = False, process_group: Any = None) -> None:
    """End an optimizer step: scaling states move on, once, the same on every rank. `scaler.update()` calls it.

    Only recipes whose scales depend on earlier steps have such states, and only those with stages count the steps; for
    the others there is nothing to move.

    Args:
        model: as for `revert`.
        skipped: the batch was abandoned: no optimizer stepped, and what was recorded of it is forgotten. Where one
            rank says so, it is so on all.
        process_group: over which ranks agree on the largest amaxes: those that hold the same layers (of a pipeline, a
            stage's). None is the default group where there is one.

    Raises:
        RecipeError: the model follows no recipe; it ran in eval(), which records nothing; or stages begin at fractions
            of a run whose length is not known (`halfstep.optimize`, `total_steps`).
    """
    Steps(root_of(model), process_group).advance(skipped)
