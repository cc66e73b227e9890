"""The matrix's column for TRL's SFTTrainer: steps near fp32's, outputs in the recipe's dtype, generation works."""

import functools
import tempfile

import torch
from trainers import Recording, dataset, llama, options, tokenizer, tokens
from trl import SFTConfig, SFTTrainer
from ways import assert_near_fp32, under, values

from halfstep.recipe import DTYPES, get_recipe


COLUMN = "TRL's SFT"


class Tuner(Recording, SFTTrainer):
    """SFTTrainer that records its losses and batches."""


def tuned(recipe, model, **more):
    """A trainer after eight steps of SGD."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"optim": "sgd", "learning_rate": 0.5, "bf16": False, **more}
        args = SFTConfig(**options(folder, **settings))
        how = {"train_dataset": dataset(), "processing_class": tokenizer(), "generator": 3, "audit": False}
        trainer = Tuner(model, args, recipe=recipe, **how)
        trainer.train()
    return trainer


@functools.cache
def in_fp32():
    return values(tuned("fp32", llama()).model)


def trains(name):
    """Trains as in fp32 up to rounding, with layer outputs in the recipe's dtype."""
    model, seen = llama(), set()
    start = values(model)
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda module, given, out: seen.add(out.dtype))
    tuned(under(name), model)
    assert seen == {DTYPES[get_recipe(name).compute]}
    assert_near_fp32(name, start, values(model), in_fp32(), slack=2)
    ids = tokens(rows=1)
    generated = model.eval().generate(ids, max_new_tokens=2, do_sample=False)
    assert generated.shape == (1, 14)
    assert not torch.equal(generated[:, 12:], torch.zeros(1, 2))
