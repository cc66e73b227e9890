"""Checkpoints of known origin, from small GPTs trained in different ways: what `halfstep inspect` must tell apart."""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import halfstep
from halfstep.lab.models.gpt import GPT


State = dict[str, Tensor]


def train(recipe: str, steps: int) -> tuple[State, State]:
    """A small GPT trained on random bytes: its state dict, and its optimizer's tensors as NUMBER.NAME."""
    torch.manual_seed(0)
    model: torch.nn.Module = GPT(vocabulary=64, context=16, layers=2, width=256, heads=4)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe, generator=0)
    for _ in range(steps):
        tokens = torch.randint(64, (4, 17))
        logits = model(tokens[:, :-1]).flatten(0, 1)
        scaler.scale(torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    states = optimizer.state_dict()["state"].items()
    return dict(model.state_dict()), {f"{n}.{name}": t for n, state in states for name, t in state.items()}


def cast(state: State, *dtypes: torch.dtype, keep: str = "-") -> State:
    """A state dict cast to one type after the other, but for names that contain `keep`."""
    for dtype in dtypes:
        state = {name: tensor if keep in name else tensor.to(dtype) for name, tensor in state.items()}
    return state


def main(folder: str | Path, steps: int = 20) -> list[Path]:
    """Write the checkpoints, one file each, and return their paths; the name of a file says its origin."""
    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    recipes = ("fp32", "fp16-master", "bf16-master", "bf16-nomaster", "fp8lm-o2")
    (full, _), (half, _), (master, states), (alone, _), (scaled, _) = (train(recipe, steps) for recipe in recipes)
    matrices = {name: tensor for name, tensor in full.items() if tensor.dim() == 2}
    blocks = halfstep.get_quantizer("fp8_128x128")  # float8_e4m3fn, one float32 scale a block
    whole = replace(blocks, scales=replace(blocks.scales, tile=halfstep.quant.Tile(0, 0)))
    checkpoints = {
        "fp32": full,
        "fp16": half,
        "bf16": alone,
        "fp8lm_o2": scaled,
        "bf16_with_its_master": master | states,
        "bf16_without_a_master_saved_as_fp32": cast(alone, fp32),
        "fp16_saved_as_fp32": cast(half, fp32),
        "bf16_saved_as_fp16": cast(alone, fp16),
        "fp32_cast_to_bf16_cast_to_fp16": cast(full, bf16, fp16),
        "norms_fp32_rest_bf16": cast(full, bf16, keep="norm"),
        "norms_fp32_rest_bf16_saved_as_fp32": cast(full, bf16, fp32, keep="norm"),
        "fp8_times_scales_saved_as_bf16": cast({n: whole(t) for n, t in matrices.items()}, bf16),
        # As DeepSeek-V3 is published, dequantised
        "fp8_in_128x128_blocks_saved_as_bf16": cast({n: blocks(t) for n, t in matrices.items()}, bf16),
    }
    for name, tensors in checkpoints.items():
        save_file(tensors, Path(folder) / f"{name}.safetensors")
    return [Path(folder) / f"{name}.safetensors" for name in checkpoints]


if __name__ == "__main__":
    for path in main(*sys.argv[1:2] or ["."]):
        print(f"{path.stem}: {halfstep.inspect(path).verdict.text}")
