"""Checks of training in 8 bits: how scales are chosen, the effect of weight decay on a gated MLP, and FP8-LM.

For FP8-LM: the effect of 8 bits on moments, on gradients summed over ranks, and on the bytes per parameter.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import formats, get_quantizer, memory, prepare, tracking
from halfstep.claims.checks.base import Numbers, check, normal, update
from halfstep.distributed.mean import Message, Simulated, Steps, fp8lm_steps, mean_steps, run
from halfstep.ops.casts import round_scaled
from halfstep.ops.operand import operand
from halfstep.quant import TENSOR, Quantizer, Scales, get_scaling, round_to
from halfstep.quant.scaling.delayed import Delayed, factor_of
from halfstep.recipe import FP8, Codes, Storage, get_recipe, get_storage


@check("te-mx-roundup")
def mx_roundup() -> Numbers:
    """The share of MXFP8 blocks of 32 normal values whose largest saturates, and the relative error, by the scale's
    rounding."""
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
    """The share of 200 steps in which an amax that alternates between 1 and 8 saturates E4M3, by the length of the
    history."""
    e4m3, found = formats.get("e4m3fn"), Numbers()
    for name, scaling in (
        ("most_recent", Delayed("delayed", history=1, algorithm="most_recent")),
        ("max_1024", Delayed("delayed", history=1024, algorithm="max")),
    ):
        state, clipped = scaling.init(), 0
        for step in range(202):
            amax = torch.tensor(8.0 if step % 2 else 1.0, dtype=torch.float32, device="cpu")
            clipped += step >= 2 and bool(amax * state[0] > 448)  # the first two steps set the scale
            scaling.record(state, amax)
            scaling.advance(state, e4m3)
        found[name] = clipped / 200
    return found


def _largest_sum(pair: tuple[str, str], margin: int) -> float:
    """The largest sum over 512 products of normal values, scaled with that margin and rounded to the formats."""
    scales = Scales(TENSOR, get_scaling("rceil", margin=margin))
    x, w = normal(64, 512), normal(512, 64, seed=1)
    lhs, rhs = (
        operand(t, Quantizer(formats.get(name), scales=scales), torch.float32).values
        for t, name in zip((x, w), pair, strict=True)
    )
    return float((lhs.double() @ rhs.double()).abs().max())


@check("perez-margin")
def margin() -> Numbers:
    """The largest sum of a matmul over 512 scaled FP8 terms by margin, and the margin from which it fits fp16."""
    found: Numbers = {}
    for name, pair in (("forward", ("e4m3fnuz", "e4m3fnuz")), ("backward", ("e5m2fnuz", "e4m3fnuz"))):
        sums = [_largest_sum(pair, room) for room in range(8)]
        found |= {f"{name}_{room}": sums[room] for room in (0, 1, 3)}
        found[f"{name}_fits"] = next(room for room, largest in enumerate(sums) if largest <= formats.get("fp16").max)
    return found


@check("perez-window")
def window() -> Numbers:
    """The relative error of a matmul when every tensor has the constant bias c."""
    x, w = normal(64, 512), normal(512, 64, seed=1) / 8
    exact, found = x.double() @ w.double(), Numbers()
    for bias in (-8, -4, 0, 4, 8):
        quantizer = Quantizer(formats.get("e4m3fnuz"), scales=Scales(TENSOR, get_scaling("fixed", bias=bias)))
        lhs, rhs = (operand(t, quantizer, torch.float32) for t in (x, w))
        product = lhs.values.double() @ rhs.values.double() * 2.0 ** (-2 * bias)
        found[f"c{bias}".replace("-", "_")] = float((product - exact).norm() / exact.norm())
    return found


_WIDTH, _CHANNELS, _OUT, _STEPS = 16, 32, 4, 3000
_E4M3 = formats.get("e4m3")  # with infinities: its largest value is 240


def _product(x: Tensor, linear: Tensor, gate: Tensor) -> Tensor:
    return F.silu(x @ gate.t()) * (x @ linear.t())


def _trained(decay: float) -> Numbers:
    """A gated MLP fitted by AdamW to a small ReLU network: figures of its contributing channels and of its gated
    product."""
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


_E4M3FN = formats.get("e4m3fn")
_FP8: Any = FP8.gradients


def _quantizer(format: str, margin: int = 0) -> Quantizer:
    return Quantizer(formats.get(format), scales=Scales(TENSOR, get_scaling("rceil", margin=margin)))


@check("fp8lm-second-moment")
def second_moment() -> Numbers:
    """The share of log-normal second moments (-18, 3) that one power-of-two scale per tensor makes zero, by format."""
    v = torch.exp(-18 + 3 * normal(10**6))
    return {format: float((_quantizer(format)(v) == 0).double().mean()) for format in ("e4m3fn", "e5m2", "fp16")}


@check("fp8lm-mu-position")
def mu_position() -> Numbers:
    """The share of E4M3 codes that change if a factor of 1/4 multiplies the values before the scale is found, or its
    target."""
    g = normal(2**16)
    codes = _quantizer("e4m3fn").quantize(g).codes
    others = {"before": _quantizer("e4m3fn").quantize(g / 4), "target": _quantizer("e4m3fn", margin=2).quantize(g)}
    return {name: float((codes != other.codes).double().mean()) for name, other in others.items()}


def shards(ranks: int, size: int = 2**13) -> Tensor:
    """Gradients of ranks whose variance is half shared, float64."""
    generator = torch.Generator().manual_seed(0)
    common, own = (
        torch.randn(n, size, generator=generator, dtype=torch.float32, device="cpu").double() for n in (1, ranks)
    )
    return (common + own) / 2**0.5


def summed(g: Tensor, mu: float) -> tuple[Tensor, float]:
    """The mean by FP8-LM's reduction of the gradients of ranks, and the resulting mu."""
    own, factors = g.float(), torch.full((len(g), 1), mu, dtype=torch.float32, device=g.device)
    run(lambda to: fp8lm_steps(own[to.rank], [g.shape[1]], _quantizer("e4m3fn"), to, factors[to.rank]), len(g))
    return own[0].double(), float(factors[0])


