"""Accelerate's own loop gives the documented loop's results, or the integration raises an error that says why not."""

import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, GradScalerKwargs, find_executable_batch_size
from matrix_accelerate import accelerated, documented_loop

import halfstep
from halfstep.errors import LossScaleError, ModelError, OptimizerError, RecipeError
from halfstep.integrations.accelerate import prepare
from tiny import adamw, assert_same, batch, mlp


@pytest.fixture(autouse=True)
def _alone():
    """Reset the state that Accelerate keeps in classes."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def started(name, optimizer=adamw, **options):
    accelerator, model = Accelerator(cpu=True), mlp()
    model, optimizer = prepare(accelerator, model, optimizer(model), recipe=name, **{"generator": 3, **options})
    return accelerator, model, optimizer


def backward(accelerator, model, seed=1, times=1.0):
    x, y = batch(seed)
    accelerator.backward(F.mse_loss(model(x), y) * times)


def values(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_steps_with_overflows_equal_torchs_scaler():
    """Equal scales, skipped steps, learning rates and weights."""

    def trajectory(accelerator, model, optimizer, scheduler):
        found = []
        for step in range(20):
            backward(accelerator, model, step, times=float("inf") if step in (4, 11) else 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            scale = accelerator.scaler.get_scale()
            found.append((accelerator.optimizer_step_was_skipped, scale, scheduler.get_last_lr()))
        return found, values(model)

    def schedule(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    ours, model = Accelerator(cpu=True), mlp()
    optimizer = adamw(model)
    made = prepare(ours, model, optimizer, schedule(optimizer), recipe="fp16-mixed")
    found, weights = trajectory(ours, *made)

    stock, model = Accelerator(cpu=True), mlp()
    halfstep.apply(model, "fp16-mixed")
    stock.scaler = torch.amp.GradScaler("cpu")
    optimizer = adamw(model)
    expected, theirs = trajectory(stock, *stock.prepare(model, optimizer, schedule(optimizer)))

    assert found == expected
    assert [skipped for skipped, *_ in found] == [step in (4, 11) for step in range(20)]
    for one, other in zip(weights, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["fp32", "fp16-mixed"])
def test_norm_and_update_use_unscaled_gradients(name):
    plain = mlp()
    x, y = batch()
    F.mse_loss(plain(x), y).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    accelerator, model, optimizer = started(name, lambda m: torch.optim.SGD(m.parameters(), lr=1.0))
    before = values(model)
    backward(accelerator, model)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e-3)
    torch.testing.assert_close(norm, expected, rtol=1e-3, atol=0)
    optimizer.step()
    moved = torch.cat([(a - b).flatten() for a, b in zip(values(model), before, strict=True)]).norm()
    torch.testing.assert_close(moved, torch.tensor(1e-3), rtol=1e-2, atol=0)


def test_clipping_and_unscaling_in_any_order_use_unscaled_gradients():
    accelerator, model, optimizer = started("fp16-mixed")
    backward(accelerator, model)
    accelerator.unscale_gradients(optimizer)
    seen = [p.grad.clone() for p in model.parameters()]
    assert max(float(grad.abs().max()) for grad in seen) < 10
    accelerator.unscale_gradients()
    accelerator.clip_grad_norm_(model.parameters(), 1e9)
    assert_same([p.grad for p in model.parameters()], seen)
    accelerator.clip_grad_value_(model.parameters(), 0.01)
    assert_same([p.grad for p in model.parameters()], [grad.clamp(-0.01, 0.01) for grad in seen])


def test_one_parameter_is_clipped_by_its_own_norm():
    accelerator, model, _ = started("fp16-mixed")
    backward(accelerator, model)
    first = model[0].weight
    norm = accelerator.clip_grad_norm_(first, 1e-3)
    assert float(norm) < 10
    torch.testing.assert_close(first.grad.norm(), torch.tensor(1e-3), rtol=1e-3, atol=0)
    assert float(model[3].weight.grad.norm()) > 1e-2


@pytest.mark.parametrize(
    "clip", [lambda a, m: a.clip_grad_norm_(m.parameters(), 1.0), lambda a, m: a.unscale_gradients()]
)
def test_clipping_before_the_last_micro_batch_raises(clip):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = mlp()
    model, _ = prepare(accelerator, model, adamw(model), recipe="fp16-mixed")
    with accelerator.accumulate(model):
        backward(accelerator, model)
        with pytest.raises(LossScaleError, match=r"if accelerator\.sync_gradients"):
            clip(accelerator, model)


@pytest.mark.quick("fp32", "fp16-mixed")
@pytest.mark.parametrize("name", ["fp32", "bf16-stochastic", "bf16-master", "fp16-mixed", "fp8-delayed", "fp8lm-o2"])
def test_saved_state_resumes_bit_for_bit(tmp_path, name):
    whole, _, _ = accelerated(name, epochs=2)
    _, accelerator, _ = accelerated(name, epochs=1)
    accelerator.save_state(tmp_path)
    assert [path.name for path in Path(tmp_path).rglob("*") if "scaler" in path.name or "custom" in path.name] == [
        "scaler.pt"
    ]
    resumed, _, _ = accelerated(name, epochs=1, seed=5, resume=tmp_path)
    assert_same(resumed, whole)


def test_stages_begin_as_in_the_documented_loop():
    recipe = "fp8-delayed until 50%, then bf16-mixed"
    found, accelerator, _ = accelerated(recipe, total_steps=4)
    assert_same(found, documented_loop(recipe, total_steps=4))
    assert accelerator.scaler.state_dict()["halfstep"]["stages"]["stage"] == 1
    AcceleratorState._reset_state(True)
    with pytest.raises(RecipeError, match="total_steps"):
        accelerated(recipe)


def out_of_memory_once(recipe, model_of):
    """Run Accelerate's documented loop, which runs out of memory after the first attempt's step. Returns the weights
    that the second attempt starts and ends with, the accelerator, and references from the first attempt that are
    still alive."""
    accelerator, before = Accelerator(cpu=True), []

    @find_executable_batch_size(starting_batch_size=8)
    def attempt(size):
        accelerator.free_memory()
        alive = [one() for one in before]
        model = model_of()
        model, optimizer = prepare(accelerator, model, adamw(model), recipe=recipe, generator=3)
        first = values(model)
        optimizer.zero_grad()  # of the model's first attempt
        backward(accelerator, model)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if size == 8:
            before.extend(map(weakref.ref, (model, optimizer.optimizer, model[0].weight)))
            raise RuntimeError("CUDA out of memory.")
        return first, values(model), accelerator, alive

    return attempt()


@pytest.mark.parametrize("recipe", ["fp32", "fp16-mixed", "bf16-master", "fp8-delayed", "fp8lm-o2"])
def test_second_attempt_after_out_of_memory_equals_a_fresh_start(recipe):
    first, last, accelerator, alive = out_of_memory_once(recipe, mlp)
    assert alive == [None] * 3
    other, model, optimizer = started(recipe)
    assert_same(first, values(model))
    backward(other, model)
    other.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert_same(last, values(model))
    accelerator.free_memory()
    assert accelerator.scaler is None
    assert "clip_grad_norm_" not in vars(accelerator)


@pytest.mark.parametrize("recipe", ["fp32", "fp16-mixed", "bf16-stochastic", "fp8-delayed"])
def test_model_whose_optimizer_was_freed_is_prepared_again(recipe):
    model = mlp()
    first, last, _, _ = out_of_memory_once(recipe, lambda: model)
    once = mlp()
    assert any(not torch.equal(a, b) for a, b in zip(first, values(once), strict=True))
    with torch.no_grad():
        for parameter, value in zip(once.parameters(), first, strict=True):
            parameter.copy_(value)
    _, optimizer, scaler = halfstep.prepare(once, adamw(once), recipe, generator=3)
    x, y = batch(1)
    scaler.scale(F.mse_loss(once(x), y)).backward()
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    assert_same(last, values(once))


def test_freed_masters_give_a_warning():
    model = mlp()
    with pytest.warns(UserWarning, match=r"'bf16-master' they start again from the rounded weights.*build the model"):
        first, _, _, _ = out_of_memory_once("bf16-master", lambda: model)
    assert {value.dtype for value in first} >= {torch.bfloat16}
    accelerator, model, _ = started("bf16-master")
    accelerator.free_memory()
    with pytest.raises(RecipeError, match=r"already follows 'bf16-master'; halfstep\.revert it first"):
        prepare(accelerator, model, adamw(model), recipe="bf16-mixed")


REFUSED = {
    "bf16": (lambda: Accelerator(cpu=True, mixed_precision="bf16"), "mixed_precision='bf16'.*mixed_precision='no'"),
    "handler": (lambda: Accelerator(cpu=True, kwargs_handlers=[GradScalerKwargs()]), "GradScalerKwargs"),
    "second": (lambda: started("fp32")[0], r"free_memory\(\) first; for a second model take a second Accelerator\(\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_incompatible_accelerator_raises_and_changes_nothing(case):
    build, words = REFUSED[case]
    accelerator, model = build(), mlp()
    optimizer = adamw(model)
    with pytest.raises(RecipeError, match=words):
        prepare(accelerator, model, optimizer, recipe="fp16-mixed")
    assert type(model[0]) is torch.nn.Linear
    halfstep.apply(model, "fp32")  # the model follows no recipe yet


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (DistributedType.FSDP, "fully_shard.*halfstep.optimize"),
        (DistributedType.DEEPSPEED, "no deepspeed_plugin"),
        (DistributedType.MEGATRON_LM, "no megatron_lm_plugin"),
        (DistributedType.XLA, "masters would be lost"),
    ],
)
def test_engines_that_replace_parameters_raise(monkeypatch, kind, words):
    accelerator, model = Accelerator(cpu=True), mlp()
    monkeypatch.setattr(Accelerator, "distributed_type", kind)
    with pytest.raises(RecipeError, match=words):
        prepare(accelerator, model, adamw(model), recipe="bf16-master")


def test_model_parallelism_raises(monkeypatch):
    accelerator, model = Accelerator(cpu=True), mlp()
    config = SimpleNamespace(tp_enabled=True, cp_enabled=False, dp_shard_enabled=False)
    monkeypatch.setattr(Accelerator, "parallelism_config", config)
    with pytest.raises(RecipeError, match=r"parallelism_config.*fully_shard"):
        prepare(accelerator, model, adamw(model), recipe="fp32")


def test_prepare_needs_one_optimizer_and_its_model():
    accelerator, first, second = Accelerator(cpu=True), mlp(), mlp(1)
    with pytest.raises(OptimizerError, match="got 0 optimizers"):
        prepare(accelerator, first, recipe="fp32")
    with pytest.raises(OptimizerError, match=r"got 2 optimizers.*second Accelerator"):
        prepare(accelerator, first, adamw(first), second, adamw(second), recipe="fp32")
    with pytest.raises(ModelError, match="got 0 models"):
        prepare(accelerator, first, adamw(second), recipe="fp32")
    with pytest.raises(OptimizerError, match=r"was returned by accelerator\.prepare"):
        prepare(accelerator, *accelerator.prepare(first, adamw(first)), recipe="fp32")


def test_untrained_second_model_is_unchanged():
    accelerator, student, teacher = Accelerator(cpu=True), mlp(), mlp(1)
    other, optimizer, model = prepare(accelerator, teacher, adamw(student), student, recipe="bf16-stochastic")
    assert other is teacher
    assert {p.dtype for p in teacher.parameters()} == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert optimizer.optimizer.recipe.name == "bf16-stochastic"


def test_two_models_with_two_accelerators():
    """Their loss scales are independent, as a GAN's must be."""
    (first, one, a), (second, two, b) = started("fp16-mixed"), started("fp16-mixed")
    backward(first, one, times=float("inf"))
    backward(second, two)
    a.step()
    b.step()
    assert (first.optimizer_step_was_skipped, second.optimizer_step_was_skipped) == (True, False)
    assert first.scaler.get_scale() < second.scaler.get_scale()


