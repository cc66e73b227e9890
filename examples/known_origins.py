"""Checkpoints of known origin, from small GPTs trained in different ways, which `halfstep inspect` must distinguish."""

import argparse
from dataclasses import replace
from functools import reduce
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, bfloat16, float16, float32

import halfstep
from halfstep.lab.models.gpt import GPT


def train(recipe: str, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A small GPT trained on random bytes: its state dict, and its optimizer's tensors as NUMBER.NAME."""
    torch.manual_seed(0)
    model: torch.nn.Module = GPT(vocabulary=64, context=16, layers=2, width=256, heads=4)
    stock = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, scaler = halfstep.prepare(model, stock, recipe, generator=0)
    for _ in range(steps):
        tokens = torch.randint(64, (4, 17))
        logits = model(tokens[:, :-1]).flatten(0, 1)
        scaler.scale(torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    states = optimizer.state_dict()["state"].items()
    return dict(model.state_dict()), {f"{n}.{name}": t for n, state in states for name, t in state.items()}


def cast(state: dict[str, Tensor], *dtypes: torch.dtype, keep: str = "-") -> dict[str, Tensor]:
    """A state dict cast to one dtype after another, except tensors whose names contain `keep`."""
    return {name: tensor if keep in name else reduce(Tensor.to, dtypes, tensor) for name, tensor in state.items()}


def main(folder: str | Path, steps: int = 20) -> list[Path]:
    """Write the checkpoints into a folder, one file each, named after their origin, and return their paths."""
    recipes = ("fp32", "fp16-master", "bf16-master", "bf16-nomaster", "fp8lm-o2")
    (full, _), (half, _), (master, states), (alone, _), (scaled, _) = (train(recipe, steps) for recipe in recipes)
    matrices = {name: tensor for name, tensor in full.items() if tensor.dim() == 2}
    blocks = halfstep.get_quantizer("fp8_128x128")  # as DeepSeek-V3 is published: one float32 scale per block
    whole = replace(blocks, scales=replace(blocks.scales, tile=halfstep.quant.Tile(0, 0)))
    checkpoints = {"fp32": full, "fp16": half, "bf16": alone, "fp8lm_o2": scaled}
    checkpoints |= {
        "bf16_with_its_master": master | states,
        "bf16_without_a_master_saved_as_fp32": cast(alone, float32),
        "fp16_saved_as_fp32": cast(half, float32),
        "bf16_saved_as_fp16": cast(alone, float16),
        "fp32_cast_to_bf16_cast_to_fp16": cast(full, bfloat16, float16),
        "norms_fp32_rest_bf16": cast(full, bfloat16, keep="norm"),
        "norms_fp32_rest_bf16_saved_as_fp32": cast(full, bfloat16, float32, keep="norm"),
        "fp8_times_scales_saved_as_bf16": cast({name: whole(t) for name, t in matrices.items()}, bfloat16),
        "fp8_in_128x128_blocks_saved_as_bf16": cast({name: blocks(t) for name, t in matrices.items()}, bfloat16),
    }
    paths = [Path(folder) / f"{name}.safetensors" for name in checkpoints]
    Path(folder).mkdir(parents=True, exist_ok=True)
    for path, tensors in zip(paths, checkpoints.values(), strict=True):
        save_file(tensors, path)
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=".", help="where the checkpoints are written")
    for path in main(parser.parse_args().folder):
        print(f"{path.stem}: {halfstep.inspect(path).verdict.text}")
