"""Trainer under recipes: logs, clipping, skipped steps, saving, resuming, and rejected configurations."""

import logging
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from trainers import (
    CHECKPOINTING,
    IS_CHECKPOINTING,
    STEPS,
    Trained,
    arguments,
    examples,
    llama,
    state_of,
    tokens,
    trainer,
)
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

import halfstep
from halfstep.errors import OptimizerError, RecipeError
from halfstep.integrations import transformers as integration
from halfstep.integrations.weights import CachedWeightsCallback
from tiny import are_same, assert_same, batch, copied, mlp


STAGED = "fp8-delayed until 50%, then bf16-mixed"


class OverflowAt(TrainerCallback):
    """Makes a parameter's gradient infinite at the given steps; records learning rates and loss scales."""

    def __init__(self, *steps):
        self.steps, self.rates, self.scales = steps, [], []

    def on_train_begin(self, args, state, control, **kwargs):
        weight = kwargs["model"].lm_head.weight
        weight.register_hook(lambda grad: grad / 0 if state.global_step in self.steps else grad)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.rates.append(kwargs["lr_scheduler"].get_last_lr()[0])

    def on_step_end(self, args, state, control, **kwargs):
        self.scales.append(kwargs["optimizer"].scaler.get_scale())


def logged(trained, name):
    return [row[name] for row in trained.state.log_history if name in row]


def test_skipped_steps_hold_the_schedule_and_are_logged(tmp_path, monkeypatch):
    overflow = OverflowAt(2, 5)
    trained = trainer("fp16-mixed", tmp_path, callbacks=[overflow], lr_scheduler_type="linear")
    records = []
    monkeypatch.setattr(integration._LOG, "handle", records.append)
    trained.train()
    rate = 5e-3 / STEPS
    assert overflow.rates == pytest.approx([5e-3 - rate * n for n in (0, 1, 2, 2, 3, 4, 4, 5)])
    assert overflow.scales == logged(trained, "loss_scale") == [2.0**16] * 2 + [2.0**15] * 3 + [2.0**14] * 3
    assert logged(trained, "skipped_steps") == [0, 0, 1, 1, 1, 2, 2, 2]
    said = "step 3 was skipped: the gradients of lm_head.weight are not finite; the loss scale is now 32768"
    assert [record.levelno for record in records] == [logging.WARNING] * 2
    assert records[0].getMessage() == said


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler("cpu"), halfstep.LossScaler()])
def test_accelerate_skips_steps_equally_with_our_and_torchs_scaler(scaler):
    model = mlp()
    halfstep.apply(model, "fp16-mixed")
    accelerator = Accelerator(mixed_precision="no", cpu=True)
    accelerator.scaler = scaler
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    skipped, scales = [], []
    for step in range(20):
        x, y = batch(step)
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        if step in (4, 11):
            model[0].weight.grad[0, 0] = math.nan
        optimizer.step()
        skipped.append(accelerator.optimizer_step_was_skipped)
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
    assert [step for step, was in enumerate(skipped) if was] == [4, 11]
    assert scales == [2.0**16] * 4 + [2.0**15] * 7 + [2.0**14] * 9
    expected = REACHED.setdefault("state", copied(model.state_dict()))  # torch's scaler runs first
    assert_same(copied(model.state_dict()), expected)


REACHED = {}


def test_clipped_and_logged_norms_are_unscaled(tmp_path):
    norms, moved = {}, {}
    for recipe in ("fp32", "fp16-mixed"):
        trained = trainer(recipe, tmp_path, max_grad_norm=1e-3, max_steps=1, optim="sgd", learning_rate=1.0)
        start = copied(trained.model.state_dict())
        trained.train()
        norms[recipe] = logged(trained, "grad_norm")[0]
        ends = trained.model.state_dict()
        moved[recipe] = math.sqrt(sum(float((ends[name] - start[name]).square().sum()) for name in start))
    assert norms["fp16-mixed"] == pytest.approx(norms["fp32"], rel=1e-3)
    assert norms["fp32"] > 0.1
    assert moved["fp16-mixed"] == pytest.approx(moved["fp32"], rel=1e-3)
    assert moved["fp32"] == pytest.approx(1e-3, rel=1e-2)
    unclipped = trainer("fp16-mixed", tmp_path, max_grad_norm=0.0, max_steps=1)
    unclipped.train()
    assert logged(unclipped, "grad_norm")[0] == pytest.approx(norms["fp32"], rel=1e-3)


