"""Checkpoints of known origin, from small GPTs trained in different ways: what `halfstep inspect` must tell apart."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import halfstep
from halfstep.lab.models.gpt import GPT


def train(recipe: str, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A small GPT trained on random bytes: its state dict, and its optimizer's tensors as NUMBER.NAME."""
    torch.manual_seed(0)
    model: torch.nn.Module = GPT(vocabulary=64, context=16, layers=2, width=64, heads=2)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe, generator=0)
    for _ in range(steps):
        tokens = torch.randint(64, (4, 17))
        logits = model(tokens[:, :-1])
        scaler.scale(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    states = optimizer.state_dict()["state"].items()
    return dict(model.state_dict()), {f"{n}.{name}": t for n, state in states for name, t in state.items()}


def cast(state: Mapping[str, Tensor], *dtypes: torch.dtype, keep: str = "-") -> dict[str, Tensor]:
    """A state dict cast to one type after the other, but for names that contain `keep`."""
    result = {}
    for name, tensor in state.items():
        for dtype in () if keep in name else dtypes:
            tensor = tensor.to(dtype)
        result[name] = tensor.clone()
    return result


def main(folder: str | Path, steps: int = 20) -> list[Path]:
    """Write the checkpoints, one file each, and return their paths; the name of a file says its origin."""
    fp32, half, bf16 = torch.float32, torch.float16, torch.bfloat16
    trained = {name: train(name, steps) for name in ("fp32", "fp16-master", "bf16-master", "bf16-nomaster")}
    model = {name: state for name, (state, _) in trained.items()}
    e4m3 = replace(halfstep.get_quantizer("int8_tensor"), format=halfstep.formats.get("e4m3fn"))  # one scale a tensor
    fp8 = {name: halfstep.quantize(t, e4m3).dequantize() for name, t in model["fp32"].items() if t.dim() == 2}
    checkpoints = {
        "fp32": model["fp32"],
        "fp16": model["fp16-master"],
        "bf16": model["bf16-nomaster"],
        "bf16_with_its_master": model["bf16-master"] | trained["bf16-master"][1],
        "bf16_without_a_master_saved_as_fp32": cast(model["bf16-nomaster"], fp32),
        "fp16_saved_as_fp32": cast(model["fp16-master"], fp32),
        "bf16_saved_as_fp16": cast(model["bf16-nomaster"], half),
        "fp32_cast_to_bf16_cast_to_fp16": cast(model["fp32"], bf16, half),
        "norms_fp32_rest_bf16": cast(model["fp32"], bf16, keep="norm"),
        "norms_fp32_rest_bf16_saved_as_fp32": cast(model["fp32"], bf16, fp32, keep="norm"),
        "fp8_times_scales_saved_as_bf16": cast(fp8, bf16),
    }
    paths = [Path(folder) / f"{name}.safetensors" for name in checkpoints]
    for path, tensors in zip(paths, checkpoints.values(), strict=True):
        save_file(tensors, path)
    return paths


if __name__ == "__main__":
    for path in main(*sys.argv[1:2] or ["."]):
        print(f"{path.stem}: {halfstep.inspect(path).verdict.text}")
