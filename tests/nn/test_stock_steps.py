"""A model under a recipe with an optimizer that `optimize` did not see: a warning names what is lost, once."""

import copy
import gc
import re
import warnings
from functools import partial

import bitsandbytes as bnb
import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks, register_optimizer_step_pre_hook

import halfstep
from tiny import batch, mlp


NO_MASTERS, TO_NEAREST = "it keeps no masters", "it rounds weights to nearest"
UNSCALED, VALUES, MOMENTS = "the loss is not scaled", "and not as codes", "moments are not kept"
LOST = {
    "bf16-master": [NO_MASTERS],
    "bf16-split": [NO_MASTERS],
    "bf16-kahan": [NO_MASTERS],
    "bf16-stochastic": [TO_NEAREST],
    "fp16-mixed": [UNSCALED],
    "fp16-static": [UNSCALED],
    "fp16-master": [UNSCALED, NO_MASTERS],
    "adamw-8bit": [MOMENTS],
    "galore": [MOMENTS],
    "fp8lm-o1": [VALUES],
    "fp32": [], "bf16-mixed": [], "fp16-mixed-unscaled": [], "fp8-current": [], "mxfp8": [], "bf16-nomaster": [],
}  # fmt: skip


def step(model, optimizer, scaler=None):
    loss = model(batch()[0]).square().mean()
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def warnings_of(name, make=torch.optim.AdamW, scaler=None, model=None):
    """The warnings of three steps, and a fourth of an optimizer that was made after them."""
    model = mlp() if model is None else model
    halfstep.apply(model, name)
    trained = [p for p in model.parameters() if p.requires_grad]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for optimizer in [make(trained)] * 3 + [make(trained)]:
            step(model, optimizer, scaler)
            if name == "fp8lm-o1":
                halfstep.advance(model)
    return [warning for warning in found if "follows recipe" in str(warning.message)]


@pytest.mark.quick(*sorted({*LOST} - {"fp8lm-o1"}))
@pytest.mark.parametrize("name", LOST)
def test_a_stock_optimizer_warns_once_of_what_is_lost(name):
    found = warnings_of(name)
    assert len(found) == bool(LOST[name])
    for warning in found:
        said = str(warning.message)
        parts = (UNSCALED, NO_MASTERS, TO_NEAREST, VALUES, MOMENTS)
        assert [part for part in parts if part in said] == LOST[name]
        assert re.search(rf"Sequential follows recipe '{name}', and its AdamW does not.* halfstep\.optimize\(", said)
        assert warning.filename == __file__


def torchao_adamw(parameters, **options):
    torchao = pytest.importorskip("torchao", reason="torchao is not installed")
    return torchao.optim._AdamW(parameters, **options)


def with_adapter():
    """A frozen network with a trained layer whose name is LoRA's."""
    model = mlp()
    model.requires_grad_(False)
    model.lora_A = torch.nn.Linear(4, 4)
    model.append(model.lora_A)
    return model


QUIET = {
    "torch's scaler": partial(warnings_of, "fp16-mixed", scaler=torch.amp.GradScaler("cpu")),
    "our scaler": partial(warnings_of, "fp16-mixed", scaler=halfstep.LossScaler()),
    "our scaler over a fused step": partial(
        warnings_of, "fp16-mixed", partial(torch.optim.AdamW, fused=True), torch.amp.GradScaler("cpu")
    ),
    "bitsandbytes' moments": partial(warnings_of, "adamw-8bit", bnb.optim.AdamW8bit),
    "torchao's stochastic rounding": partial(
        warnings_of, "bf16-stochastic", partial(torchao_adamw, bf16_stochastic_round=True)
    ),
    "our own class": partial(
        warnings_of, "bf16-stochastic", partial(halfstep.optim.AdamW8bit, bf16_stochastic_round=True)
    ),
    "GaLore's own class": partial(warnings_of, "bf16-mixed", halfstep.optim.GaLoreAdamW),
}


@pytest.mark.quick(*sorted({*QUIET} - {"torchao's stochastic rounding"}))  # compiles for a minute
@pytest.mark.parametrize("case", QUIET)
def test_setups_that_lose_nothing_do_not_warn(case):
    assert [str(warning.message) for warning in QUIET[case]()] == []


def test_adapters_in_float32_need_no_masters():
    model = with_adapter()
    assert [str(warning.message) for warning in warnings_of("bf16-master", model=model)] == []
    assert model[0].weight.dtype == torch.bfloat16


def test_a_disabled_scaler_is_warned_of():
    (warning,) = warnings_of("fp16-mixed", scaler=torch.amp.GradScaler("cpu", enabled=False))
    assert UNSCALED in str(warning.message)


def hooks_left():
    """The number of hooks, after a step has removed those of deleted models."""
    gc.collect()
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()
    return len(hooks)


def test_a_model_may_be_deleted_while_torch_iterates_over_the_hooks():
    before, models = hooks_left(), [mlp()]

    def collect(*_):
        models.clear()
        gc.collect()

    handle = register_optimizer_step_pre_hook(collect)
    halfstep.apply(models[0], "bf16-master")
    copy.deepcopy(models[0])
    other = mlp(1)
    step(other, torch.optim.AdamW(other.parameters()))
    handle.remove()
    assert hooks_left() == before


def test_steps_on_other_models_do_not_warn_and_hooks_are_removed():
    """Hooks go with `optimize`, `revert` and the end of the model, so that a step costs no more afterwards."""
    before = hooks_left()
    for name in LOST:
        model = mlp()
        halfstep.prepare(model, torch.optim.AdamW(model.parameters()), name)
        assert len(hooks) == before
    teacher, student = mlp(), mlp(1)
    halfstep.apply(teacher, "bf16-master")
    assert len(hooks) == before + 1
    step(student, torch.optim.AdamW(student.parameters()))
    halfstep.revert(teacher)
    assert len(hooks) == before
    halfstep.apply(teacher, "bf16-master")
    del teacher
    assert hooks_left() == before


def test_two_models_are_each_warned_of():
    """torch iterates over both hooks before each step, so none may be removed meanwhile."""
    hooks_left()
    pairs = [(model, torch.optim.AdamW(model.parameters())) for model in (mlp(), mlp(1))]
    for model, _ in pairs:
        halfstep.apply(model, "bf16-master")
    before = len(hooks)
    for model, optimizer in pairs:
        with pytest.warns(UserWarning, match=NO_MASTERS):
            step(model, optimizer)
    assert len(hooks) == before - 2
