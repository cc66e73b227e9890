"""TRL's GRPO with trainer and rollout under the same or different recipes: their mismatch, step by step.

    python benchmarks/grpo.py [--keep]

A small Llama with random weights is rewarded for the share of even tokens. Before each generation the
rollout, a second model under its own recipe, takes the trainer's float32 weights, and TRL generates with it. KL and
differences are over the completions just drawn, from one call of each model. Three seeds. --keep writes
results/grpo.json and the table of docs/mismatch.md between `<!-- grpo -->` marks.
"""

from __future__ import annotations

import logging
import re
import tempfile
from importlib.metadata import version
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import halfstep
from halfstep.integrations.transformers import HalfstepMixin
from halfstep.lab.environment import environment
from harness import RESULTS, keep, keeps


PAIRS = (
    ("bf16-mixed", "bf16-mixed"),
    ("bf16-mixed", "fp8-current"),
    ("fp8-current", "fp8-current"),
    ("fp8-rowwise", "fp8-rowwise"),
)  # recipes of the trainer and of the rollout
SEEDS, STEPS, WORDS, PROMPT, REPLY, ROWS, EACH = 3, 60, 64, 4, 16, 32, 8
CLIP = 0.2
SIZES = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
PAGE = RESULTS.parent.parent / "docs" / "mismatch.md"
TABLE = re.compile(r"(?<=<!-- grpo -->\n).*?(?=<!-- end grpo -->)", re.DOTALL)


class GRPO(HalfstepMixin, GRPOTrainer):  # type: ignore[misc]
    """GRPO whose completions are sampled by a second model, the rollout, with the weights of the trained one."""

    rollout: LlamaForCausalLM
    seen: list[dict[str, float]]

    def _generate_single_turn(self, *args: Any, **named: Any) -> Any:
        self.rollout.load_state_dict(self.model.state_dict())
        trained, self.model_wrapped = self.model_wrapped, self.rollout
        try:
            drawn = super()._generate_single_turn(*args, **named)
        finally:
            self.model_wrapped = trained
        self.seen.append(self.differences(torch.tensor([[*p, *c] for p, c in zip(args[0], drawn[0], strict=True)])))
        return drawn

    @torch.no_grad()
    def differences(self, ids: torch.Tensor) -> dict[str, float]:
        """The mean KL of the rollout's next-token distributions to the trainer's, the largest difference of the sampled
        tokens' log-probabilities, the share of ratios that would be clipped, and the reward."""
        logs = [
            model(input_ids=ids).logits[:, PROMPT - 1 : -1].double().log_softmax(-1)
            for model in (self.rollout, self.model)
        ]
        chosen = [log.gather(-1, ids[:, PROMPT:, None]) for log in logs]
        ratio = (chosen[1] - chosen[0]).exp()
        return {
            "kl": float((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean()),
            "difference": float((chosen[0] - chosen[1]).abs().max()),
            "clipped": float(((ratio - 1).abs() > CLIP).double().mean()),
            "reward": float((ids[:, PROMPT:] % 2 == 0).double().mean()),
        }


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose word `wN` is token N, and none of which ends a text."""
    words = {**{f"w{number}": number for number in range(WORDS)}, "<pad>": WORDS, "<end>": WORDS + 1}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>", padding_side="left")


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of even tokens in each completion."""
    return [fmean(token % 2 == 0 for token in ids) for ids in completion_ids]


def model(seed: int) -> LlamaForCausalLM:
    """A small Llama without an end-of-text token."""
    torch.manual_seed(seed)
    made = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, eos_token_id=None, pad_token_id=None, **SIZES))
    made.generation_config.eos_token_id = made.generation_config.pad_token_id = None
    return made


def run(train: str, rollout: str, seed: int) -> list[dict[str, float]]:
    """The results of `differences` before each step."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [" ".join(f"w{n}" for n in row) for row in torch.randint(WORDS, (64, PROMPT), generator=generator)]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            folder, max_steps=STEPS, per_device_train_batch_size=ROWS, num_generations=EACH, learning_rate=2e-3,
            max_completion_length=REPLY, seed=seed, bf16=False, use_cpu=True, report_to=[], disable_tqdm=True,
            gradient_checkpointing=False, save_strategy="no", logging_strategy="no",
        )  # fmt: skip
        how = {"train_dataset": Dataset.from_dict({"prompt": prompts}), "processing_class": tokenizer()}
        trainer = GRPO(model(seed), reward_funcs=even, args=config, recipe=train, audit=False, **how)
        trainer.rollout, trainer.seen = model(seed), []
        halfstep.apply(trainer.rollout, rollout)
        trainer.train()
    return trainer.seen


def table(data: dict[str, Any]) -> str:
    """The table of docs/mismatch.md, one row per pair: the mean and range over seeds."""
    heads = "trained under | generated under | KL, first step | KL, last 10 | largest difference | reward, last 10"
    lines = [f"| {heads} |", "| --- |" + " --- |" * 5]
    for pair in data["pairs"]:
        runs = pair["seeds"]
        most = max(step["difference"] for run in runs for step in run)
        cells = [
            f"`{pair['train']}`",
            f"`{pair['rollout']}`",
            spread([run[0]["kl"] for run in runs]),
            spread([fmean(step["kl"] for step in run[-10:]) for run in runs]),
            f"{most:.1e}" if most else "0",
            f"{fmean(step['reward'] for run in runs for step in run[-10:]):.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def spread(found: list[float]) -> str:
    """The mean of several seeds with their minimum and maximum, as text."""
    return f"{fmean(found):.1e} ({min(found):.1e} to {max(found):.1e})" if any(found) else "0"


def main() -> None:
    """Train, print, and with --keep write."""
    kept = keeps(__doc__)
    disable_progress_bars()
    logging.disable(logging.WARNING)
    pairs = []
    for train, rollout in PAIRS:
        pairs.append({"train": train, "rollout": rollout, "seeds": [run(train, rollout, s) for s in range(SEEDS)]})
        print(table({"pairs": pairs[-1:]}), flush=True)
    data = {"machine": environment(), "trl": version("trl"), "steps": STEPS, "pairs": pairs}
    if kept:
        keep("grpo", data)
        PAGE.write_text(TABLE.sub(lambda _: table(data), PAGE.read_text()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
