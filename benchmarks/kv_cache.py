"""KV caches in 8 and 4 bits: the KL of next-token distributions by length, bytes, and step time: docs/inference.md.

    python benchmarks/kv_cache.py [--keep]

A small Llama is trained on the lab's text for each of three seeds, then reads 8 held-out windows of 256 bytes, one
byte per call. KL is of its next-byte distribution with the full cache to that with the other cache, in float64,
averaged over the first or the last eighth of the window. Time is the CPU time of a step after 128 bytes, relative to
the full cache's in the same round. transformers' QuantizedCache("fp8") has one scale per tensor from its first
call. --keep writes results/kv_cache.json.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache, QuantizedCache

from halfstep.integrations.kv_cache import KINDS, LowBitCache
from halfstep.lab.environment import environment
from halfstep.lab.interval import paired
from halfstep.lab.task import VOCABULARY
from halfstep.lab.tasks import experiment_for, get_task
from harness import keep, keeps


SEEDS, STEPS, LENGTH, BATCH, ROUNDS = 3, 200, 256, 8, 15
EIGHTH = LENGTH // 8
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
PEER = "transformers, fp8"
CACHES: dict[str, Callable[[], Any]] = {
    **{kind: partial(LowBitCache, CONFIG, kind) for kind in KINDS},
    PEER: partial(QuantizedCache, "fp8", CONFIG),
}


def trained(seed: int) -> tuple[LlamaForCausalLM, Tensor]:
    """A trained model, and held-out windows."""
    task = get_task("lm").open(experiment_for("lm", recipes=("fp32",), batch=BATCH, context=LENGTH))
    torch.manual_seed(seed)
    model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, STEPS + 1):
        tokens = task.batch(seed, step)["tokens"]
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), task.held_out()[seed]["tokens"]


@torch.no_grad()
def read(model: LlamaForCausalLM, tokens: Tensor, cache: Any) -> Tensor:
    """Log-probabilities in float64 after each token, with one call per token."""
    rows = [model(token, past_key_values=cache).logits[:, -1].double().log_softmax(-1) for token in tokens.split(1, 1)]
    return torch.stack(rows, 1)


def divergences(model: LlamaForCausalLM, tokens: Tensor) -> dict[str, list[float]]:
    """By cache, the mean KL in each eighth of the window."""
    full = read(model, tokens, DynamicCache(config=CONFIG))
    found = {}
    for name, make in CACHES.items():
        kl = (full.exp() * (full - read(model, tokens, make()))).sum(-1)
        found[name] = [float(part.mean()) for part in kl.split(EIGHTH, 1)]
    return found


def times(model: LlamaForCausalLM, tokens: Tensor) -> dict[str, list[float]]:
    """By cache, the CPU times of steps after half of the window, relative to the full cache's in the same round."""
    half, ratios = LENGTH // 2, {name: [] for name in CACHES}
    caches = {"full": DynamicCache(config=CONFIG), **{name: make() for name, make in CACHES.items()}}
    with torch.no_grad():
        for cache in caches.values():
            model(tokens[:, :half], past_key_values=cache)
        for number in range(ROUNDS):
            took = {}
            for name, cache in caches.items():
                began = time.process_time()
                model(tokens[:, half + number : half + number + 1], past_key_values=cache)
                took[name] = time.process_time() - began
            for name, own in ratios.items():
                own.append(took[name] / took["full"])
    return ratios


def bits(model: LlamaForCausalLM, tokens: Tensor) -> dict[str, float]:
    """Bits per stored value in each cache."""
    found, numbers = {PEER: 8.0}, 2 * CONFIG.num_hidden_layers * CONFIG.num_key_value_heads * CONFIG.head_dim
    for kind in KINDS:
        cache = LowBitCache(CONFIG, kind)
        read(model, tokens[:, :8], cache)
        found[kind] = 8 * cache.nbytes / (numbers * tokens[:, :8].numel())
    return found


def table(data: dict[str, Any]) -> str:
    """The table of docs/inference.md."""
    first, last = f"KL at 1 to {EIGHTH}", f"at {LENGTH - EIGHTH + 1} to {LENGTH} (95% interval)"
    lines = [f"| cache | bits a number | {first} | {last} | CPU time of a step |", f"|{' --- |' * 5}"]
    for name, row in data["rows"].items():
        ends, (low, high) = row["last"], row["interval"]
        lines.append(
            f"| {name} | {row['bits']:.2f} | {statistics.fmean(row['first']):.1e} | {statistics.fmean(ends):.1e} "
            f"({low:.1e} to {high:.1e}) | {row['time']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train, measure, print, and with --keep write."""
    kept = keeps(__doc__)
    runs = []
    for seed in range(SEEDS):
        model, tokens = trained(seed)
        runs.append(divergences(model, tokens))
        print(seed, {name: (kl[0], kl[-1]) for name, kl in runs[-1].items()}, flush=True)
    ratios, size = times(model, tokens), bits(model, tokens)
    rows = {}
    for name in CACHES:
        last = [run[name][-1] for run in runs]
        interval = paired(last)
        rows[name] = {
            "bits": size[name],
            "first": [run[name][0] for run in runs],
            "last": last,
            "interval": [interval.low, interval.high],
            "time": statistics.median(ratios[name]),
        }
    data = {"machine": environment(), "rows": rows}
    print(table(data))
    if kept:
        keep("kv_cache", data)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