def test_nonfinite_loss_is_logged_as_raw_loss(tmp_path):
    class Broken(Trained):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss * math.nan if self.state.global_step == 1 else loss

    told = arguments(tmp_path, max_steps=3)
    broken = Broken(llama(), told, train_dataset=examples(), recipe="fp16-mixed", generator=3, audit=False)
    broken.train()
    raw, loss = logged(broken, "raw_loss"), logged(broken, "loss")
    assert math.isnan(raw[1])
    assert not math.isnan(loss[1])
    assert [raw[0], raw[2]] == pytest.approx([loss[0], loss[2]], rel=1e-5)
    assert broken.scaler.skipped_steps == 1


@pytest.mark.parametrize("name", ["bf16", "fp16", "bf16_full_eval"])
def test_precision_arguments_with_a_recipe_raise(name, tmp_path):
    with pytest.raises(RecipeError, match=rf"{name}=True with recipe 'fp8-delayed'.*set {name}=False"):
        trainer("fp8-delayed", tmp_path, **{name: True})


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        ({"is_fsdp_enabled": True}, "FSDP replaces.*Use DDP.*fully_shard"),
        ({"is_deepspeed_enabled": True}, "DeepSpeed replaces.*Use DDP"),
        ({"accelerator": SimpleNamespace(parallelism_config=object(), mixed_precision="no")}, "split over ranks"),
        ({"accelerator": SimpleNamespace(parallelism_config=None, mixed_precision="fp8")}, "set it to 'no'"),
    ],
)
def test_sharding_engines_and_wrapped_forwards_raise(setup, said, monkeypatch, tmp_path):
    def created(self):
        stock = SimpleNamespace(parallelism_config=None, mixed_precision="no")
        vars(self).update({"is_fsdp_enabled": False, "is_deepspeed_enabled": False, "accelerator": stock, **setup})

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", created)
    with pytest.raises(RecipeError, match=said):
        trainer("bf16-master", tmp_path)


def test_several_gpus_in_one_process_raise(tmp_path):
    told = arguments(tmp_path)
    told._n_gpu = 2
    with pytest.raises(RecipeError, match=r"sees 2 GPUs.*torchrun --nproc_per_node=2"):
        Trained(llama(), told, train_dataset=examples(), recipe="fp8-delayed")


@pytest.mark.parametrize(
    ("optim", "said"),
    [
        ("adamw_8bit", "optim='adamw_torch' and take the recipe 'adamw-8bit'"),
        ("adamw_torch_4bit", "take the recipe 'adamw-8bit'"),
        ("paged_adamw_32bit", "such as 'adamw-8bit'"),
        ("galore_adamw_8bit", "the recipe 'galore'"),
        ("adafactor", "Adafactor"),
    ],
)
def test_other_libraries_optimizers_raise(optim, said, tmp_path):
    with pytest.raises(OptimizerError, match=said):
        trainer("bf16-master", tmp_path, optim=optim).train()


def test_stock_trainer_without_our_scaler_warns_once(tmp_path):
    model = llama()
    model, optimizer, _ = halfstep.prepare(model, torch.optim.AdamW(model.parameters()), "fp16-mixed")
    stock = Trainer(model, arguments(tmp_path), train_dataset=examples(), optimizers=(optimizer, None))
    with pytest.warns(UserWarning, match="set accelerator.scaler to it before accelerator.prepare") as warned:
        stock.train()
    assert len([w for w in warned if "loss scale" in str(w.message)]) == 1


