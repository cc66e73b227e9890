"""Checks of rounding: ranges, bias, small gradients, accumulation, additions and masters, and rotary positions.

Also of operations that torch.autocast runs in float32 on CUDA, and what it does with them on the CPU.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep import formats, round_to
from halfstep.claims.checks.base import Numbers, check, normal, stepped
from halfstep.recipe import DTYPES
from halfstep.tracking import share_zeroed


def _small_gradients() -> Tensor:
    """A million gradients 2^U(-30, -15)."""
    exponents = (
        torch.rand(1_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu") * 15 - 30
    )
    return torch.exp2(exponents).float()


@check("micikevicius-loss-scale")
def loss_scale() -> Numbers:
    """The share of small gradients that fp16 makes zero, by loss scale."""
    gradients = _small_gradients()
    scales = {"s1": 1, "s8": 8, "s128": 128, "s1024": 1024}
    return {name: share_zeroed([gradients * scale], formats.get("fp16")) for name, scale in scales.items()}


@check("kalamkar-range")
def bfloat16_range() -> Numbers:
    """The ends of bf16's range, the lower as a power of two, and the share of small gradients that it makes zero."""
    found: Numbers = {"zeroed": share_zeroed([_small_gradients()], formats.get("bf16"))}
    for name in ("fp32", "bf16", "fp16"):
        finfo = torch.finfo(DTYPES[name])
        found |= {f"{name}_largest": finfo.max, f"{name}_normal": math.log2(finfo.tiny)}
    return found


@check("kalamkar-rounding")
def rounding() -> Numbers:
    """The effect of a cast to bf16 on the magnitude of a million N(0, 1) values: mean and largest relative change."""
    x = normal(1_000_000)
    found: Numbers = {}
    for short, mode in (("nearest", "nearest_even"), ("truncated", "toward_zero")):
        change = (round_to(x, "bf16", mode).double() / x.double()) - 1
        found |= {f"{short}_mean": float(change.mean()), f"{short}_max": float(change.abs().max())}
    return found