def test_missing_accelerate_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "halfstep.integrations.accelerate")
    with pytest.raises(ImportError, match=r"pip install 'halfstep\[accelerate\]'"):
        import halfstep.integrations.accelerate  # noqa: F401


RANK = """
import sys, torch
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/.."]
torch.set_num_threads(1)
from matrix_accelerate import accelerated
for name in sys.argv[3].split(","):
    torch.save(accelerated(name, generator=int(sys.argv[4]) + 3)[0], f"{sys.argv[2]}/{name}-{sys.argv[4]}.pt")
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks_are_equal_and_train_like_one_process(tmp_path):
    """Ranks are equal bit for bit under each recipe; in fp32 they equal one process with both halves of each batch."""
    names = ["fp32", "bf16-stochastic", "bf16-master", "fp16-mixed", "fp8-delayed"]
    ports = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "ACCELERATE_USE_CPU": "true"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(Path(__file__).parent), str(tmp_path), ",".join(names), str(rank)],
            env={**os.environ, **ports, **paths, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in (0, 1)
    ]
    assert [rank.wait(300) for rank in ranks] == [0, 0]
    for name in names:
        first, second = (torch.load(tmp_path / f"{name}-{rank}.pt") for rank in (0, 1))
        assert_same(first, second)
        start = [p.detach() for p in mlp().parameters()]
        assert any(not torch.equal(a.float(), b) for a, b in zip(first.values(), start, strict=True))
