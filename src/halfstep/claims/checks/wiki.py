"""Checks of what a forum's wiki on the precision of models says: how far apart the ranges of bf16 and fp16 are."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import halfstep
from halfstep import formats
from halfstep.bits.statistics import Statistics
from halfstep.claims.checks.base import Numbers, check
from halfstep.formats import Float


def _trained(folder: Path) -> Path:
    """A checkpoint: the bf16 weights, and the moments, of a small transformer after 20 steps on random tokens."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 2, 256, dropout=0.0, batch_first=True, norm_first=True)
    model: nn.Module = nn.Sequential(
        nn.Embedding(64, 64), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 64)
    )
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, scaler = halfstep.prepare(model, optimizer, "bf16-nomaster", generator=0)
    for _ in range(20):
        tokens = torch.randint(64, (8, 32), dtype=torch.int64, device="cpu")
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    states = optimizer.state_dict()["state"].items()
    moments = {f"{n}.{name}": t for n, state in states for name, t in state.items() if name.startswith("exp_avg")}
    save_file(
        {**{name: t.contiguous() for name, t in model.state_dict().items()}, **moments}, folder / "model.safetensors"
    )
    return folder / "model.safetensors"


def _binades(format: Float) -> int:
    """Powers of two between a format's smallest value and its largest."""
    return format.max_exponent - (format.min_exponent - format.mantissa_bits) + 1


def _shares(prefix: str, parts: list[Statistics]) -> Numbers:
    total = sum(part.nonzero for part in parts)
    return {
        f"{prefix}_subnormal": sum(part.fp16_subnormal for part in parts) / total,
        f"{prefix}_below": sum(part.fp16_below for part in parts) / total,
        f"{prefix}_above": sum(part.fp16_above for part in parts) / total,
        f"{prefix}_inexact": 1 - sum(part.exact["fp16"] * part.nonzero for part in parts) / total,
    }


@check("wiki-ranges")
def ranges() -> Numbers:
    """How much of bf16's range fp16 has, and what of a bf16 checkpoint lies outside: the weights and Adam's moments."""
    bf16, fp16 = formats.get("bf16", Float), formats.get("fp16", Float)
    with tempfile.TemporaryDirectory() as folder:
        report = halfstep.inspect(_trained(Path(folder)))
    found: Numbers = {"bf16_binades": _binades(bf16), "fp16_binades": _binades(fp16)}
    for prefix, ending in (("first", ".exp_avg"), ("second", ".exp_avg_sq"), ("weights", "")):
        parts = [
            tensor.statistics
            for tensor in report.tensors
            if tensor.statistics is not None and (tensor.name.endswith(ending) if ending else tensor.role != "moments")
        ]
        found |= _shares(prefix, parts)
    return found
