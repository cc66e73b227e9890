"""Resuming under another recipe in Trainer, Lightning and Accelerate raises, or says what happens to the states;
switching to a stock trainer works."""

import json
import re
import warnings

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from lightning.pytorch.callbacks import ModelCheckpoint
from matrix_accelerate import accelerated, loader
from matrix_lightning import Module, fit, trainer_of
from trainers import StopAfter, arguments, examples, llama, state_of, trainer
from transformers import Trainer, TrainerCallback

from halfstep.errors import RecipeError
from halfstep.recipe import digest, get_recipe
from tiny import assert_same, copied


SAVES = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
STAGED = "fp8-delayed until 50%, then bf16-mixed"
# (saved recipe, new recipe, expected message); these changes were once silent
PAIRS = [
    ("bf16-mixed", "fp8-delayed", "scaling states start over"),
    ("bf16-mixed", "bf16-stochastic", "weights that were kept in more bits are rounded to bf16"),
    ("fp16-mixed", "bf16-mixed", "the loss scale, 65536, is dropped"),
    ("bf16-mixed", "fp16-mixed", "the loss scale (begins anew|starts over) at 65536"),
    ("fp32", "bf16-collage-plus", "masters of .* parameters begin from the present weights"),
    ("bf16-master", "bf16-mixed", "the masters of .* parameters are dropped"),
    (STAGED, "bf16-mixed", "stages end, and this recipe holds to the end"),
    ("bf16-mixed", STAGED, "it goes on after step . in stage 2"),
]
some = pytest.mark.quick(*(f"{one}-{other}" for one, other, _ in PAIRS[:1]))
pairs = pytest.mark.parametrize(
    ("saved", "recipe", "warning"), PAIRS, ids=[f"{one}-{other}" for one, other, _ in PAIRS]
)


def stopped(recipe, folder, **options):
    trained = trainer(recipe, folder, callbacks=[StopAfter(2)], **SAVES, **options)
    trained.train()
    return str(folder / "checkpoint-2")


@some
@pytest.mark.filterwarnings("ignore:the .* state was saved under recipe")
@pairs
def test_trainer_checkpoint_of_another_recipe_raises_or_is_reported(saved, recipe, warning, tmp_path):
    checkpoint = stopped(saved, tmp_path)
    other = trainer(recipe, tmp_path, max_steps=4)
    before = {name: value.clone() for name, value in other.model.state_dict().items()}
    message = rf"checkpoint-2 was saved under recipe '{get_recipe(saved).name}', and this run.*recipe_change='allow'"
    with pytest.raises(RecipeError, match=message):
        other.train(resume_from_checkpoint=checkpoint)
    assert_same(dict(other.model.state_dict()), before)
    changed = trainer(recipe, tmp_path, max_steps=4, how={"recipe_change": "allow"})
    with pytest.warns(UserWarning, match=warning):
        changed.train(resume_from_checkpoint=checkpoint)
    assert changed.state.global_step == 4
    if "until" in recipe:
        assert "stage 2 of 2" in str(changed.model._halfstep.applied.schedule)


def test_trainer_checkpoint_names_its_recipe(tmp_path):
    checkpoint = tmp_path / "checkpoint-2"
    stopped("fp8-delayed", tmp_path)
    named = {"recipe": "fp8-delayed", "digest": digest(get_recipe("fp8-delayed"))}
    assert json.loads((checkpoint / "halfstep.json").read_text()) == named
    for file, entry in (("optimizer.pt", "param_groups"), ("halfstep.pt", "halfstep")):
        found = torch.load(checkpoint / file, weights_only=True)[entry]
        assert (found[0] if entry == "param_groups" else found)["recipe"] == "fp8-delayed @" + named["digest"]


CODED = ("fp8lm-o2", "fp8-adam", "coat", "adamw-8bit")


