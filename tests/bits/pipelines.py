"""Generated tensors of known history: source, quantizer, tile and rule of the scales, later changes, stored dtype.

Pipelines are drawn at random from the space of each family. `past` gives the tags that a true verdict may name, `right`
a pattern of the keys that name the history best; both follow from the description, not from a verdict."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from test_grids import ROUND, nearest
from torch import Tensor


@dataclass(frozen=True)
class Pipeline:
    """One history. `tile`: the elements that share a scale; `rule`: how the scale is chosen; `after`: what was done to
    the values after quantization."""

    family: str
    source: str = "normal"
    quantizer: str = "none"
    tile: str = "tensor"
    rule: str = "absmax"
    after: str = "none"
    stored: str = "float32"
    shape: tuple[int, int] = (256, 384)
    seed: int = 0

    @property
    def name(self) -> str:
        """The description."""
        return f"{self.family}: {self.source}, {self.quantizer} {self.tile} {self.rule}, {self.after}, {self.stored}"


CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
FLOATS = ("float8_e4m3fn", "float8_e5m2", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn")
TABLES = ("nf4", "bnb_fp4")
LOOKED = ("tensor", "row", "1x128", "1x64", "1x32", "1x16", "128x128")
TRAINED = ("normal", "heavy", "rows")

SPACES: dict[str, dict[str, tuple[str, ...]]] = {
    "trained": {"source": (*TRAINED, "norm", "small"), "stored": ("float32", "bfloat16", "float16")},
    "casts": {
        "source": (*TRAINED, "norm", "small"),
        "quantizer": ("bf16", "fp16", "tf32", "tf32", "bf16 fp16", "6 bits", "9 bits", "14 bits", "17 bits"),
    },
    "integers": {
        "source": TRAINED,
        "quantizer": tuple(f"int{bits}" for bits in range(2, 9)),
        "tile": LOOKED,
        "rule": ("absmax", "clipped", "fp16"),
        "stored": ("float32", "bfloat16", "float16"),
    },
    "integers under powers of two": {
        "source": TRAINED,
        "quantizer": tuple(f"int{bits}" for bits in range(3, 9)),
        "tile": ("tensor", "row", "1x32", "1x16", "128x128"),
        "rule": ("power of two",),
        "stored": ("float32", "bfloat16", "float16"),
    },
    "small floats": {
        "source": TRAINED,
        "quantizer": FLOATS,
        "tile": LOOKED,
        "rule": ("absmax", "power of two", "two levels"),
        "stored": ("float32", "bfloat16"),
    },
    "tables": {
        "source": TRAINED,
        "quantizer": (*TABLES, "palette 5", "palette 16", "palette 200", "zero 4", "zero 8", "float zero 4"),
        "tile": ("tensor", "row", "1x64", "1x128"),
        "stored": ("float32", "bfloat16", "float16"),
    },
    "signs": {
        "source": TRAINED,
        "quantizer": ("ternary", "binary"),
        "tile": ("tensor", "row", "1x128"),
        "stored": ("float32", "bfloat16", "float16"),
    },
    "elsewhere": {
        "source": TRAINED,
        "quantizer": ("int8", "int4", "float8_e4m3fn", "nf4"),
        "tile": ("column", "filter", "flat", "128x1"),
        "after": ("none", "none", "row factors", "column factors"),
        "stored": ("float32", "bfloat16", "float16"),
    },
    "drawn or counted": {
        "source": ("uniform 1", "uniform 0.5", "uniform fan", "steps 1e-4", "steps 3e-3", "counts 1000", "many steps"),
        "stored": ("float32", "float32", "bfloat16", "float16"),
    },
    "scaled": {
        "source": TRAINED,
        "quantizer": ("bf16", "fp16", "int8", "float8_e4m3fn"),
        "tile": ("row", "128x128"),
        "after": ("times 0.1", "times 0.1", "row factors", "column factors"),
        "stored": ("float32", "float32", "bfloat16"),
    },
    "mixed": {
        "source": TRAINED,
        "quantizer": ("bf16", "fp16", "int8", "float8_e4m3fn"),
        "tile": ("row",),
        "after": ("averaged", "LoRA", "tuned 0.01", "tuned 0.5", "rows tuned", "pruned"),
    },
    "repeated": {
        "source": TRAINED,
        "quantizer": ("none", "none", "none", "bf16", "int8"),
        "tile": ("row",),
        "after": ("heads", "doubled", "circulant", "grown"),
        "stored": ("float32", "bfloat16"),
    },
    "slivers": {
        "source": ("log2 with outliers", "ones", "whole with outliers"),
        "quantizer": ("none", "bf16"),
        "stored": ("float32", "bfloat16"),
    },
}


def possible(one: Pipeline) -> bool:
    """Whether the history makes sense and leaves a trace in the values."""
    width = {"bfloat16": 8, "float16": 11, "float32": 24}[one.stored]
    if one.family == "casts":
        return one.stored == "float32"
    if one.rule == "two levels" and not (one.quantizer == "float4_e2m1fn" and one.tile == "1x16"):
        return False
    if one.quantizer.startswith("palette") and one.tile != "tensor" and one.quantizer != "palette 16":
        return False
    if one.quantizer in TABLES and one.tile == "tensor":
        return False
    if one.quantizer == "zero 8" and one.stored == "bfloat16":
        return False
    if one.family == "elsewhere" and one.after != "none" and one.tile != "filter":
        return False
    if one.stored == "float16" and one.source == "heavy":
        return False  # subnormal values show fp16's rounding rather than the quantizer's
    return not (one.quantizer in ("bf16", "fp16") and width < 24 and one.family in ("scaled", "slivers"))


def drawn(seed: int, shape: tuple[int, int], each: int) -> list[Pipeline]:
    """`each` random pipelines of every family."""
    choose, found = random.Random(seed), []
    for family, space in SPACES.items():
        some: dict[str, Pipeline] = {}
        for _ in range(1000):
            one = Pipeline(family, **{key: choose.choice(values) for key, values in space.items()})
            if possible(one) and len(some) < each:
                some.setdefault(one.name, replace(one, shape=shape, seed=choose.randrange(1 << 30)))
        found += some.values()
    return found


def made(one: Pipeline) -> Tensor:
    """The tensor of a pipeline."""
    g = torch.Generator().manual_seed(one.seed)
    dtype = getattr(torch, one.stored)
    x = source(one, g)
    if one.after == "circulant":
        x = circulant(x)
    x = quantized(x, one) if one.quantizer != "none" else x
    x = treated(x, one, g).to(dtype)
    return x.flatten() if one.tile == "flat" else x.contiguous()


def source(one: Pipeline, g: torch.Generator) -> Tensor:
    """The source values in float32, before quantization."""
    rows, columns = one.shape
    kind, _, size = one.source.partition(" ")
    x = torch.randn(one.shape, generator=g)
    if kind == "norm":
        return 1 + 0.1 * x[:1]
    if kind == "small":
        return x[:32, :64] * 0.3
    if kind == "heavy":
        return x * torch.rand(one.shape, generator=g).clamp(min=0.05) ** -0.5 * 0.03
    if kind == "rows":
        return x * (torch.rand(rows, 1, generator=g) + 0.05) * 0.1
    if kind == "uniform":
        bound = {"fan": columns**-0.5}.get(size) or float(size)
        to = getattr(torch, one.stored)
        return torch.empty(one.shape, dtype=to).uniform_(-bound, bound, generator=g).float()
    if kind == "steps":  # a LoRA's B after updates by signs
        steps = torch.randint(0, 2, (12, *one.shape), generator=g).mul(2).sub(1).sum(0)
        return steps.float() * float(size)
    if kind == "counts":
        return torch.poisson(x.exp() * 9, generator=g) / float(size)
    if kind == "many":
        return (x * 300).round() * 1e-4
    if kind == "ones":
        return torch.where(torch.rand(one.shape, generator=g) < 0.006, 1 + x / 10, torch.ones(1))
    if kind == "whole":
        return torch.where(torch.rand(one.shape, generator=g) < 0.006, x, (x * 20).round())
    if kind == "log2":
        powers = torch.exp2(x.abs().clamp(min=1e-9).log2().round()) * x.sign() / 16
        return torch.where(torch.rand(one.shape, generator=g) < 0.006, x, powers)
    return x * 0.02


def circulant(x: Tensor, size: int = 64) -> Tensor:
    """Block-circulant values: each row of a block is the first one, rotated by one more element."""
    rows, columns = (side // size for side in x.shape)
    first = x[:rows, : columns * size].view(rows, 1, columns, size)
    turned = torch.cat([first.roll(i, -1) for i in range(size)], 1)
    return turned.reshape(rows * size, columns * size)


def bits_of(x: Tensor, bits: int) -> Tensor:
    """x rounded to `bits` significant bits."""
    mantissa, exponent = torch.frexp(x.double())
    return torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent).float()


def tiles(x: Tensor, tile: str) -> Tensor:
    """x reshaped to one row per tile; `untiled` undoes it."""
    rows, columns = x.shape
    if tile == "tensor":
        return x.reshape(1, -1)
    if tile in ("row", "filter", "flat"):
        return x
    if tile == "column":
        return x.t()
    high, wide = map(int, tile.split("x"))
    return x.reshape(rows // high, high, columns // wide, wide).permute(0, 2, 1, 3).reshape(-1, high * wide)


def untiled(values: Tensor, tile: str, shape: torch.Size) -> Tensor:
    """Tiled values in the original shape and order."""
    rows, columns = shape
    if tile == "column":
        return values.t().contiguous()
    if "x" not in tile:
        return values.reshape(shape)
    high, wide = map(int, tile.split("x"))
    return values.reshape(rows // high, columns // wide, high, wide).permute(0, 2, 1, 3).reshape(shape)


def quantized(x: Tensor, one: Pipeline) -> Tensor:
    """x rounded and dequantized in float32. A filter's window is the last two of four dimensions."""
    kind, _, size = one.quantizer.partition(" ")
    if one.quantizer == "bf16 fp16":
        return x.bfloat16().half().float()
    if one.quantizer in CASTS:
        return x.to(CASTS[one.quantizer]).float()
    if one.quantizer == "tf32" or size == "bits":
        return bits_of(x, 11 if one.quantizer == "tf32" else int(kind))
    if one.tile == "filter":
        x = x[:, : x.shape[1] // 9 * 9]
    values = untiled(in_tiles(tiles(x, one.tile), one), one.tile, x.shape)
    return values.reshape(len(x), -1, 3, 3) if one.tile == "filter" else values


def in_tiles(x: Tensor, one: Pipeline) -> Tensor:
    """`quantized` for values with one row per tile."""
    kind, _, size = one.quantizer.rpartition(" ")
    if one.quantizer in ("ternary", "binary"):
        scale = x.abs().mean(1, keepdim=True)
        return (x / scale).round().clamp(-1, 1) * scale if one.quantizer == "ternary" else x.sign() * scale
    if kind == "palette":
        wanted = torch.linspace(0.5 / int(size), 1 - 0.5 / int(size), int(size))
        levels = torch.stack([row.sort().values[(wanted * row.numel()).long()] for row in x])
        return torch.stack([nearest(row, own) for row, own in zip(x, levels, strict=True)])
    if kind:
        low, high = x.aminmax(dim=1, keepdim=True)
        step = (high - low) / (2 ** int(size) - 1)
        if kind == "float zero":
            return ((x - low) / step).round() * step + low
        zero = (-low / step).round()
        return ((x / step + zero).round().clamp(0, 2 ** int(size) - 1) - zero) * step
    if one.quantizer.startswith("int"):
        largest, rounded = 2 ** (int(one.quantizer[3:]) - 1) - 1, torch.round
    else:
        largest, rounded = ROUND[one.quantizer]
    amax = x.abs().amax(1, keepdim=True) * (0.7 if one.rule == "clipped" else 1)
    scale = amax / largest
    if one.rule == "fp16":
        scale = scale.half().float()
    if one.rule == "power of two":
        scale = torch.exp2(torch.log2(scale).ceil())
    if one.rule == "two levels":
        scale = (scale / 1e-5).to(torch.float8_e4m3fn).float() * 1e-5
    return rounded((x / scale).clamp(-largest, largest)) * scale


def treated(x: Tensor, one: Pipeline, g: torch.Generator) -> Tensor:
    """The values after what `one.after` names, such as a factor, an average or fine-tuning."""
    kind, _, share = one.after.partition(" ")
    rows, columns = x.shape[:2]
    near = x + torch.randn(x.shape, generator=g) * x.std() * 0.01
    if one.after == "times 0.1":
        return x * 0.1
    if one.after == "row factors":
        return x * (torch.rand(rows, *[1] * (x.dim() - 1), generator=g) + 0.5)
    if one.after == "column factors":
        return x * (torch.rand(columns, *[1] * (x.dim() - 2), generator=g) + 0.5)
    if one.after == "averaged":
        return (x + (quantized(near, one))) / 2
    if one.after == "LoRA":
        return x + torch.randn(rows, 8, generator=g) @ torch.randn(8, columns, generator=g) / 999
    if kind == "tuned":
        return torch.where(torch.rand(x.shape, generator=g) < float(share), near, x)
    if one.after == "rows tuned":
        return torch.where(torch.arange(rows)[:, None] % 7 == 3, near, x)
    if one.after == "pruned":
        return x * (x.abs() > x.abs().median())
    if one.after == "heads":  # keys of 4 heads, each repeated for 4 of 16 heads
        heads = x[: rows // 64 * 16].reshape(4, -1, columns)
        return heads.repeat_interleave(4, 0).reshape(-1, columns)
    if one.after == "doubled":
        return x[:, : columns // 2].repeat(1, 2)
    if one.after == "grown":  # Net2Net: duplicated neurons with unchanged inputs
        return x[:, torch.randint(0, columns // 3, (columns,), generator=g)]
    return x


def past(one: Pipeline) -> set[str]:
    """The tags of a history; a verdict that states what happened to the values is true if it names one of them."""
    kind = one.source.split()[0]
    tags = {kind} if kind in ("uniform", "steps", "counts", "many", "log2", "whole", "ones") else set[str]()
    if one.quantizer == "none" and not tags:
        tags = {"wide"}
    if kind in ("steps", "counts", "many"):
        tags |= {"steps", "wide"}
    if kind == "uniform":
        tags |= {"wide", "fixed"}
    if one.quantizer != "none":
        tags |= set(one.quantizer.split()) if one.quantizer == "bf16 fp16" else {one.quantizer}
    if one.quantizer.endswith(" bits") or one.quantizer == "tf32":
        tags |= {"rounded"}
    codes = one.quantizer not in ("none", "bf16", "fp16", "tf32", "bf16 fp16") and not one.quantizer.endswith(" bits")
    if codes:
        tags |= {"codes"}
        if one.tile not in LOOKED or one.after in ("row factors", "column factors"):
            tags |= {"elsewhere"}
        if "zero" in one.quantizer:
            tags |= {"zero point"}
            tags |= {f"int{one.quantizer[-1]}"} if one.quantizer.startswith("zero") else set[str]()
        if one.quantizer.startswith("palette") or one.quantizer in ("ternary", "binary"):
            tags |= {"palette"}
        if one.quantizer in ("ternary", "int2"):
            tags |= {"ternary", "int2", "palette"}
        if one.rule == "power of two":
            tags |= {"power of two"}
        if one.rule == "fp16":
            tags |= {"product"}
    if one.after in ("times 0.1", "row factors", "column factors"):
        tags |= {"factors"}
    if one.after in ("averaged", "LoRA"):
        tags |= {"merge"}
    if "tuned" in one.after or one.source.endswith("outliers") or kind == "ones":
        tags |= {"partly"}
    if one.stored != "float32" and not codes:
        tags |= {"wide"}  # a cast from a wider type, whatever its history
    if one.after in ("heads", "doubled", "circulant", "grown"):
        tags |= {"repeated"}
    return tags


def right(one: Pipeline) -> str:
    """A pattern of the keys that name the history best."""
    name, kind = one.quantizer, one.source.split()[0]
    if kind == "uniform":
        return r"full|unknown|\d+ bits( .*)?"
    if kind in ("steps", "counts", "many"):
        return "scaled int.*|levels.*|full"
    if kind in ("log2", "whole", "ones"):
        return "unknown|partly.*|full" if name == "none" else "unknown|partly.*|bf16|full"
    if one.after in ("averaged", "LoRA"):
        return r"full|half \d+ bits|\d+ bits|levels.*"
    if name == "none":
        return "full"
    if name == "bf16 fp16":
        return "bf16([+]fp16)?"
    if name.endswith(" bits"):
        return name
    if name == "tf32":
        return "tf32|(scaled )?fp16"
    known = name.replace("zero ", "int") if name.startswith("zero") else name
    if name in CASTS:
        word = {"bf16": 8, "fp16": 11}[name]
        if one.after in ("times 0.1", "row factors"):
            return rf"scaled ({name}|{word} bits).*|full" if one.stored == "float32" else "full"
        if one.after == "column factors":
            return f"full|scaled {name} column"
        if one.stored != "float32":
            return "full"
        return f"partly {name}" if "tuned" in one.after else name
    if name in ("ternary", "binary"):
        return "levels.*|scaled int2.*|scaled ternary.*"
    if "palette" in name or name.startswith("float zero") or name == "zero 8":
        return "levels.*|scaled int8.*" if name == "zero 8" else "levels.*"
    if one.after == "column factors" or one.tile in ("column", "filter", "flat", "128x1"):
        return f"levels.*|(partly )?scaled {known}.*"
    if "tuned" in one.after:
        return f"partly scaled {known}.*|levels.*|full"
    if name == "int2":
        return "levels.*|scaled int2.*|scaled ternary.*"
    return f"scaled {known}( .*)?"


ADMITTED: tuple[tuple[str, set[str]], ...] = (
    (r"from no narrower type", {"wide", "merge"}),
    (r"that (was|were) (not )?looked for", {"wide", "merge", "elsewhere", "factors"}),
    (r"looked for.*partly written since", {"wide", "merge", "elsewhere", "factors", "partly"}),
    (r"all \d+ bits in use", {"wide"}),
    (r"codes of a palette", {"palette", "zero point", "elsewhere"}),
    (r"codes of few bits", {"codes", "partly", "merge", "steps"}),
    (r"the others in full|in part, or partly written", {"partly"}),
    (r"half of the values fit", {"merge", "partly"}),
    (r"is an integer of at most", {"fixed", "power of two", "uniform", "steps"}),
    (r"rounded or truncated to so many, or products", {"rounded", "product"}),
    (r"products or sums", {"rounded", "product", "merge"}),
)
"""Phrases of verdicts and the tags they claim; one tag of the last matching phrase must be in the history."""


def untrue(one: Pipeline, text: str) -> str | None:
    """The first claim of a verdict's text that the history refutes, as a message, or None."""
    true = past(one)
    partly = {"partly"} if "of the values are evidence" in text else set[str]()
    for claim in claims(text):
        if not (claim | partly) & true:
            return f"said {sorted(claim)}, true {sorted(true)}"
    return None


def claims(text: str) -> Iterator[set[str]]:
    """The sets of tags that a text claims; one tag of each must be in the history."""
    steps = {"steps"} if "equal steps" in text else set[str]()
    repeated = {"repeated"} if "repeat" in text else set[str]()
    for names in re.findall(r"quantised to ([\w ]+?)(?: before| in | by |:|,|$)", text):
        yield {*re.split(" and | or ", names), *steps}
    for names in re.findall(r"(?:cast from|saved from|a chain of casts,) ([\w ]+?)(?: weights|,|;| \(|$)", text):
        if "wider" not in names:
            yield {*re.split(" and | or a | or | to ", names.replace(" draw", ""))}
    found = [tags for pattern, tags in ADMITTED if re.search(pattern, text)]
    general = [tags for tags in found if not any(tags < other for other in found)]
    for tags in general:
        yield {*tags, *repeated}
    if "scaled fp16 (FP8-LM)" in text:
        yield {"fp16", "tf32"}
    for names in re.findall(r"times .* factor.*: ([\w ]+) values that were scaled", text):
        yield set(names.split(" or "))
        yield {"factors"}
