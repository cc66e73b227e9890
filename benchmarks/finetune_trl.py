"""FP8-LM fine-tuning: SFT and DPO by TRL of a small Llama under fp8lm-o2 and fp32.

    python benchmarks/finetune_trl.py [--keep] [--out FOLDER]

The Llama is trained in fp32 on Python's standard library, byte by byte, and fine-tuned on the READMEs of the packages
that are installed beside halfstep. A preference pair is a prompt from a README, its continuation, and the same with the
letters of every other word shuffled. The DPO policy and its reference start from the fp32 fine-tuning of
seed 0. Loss and reward accuracy are of held-out READMEs; bytes are measured on the live tensors. --keep writes
results/finetune_trl.json. An interrupted run resumes with the trainings that are missing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import random
import re
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import halfstep
from finetune import differences_to_fp32, readmes
from halfstep.integrations.transformers import HalfstepMixin
from halfstep.lab.environment import environment
from halfstep.lab.task import load_corpus
from halfstep.memory import measure_persistent
from harness import keep


RECIPES, SEEDS, TEXT, PROMPT, REPLY = ("fp32", "fp8lm-o2"), 3, 126, 64, 48
SIZES = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
QUIET = {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "activation_checkpointing": False}
STEPS = {"pretraining": 300, "sft": 80, "dpo": 60}
RATES = {"pretraining": 4e-3, "sft": 2e-3, "dpo": 5e-4}
BATCH, HELD_OUT = 8, 200
State = dict[str, torch.Tensor]


class SFT(HalfstepMixin, SFTTrainer):  # type: ignore[misc]
    """TRL's SFT trainer under a recipe."""


class DPO(HalfstepMixin, DPOTrainer):  # type: ignore[misc]
    """TRL's DPO trainer under a recipe."""


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte."""
    words = ["<pad>", "<end>", *sorted(ByteLevel.alphabet())]
    model = Tokenizer(BPE({word: i for i, word in enumerate(words)}, []))
    model.pre_tokenizer, model.decoder = ByteLevel(add_prefix_space=False, use_regex=False), Decoder()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<end>")


def llama(state: State | None = None) -> LlamaForCausalLM:
    """A Llama of 0.13 million parameters, initialised with seed 0 or with these weights."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=258, max_position_embeddings=256, pad_token_id=0, **SIZES))
    if state is not None:
        model.load_state_dict(state)
    return model


def text_of(folder: str | None, split: str) -> str:
    """The training or held-out split of a corpus, as text."""
    return bytes(getattr(load_corpus(folder, TEXT), split).tolist()).decode("utf-8", errors="ignore")


def windows(text: str, count: int, seed: int = 0) -> Dataset:
    """Pieces of a text from random positions."""
    places = random.Random(seed).choices(range(len(text) - TEXT), k=count)
    return Dataset.from_dict({"text": [text[place : place + TEXT] for place in places]})


def misspelt(text: str, draw: random.Random) -> str:
    """The text with the letters of every other word shuffled."""
    odd = itertools.cycle((False, True))
    return re.sub(r"\w{3,}", lambda word: "".join(draw.sample(word[0], len(word[0]))) if next(odd) else word[0], text)


def pairs(text: str, count: int, seed: int = 0) -> Dataset:
    """Preference pairs: a prompt with its continuation (chosen) and the misspelt continuation (rejected)."""
    rows, draw = [], random.Random(seed)
    while len(rows) < count:
        after = PROMPT + draw.randrange(len(text) - PROMPT - REPLY)
        reply = text[after : after + REPLY]
        if (wrong := misspelt(reply, draw)) != reply:
            rows.append({"prompt": text[after - PROMPT : after], "chosen": reply, "rejected": wrong})
    return Dataset.from_list(rows)


def training_arguments(kind: str, seed: int, out: Path) -> dict[str, Any]:
    """The training arguments."""
    return {
        "output_dir": str(out), "max_steps": STEPS[kind], "learning_rate": RATES[kind], "seed": seed,
        "warmup_steps": 10, "lr_scheduler_type": "cosine", "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": 32, "logging_steps": 20, "max_length": 128, "save_strategy": "no", **QUIET,
    }  # fmt: skip


def sft(recipe: str, start: State | None, data: tuple[Dataset, Dataset], kind: str, seed: int, out: Path) -> Any:
    """A trained SFTTrainer."""
    options = {
        "args": SFTConfig(**training_arguments(kind, seed, out)),
        "train_dataset": data[0],
        "eval_dataset": data[1],
    }
    trainer = SFT(llama(start), recipe=recipe, generator=seed, processing_class=tokenizer(), audit=False, **options)
    trainer.train()
    return trainer


def dpo(recipe: str, start: State, data: tuple[Dataset, Dataset], seed: int, out: Path) -> Any:
    """A trained DPOTrainer."""
    options = {
        "args": DPOConfig(**training_arguments("dpo", seed, out)),
        "train_dataset": data[0],
        "eval_dataset": data[1],
    }
    models = {"model": llama(start), "ref_model": llama(start)}
    trainer = DPO(**models, recipe=recipe, generator=seed, processing_class=tokenizer(), audit=False, **options)
    trainer.train()
    return trainer


