"""The matrix's column for transformers' Trainer: equals the documented loop bit for bit, uninterrupted or resumed."""

import tempfile

from trainers import documented_loop, state, state_of, trainer

from tiny import are_same, assert_same


COLUMN = "Trainer"


def trains(recipe):
    """Eight steps equal the documented loop's, and those of a run resumed after four."""
    with tempfile.TemporaryDirectory() as folder:
        whole = trainer(recipe, folder, save_strategy="steps", save_steps=4)
        whole.train()
        resumed = trainer(recipe, folder)
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
    assert_same(state_of(resumed), state_of(whole))
    assert_same(resumed.losses, whole.losses[8:])
    *prepared, losses = documented_loop(recipe, whole.fed, whole.generator_state)
    assert_same(losses, whole.losses)
    assert_same(state(*prepared), state_of(whole))
    fp32 = state(*documented_loop("fp32", whole.fed, whole.generator_state)[:3])
    assert recipe == "fp32" or not are_same(fp32[0], state_of(whole)[0]), "nothing was rounded"
