"""Check of rotary positions whose queries and keys are rounded: whether attention still sees distances alone."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.claims.checks.base import Numbers, check
from halfstep.recipe import DTYPES


_SIZE, _BASE = 128, 10_000.0


def _rotated(x: Tensor, start: int) -> Tensor:
    """x (tokens, size) in float64, each pair turned by its position's angle; the first token stands at `start`."""
    angles = (start + torch.arange(len(x), dtype=torch.int64, device="cpu").double())[:, None] * _BASE ** (
        -torch.arange(0, _SIZE, 2, dtype=torch.int64, device="cpu").double() / _SIZE
    )
    first, second = x.double().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _moved(tokens: int, shift: int, format: str) -> float:
    """How far logits q k / sqrt(d) of normal q and k move, root mean square, where the text begins `shift` later."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, tokens, _SIZE, generator=generator, dtype=torch.float32, device="cpu")

    def logits(start: int) -> Tensor:
        lhs, rhs = (_rotated(x, start).float().to(DTYPES[format]).double() for x in (q, k))
        return torch.tril(lhs @ rhs.T / _SIZE**0.5)

    change = (logits(shift) - logits(0)).square().sum() / (tokens * (tokens + 1) / 2)
    return float(change.sqrt())


@check("wang-rope-bf16")
def relative() -> Numbers:
    """By format, by how far the text is moved, and by its length."""
    formats = {format: _moved(256, 16, format) for format in ("bf16", "fp16", "fp32")}
    return {**formats, "far": _moved(256, 4096, "bf16"), "long": _moved(1024, 16, "bf16")}