@pytest.mark.quick("bf16-mixed", "galore")
@pytest.mark.parametrize("recipe", ["bf16-mixed", "fp8-delayed", "bf16-collage-plus", *CODED, "galore", "galore-8bit"])
def test_stock_trainer_resumes_our_checkpoint(recipe, tmp_path):
    """The checkpoint has no file on which a stock Trainer fails, and no codes where it reads values."""
    trained = trainer(recipe, tmp_path, model=llama(hidden_size=64), callbacks=[StopAfter(2)], **SAVES)
    trained.train()
    settings = arguments(tmp_path, max_steps=4, learning_rate=0.0)
    stock = Trainer(llama(hidden_size=64), settings, train_dataset=examples())
    loaded = []

    class Look(TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer, **kwargs):
            loaded.append(copied(optimizer.state_dict()["state"]))

    stock.add_callback(Look())
    stock.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert stock.state.global_step == 4
    if "galore" in recipe:
        assert loaded == [{}]
        return
    kept = trained.optimizer.optimizer.float32_state_dict()["state"]
    for number, moments in loaded[0].items():
        assert_same(moments["exp_avg"], kept[number]["exp_avg"])
        assert_same(moments["exp_avg_sq"], kept[number]["exp_avg_sq"])
    assert len(loaded[0]) == len([*llama().parameters()])


@pytest.mark.quick("bf16-mixed", "bf16-stochastic")
@pytest.mark.parametrize("recipe", ["bf16-mixed", "fp8-delayed", "fp16-mixed", "bf16-stochastic"])
def test_stock_trainer_checkpoint_resumes_under_a_recipe(recipe, tmp_path):
    stock = Trainer(llama(), arguments(tmp_path, **SAVES), train_dataset=examples(), callbacks=[StopAfter(2)])
    stock.train()
    resumed = trainer(recipe, tmp_path, max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4


def test_scaler_warnings_are_shown_by_trainer(tmp_path):
    """transformers suppresses warnings raised while it loads the scaler's state."""
    checkpoint = stopped("fp8-delayed", tmp_path)
    file = tmp_path / "checkpoint-2" / "halfstep.pt"
    torch.save({}, file)
    with pytest.warns(UserWarning, match="holds no scaling states, so the model's scales start over"):
        trainer("fp8-delayed", tmp_path, max_steps=4).train(resume_from_checkpoint=checkpoint)


def test_checkpoint_of_an_older_version_resumes_bit_for_bit(tmp_path):
    """Older checkpoints have the scaler's state in scaler.pt and name no recipe."""
    whole = trainer("fp8-delayed", tmp_path, **SAVES)
    whole.train()
    checkpoint = tmp_path / "checkpoint-2"
    (checkpoint / "halfstep.json").unlink()
    (checkpoint / "halfstep.pt").rename(checkpoint / "scaler.pt")
    for file in ("scaler.pt", "optimizer.pt"):
        state = torch.load(checkpoint / file, weights_only=True)
        for part in (*state.get("param_groups", ()), state.get("halfstep", {})):
            part.pop("recipe", None)
        torch.save(state, checkpoint / file)
    resumed = trainer("fp8-delayed", tmp_path, max_steps=4)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert_same(state_of(resumed), state_of(whole))


@some
@pairs
def test_lightning_checkpoint_of_another_recipe_raises_or_is_reported(saved, recipe, warning, tmp_path):
    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit(trainer_of(saved, callbacks=[saves], enable_checkpointing=True, max_steps=2), Module(saved))
    with pytest.raises(RecipeError, match=r"was saved under recipe.*recipe_change='allow'"):
        fit(trainer_of(recipe), Module(recipe), resume=tmp_path / "step=2.ckpt")
    changed = trainer_of(recipe, recipe_change="allow")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        changed.fit(Module(recipe), loader(), ckpt_path=tmp_path / "step=2.ckpt")
    assert any(re.search(warning, str(one.message)) for one in caught)


@some
@pairs
@pytest.mark.filterwarnings("ignore:the .* state was saved under recipe")
def test_accelerate_checkpoint_of_another_recipe_raises_or_is_reported(saved, recipe, warning, tmp_path):
    def run(recipe, **options):
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        steps = {"total_steps": 4} if "until" in recipe else {}
        return accelerated(recipe, epochs=1, **steps, **options)

    _, accelerator, _ = run(saved)
    accelerator.save_state(str(tmp_path / "state"))
    with pytest.raises(RecipeError, match=r"was saved under recipe.*recipe_change='allow'"):
        run(recipe, resume=str(tmp_path / "state"))
    with pytest.warns(UserWarning, match=warning):
        run(recipe, resume=str(tmp_path / "state"), recipe_change="allow")
