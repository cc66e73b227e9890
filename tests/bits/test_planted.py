"""200 tensors of known history: no verdict is certain and wrong, and unmixed histories are recognised."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from test_grids import E2M1, ROUND, nearest, quantized
from torch import Tensor

from halfstep.bits.origin import Origin, origin
from halfstep.bits.scan import scan
from halfstep.bits.sentences import Evidence, verdict
from halfstep.bits.values import InMemory


@dataclass(frozen=True)
class History:
    """A tensor, the keys that name its history, and whether the verdict has to name it."""

    name: str
    tensor: Tensor
    right: str = "full"
    """A pattern of the keys that name the history; keys that only describe bits are checked against the bits."""
    pure: bool = False


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


BASES: dict[str, Callable[[torch.Generator], Tensor]] = {
    "normal": lambda g: torch.randn(384, 512, generator=g) * 0.02,
    "heavy": lambda g: (
        torch.randn(256, 640, generator=g) * torch.rand(256, 640, generator=g).clamp(min=0.05) ** -0.5 * 0.03
    ),
    "rows": lambda g: torch.randn(512, 256, generator=g) * (torch.rand(512, 1, generator=g) + 0.05),
    "uniform": lambda g: (torch.rand(320, 384, generator=g) - 0.5) / 9,
}


def rounded(x: Tensor, bits: int) -> Tensor:
    """x rounded to `bits` significant bits."""
    mantissa, exponent = torch.frexp(x.double())
    return torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent).float()


def palette(x: Tensor, count: int) -> Tensor:
    """Each value replaced by the nearest of `count` quantiles of its row (last dimension)."""
    wanted = torch.linspace(0.5 / count, 1 - 0.5 / count, count, dtype=x.dtype)
    values = torch.quantile(x, wanted, dim=-1).movedim(0, -1)
    if values.dim() == 1:
        return nearest(x, values)
    return torch.stack([nearest(row, own) for row, own in zip(x, values, strict=True)])


def asymmetric(x: Tensor, levels: int, whole: bool) -> Tensor:
    """x quantized along the last dimension to codes from 0 to levels - 1, with an integer zero point if `whole`, else a
    float one."""
    low, high = x.aminmax(dim=-1, keepdim=True)
    step = (high - low) / (levels - 1)
    if whole:
        zero = (-low / step).round()
        return ((x / step + zero).round().clamp(0, levels - 1) - zero) * step
    return ((x - low) / step).round() * step + low


def microscaled(x: Tensor, format: str, size: int = 32) -> Tensor:
    """x quantized in blocks with power-of-two scales."""
    largest, to = ROUND[format]
    blocks = x.reshape(-1, size)
    scale = torch.exp2(torch.floor(torch.log2(blocks.abs().amax(1, keepdim=True) / largest)) + 1)
    return (to(blocks / scale) * scale).view_as(x)


def casts(base: str, x: Tensor) -> Iterator[History]:
    def of(name: str, tensor: Tensor, right: str = "full") -> History:
        return History(f"{base}: {name}", tensor, right, pure=True)

    bf16, fp16 = x.bfloat16(), x.half()
    yield of("float32", x)
    yield of("bf16", bf16)
    yield of("fp16", fp16)
    yield of("bf16 to float32", bf16.float(), "bf16")
    yield of("fp16 to float32", fp16.float(), "fp16")
    yield of("bf16 to fp16", bf16.half(), "bf16")
    yield of("bf16 to fp16 to float32", bf16.half().float(), r"bf16(\+fp16)?|fp16\+bf16")
    yield of("fp16 to bf16", fp16.bfloat16(), "full|fp16")
    yield of("tf32", rounded(x, 11), "tf32|scaled fp16")
    yield of("float32 to float64", x.double(), "fp32")
    yield of("bf16 to float64", bf16.double(), r"bf16(\+\w+)*")


def grids(base: str, x: Tensor) -> Iterator[History]:
    def of(name: str, tensor: Tensor, right: str) -> History:
        return History(f"{base}: {name}", tensor, right, pure=True)

    rows, columns = x.shape
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        stored = str(dtype)[6:]
        yield of(f"int8 rows, {stored}", quantized(x, "int8", 1, columns).to(dtype), "scaled int8 row")
        yield of(f"int8 tensor, {stored}", quantized(x, "int8", rows, columns).to(dtype), "scaled int8")
    for name in ("float8_e4m3fn", "float8_e5m2"):
        yield of(f"{name} tensor", quantized(x, name, rows, columns).bfloat16(), f"scaled {name}")
        yield of(f"{name} blocks", quantized(x, name, 128, 128).bfloat16(), f"scaled {name} 128x128")
    yield of("e4m3 rows", quantized(x, "float8_e4m3fn", 1, columns).half(), "scaled float8_e4m3fn row")
    yield of("nf4", quantized(x, "nf4", 1, 64).bfloat16(), "scaled nf4 1x64")
    yield of("fp4 of bitsandbytes", quantized(x, "bnb_fp4", 1, 64).half(), "scaled bnb_fp4 1x64")
    yield of("int4 groups", quantized(x, "int4", 1, 128).half(), "scaled int4 1x128")
    yield of("awq groups", asymmetric(x.reshape(-1, 128), 16, True).view_as(x).half(), "scaled int4 1x128")
    for name in ("float8_e4m3fn", "float8_e5m2", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"):
        yield of(f"mx {name}", microscaled(x, name).bfloat16(), f"scaled {name}( .*)?")
    blocks = x.reshape(-1, 16)
    scales = (blocks.abs().amax(1, keepdim=True) / 6 / 1e-5).to(torch.float8_e4m3fn).float() * 1e-5
    nvfp4 = nearest((blocks / scales).clamp(-6, 6), torch.cat([-E2M1, E2M1])) * scales
    yield of("nvfp4", nvfp4.view_as(x).bfloat16(), "scaled float4_e2m1fn 1x16")


def mixtures(base: str, x: Tensor, g: torch.Generator) -> Iterator[History]:
    def of(name: str, tensor: Tensor, right: str = "full") -> History:
        return History(f"{base}: {name}", tensor, right)

    near = x + torch.randn(x.shape, generator=g) * x.std() * 0.01
    far = torch.randn(x.shape, generator=g) * x.std()
    tuned = torch.randn(x.shape, generator=g)
    b, c, d = x.bfloat16().float(), near.bfloat16().float(), far.bfloat16().float()
    yield of("soup of two bf16", (b + c) / 2)
    yield of("soup of two far bf16", (b + d) / 2)
    yield of("soup of three bf16", (b + c + d) / 3)
    yield of("weighted soup", 0.7 * b + 0.3 * c, "full|partly bf16")  # where both runs are equal
    yield of("soup of two fp16", (x.half().float() + near.half().float()) / 2)
    yield of("soup saved in bf16", ((b + c) / 2).bfloat16())
    yield of("bf16 and a LoRA", b + torch.randn(len(x), 8, generator=g) @ torch.randn(8, x.shape[1], generator=g) / 999)
    yield of("task arithmetic", b + 0.5 * (c - b))
    yield of("folded bf16 norm", b * (1 + torch.randn(x.shape[1], generator=g) * 0.1).bfloat16().float())
    yield of("folded float32 norm", b * (1 + torch.randn(x.shape[1], generator=g) * 0.1), "full|scaled bf16 column")
    yield of("folded batch norm of fp16", x.half().float() * torch.rand(len(x), 1, generator=g), "full|scaled fp16 row")
    yield of("product of bf16 factors", b[:, :4] @ c[:4, :])
    for count in (5, 16, 200):
        yield of(f"palette of {count}", palette(x.flatten(), count).view_as(x))
    yield of("palette of 16 a row", palette(x, 16))
    yield of("palette of 16 a row in bf16", palette(x, 16).bfloat16())
    yield of("palette of 8 a group", palette(x.reshape(-1, 128), 8).view_as(x))
    yield of("pruned float32", x * (x.abs() > x.abs().median()))
    yield of("pruned bf16", b * (x.abs() > x.abs().median()), "bf16")
    yield of("pruned int8 rows", quantized(x * (x.abs() > x.abs().median()), "int8", 1, x.shape[1]), "scaled int8 row")
    for bits in (5, 6, 7, 9, 10, 12, 13, 14, 15, 16, 17, 20):
        yield of(f"{bits} bits", rounded(x, bits), f"{bits} bits")
    yield of("asymmetric int8 rows", asymmetric(x, 256, True), "scaled int8 row")
    yield of("asymmetric int8 rows, float zero", asymmetric(x, 256, False))
    yield of("HQQ groups", asymmetric(x.reshape(-1, 64), 16, False).view_as(x))
    yield of("asymmetric int8 rows in bf16", asymmetric(x, 256, True).bfloat16(), "levels.*|scaled int8.*")
    yield of("int8 columns", quantized(x.t().contiguous(), "int8", 1, len(x)).t().contiguous())
    yield of("int8 columns in bf16", quantized(x.t().contiguous(), "int8", 1, len(x)).t().bfloat16().contiguous())
    some = torch.rand(x.shape, generator=g)
    yield of("bf16, a hundredth tuned", torch.where(some < 0.01, b + tuned * 1e-3, b), "partly bf16")
    yield of("bf16, half tuned", torch.where(some < 0.5, b + tuned * 1e-3, b), "partly bf16")
    yield of("fp16, a tenth tuned", torch.where(some < 0.1, near, x.half().float()), "partly fp16")
    yield of("bf16 rows, some tuned", torch.where(torch.arange(len(x))[:, None] % 7 > 0, b, near), "partly bf16")
    int8 = quantized(x, "int8", 1, x.shape[1])
    first = torch.arange(len(x))[:, None]
    yield of("first rows int8", torch.where(first < 128, int8, near), "partly scaled int8 row")
    yield of("last rows not int8", torch.where(first < len(x) * 9 // 10, int8, near), "partly scaled int8 row")
    yield of("int8 rows, a tenth tuned", torch.where(first % 10 > 0, int8, near), "partly scaled int8 row")
    yield of("fixed point", (x * 2**12).round() / 2**12)
    yield of("fixed point of 16 bits", (x / x.abs().max() * 2**15).round() / 2**15)
    yield of("powers of two", torch.exp2(torch.log2(x.abs()).round()) * x.sign())
    yield of("int8 blocks of a power of two", microscaled(x, "int8"), "scaled int8( .*)?")


def histories() -> list[History]:
    found: list[History] = []
    for seed, (base, make) in enumerate(BASES.items()):
        g = generator(seed)
        x = make(g)
        found += casts(base, x)
        found += grids(base, x) if seed < 2 else ()
        found += mixtures(base, x, g) if seed < 3 else ()
    return found


def distinct(tensor: Tensor, tile: str | None) -> int:
    """The largest number of distinct magnitudes in any tile."""
    x = tensor.double().abs()
    rows, columns = x.shape
    high, wide = {None: (rows, columns), "row": (1, columns), "column": (rows, 1)}.get(tile) or map(
        int, tile.split("x")
    )
    tiles = (x[i : i + high, j : j + wide] for i in range(0, rows, high) for j in range(0, columns, wide))
    return max(int(values[values > 0].unique().numel()) for values in tiles)


def shown(found_origin: Origin, tensor: Tensor) -> bool:
    """Whether a key that only describes bits (levels, steps) is true of the tensor."""
    if found_origin.levels is not None:
        tile = None if found_origin.scale is None else found_origin.scale
        return (
            distinct(tensor[:128] if tile == "column" else tensor, tile) <= 1.25 * found_origin.levels
        )  # of the tiles looked at
    if found_origin.step is not None:
        codes = tensor.double() / 2.0**found_origin.step
        return bool((codes == codes.round()).all()) and codes.abs().max() < 2**found_origin.bits
    if found_origin.bits is not None:
        share = float((rounded(tensor.float(), found_origin.bits) == tensor.float()).double().mean())
        return 0.45 < share < 1 if found_origin.half else share == 1
    return found_origin.key == "full"


@pytest.mark.slow
def test_no_planted_history_is_certain_and_wrong() -> None:
    """Statements about bits must be true of the bits, and statements about the past true of the history."""
    planted = histories()
    assert len(planted) >= 200
    wrong, unnamed, pure = [], [], []
    for one in planted:
        found_origin = origin(scan(InMemory(one.tensor)), str(one.tensor.dtype)[6:])
        named = re.fullmatch(one.right, found_origin.key) is not None
        if not (named or shown(found_origin, one.tensor)) and found_origin.confidence == "certain":
            wrong.append((one.name, found_origin.key))
            print("WRONG", one.name, found_origin.key, found_origin.levels, found_origin.bits)
        text = verdict([Evidence(found_origin.stored, one.tensor.numel(), found_origin)]).text
        assert ("quantised to" in text) <= ("scaled" in found_origin.key)
        unnamed += [one.name] if found_origin.confidence == "none" else []
        pure += [named and found_origin.confidence == "certain"] if one.pure else []
        if one.pure and not pure[-1]:
            print(one.name, "is told to be", found_origin.key, found_origin.confidence)
    print(f"{len(planted)} histories; cannot tell: {len(unnamed)}; pure and right: {sum(pure)} of {len(pure)}")
    assert not wrong
    assert sum(pure) >= 0.9 * len(pure)
    assert len(unnamed) <= 0.02 * len(planted)