@check("micikevicius-accumulate")
def accumulate() -> Numbers:
    """Relative errors of dot products of 4096 values from U(0.5, 1.5), by the format of the running sum."""
    x, y = torch.rand(2, 4096, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu") + 0.5
    exact = (x.double() * y.double()).sum(0)

    # A product of two rounded inputs is exact in float32; a sum is rounded to float32, and then to `sums`.
    def error(inputs: str, sums: str, mode: str = "nearest_even") -> float:
        total = torch.zeros(256, dtype=torch.float32, device="cpu")
        for a, b in zip(round_to(x, inputs, mode), round_to(y, inputs, mode), strict=True):
            total = (total + a * b).to(DTYPES[sums]).float()
        return float((total.double() / exact - 1).mean())

    return {
        "fp16_fp32": error("fp16", "fp32"),
        "fp16_fp16": error("fp16", "fp16"),
        "bf16_fp32": error("bf16", "fp32"),
        "bf16_bf16": error("bf16", "bf16"),
        "truncated_fp32": error("bf16", "fp32", "toward_zero"),
    }


_SIZE, _BASE = 128, 10_000.0


def _rotated(x: Tensor, start: int) -> Tensor:
    """x (tokens, size) in float64, each pair rotated by its position's angle; the first token is at position
    `start`."""
    angles = (start + torch.arange(len(x), dtype=torch.int64, device="cpu").double())[:, None] * _BASE ** (
        -torch.arange(0, _SIZE, 2, dtype=torch.int64, device="cpu").double() / _SIZE
    )
    first, second = x.double().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _moved(tokens: int, shift: int, format: str) -> float:
    """The root mean square change of logits q k / sqrt(d) of normal q and k, when the text begins `shift` positions
    later."""
    q, k = normal(2, tokens, _SIZE)

    def logits(start: int) -> Tensor:
        lhs, rhs = (_rotated(x, start).float().to(DTYPES[format]).double() for x in (q, k))
        return torch.tril(lhs @ rhs.T / _SIZE**0.5)

    return float(((logits(shift) - logits(0)).square().sum() / (tokens * (tokens + 1) / 2)).sqrt())


@check("wang-rope-bf16")
def relative() -> Numbers:
    """By format, by shift of the text, and by its length."""
    formats = {format: _moved(256, 16, format) for format in ("bf16", "fp16", "fp32")}
    return {**formats, "far": _moved(256, 4096, "bf16"), "long": _moved(1024, 16, "bf16")}


def _mantissas(bits: int) -> Tensor:
    """The values in [1, 2) with that many fraction bits."""
    return 1 + torch.arange(1 << bits, dtype=torch.float32, device="cpu") / (1 << bits)


def _lost(weight: Tensor, update: Tensor, format: str, rounding: str = "nearest_even") -> Tensor:
    """Where weight + update, rounded to the format, equals the weight; the sum is exact in float64 before it is
    rounded."""
    return torch.eq(round_to(weight.double() + update.double(), format, rounding), weight)


@check("micikevicius-ratio")
def ratio() -> Numbers:
    """|w| / |u| at which updates are lost: every mantissa of w and of u, added and subtracted."""
    found: Numbers = {}
    for format, bits in (("fp16", 10), ("bf16", 7)):
        weights, steps = _mantissas(bits)[:, None], _mantissas(bits)[None, :]
        first, last = float("inf"), 0.0
        for gap in range(bits - 1, bits + 4):
            for sign in (1, -1):
                update = sign * steps * 2.0**-gap
                lost, ratios = _lost(weights, update, format), (weights / update).abs()
                first = min(first, float(ratios[lost].min()) if lost.any() else first)
                last = max(last, float(ratios[~lost].max()) if (~lost).any() else last)
        found |= {f"{format}_first": first, f"{format}_last": last}
    ones = _mantissas(10)
    found["at_2048"] = float(_lost(ones, ones / 2048, "fp16").double().mean())
    found["at_4096"] = float(_lost(ones, ones / 4096, "fp16").double().mean())
    return found


@check("slides-exponents")
def exponents() -> Numbers:
    """The share of all fp16 additions that are lost when the exponents differ by 10, 11 and 12."""
    weights, steps = _mantissas(10)[:, None], _mantissas(10)[None, :]
    return {
        f"{short}_{gap}": float(_lost(weights, steps * 2.0**-gap, "fp16", rounding).double().mean())
        for short, rounding in (("nearest", "nearest_even"), ("truncated", "toward_zero"))
        for gap in (10, 11, 12)
    }


@check("micikevicius-master")
def stall() -> Numbers:
    """The weight after 4096 updates of -2^-12 from 1, by recipe."""
    recipes = ("fp16-nomaster", "fp16-master", "bf16-nomaster", "bf16-master", "fp32")
    weights = {name: stepped(name, 16, partial(torch.optim.SGD, lr=1.0), 2.0**-12, 4096)[0] for name in recipes}
    return {name.replace("-", "_"): float(weight.detach().double().mean()) for name, weight in weights.items()}


# Each is on torch.autocast's float32 lists for CUDA (cross_entropy through log_softmax and nll_loss).
_OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "group_norm": lambda x: F.group_norm(x, 2),
    "softplus": F.softplus,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "pow": lambda x: torch.pow(x, 3),
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "tan": torch.tan,
    "sum": torch.sum,
    "norm": lambda x: torch.linalg.vector_norm(x),
    "cumsum": lambda x: torch.cumsum(x, -1),
    "cumprod": lambda x: torch.cumprod(x, -1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x),
    "prod": torch.prod,
    "cdist": lambda x: torch.cdist(x, x),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long, device="cpu")),
}
_NAMED = {"prod", "cdist", "mse_loss", "binary_cross_entropy_with_logits", "cross_entropy"}


@check("autocast-cpu")
def autocast() -> Numbers:
    """How many operations with bf16 inputs return float32 under CPU autocast, and how many of those the row names."""
    x = torch.rand(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu").to(
        torch.bfloat16
    )
    with torch.autocast("cpu", torch.bfloat16):
        widened = {name for name, op in _OPS.items() if op(x).dtype == torch.float32}
    return {"operations": len(_OPS), "float32": len(widened), "named": len(widened & _NAMED)}