def test_stages_follow_trainer_steps_and_second_training_raises(tmp_path):
    stages = []

    class Note(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            stages.append(halfstep.audit(kwargs["model"]).stage.split(",")[0])

    whole = trainer(STAGED, tmp_path, callbacks=[Note()], save_strategy="steps", save_steps=2)
    whole.train()
    assert stages == ["stage 1 of 2"] * 4 + ["stage 2 of 2"] * 4
    for step in (2, 6):  # one step in each stage
        resumed = trainer(STAGED, tmp_path)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert_same(state_of(resumed), state_of(whole))
    with pytest.raises(RecipeError, match="is after step 8 and the trainer after step 0"):
        whole.train()


@pytest.mark.slow
def test_trainer_can_continue_and_resume_its_own_run(tmp_path):
    whole = trainer("fp8-delayed", tmp_path, save_strategy="steps", save_steps=4)
    whole.train()
    expected = state_of(whole)
    whole.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same(state_of(whole), expected)
    prepared = whole.optimizer.optimizer
    whole.train()
    assert whole.optimizer.optimizer is prepared
    assert not are_same(state_of(whole), expected)


@pytest.mark.slow
def test_model_init_builds_a_model_for_each_training(tmp_path):
    told = arguments(tmp_path, max_steps=2)
    trained = Trained(
        model_init=lambda: llama(), args=told, train_dataset=examples(), recipe="fp8lm-o2", generator=3, audit=False
    )
    trained.train()
    first, model = state_of(trained), trained.model
    trained.train()
    assert trained.model is not model
    assert_same(state_of(trained), first)


@pytest.mark.quick("fp8-delayed")
@pytest.mark.parametrize("recipe", ["bf16-master", "fp8-delayed", "fp8lm-o2"])
def test_best_model_is_loaded_evaluated_saved_and_generates(recipe, tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 1e-2, "max_steps": 6}
    best["greater_is_better"] = True  # so that an earlier checkpoint is the best
    trained = trainer(recipe, tmp_path, how={"eval_dataset": examples(rows=6)}, **saves, **best)
    trained.train()
    losses = logged(trained, "eval_loss")
    assert max(losses) > losses[-1], losses
    assert trained.evaluate()["eval_loss"] == max(losses)
    trained.save_model(str(tmp_path / "saved"))
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same(copied(stock.state_dict()), copied(dict(trained.model.state_dict())))
    ids = tokens(rows=2)
    generated = trained.model.generate(ids, max_new_tokens=3, do_sample=False)
    assert generated.shape == (2, 15)
    assert (generated[:, :12] == ids).all()


def test_options_are_passed_to_prepare(tmp_path):
    how = {"module_filter": lambda module, path: "q_proj" in path, "generator": 5}
    trained = trainer("fp8-delayed", tmp_path, how=how, max_steps=1)
    trained.train()
    scales = [name for name, _ in trained.model.named_buffers() if "scaling" in name]
    assert scales
    assert all("q_proj" in name for name in scales)


@pytest.mark.slow
def test_gradient_checkpointing_changes_no_bit(tmp_path):
    plain = trainer("fp8-delayed", tmp_path, max_steps=2)
    again = trainer("fp8-delayed", tmp_path, max_steps=2, **{CHECKPOINTING: True})
    runs = {plain: [], again: []}
    for trained, found in runs.items():
        trained.model.model.layers[1].mlp.register_forward_pre_hook(lambda *_, found=found: found.append(None))
        trained.train()
    assert getattr(again.model, IS_CHECKPOINTING)
    assert len(runs[again]) == 2 * len(runs[plain]) > 0
    assert_same(state_of(again), state_of(plain))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, raised while tracing
@pytest.mark.parametrize("recipe", ["bf16-mixed", "fp8-delayed", "bf16-stochastic"])
def test_compiled_model_trains_like_eager(recipe, tmp_path):
    compiled = trainer(recipe, tmp_path, torch_compile=True, torch_compile_backend="aot_eager", max_steps=2)
    compiled.train()
    eager = trainer(recipe, tmp_path, max_steps=2)
    eager.train()
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-4)