def result(trainer: Any) -> dict[str, Any]:
    """Held-out figures, and persistent bytes by role."""
    found = trainer.evaluate()
    figures = {name: found[name] for name in ("eval_loss", "eval_rewards/accuracies") if name in found}
    stays = measure_persistent(trainer.model, trainer.optimizer.optimizer)
    count = sum(p.numel() for p in trainer.model.parameters())
    own = {"bytes": {role: n for role, n in asdict(stays).items() if n}, "parameters": count}
    if getattr(trainer, "ref_model", None) is not None:
        own["reference"] = sum(p.numel() * p.element_size() for p in trainer.ref_model.parameters())
    return {**figures, **own, "skipped_steps": trainer.scaler.skipped_steps}


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """The `result` stored in a file; if the file is missing, made now and written there."""
    if not path.exists():
        row = result(make())
        path.write_text(json.dumps(row))
        print(path.stem, {name: value for name, value in row.items() if name != "bytes"}, flush=True)
    return json.loads(path.read_text())


def trained(path: Path, make: Callable[[], Any]) -> State:
    """The weights stored in a file; if it is missing, trained now and written there."""
    if not path.exists():
        torch.save(make().model.state_dict(), path)
    return torch.load(path)  # type: ignore[no-any-return]


def measured(out: Path) -> dict[str, Any]:
    """Run every training that is missing; the results of all."""
    out.mkdir(parents=True, exist_ok=True)
    folder = str(readmes(out / "readmes"))
    library, train, rest = text_of(None, "train"), text_of(folder, "train"), text_of(folder, "held_out")
    text, pretraining = (windows(train, 1000), windows(rest, HELD_OUT)), windows(library, 2500)
    chosen = pairs(train, 500), pairs(rest, HELD_OUT)
    base = trained(out / "base.pt", lambda: sft("fp32", None, (pretraining, text[1]), "pretraining", 0, out))
    policy = trained(out / "policy.pt", lambda: sft("fp32", base, text, "sft", 0, out))
    makers = {
        "sft": lambda recipe, seed: sft(recipe, base, text, "sft", seed, out),
        "dpo": lambda recipe, seed: dpo(recipe, policy, chosen, seed, out),
    }
    found: dict[str, Any] = {kind: {recipe: [] for recipe in RECIPES} for kind in makers}
    for seed, (kind, make), recipe in itertools.product(range(SEEDS), makers.items(), RECIPES):
        found[kind][recipe].append(kept(out / f"{kind} {recipe} {seed}.json", partial(make, recipe, seed)))
    return {"digest": load_corpus(folder, TEXT).digest, **found, **compared(found)}


def compared(found: dict[str, Any]) -> dict[str, Any]:
    """Losses and accuracies compared with fp32 as `halfstep compare` judges, and persistent bytes compared with
    bf16-master."""

    def of(kind: str, name: str) -> dict[str, Any]:
        return {recipe: [row[name] for row in rows] for recipe, rows in found[kind].items()}

    accuracy = "eval_rewards/accuracies"
    differences = {
        "sft_loss": differences_to_fp32(of("sft", "eval_loss")),
        "dpo_loss": differences_to_fp32(of("dpo", "eval_loss")),
        "dpo_accuracy": differences_to_fp32(of("dpo", accuracy), higher_is_better=True),
        "accuracy": {recipe: sum(each) / len(each) for recipe, each in of("dpo", accuracy).items()},
    }
    return differences | {"to_bf16_master": {recipe: saved(recipe) for recipe in ("fp8lm-o2", "fp8lm-o3")}}


def saved(recipe: str) -> dict[str, float]:
    """The shares of persistent bytes that a recipe saves over bf16-master for this model."""
    ours, theirs = bytes_of(recipe), bytes_of("bf16-master")
    roles = {"weights": ("weights",), "optimizer": ("master", "states"), "all": tuple(theirs)}
    return {name: 1 - sum(ours[r] for r in own) / sum(theirs[r] for r in own) for name, own in roles.items()}


def bytes_of(recipe: str) -> dict[str, int]:
    """The persistent bytes of the model under a recipe, by role."""
    model = llama()
    model, optimizer, _ = halfstep.prepare(model, torch.optim.AdamW(model.parameters()), recipe)
    return asdict(measure_persistent(model, optimizer))


def main() -> None:
    """Train the runs that are missing, print, and with --keep write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune_trl"))
    arguments = parser.parse_args()
    versions = {name: version(name) for name in ("transformers", "trl")}
    settings = {"steps": STEPS, "rates": RATES, "batch": BATCH, "seeds": SEEDS, "sizes": SIZES}
    data = {"machine": environment(), "versions": versions, "settings": settings, **measured(arguments.out)}
    for name, row in data.items():
        if name not in ("machine", "sft", "dpo"):
            print(name, row)
    if arguments.keep:
        keep("finetune_trl", data)


if __name__ == "__main__":
    torch.set_num_threads(1)
    disable_progress_bars()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    main()
