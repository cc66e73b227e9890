"""Memory accounts of models too large for this machine, for docs/memory.md and the ledger.

python benchmarks/accounts.py [--keep]
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import Any

from halfstep.accounting import Account, account, load_subject, share
from halfstep.lab.environment import environment
from halfstep.recipe import Recipe
from halfstep.recipe.named.adamw_8bit import MAPS
from halfstep.recipe.projection import PROJECTOR, Projection
from harness import keep


MODELS = ("galore-1b", "llama-7b", "llama-13b")
OPTIMIZERS = (
    "bf16-mixed", "bf16-master", "bf16-stochastic", "bf16-collage-light", "bf16-pure",
    "adamw-8bit", "fp8-adam", "coat", "fp8lm-o2", "galore", "galore-bf16", "galore-8bit",
)  # fmt: skip
GIB = 2**30


def states_of(name: str, recipe: str | Recipe) -> Account:
    """The account of persistent memory (what stays from step to step), without that of a pass."""
    return account(replace(load_subject(name), batch=None), recipe)


def optimizers() -> dict[str, Any]:
    """Persistent bytes by model and recipe, with AdamW."""
    found: dict[str, Any] = {}
    for name in MODELS:
        for recipe in OPTIMIZERS:
            made = states_of(name, recipe)
            found.setdefault(name, {})[recipe] = {
                "bytes": asdict(made.bytes),
                "bytes_per_parameter": made.per_parameter,
                "GiB": made.bytes.persistent / GIB,
            }
            print(
                name, recipe, f"{made.per_parameter:.4g} bytes/param, {made.bytes.persistent / GIB:.2f} GiB", flush=True
            )
    return found


def galore() -> dict[str, Any]:
    """The shares of memory that GaLore with rank 1024 saves for LLaMA 7B in bf16: the paper's headline figures."""

    def of(**kinds: Any) -> Account:
        return states_of("llama-7b", Recipe("galore-7b", "", "Zhao et al. 2024", weights="bf16", **kinds))

    projection = Projection(rank=1024, share=None)
    adam, low = of(moments="bf16"), of(moments="bf16", projection=projection)
    two, four = (of(moments=((PROJECTOR, kind), *MAPS), projection=projection).bytes for kind in ("bf16", "fp32"))
    projectors = (four.states - two.states) // 2  # elements of the projectors
    whole, states = adam.bytes.persistent, adam.bytes.states
    rest = two.persistent - two.state_scales  # a float32 for each 256 moments, which the paper's count leaves out
    found = {
        "states": 1 - low.bytes.states / states,
        "states_8bit_projector_1_byte": 1 - (two.states - projectors) / states,
        "states_8bit_projector_2_bytes": 1 - two.states / states,
        "total_8bit_gradients_freed": 1 - (rest - two.gradients) / whole,
        "total_8bit_gradients_kept": 1 - rest / whole,
        "adam_GB": whole / 1e9,
        "galore_8bit_GB": (two.persistent - two.gradients) / 1e9,
    }
    print(found, flush=True)
    return found


def passes() -> dict[str, Any]:
    """Bytes of a training step by role, the ratio of activations to master weights, and what FP8-LM saves over bf16."""
    found: dict[str, Any] = {}
    for name, recipe, batch, how in (
        ("resnet-50", "fp16-master", 256, "none"),
        ("llama-7b", "bf16-master", 1, "none"),
        ("llama-7b", "bf16-master", 1, "full"),
        ("gpt3-175b", "bf16-master", 1, "full"),
        ("gpt3-175b", "fp8lm-o2", 1, "full"),
    ):
        made = account(load_subject(name), recipe, batch=batch, checkpointing=how)
        found[f"{name} {recipe} {how}"] = {**asdict(made.bytes), "peak_of_one_device": share(made).peak}
        print(name, recipe, how, found[f"{name} {recipe} {how}"], flush=True)
    large = [found[f"gpt3-175b {recipe} full"]["peak_of_one_device"] for recipe in ("bf16-master", "fp8lm-o2")]
    found["fp8lm_saves"] = 1 - large[1] / large[0]
    for key in ("resnet-50 fp16-master none", "llama-7b bf16-master none", "llama-7b bf16-master full"):
        found[f"{key}: activations of masters"] = found[key]["activations"] / found[key]["master"]
    return found


def doubled() -> dict[str, Any]:
    """The peak memory of a training step of a 1B LLaMA by batch size, under COAT and under bf16-master (all activations
    in bf16)."""
    found: dict[str, Any] = {}
    for recipe in ("bf16-master", "coat"):
        for batch in (4, 8, 16):
            made = account(load_subject("galore-1b"), recipe, batch=batch)
            found.setdefault(recipe, {})[str(batch)] = {**asdict(made.bytes), "peak_GB": share(made).peak / 1e9}
            print(recipe, batch, found[recipe][str(batch)], flush=True)
    for batch, row in found["coat"].items():
        row["saves"] = found["bf16-master"][batch]["peak_GB"] / row["peak_GB"]
    return found


def main() -> None:
    """Run, print, and with --keep write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true")
    arguments = parser.parse_args()
    rows = {"galore": galore(), "passes": passes(), "optimizers": optimizers(), "doubled": doubled()}
    if arguments.keep:
        keep("accounts", {"machine": environment(), **rows})


if __name__ == "__main__":
    main()