def by_halfstep(g: Tensor) -> Tensor:
    """The mean by halfstep's own reduction, in FP8."""
    own = g.float()
    run(lambda to: mean_steps(own[to.rank], _FP8, to), len(g))
    return own[0].double()


def snr(found: Tensor, exact: Tensor) -> float:
    """The signal-to-noise ratio, in decibels."""
    return float(10 * torch.log10(exact.square().sum() / (found - exact).square().sum()))


def controlled(g: Tensor, steps: int) -> list[tuple[float, float]]:
    """mu and the SNR of each step, from 1: halved if over 0.001 % saturate, else raised by 2^(1/1000) up to 2."""
    mu, found, exact = 1.0, [], g.mean(0)
    for _ in range(steps):
        mean, following = summed(g, mu)
        found.append((mu, snr(mean, exact)))
        mu = following
    return found


@check("fp8lm-all-reduce")
def all_reduce() -> Numbers:
    """The SNR of the mean gradient of 16 ranks summed in E4M3, by the factor mu of the scale's target."""
    g = shards(16)
    fixed = {f"mu_{n}": snr(summed(g, 1 / n)[0], g.mean(0)) for n in (1, 2, 4, 8, 16)}
    steps = controlled(g, 40)
    own = {f"own_{ranks}": snr(by_halfstep(shards(ranks)), shards(ranks).mean(0)) for ranks in (2, 16)}
    return {**fixed, "worst": min(decibels for _, decibels in steps[4:]), "mu": steps[-1][0], **own}


@check("fp8lm-traffic")
def traffic() -> Numbers:
    """The bytes per element that one of 8 ranks sends when gradients are reduced to the owner of an element and weights
    are gathered from it, as the collectives count them; and the saving with 8 bits."""
    size, ranks = 2**18, 8

    def sent(*formats: str | Storage) -> float:
        gradients, weights = (Message(get_storage(format), size // ranks) for format in formats)

        def steps(to: Simulated) -> Steps:
            given = torch.zeros(ranks, gradients.bytes, dtype=torch.uint8, device="cpu")
            yield to.all_to_all(given.clone(), given)
            yield to.all_gather(torch.zeros(weights.bytes, dtype=torch.uint8, device="cpu").repeat(ranks, 1))

        return run(steps, ranks)[0].sent / size

    few, wide, half = sent(_FP8, _FP8), sent("fp32", "bf16"), sent("bf16", "bf16")
    return {"fp8": few, "fp32_bf16": wide, "bf16": half, "saved_fp32": 1 - few / wide, "saved_bf16": 1 - few / half}


@check("fp8lm-pre-and-post")
def pre_and_post() -> Numbers:
    """Log-normal gradients (0, 2) with one scale: the share that 64 ranks zero by dividing first, and clip by dividing
    last."""
    g = torch.exp(2 * normal(2**16))
    codes = g * float(get_scaling("rceil").factor(g.amax(), _E4M3FN))  # type: ignore[arg-type]
    zeroed = {f"zeroed_{n}": float((round_to(codes / n, _E4M3FN) == 0).double().mean()) for n in (1, 64)}
    return {**zeroed, "clipped_64": float((round_to(codes, _E4M3FN) * 64 > _E4M3FN.max).double().mean())}


@check("fp8lm-master")
def master() -> Numbers:
    """The share of Adam's updates of N(0, 0.02) weights, at a learning rate of 1e-4, that change nothing, by master."""
    found, o1 = Numbers(), get_recipe("fp8lm-o1")
    assert o1.codes is not None
    assert o1.codes.grads is not None
    for name, weights in (("fp16", o1.codes.weights), ("e4m3fn", o1.codes.grads)):
        torch.manual_seed(0)
        model = nn.Linear(256, 256, bias=False)
        nn.init.normal_(model.weight, std=0.02)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        _, low_bit, _ = prepare(model, optimizer, replace(o1, name=name, codes=Codes(weights, o1.codes.grads)))
        model.weight.grad = torch.randn(256, 256, dtype=torch.float32, device="cpu")
        with tracking.arrivals(low_bit, {}) as arrived:
            low_bit.step()
        found[name] = float(arrived.model.lost_share or 0.0)
    return found


@check("fp8lm-bytes")
def stored() -> Numbers:
    """The bytes of a parameter with Adam, measured from live tensors, by recipe."""
    found: Numbers = {}
    for name, recipe in (("fp32", "fp32"), ("o1", "fp8lm-o1"), ("o2", "fp8lm-o2"), ("o3", "fp8lm-o3")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.GELU(), nn.Linear(64, 64, bias=False))
        _, optimizer, scaler = prepare(model, torch.optim.AdamW(model.parameters()), recipe)
        x = torch.randn(8, 64, dtype=torch.float32, device="cpu")
        for _ in range(2):
            F.mse_loss(model(x), x).backward()  # type: ignore[no-untyped-call]
            size = memory.measure(model, optimizer)
            update(optimizer, scaler)
        found |= {name: size.total, "grads": size.grads}
    return found
