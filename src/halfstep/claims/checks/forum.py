"""Checks of what a forum's thread says about bf16 training: bytes, descent, and what becomes zero."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

import halfstep
from halfstep import formats
from halfstep.claims.checks.base import Numbers, check, grad_dtype, one_weight
from halfstep.memory import measure
from halfstep.tracking import Arrival, arrivals, share_lost, share_zeroed


def bytes_per_parameter(recipe: str) -> float:
    """Measured on the live tensors of a linear layer under AdamW, before its second step."""
    model: nn.Module = nn.Linear(64, 64)
    model, optimizer, scaler = halfstep.prepare(model, torch.optim.AdamW(model.parameters()), recipe, generator=0)
    for step in range(2):
        scaler.scale(model(torch.ones(4, 64, dtype=torch.float32, device="cpu")).square().mean()).backward()
        if step == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return measure(model, optimizer).total


def weights(count: int) -> Tensor:
    """Weights as a transformer starts with them: N(0, 0.02)."""
    return torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu") * 0.02


def descent(recipe: str, lr: float, steps: int = 5) -> Arrival:
    """What arrives of AdamW's update of N(0, 0.02) weights, at the last of a few steps with N(0, 1) gradients."""
    values = weights(20_000)
    choose = partial(torch.optim.AdamW, lr=lr, weight_decay=0.0)
    weight, optimizer = one_weight(recipe, values, choose)
    generator = torch.Generator().manual_seed(1)
    found = Arrival()
    for _ in range(steps):
        weight.grad = torch.randn(values.shape, generator=generator, dtype=torch.float32, device="cpu").to(
            grad_dtype(recipe)
        )
        with arrivals(optimizer, {weight: "weight"}) as arrived:
            optimizer.step()
        found = arrived.model
    return found


@check("forum-bytes")
def sizes() -> Numbers:
    """The three options of the question, as it states them."""
    recipes = ("bf16-master", "bf16-fp32grad", "bf16-nomaster")
    return {recipe.replace("-", "_"): bytes_per_parameter(recipe) for recipe in recipes}


@check("forum-correction")
def correction() -> Numbers:
    """The second option as asked, and with the master copy that the reply adds to it."""
    return {"asked": bytes_per_parameter("bf16-fp32grad"), "answered": bytes_per_parameter("bf16-master")}


@check("forum-megatron")
def megatron() -> Numbers:
    """bf16 weights with an fp32 master, whose gradients are accumulated in fp32."""
    return {"megatron": bytes_per_parameter("bf16-megatron")}


@check("slides-adam-bytes")
def adam_bytes() -> Numbers:
    """Weights that are their own master, under torch.autocast."""
    return {recipe.replace("-", "_"): bytes_per_parameter(recipe) for recipe in ("fp16-mixed", "bf16-mixed")}


@check("forum-descent")
def skipped_master() -> Numbers:
    """Descent quality and the share of lost updates at three learning rates, with a master copy and without."""
    found: Numbers = {}
    for short, lr in (("4", 1e-4), ("5", 1e-5), ("6", 1e-6)):
        plain = descent("bf16-nomaster", lr)
        master = descent("bf16-master", lr)
        found |= {
            f"quality_{short}": plain.quality or 0.0,
            f"lost_{short}": plain.lost_share or 0.0,
            f"master_{short}": master.quality or 0.0,
        }
    return found


@check("forum-zeroed")
def zeroed() -> Numbers:
    """The share of 10^7 weights N(0, 0.02) that a cast makes zero, and of updates of 1e-5 that bf16 loses."""
    stored = weights(10_000_000)
    return {
        "bf16": share_zeroed([stored], formats.get("bf16")),
        "fp16": share_zeroed([stored], formats.get("fp16")),
        "updates": share_lost([(stored, stored - 1e-5)], formats.get("bf16")),
    }
