"""Tests of kernels that quantize in tiles, in one layout or both, and after a Hadamard transform."""

from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from halfstep import formats, quant
from halfstep.kernels.cpu import blocks, dequantize, panels, rotated, rotated_tiles, tiles
from halfstep.kernels.gpu import (
    blocks as gpu_blocks,
    layouts,
    rotated as gpu_rotated,
    turned,
)
from halfstep.kernels.selftest.case import (
    DTYPES,
    SEED,
    Case,
    Cases,
    Make,
    Run,
    bounded,
    cell,
    hard,
    kernel_tests,
    matrix,
    named,
    scalar,
    seed_of,
    written,
)
from halfstep.quant import Hadamard, Quantizer, Scales, Tile, draw_seed, get_quantizer
from halfstep.quant.cast import pack, unpack
from halfstep.quant.rounding import Draws
from halfstep.quant.scaling import delayed, get_scaling


def hard_matrix(shape: tuple[int, int], dtype: torch.dtype, quantizer: Quantizer) -> Tensor:
    """Rows of many magnitudes, with hard values in some: tiles of zeros, of tiny values, with infinity or NaN, near
    ties."""
    (count, columns), generator = shape, torch.Generator().manual_seed(shape[0])
    sizes = torch.arange(count, dtype=torch.float32, device="cpu")[:, None] * 7 % 60 - 30
    x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * torch.exp2(sizes)
    if columns > 16 and count > 3:
        x[1] = hard(columns, format=quantizer.format)
        x[2, : columns // 2] = 0
        x[3] *= 2.0**-110
        x[-1] = hard(4 * columns, format=quantizer.format)[-columns:]
    return x.to(dtype)


def tied(shape: tuple[int, int], dtype: torch.dtype = torch.float32, quantizer: Quantizer | None = None) -> Tensor:
    """Tiles of 16 columns for which `four_over_six` has equal errors with the multiplier 256 (amax to 6) and 384 (to
    4). Of each 48 rows, the first 16 have smaller errors with 256 and the last 16 with 384, by 2^-15 a row."""
    generator, size = torch.Generator().manual_seed(shape[1]), (shape[0], shape[1] // 16)
    apart = torch.randint(0, 2**20, (*size, 4), generator=generator, dtype=torch.int64, device="cpu") * 2.0**-16
    tiny = torch.randn(*size, 7, generator=generator, dtype=torch.float32, device="cpu") * 2.0**-30
    x = torch.cat([torch.full_like(tiny[..., :1], 1536), 160 + apart, -160 + apart, tiny], -1)
    x[..., 1] += (torch.arange(shape[0], dtype=torch.int64, device="cpu") // 16 % 3 - 1)[:, None] * 2.0**-16
    return x.view(shape).to(dtype)


def quantised(
    quantizer: Quantizer, device: torch.device, dtype: torch.dtype, shape: tuple[int, int], make: Make = hard_matrix,
    run: Run = gpu_blocks.run, held: bool = True,
) -> Cases:  # fmt: skip
    """Codes and scales."""
    x, seed = make(shape, dtype, quantizer), seed_of(quantizer.rounding)
    made = quantizer.quantize(x, seed).tensors
    tensors = {key: torch.full_like(tensor, 7, device=device) for key, tensor in made.items()}
    done = run(x.to(device), tensors, quantizer, _handed(seed, x, device, held))
    yield from (Case(expected, done and tensors[key], key) for key, expected in made.items())


def valued(
    quantizer: Quantizer, device: torch.device, dtype: torch.dtype, shape: tuple[int, int], make: Make = hard_matrix,
    into: torch.dtype | None = None, run: Run = gpu_blocks.run_values,
) -> Cases:  # fmt: skip
    """Dequantized values; with two levels of scales, also without the tensor's scale."""
    x, seed = make(shape, dtype, quantizer), seed_of(quantizer.rounding)
    out, expected = torch.full(shape, 7, dtype=into or dtype, device=device), quantizer.quantize(x, seed)
    yield Case(expected.dequantize(out.dtype), written(run, x, out, quantizer, seed), "", x)
    if "tensor_scale" in expected.tensors:
        scale = scalar(0.0, device)
        found = written(run, x, out, quantizer, seed, scale)
        yield Case(expected.tensors["tensor_scale"], found is not False and scale, "tensor's scale")
        apart = replace(expected, tensors=expected.tensors | {"tensor_scale": scalar(1.0)})
        yield Case(apart.dequantize(out.dtype), found, "without the tensor's scale", x)


def dequantised(
    quantizer: Quantizer, device: torch.device, dtype: torch.dtype, shape: tuple[int, int], make: Make = hard_matrix,
    into: torch.dtype | None = None, run: Run = gpu_blocks.run_dequantize,
) -> Cases:  # fmt: skip
    """Values of codes and scales; also with random codes, which no rounding gives, in half of the rows."""
    made, generator = quantizer.quantize(make(shape, dtype, quantizer), SEED), torch.Generator().manual_seed(1)
    random = torch.randint(0, 256, made.codes.shape, generator=generator, dtype=torch.int64, device="cpu")
    for codes in (made.codes.clone(), random):
        made.codes[::2] = codes[::2].to(made.codes.dtype)
        out = torch.full(shape, 7, dtype=into or dtype, device=device)
        done = run({key: tensor.to(device) for key, tensor in made.tensors.items()}, out, quantizer)
        yield Case(made.dequantize(out.dtype), done and out)


def both(
    quantizer: Quantizer, device: torch.device, dtype: torch.dtype, shape: tuple[int, int], form: str, outer: str
) -> Cases:
    """Codes and scales of a matrix and of its transpose; with a seed, the transpose has the matrix's codes."""
    x, seed = hard_matrix(shape, dtype, quantizer), seed_of(quantizer.rounding)
    copies = layouts.empty(x.to(device), quantizer, form, bool(outer))
    layouts.run(x.to(device), quantizer, *copies, _handed(seed, x, device))
    one = quantizer.quantize(x, seed).tensors
    other = quantizer.quantize(x.t().contiguous(), seed).tensors
    if seed:
        bits, first = quantizer.format.bits, quantizer.format.high_nibble_first
        codes = unpack(one["codes"], bits, shape[1], first).t().contiguous()
        other = one | {"codes": pack(codes, bits, first), "scale": one["scale"].t()}
    for copy, made, which, rows in zip(copies, (one, other), ("as it lies", "transposed"), shape, strict=True):
        laid = made | {"scale": _laid(made["scale"], quantizer, form, rows)}
        yield from (Case(laid[key], found, f"{key} {which}") for key, found in copy.items())


def _laid(scales: Tensor, quantizer: Any, form: str, rows: int) -> Tensor:
    """Scales in that form, for a copy with `rows` rows; swizzled, repeated for each row of a tile, by the formula of
    PyTorch's documentation, entry by entry."""
    if form != "swizzled":
        apart = {"scale": scales, "tensor_scale": scalar(1.0)}
        return scales if form == "stored" else quantizer.scales.rule.multiplier(apart, quantizer.format)
    scales = scales.repeat_interleave(max(quantizer.scales.tile.rows, 1), 0)[:rows]
    (count, across), groups = scales.shape, -(-scales.shape[1] // 4)
    out = torch.zeros(-(-count // 128) * groups * 512, dtype=scales.dtype, device="cpu")
    row = torch.arange(count, dtype=torch.int64, device="cpu")[:, None]
    column = torch.arange(across, dtype=torch.int64, device="cpu")
    block = row // 128 * groups + column // 4
    out[block * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4] = scales
    return out


def _given(quantizer: Quantizer, device: torch.device, dtype: torch.dtype, shape: tuple[int, int], kind: str) -> Cases:
    """Both copies of a matrix times a given factor, for NaN and infinity too; and the amax."""
    x, largest = hard_matrix(shape, dtype, quantizer), scalar(0.5, device)
    x[0, :8] = torch.tensor(
        [torch.nan, torch.inf, -torch.inf, 1e30, -0.0, 0.0, 1e-30, 3.0], dtype=torch.float32, device="cpu"
    ).to(dtype)
    x = x.nan_to_num(1.0, 2.0, 2.0) if kind == "numbers" else x
    yield from _times(x, quantizer, device, scalar(3.7), scalar(3.7, device), largest)
    yield Case(torch.maximum(x.float().abs().amax(), scalar(0.5)), largest, "largest magnitude")


def _formed(
    quantizer: Quantizer, device: torch.device, dtype: torch.dtype, shape: tuple[int, int], size: float,
    state: float | None,
) -> Cases:  # fmt: skip
    """Both copies times a factor that the kernel computes from amax, where none is given or it is 0."""
    x = hard_matrix(shape, dtype, quantizer).nan_to_num(1.0, 2.0, 2.0)
    x = x * size if size in (1.0, 2.0**-130) else torch.full_like(x, size)
    largest = x.float().abs().amax()
    factor = scalar(state) if state else delayed.factor_of(largest, quantizer.format)
    held = None if state is None else scalar(state, device)
    yield from _times(x, quantizer, device, factor, held, None, largest.to(device))


def _times(x: Tensor, quantizer: Quantizer, device: torch.device, factor: Tensor, *given: Any) -> Cases:
    """The codes of x times a factor. The sign of a NaN depends on the processor, so it is not compared."""
    seed = seed_of(quantizer.rounding)
    along, down, scale = layouts.codes(x.to(device), quantizer, _handed(seed, x, device), *given)
    expected = Quantizer(quantizer.format, quantizer.rounding).quantize(x.float() * factor, seed).codes
    kept = torch.where(quant.decode(expected, quantizer.format).isnan(), 0x7F, 0xFF).to(torch.uint8)
    yield Case(expected & kept, along.cpu() & kept, "", x)
    yield Case(expected & kept, down.cpu().t() & kept, "transposed")
    yield Case(factor.reciprocal(), scale, "one over the factor")


def _replayed(quantizer: Quantizer, device: torch.device) -> Cases:
    """The same launches twice, with seeds drawn into GPU memory before each run, against two eager steps."""
    x = hard_matrix((130, 144), torch.float32, quantizer)
    ours, theirs = (torch.Generator().manual_seed(7) for _ in range(2))
    draws, outs = Draws(), [torch.full(x.shape, 7.0, device=device, dtype=torch.float32) for _ in range(2)]
    cells = [draws.cells(lambda: [int(draw_seed(ours))], 1, device)[0] for _ in outs]
    for run in ("first", "second"):
        draws.fill()
        for out, seed in zip(outs, cells, strict=True):
            gpu_blocks.run_values(x.to(device), out, quantizer, seed)
        yield from (Case(quantizer.quantize(x, theirs).dequantize(), out, f"{run} time", x) for out in outs)


def _handed(seed: int | None, x: Tensor, device: torch.device, held: bool = True) -> Any:
    """The seed as an int; for float32, if `held`, as a scalar on the device."""
    return cell(seed, device) if held and seed is not None and x.dtype == torch.float32 else seed


Spun = tuple[Any, Hadamard]
"""A quantizer of tiles along rows, and the rotation before it."""


def spread(shape: tuple[int, int], dtype: torch.dtype, quantizer: Any) -> Tensor:
    """Hard values, few of which are not finite, since a rotation spreads these over its block."""
    x = hard_matrix(shape, dtype, quantizer)
    small = torch.where(x.float().abs() < 1e30, x, 1.0)
    small[:2, :3], small[-1, -1] = x[:2, :3], torch.inf
    return small


def rotations(
    spun: Spun, device: torch.device, dtype: torch.dtype, shape: tuple[int, int], dim: int, make: Make = spread,
    run: Run = gpu_rotated.run,
) -> Cases:  # fmt: skip
    """The transform alone."""
    x, signs = make(shape, dtype, spun[0]), spun[1].signs()
    yield Case(quant.rotate(x, signs, dim), run(x.to(device), signs.to(device), dim))


def rotated_values(
    spun: Spun, device: torch.device, dtype: torch.dtype, shape: tuple[int, int], dim: int, make: Make = spread,
    constants: Run = gpu_rotated.constants, run: Run = gpu_rotated.run_values, into: torch.dtype = torch.bfloat16,
    part: float = 0.75,
) -> Cases:  # fmt: skip
    """Values: along rows, of the whole in the input's dtype; along columns, of that part; with two levels of scales,
    also without the tensor's scale."""
    quantizer, part, into = (spun[0], 1.0, dtype) if dim else (spun[0].down, part, into)
    x, signs, seed = make(shape, dtype, spun[0]), spun[1].signs(), seed_of(quantizer.rounding)
    known, two_level = constants(x, signs, dim, quantizer), quantizer.scales.rule.two_level
    wide, upright = quant.rotate(x, signs, dim) * part, dim or two_level
    expected = quantizer.quantize(wide, seed) if upright else spun[0].quantize(wide.t().contiguous(), seed)
    values, there = expected.dequantize(into), (x.to(device), signs.to(device), dim, quantizer, known, seed)
    yield Case(values if upright else values.t(), run(*there, into, part))
    if two_level:
        scale = scalar(0.0, device)
        found, apart = run(*there, torch.float32, part, scale), expected.tensors | {"tensor_scale": scalar(1.0)}
        yield Case(expected.tensors["tensor_scale"], found is not None and scale, "tensor's scale")
        values = replace(expected, tensors=apart).dequantize(torch.float32)
        yield Case(values, found, "without the tensor's scale")


def rotated_codes(spun: Spun, device: torch.device, dtype: torch.dtype, shape: tuple[int, int], dim: int) -> Cases:
    """Codes and scales; along columns, those of the transpose."""
    (quantizer, hadamard), x = spun, spread(shape, dtype, spun[0])
    signs, seed = hadamard.signs(), seed_of(quantizer.rounding)
    constants: Any = gpu_rotated.constants(x, signs, dim, quantizer, turned=True)
    size, found = gpu_rotated.run_codes(x.to(device), signs.to(device), dim, quantizer, constants, seed)
    wide = quant.rotate(x, signs, dim) if dim else quant.rotate(x, signs, dim).t().contiguous()
    assert size == tuple(wide.shape)
    yield from (Case(expected, found[key], key) for key, expected in quantizer.quantize(wide, seed).tensors.items())


def _rotated_both(
    spun: Spun, device: torch.device, dtype: torch.dtype, shape: tuple[int, int], form: str
) -> Cases:  # fmt: skip
    """Codes and scales of the matrix, and of its rotated transpose, with a seed each, one of which is on the device."""
    (quantizer, hadamard), x = spun, spread(shape, dtype, spun[0])
    signs, seeds = hadamard.signs(), (SEED, 7) if quantizer.rounding == "stochastic" else (None, None)
    constants: Any = turned.constants(x, quantizer, signs)
    copies = layouts.empty(x.to(device), quantizer, form)
    handed = (cell(SEED, device), 7) if seeds[0] else seeds
    turned.run(x.to(device), quantizer, constants, signs.to(device), *copies, *handed)
    wide = x, quant.rotate(x, signs, 0).t().contiguous()
    for one, seed, found, which in zip(wide, seeds, copies, ("as it lies", "rotated"), strict=True):
        made = quantizer.quantize(one, seed).tensors
        made["scale"] = _laid(made["scale"], quantizer, form, len(one))
        yield from (Case(expected, found[key], f"{key} {which}") for key, expected in made.items())


def _cpu_rotated(
    x: Tensor, signs: Tensor, dim: int, quantizer: Any, numbers: Any, seed: int | None, into: torch.dtype,
    part: float, scale: Any = None,
) -> Tensor | None:  # fmt: skip
    """The interface of the GPU's `rotated.run_values`; with two levels only with the tensor's scale apart."""
    if not quantizer.scales.rule.two_level:
        return rotated_tiles.run_powers(x, signs, dim, quantizer, numbers, seed, part, into)[0]
    if scale is None:
        return None
    scale.copy_(rotated_tiles.tensor_scale(x, signs, quantizer))
    return rotated_tiles.run_two_levels(x, signs, quantizer, numbers, seed, scale, into)


def _rotated_inputs(spun: Spun, *more: tuple[Any, ...]) -> list[Any]:
    """Whole blocks of the rotation that fill a program, and short ones in both directions; along both dimensions."""
    return [
        (*one, dim)
        for one in ((torch.bfloat16, (spun[1].size, 512)), (torch.float32, (spun[1].size + 3, 45)), *more)
        for dim in (0, 1)
    ]


def with_scales(format: str, tile: Tile, rule: str, rounding: str = "nearest_even") -> Quantizer:
    return Quantizer(formats.get(format), rounding, scales=Scales(tile, get_scaling(rule)))


_QUANTIZERS: dict[str, Quantizer] = {
    "mxfp8 1x32": get_quantizer("mxfp8_e4m3"),
    "mxfp6 1x32 ceil": get_quantizer("mxfp6_e3m2", scale="ceil"),
    "mxfp4 1x32 rceil": get_quantizer("mxfp4", scale="rceil", rounding="stochastic"),
    "mxint8 1x32 even": get_quantizer("mxint8", scale="even"),
    "nvfp4 1x16": get_quantizer("nvfp4"),
    "nvfp4 1x16 up": get_quantizer("nvfp4", scale="two_level_up", rounding="stochastic"),
    "nvfp4 1x16 four_over_six": get_quantizer("nvfp4", scale="four_over_six"),
    "nf4 1x64": get_quantizer("nf4"),
    "bnb_fp4 1x64": get_quantizer("bnb_fp4"),
    "fp8 1x128": get_quantizer("fp8_1x128"),
    "fp8 128x128": get_quantizer("fp8_128x128"),
    "e2m1fn 1x32 three_quarters": with_scales("e2m1fn", Tile(1, 32), "three_quarters", "stochastic"),
    "e4m3fn 1x16 absmax_bf16": with_scales("e4m3fn", Tile(1, 16), "absmax_bf16"),
    "int4 1x256": with_scales("int4", Tile(1, 256), "absmax", "stochastic"),
    "e4m3fn 128x1 rceil": with_scales("e4m3fn", Tile(128, 1), "rceil"),
    "e2m1fn 16x16 two_level": with_scales("e2m1fn", Tile(16, 16), "two_level"),
    "e2m1fn 16x16 four_over_six": with_scales("e2m1fn", Tile(16, 16), "four_over_six", "stochastic"),
    "e5m2 2x32 current": with_scales("e5m2", Tile(2, 32), "current", "stochastic"),
    "e4m3fn whole current": with_scales("e4m3fn", Tile(0, 0), "current"),
    "e5m2 whole rceil": with_scales("e5m2", Tile(0, 0), "rceil", "stochastic"),
    "e5m2 128x128 rceil": with_scales("e5m2", Tile(128, 128), "rceil", "stochastic"),
    "e4m3fn columns absmax": with_scales("e4m3fn", Tile(0, 1), "absmax"),
    "e4m3fnuz rows current": with_scales("e4m3fnuz", Tile(1, 0), "current"),
    "nf4 1x64 double_absmax": get_quantizer("nf4", scale="double_absmax"),
    "int8 2x16 double_absmax": with_scales("int8", Tile(2, 16), "double_absmax", "stochastic"),
    "dynamic8 1x256": get_quantizer("dynamic8"),
    "dynamic8_unsigned 2x16 current": with_scales("dynamic8_unsigned", Tile(2, 16), "current"),
}
_VALUES = named(
    _QUANTIZERS.__getitem__,
    "mxfp8 1x32", "mxfp4 1x32 rceil", "mxint8 1x32 even", "nvfp4 1x16 up", "bnb_fp4 1x64", "fp8 1x128", "fp8 128x128",
    "e2m1fn 16x16 four_over_six", "e2m1fn 1x32 three_quarters", "e4m3fn 1x16 absmax_bf16", "e5m2 2x32 current",
    "e4m3fn columns absmax", "nf4 1x64 double_absmax", "int8 2x16 double_absmax", "dynamic8 1x256",
    "dynamic8_unsigned 2x16 current",
)  # fmt: skip
_WHOLE = named(_QUANTIZERS.__getitem__, "e4m3fn whole current", "e5m2 whole rceil")
_AT = ((torch.bfloat16, (130, 144)), (torch.float32, (36, 20)))


def _inputs(quantizer: Any) -> list[Any]:
    """Whole blocks of a row, short tiles, rows that start at 16 bytes, and rows that start anywhere; ties where there
    are two scales to choose from; groups of scales that are lost with a tile, and others, where scales have scales."""
    rule = quantizer.scales.rule.name
    return [
        (torch.bfloat16, (3, 256), hard_matrix), (torch.float32, (130, 144), hard_matrix),
        (torch.float16, (17, 80), hard_matrix), (torch.float32, (5, 13), hard_matrix),
        *([(torch.bfloat16, (520, 128), hard_matrix)] if rule == "double_absmax" else []),
        *([(torch.float32, (48, 144), tied)] if rule == "four_over_six" else []),
    ]  # fmt: skip


def _in_tiles(quantizer: Any) -> list[Any]:
    """One tile, and several in several rows."""
    return [
        (dtype, (high, wide * quantizer.scales.tile.columns), matrix)
        for dtype, high, wide in ((torch.float32, 1, 1), (torch.float32, 9, 5), (torch.bfloat16, 9, 5))
    ]


def _taken(run: Run) -> Run:
    """Whether a kernel supported its input, for one that returns more than that."""
    return lambda *given: run(*given) is not None


def _by_view(x: Tensor, out: Tensor, quantizer: Quantizer, seed: Any) -> bool | None:
    return panels.run_view(x.t().contiguous().t(), out, quantizer)


_MX, _DYNAMIC = named(get_quantizer, "mxfp8_e4m3", "mxfp4", "mxfp6_e3m2"), named(get_quantizer, "dynamic8")
_BLOCKS = named(get_quantizer, "nf4", "nvfp4", "fp8_1x128") | _MX | {
    f"{name} stochastic": get_quantizer(name, rounding="stochastic") for name in ("nvfp4", "fp8_1x128", *_MX)
}  # fmt: skip
_SPUN: dict[str, Spun] = {
    "nvfp4 1x16, NVFP4's signs": (get_quantizer("nvfp4", rounding="stochastic"), Hadamard()),
    "mxfp4 1x32, 64 signs": (with_scales("e2m1fn", Tile(1, 32), "rceil", "stochastic"), Hadamard(64, 5)),
    "nvfp4 1x16 up, 32 signs": (get_quantizer("nvfp4", scale="two_level_up"), Hadamard(32, 5)),
    "mxfp6 1x32, 32 signs": (get_quantizer("mxfp6_e2m3"), Hadamard(32, 7)),
    "fp8 1x4 absmax, 8 signs": (with_scales("float8_e4m3fn", Tile(1, 4), "absmax"), Hadamard(8, 1)),
    "nvfp4 1x16 four_over_six, NVFP4's signs": (
        get_quantizer("nvfp4", scale="four_over_six", rounding="stochastic"), Hadamard(),
    ),
}  # fmt: skip
"""The quantizers of the recipes that rotate first, and others."""
CPU = (
    *kernel_tests(
        "tiles",
        {
            f"{name} {tile}": with_scales(name, tile, "rceil")
            for name in ("float8_e4m3fn", "float8_e5m2", "e4m3fnuz", "e2m1fn")
            for tile in (Tile(1, 0), Tile(0, 0), Tile(16, 16))
        },
        valued, product(DTYPES[:2], [(32, 48)]), make=lambda *how: matrix(*how).nan_to_num(1.0), run=_taken(tiles.run),
    ),
    *kernel_tests(
        "panels",
        {
            f"{rule} {tile} {rounding}": with_scales("e2m1fn", tile, rule, rounding)
            for rule in ("rceil", "two_level", "two_level_up")
            for tile in (Tile(16, 1), Tile(16, 16))
            for rounding in ("nearest_even", "stochastic")
        },
        valued, product(DTYPES[:2], [(33, 47)], [matrix]), run=_taken(panels.run_values),
    ),
    *kernel_tests("blocks", _BLOCKS | _DYNAMIC, quantised, _in_tiles, run=blocks.run, held=False),
    *kernel_tests("block values", _BLOCKS, valued, _in_tiles, into=torch.float32, run=_taken(blocks.run_values)),
    *kernel_tests("values of views", _MX, valued, _in_tiles, into=torch.float32, run=_taken(_by_view)),
    *kernel_tests(
        "blocks dequantised", _BLOCKS | _DYNAMIC, dequantised, _in_tiles, into=torch.float32, run=dequantize.run,
    ),
    *(
        test
        for kernel, run in (("powered rows", blocks.run_values), ("powered columns", _by_view))
        for test in kernel_tests(
            kernel,
            {name: with_scales(name, Tile(1, 0), "rceil") for name in ("float8_e4m3fn", "float8_e5m2", "e2m1fn")},
            valued, product(DTYPES[:2], [(33, 64)], [matrix]), run=_taken(run),
        )
    ),
    *kernel_tests(
        "rotated", {str(size): (None, Hadamard(size, 5)) for size in (2, 16, 64)}, rotations,
        product(DTYPES[:2], [(33, 47)], (0, 1)), make=bounded, run=rotated.run,
    ),
    *kernel_tests(
        "rotated tiles",
        {
            f"{rule} {rounding}": (with_scales("e2m1fn", Tile(1, tile), rule, rounding), Hadamard(size, 5))
            for rule, tile, size in (("two_level", 16, 16), ("rceil", 32, 64))
            for rounding in ("nearest_even", "stochastic")
        },
        rotated_values, product(DTYPES[:2], [(33, 64)], [0]), make=bounded, into=torch.float32, part=1.0,
        constants=lambda x, signs, dim, q: rotated_tiles.constants(x, signs, dim, q, torch.float32), run=_cpu_rotated,
    ),
)  # fmt: skip
GPU = (
    *kernel_tests("tiles", _QUANTIZERS, quantised, _inputs),
    *kernel_tests(
        "tile values", _VALUES, valued,
        lambda q: [(*one, into) for one in _inputs(q) for into in dict.fromkeys((one[0], torch.bfloat16))],
    ),
    *kernel_tests("tiles dequantised", _VALUES, dequantised, _inputs),
    *kernel_tests(
        "both layouts",
        named(
            _QUANTIZERS.__getitem__,
            "fp8 1x128", "mxfp8 1x32", "fp8 128x128", "nvfp4 1x16", "e2m1fn 16x16 two_level", "e4m3fn whole current",
            "e5m2 whole rceil", "e4m3fnuz rows current", "e5m2 128x128 rceil",
            "nvfp4 1x16 four_over_six", "e2m1fn 16x16 four_over_six",
        ),
        both,
        (
            (torch.bfloat16, (256, 128), "stored", "outer"), (torch.float32, (130, 144), "swizzled", ""),
            (torch.float16, (36, 20), "number", "outer"), (torch.float16, (144, 176), "stored", ""),
            (torch.bfloat16, (160, 272), "swizzled", ""),
        ),
    ),
    *kernel_tests(
        "both layouts of a factor", _WHOLE, _given, [(*at, kind) for at in _AT for kind in ("hard", "numbers")],
    ),
    *kernel_tests(
        "both layouts by the largest", named(_WHOLE.__getitem__, "e4m3fn whole current"), _formed,
        [
            (*at, *by)  # what the matrix is multiplied by, or full of, and the factor that is held
            for at in _AT
            for by in ((1.0, None), (1.0, 0.0), (1.0, 0.25), *product((2.0**-130, 0.0, torch.inf, torch.nan), (None,)))
        ],
    ),
    *kernel_tests("replays", named(_QUANTIZERS.__getitem__, "mxfp4 1x32 rceil", "nvfp4 1x16 up"), _replayed),
    *kernel_tests(
        "rotated", {str(size): (get_quantizer("mxfp4"), Hadamard(size, 3)) for size in (16, 8, 64)}, rotations,
        lambda spun: _rotated_inputs(spun, (torch.float16, (spun[1].size + 1, 80))),
    ),
    *kernel_tests("rotated values", _SPUN, rotated_values, _rotated_inputs),
    *kernel_tests("rotated codes", _SPUN, rotated_codes, _rotated_inputs),
    *kernel_tests(
        "rotated and as it lies",
        named(
            _SPUN.__getitem__, "fp8 1x4 absmax, 8 signs", "nvfp4 1x16, NVFP4's signs", "nvfp4 1x16 up, 32 signs",
            "mxfp6 1x32, 32 signs",
        ),
        _rotated_both,
        (
            (torch.bfloat16, (64, 160), "stored"), (torch.float32, (32, 144), "stored"),
            (torch.float16, (32, 48), "stored"), (torch.bfloat16, (160, 144), "swizzled"),
        ),
    ),
)  # fmt: skip
