"""Checks of training in 8 bits: how scales are chosen, and what weight decay does to a gated MLP."""

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep import formats, get_quantizer
from halfstep.claims.checks.base import Numbers, check, normal
from halfstep.ops.casts import round_scaled
from halfstep.ops.operand import operand
from halfstep.quant import TENSOR, Quantizer, Scales, get_scaling
from halfstep.quant.scaling.current import factor_of
from halfstep.quant.scaling.delayed import Delayed


@check("te-mx-roundup")
def mx_roundup() -> Numbers:
    """MXFP8 blocks of 32 normal numbers whose largest saturates, and the relative error, by the scale's rounding."""
    x = normal(32768, 32)
    found: Numbers = {}
    for rule in ("rceil", "floor"):
        quantizer = get_quantizer("mxfp8_e4m3", scale=rule)
        quantized = quantizer.quantize(x)
        scale = get_scaling(rule).multiplier(quantized.tensors, quantizer.format)[:, 0]
        found[f"{rule}_saturated"] = float((x.abs().amax(1) > 448 * scale).double().mean())
        found[f"{rule}_error"] = float((quantized.dequantize() - x).norm() / x.norm())
    return found


@check("te-history")
def history() -> Numbers:
    """The share of 200 steps in which an amax that alternates between 1 and 8 saturates E4M3, by the history."""
    e4m3, found = formats.get("e4m3fn"), Numbers()
    for name, scaling in (
        ("most_recent", Delayed("delayed", history=1, algorithm="most_recent")),
        ("max_1024", Delayed("delayed", history=1024, algorithm="max")),
    ):
        state, clipped = scaling.init(), 0
        for step in range(202):
            amax = torch.tensor(8.0 if step % 2 else 1.0, dtype=torch.float32, device="cpu")
            clipped += step >= 2 and bool(amax * state[0] > 448)  # the first two find the scale
            scaling.record(state, amax)
            scaling.advance(state, e4m3)
        found[name] = clipped / 200
    return found


def _largest_sum(pair: tuple[str, str], margin: int) -> float:
    """The largest sum over 512 products of normal numbers, scaled with that margin and rounded to the formats."""
    scales = Scales(TENSOR, get_scaling("rceil", margin=margin))
    x, w = normal(64, 512), normal(512, 64, seed=1)
    lhs, rhs = (
        operand(t, Quantizer(formats.get(name), scales=scales), torch.float32).values
        for t, name in zip((x, w), pair, strict=True)
    )
    return float((lhs.double() @ rhs.double()).abs().max())


@check("perez-margin")
def margin() -> Numbers:
    """The largest sum in a product of 512 scaled FP8 numbers by margin, and the margin from which it fits fp16."""
    found: Numbers = {}
    for name, pair in (("forward", ("e4m3fnuz", "e4m3fnuz")), ("backward", ("e5m2fnuz", "e4m3fnuz"))):
        sums = [_largest_sum(pair, room) for room in range(8)]
        found |= {f"{name}_{room}": sums[room] for room in (0, 1, 3)}
        found[f"{name}_fits"] = next(room for room, largest in enumerate(sums) if largest <= formats.get("fp16").max)
    return found


@check("perez-window")
def window() -> Numbers:
    """The relative error of a product when every tensor has the constant bias c."""
    x, w = normal(64, 512), normal(512, 64, seed=1) / 8
    exact, found = x.double() @ w.double(), Numbers()
    for bias in (-8, -4, 0, 4, 8):
        quantizer = Quantizer(formats.get("e4m3fnuz"), scales=Scales(TENSOR, get_scaling("fixed", bias=bias)))
        lhs, rhs = (operand(t, quantizer, torch.float32) for t in (x, w))
        product = lhs.values.double() @ rhs.values.double() * 2.0 ** (-2 * bias)
        found[f"c{bias}".replace("-", "_")] = float((product - exact).norm() / exact.norm())
    return found


_WIDTH, _CHANNELS, _OUT, _STEPS = 16, 32, 4, 3000
_E4M3 = formats.get("e4m3")  # the one with infinities: its largest is 240


def _product(x: Tensor, linear: Tensor, gate: Tensor) -> Tensor:
    return F.silu(x @ gate.t()) * (x @ linear.t())


def _trained(decay: float) -> Numbers:
    """A gated MLP fitted by AdamW to a small ReLU network; of its channels that contribute, and of its product."""
    generator = torch.Generator().manual_seed(0)

    def drawn(rows: int, columns: int, size: float) -> Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=torch.float32, device="cpu") * size

    x = drawn(2048, _WIDTH, 1.0)
    y = torch.relu(x @ drawn(_WIDTH, 8, 0.25)) @ drawn(8, _OUT, 0.5)
    weights = [drawn(_CHANNELS, _WIDTH, 0.25), drawn(_CHANNELS, _WIDTH, 0.25), drawn(_OUT, _CHANNELS, 1 / 6)]
    linear, gate, down = (weight.requires_grad_() for weight in weights)
    optimizer = torch.optim.AdamW([linear, gate, down], lr=3e-3, betas=(0.9, 0.95), weight_decay=decay)
    halfway = torch.ones((), dtype=torch.float32, device="cpu")
    for step in range(_STEPS):
        if step == _STEPS // 2:
            halfway = _product(x, linear, gate).detach().abs().max()
        rows = torch.randint(len(x), (256,), generator=generator, dtype=torch.int64, device="cpu")
        F.mse_loss(_product(x[rows], linear, gate) @ down.t(), y[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        product = _product(x, linear, gate)
        size = product.square().mean(0).sqrt() * down.norm(dim=0)
        cosine = F.cosine_similarity(linear, gate).abs()[size > 0.01 * size.max()]
        factor = factor_of(halfway, _E4M3)
        stale = round_scaled(product, factor, _E4M3, "nearest_even", torch.float32) / factor
        return {
            "mean": float(cosine.mean()),
            "aligned": float((cosine > 0.9).double().mean()),
            "amax": float(product.abs().max()),
            "stale": float((stale - product).norm() / product.norm()),
        }


@check("fishman-alignment")
def alignment() -> Numbers:
    """The same fit without weight decay and with a strong one."""
    found = {"without": _trained(0.0), "decay": _trained(1.0)}
    return {f"{name}_{key}": value for name, numbers in found.items() for key, value in numbers.items()}
