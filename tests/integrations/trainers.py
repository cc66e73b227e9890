"""A small Llama, tokens, and arguments for Trainer and TRL's trainers; a Trainer that records its batches."""

import logging

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback, TrainingArguments

import halfstep
from halfstep.integrations.transformers import HalfstepMixin, HalfstepTrainer
from tiny import copied


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
QUIET = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
KNOWN = TrainingArguments.__dataclass_fields__  # transformers 5.8 has only the older name
CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in KNOWN else "gradient_checkpointing"
IS_CHECKPOINTING = f"is_{CHECKPOINTING}"
QUIET |= {CHECKPOINTING: False}  # TRL's arguments enable it, under an older name
STEPS, MICRO, ROWS = 8, 2, 2
logging.getLogger("transformers").setLevel(logging.ERROR)


def llama(seed=0, **options):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 64, "max_position_embeddings": 32, "pad_token_id": 0, "eos_token_id": 1, **SIZES}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **options}))


def tokens(rows=STEPS * MICRO * ROWS, length=12):
    return torch.randint(2, 64, (rows, length), generator=torch.Generator().manual_seed(1))


def examples(**options):
    return [{"input_ids": row, "labels": row} for row in tokens(**options)]


def dataset():
    return Dataset.from_dict({"input_ids": tokens().tolist()})


def tokenizer():
    words = {"<pad>": 0, "<end>": 1} | {f"w{i}": i for i in range(2, 64)}
    model = Tokenizer(WordLevel(words, unk_token="<pad>"))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>", pad_token="<pad>")


def options(folder, **more):
    """Arguments for any trainer: eight steps of two micro-batches, AdamW at a constant rate."""
    batches = {"max_steps": STEPS, "gradient_accumulation_steps": MICRO, "per_device_train_batch_size": ROWS}
    constant = {"learning_rate": 5e-3, "lr_scheduler_type": "constant"}
    return {"output_dir": str(folder), **QUIET, **batches, **constant, **more}


def arguments(folder, **more):
    return TrainingArguments(**options(folder, **more))


class Recording(HalfstepMixin):
    """Records each micro-batch with its loss, and torch's generator state before the first one."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        if not hasattr(self, "fed"):
            self.fed, self.losses, self.generator_state = [], [], torch.get_rng_state()
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.fed.append((inputs, num_items_in_batch))
        self.losses.append(loss.item())
        return loss


class Trained(Recording, HalfstepTrainer):
    """Trainer that records batches and losses."""


def trainer(recipe, folder, model=None, callbacks=(), how=None, **more):
    """A `Trained` for the recipe, ready to train."""
    how = {"audit": False, "generator": 3, "train_dataset": examples(), **(how or {})}
    return Trained(model or llama(), arguments(folder, **more), recipe=recipe, callbacks=list(callbacks), **how)


def documented_loop(recipe, fed, generator_state, max_norm=1.0):
    """The documented loop on a trainer's recorded batches; returns model, optimizer, scaler and losses."""
    model = llama()
    decays = {n for n, _ in model.named_parameters() if not n.endswith("norm.weight")}
    groups = [[p for n, p in model.named_parameters() if (n in decays) == first] for first in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group, "weight_decay": 0.0} for group in groups], lr=5e-3)
    prepared = model, optimizer, scaler = halfstep.prepare(model.train(), optimizer, recipe, generator=3)
    torch.set_rng_state(generator_state)
    losses = []
    for first in range(0, len(fed), MICRO):
        for inputs, items in fed[first : first + MICRO]:
            loss = model(**inputs, num_items_in_batch=items).loss
            scaler.scale(loss).backward()
            losses.append(loss.item())
        scaler.clip_grad_norm_(optimizer, max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return *prepared, losses


def state(model, optimizer, scaler):
    return copied([model.state_dict(), optimizer.state_dict()["state"], scaler.state_dict()])


def state_of(trained):
    return state(trained.model, trained.optimizer, trained.scaler)


class StopAfter(TrainerCallback):
    """Ends training after `steps` steps, like an interruption."""

    def __init__(self, steps):
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.steps
