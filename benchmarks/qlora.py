"""LoRA over a frozen low-bit base, against bitsandbytes and PEFT: bytes and loss. --keep writes results/qlora.json.

    python benchmarks/qlora.py [--keep]

A small Llama is trained on the bytes of Python's own modules, then by LoRA of rank 8 on all linear layers on those of
`encodings`. The base is in bf16 or in 4 or 8 bits, from the same weights; the adapters start with the same values and
see the same batches. Bytes are those of the base's tensors, without adapters.
"""

from __future__ import annotations

import copy
import sysconfig
import warnings
from pathlib import Path

import bitsandbytes as bnb
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import halfstep
from halfstep.lab.environment import environment
from halfstep.memory import stored_bytes
from harness import keep, keeps


LENGTH, BATCH, FIRST, STEPS, RANK = 64, 8, 200, 60, 8
OURS = ("bf16-stochastic", "nf4", "nf4-double", "mxfp4", "fp8-current")
THEIRS = {"bitsandbytes nf4": False, "bitsandbytes nf4, double": True}


def text(folder: str) -> Tensor:
    """The bytes of the modules in a folder of the standard library."""
    files = sorted((Path(sysconfig.get_paths()["stdlib"]) / folder).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def batches(data: Tensor, steps: int, seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - LENGTH, (steps, BATCH), generator=draw)
    return [torch.stack([data[start : start + LENGTH] for start in row]) for row in starts]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: halfstep.LossScaler, data: list[Tensor]) -> None:
    model.train()
    for ids in data:
        scaler.scale(model(input_ids=ids, labels=ids).loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@torch.no_grad()
def loss(model: nn.Module, data: list[Tensor]) -> float:
    model.eval()
    return sum(float(model(input_ids=ids, labels=ids).loss) for ids in data) / len(data)


def base() -> LlamaForCausalLM:
    """The trained model that is adapted."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train(model, optimizer, halfstep.LossScaler(enabled=False), batches(text("."), FIRST, 0))
    return model


def with_bitsandbytes(model: nn.Module, double: bool) -> nn.Module:
    model = model.bfloat16()
    options = {"quant_type": "nf4", "compress_statistics": double}
    for path, layer in [*model.named_modules()]:
        if isinstance(layer, nn.Linear) and path != "lm_head":
            made = bnb.nn.Linear4bit(layer.in_features, layer.out_features, False, torch.bfloat16, **options)
            made.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, **options)
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, made.to("cpu"))
    return model


def bytes_of(model: nn.Module) -> int:
    """The bytes of all tensors, including bitsandbytes' scales, which are not buffers."""
    states = [m.weight.quant_state for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)]
    scales = [t for s in states for t in (s.absmax, s.offset, getattr(s.state2, "absmax", None)) if t is not None]
    return stored_bytes(model) + sum(t.numel() * t.element_size() for t in scales)


def adapted(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    with warnings.catch_warnings():  # PEFT uses names that transformers has deprecated
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))


def run(name: str, model: nn.Module, data: list[Tensor], held_out: list[Tensor]) -> dict[str, float | int | str]:
    """Adapt one base: its bytes, and the losses before and after."""
    if name in THEIRS:
        model = with_bitsandbytes(model, THEIRS[name])
    elif name == "bf16-stochastic":
        halfstep.apply(model, name)
    else:
        halfstep.quantize_model(model, name, adapters=True)
    # Of a copy: evaluated, bitsandbytes packs weights for AVX512's bf16 units, and gradients do not pass through after.
    size, before = bytes_of(model), loss(copy.deepcopy(model), held_out)
    model = adapted(model)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    if name in THEIRS:
        optimizer, scaler = adamw, halfstep.LossScaler(enabled=False)
    else:
        optimizer, scaler = halfstep.optimize(model, adamw, generator=3)
    train(model, optimizer, scaler, data)
    return {"base": name, "bytes": size, "loss before": before, "loss after": loss(model, held_out)}


def main() -> None:
    """Train each, print, and with --keep write."""
    kept = keeps(__doc__)
    torch.set_num_threads(1)
    model, target = base(), text("encodings")
    half = len(target) // 2
    data, held_out = batches(target[:half], STEPS, 1), batches(target[half:], 8, 2)
    rows = [run(name, copy.deepcopy(model), data, held_out) for name in (*OURS, *THEIRS)]
    for row in rows:
        print(f"{row['base']:26} {row['bytes']:>10,} {row['loss before']:8.4f} {row['loss after']:8.4f}", flush=True)
    if kept:
        keep("qlora", {"environment": environment(), "rank": RANK, "steps": STEPS, "rows": rows})


if __name__ == "__main__":
    main()
