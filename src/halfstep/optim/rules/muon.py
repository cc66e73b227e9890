"""Muon: a step along the orthogonalized momentum of a matrix (all singular values near 1)."""

import math
from typing import Any

import torch
from torch import Tensor

from halfstep.optim.rules import Group, Moments, UpdateRule
from halfstep.optim.shards import cut_like, whole


def _update(weight: Tensor, grad: Tensor, moments: Moments, step: int, group: Group) -> tuple[Tensor, Moments]:
    """b <- momentum b + (1 - momentum) g; w <- (1 - lr decay) w - lr ratio O(b); with Nesterov, O((1 - momentum) g +
    momentum b).

    O orthogonalizes a matrix. The ratio is sqrt(max(1, rows / columns)), or, for steps of AdamW's size, 0.2 sqrt(max(
    rows, columns)). A sharded matrix is gathered in bf16, and each rank computes all of O.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv 2502.16982, for the
    second ratio; both in torch.optim.Muon's form.
    """
    momentum, lr = float(group["momentum"]), float(group["lr"])
    buffer = torch.lerp(moments["momentum_buffer"], grad, 1 - momentum)
    direction = torch.lerp(grad, buffer, momentum) if group["nesterov"] else buffer
    orthogonal = cut_like(_orthogonal(whole(direction.bfloat16()), group), weight)
    ratio = _RATIOS[group["adjust_lr_fn"]](*weight.shape)
    moved = weight * (1 - lr * float(group["weight_decay"]))
    return torch.add(moved, orthogonal, alpha=-lr * ratio), {"momentum_buffer": buffer}


def _orthogonal(matrix: Tensor, group: Group) -> Tensor:
    """U S V^T for a bf16 matrix U D V^T, with S near 1, by Newton-Schulz iterations of degree five in bf16."""
    a, b, c = group["ns_coefficients"]
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _original(rows: int, columns: int) -> float:
    return math.sqrt(max(1, rows / columns)) if columns else 1.0


_RATIOS: dict[Any, Any] = {
    None: _original,
    "original": _original,
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


def _refusal(group: Group) -> str | None:
    if group["adjust_lr_fn"] not in _RATIOS:
        return f"adjust_lr_fn = {group['adjust_lr_fn']!r} given; expected None, 'original' or 'match_rms_adamw'"
    if len(group["ns_coefficients"]) != 3 or not 0 <= group["ns_steps"] < 100:
        return (
            f"ns_coefficients = {group['ns_coefficients']} and ns_steps = {group['ns_steps']} given; expected three "
            "numbers, and fewer than 100 steps"
        )
    return None


muon = UpdateRule(
    "muon", torch.optim.Muon, lambda group: ("momentum_buffer",), _update, elementwise=False, dims=2,
    refusal=_refusal, kept_as=lambda name, group: "exp_avg",
)  # fmt: skip