DDP = Path(__file__).with_name("trainer_on_ranks.py")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp16-mixed", "fp8-delayed", "bf16-stochastic", "fp8lm-o2"])
def test_two_ranks_are_equal_skip_together_and_resume(recipe, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = subprocess.run([*command, str(DDP), recipe, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("alike") == 2, done.stdout[-1000:]


def test_audit_is_printed_when_training_ends(tmp_path, capsys):
    trained = trainer("bf16-master", tmp_path, how={"audit": True}, max_steps=1)
    trained.train()
    report = next(c for c in trained.callback_handler.callbacks if isinstance(c, integration.HalfstepCallback)).report
    assert str(report) in capsys.readouterr().out
    assert "bfloat16" in str(report)


def test_subclass_can_create_the_optimizer(tmp_path):
    class Own(Trained):
        def create_optimizer(self, model=None):
            if self.optimizer is None:
                self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3, weight_decay=0.0)
            return self.optimizer

    how = {"train_dataset": examples(), "recipe": "fp16-mixed", "generator": 3, "audit": False}
    # The usual optimizer has two groups, whose norms are summed in another order; nothing is clipped here.
    own, usual = (kind(llama(), arguments(tmp_path, max_grad_norm=1e9), **how) for kind in (Own, Trained))
    own.train()
    usual.train()
    assert own.losses == usual.losses
    assert own.scaler.is_enabled()
    assert own.evaluate(examples(rows=4))["eval_loss"] > 0
    own.train()  # again, with the optimizer it already has


@pytest.mark.parametrize("recipe", ["bf16-stochastic", "bf16-master"])
def test_loss_can_use_a_weight_directly(recipe, tmp_path):
    class Direct(Trained):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            hidden = model.model(input_ids=inputs["input_ids"]).last_hidden_state
            logits = torch.nn.functional.linear(hidden, model.lm_head.weight)
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
            return (loss, logits) if return_outputs else loss

    direct = Direct(llama(), arguments(tmp_path, max_steps=2), train_dataset=examples(), recipe=recipe, audit=False)
    direct.train()
    assert direct.evaluate(examples(rows=4))["eval_loss"] < 5
    assert direct.losses[0] == pytest.approx(4.17, rel=0.02)
    halfstep.revert(direct.model)
    direct.evaluate(examples(rows=4))


@pytest.mark.parametrize("steps", [3, 100])
def test_audit_callback_reports_lost_updates_of_a_stock_trainer(tmp_path, capsys, steps):
    """Reports after `steps` steps or at the end, and does not change training."""
    trained = []
    for callbacks in ([], [told := integration.AuditCallback(steps=steps)]):
        model = llama().bfloat16()
        args = arguments(tmp_path, learning_rate=1e-5)
        Trainer(model=model, args=args, train_dataset=examples(), callbacks=callbacks).train()
        trained.append(copied(model.state_dict()))
    assert_same(*trained)
    (report,) = told.reports
    assert report.loses
    assert report.updates[0].step == min(steps, STEPS)
    out = capsys.readouterr().out
    assert out.count("Your updates are being lost: 9") == 1
    assert "HalfstepTrainer as Trainer" in out


def test_cached_weights_are_rounded_once_per_step(tmp_path):
    runs, callback = [], CachedWeightsCallback()
    for callbacks in ([], [callback]):
        trained = trainer("fp8-current", tmp_path, callbacks=callbacks, gradient_accumulation_steps=3)
        trained.train()
        runs.append(dict(trained.model.state_dict()))
    assert_same(*runs)
    assert 3 * callback.cached.rounded == callback.cached.used > 0
    assert trained.model._halfstep.following.cached is None
