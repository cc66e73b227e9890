"""Every Triton kernel of scaled tiles against the reference, bit for bit: cases of `selftest_gpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from halfstep import formats
from halfstep.kernels.gpu import blocks, dequantize, layouts
from halfstep.kernels.selftest import Case, hard, words
from halfstep.quant import Quantizer, Scales, Tile, draw_seed, get_quantizer
from halfstep.quant.captured import Draws
from halfstep.quant.cast import decode
from halfstep.quant.pack import pack, unpack
from halfstep.quant.quantizer import layout
from halfstep.quant.rounding import Seed
from halfstep.quant.scaling import current, get_scaling


_SEED = 0x9E3779B97F4A7C15
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
}


def _with(format: str, tile: Tile, rule: str, rounding: str = "nearest_even") -> Quantizer:
    return Quantizer(formats.get(format), rounding, scales=Scales(tile, get_scaling(rule)))


_QUANTIZERS |= {
    "e2m1fn 1x32 three_quarters": _with("e2m1fn", Tile(1, 32), "three_quarters", "stochastic"),
    "e4m3fn 1x16 absmax_bf16": _with("e4m3fn", Tile(1, 16), "absmax_bf16"),
    "int4 1x256": _with("int4", Tile(1, 256), "absmax", "stochastic"),
    "e4m3fn 128x1 rceil": _with("e4m3fn", Tile(128, 1), "rceil"),
    "e2m1fn 16x16 two_level": _with("e2m1fn", Tile(16, 16), "two_level"),
    "e2m1fn 16x16 four_over_six": _with("e2m1fn", Tile(16, 16), "four_over_six", "stochastic"),
    "e5m2 2x32 current": _with("e5m2", Tile(2, 32), "current", "stochastic"),
    "e4m3fn whole current": _with("e4m3fn", Tile(0, 0), "current"),
    "e5m2 whole rceil": _with("e5m2", Tile(0, 0), "rceil", "stochastic"),
    "e5m2 128x128 rceil": _with("e5m2", Tile(128, 128), "rceil", "stochastic"),
    "e4m3fn columns absmax": _with("e4m3fn", Tile(0, 1), "absmax"),
    "e4m3fnuz rows current": _with("e4m3fnuz", Tile(1, 0), "current"),
    "nf4 1x64 double_absmax": get_quantizer("nf4", scale="double_absmax"),
    "int8 2x16 double_absmax": _with("int8", Tile(2, 16), "double_absmax", "stochastic"),
    "dynamic8 1x256": get_quantizer("dynamic8"),
    "dynamic8_unsigned 2x16 current": _with("dynamic8_unsigned", Tile(2, 16), "current"),
}
_VALUES = (
    "mxfp8 1x32", "mxfp4 1x32 rceil", "mxint8 1x32 even", "nvfp4 1x16 up", "bnb_fp4 1x64", "fp8 1x128", "fp8 128x128",
    "e2m1fn 16x16 four_over_six", "e2m1fn 1x32 three_quarters", "e4m3fn 1x16 absmax_bf16", "e5m2 2x32 current",
    "e4m3fn columns absmax", "nf4 1x64 double_absmax", "int8 2x16 double_absmax", "dynamic8 1x256",
    "dynamic8_unsigned 2x16 current",
)  # fmt: skip
_BOTH = (
    "fp8 1x128", "mxfp8 1x32", "fp8 128x128", "nvfp4 1x16", "e2m1fn 16x16 two_level", "e4m3fn whole current",
    "e5m2 whole rceil", "e4m3fnuz rows current", "e5m2 128x128 rceil",
    "nvfp4 1x16 four_over_six", "e2m1fn 16x16 four_over_six",
)  # fmt: skip
_INPUTS = (
    (torch.bfloat16, (3, 256)), (torch.float32, (130, 144)), (torch.float16, (17, 80)), (torch.float32, (5, 13)),
)  # fmt: skip
"""Whole blocks of a row, short tiles, rows that start at 16 bytes, and rows that start anywhere."""
_GROUPS = ((torch.bfloat16, (520, 128)),)
"""Of scales that have scales: groups that are lost with a tile, and others."""
_MATRICES = (
    (torch.bfloat16, (256, 128)), (torch.float32, (130, 144)), (torch.float16, (36, 20)), (torch.float16, (144, 176)),
)  # fmt: skip
_FORMS = (("stored", True), ("swizzled", False), ("number", True), ("stored", False))


def hard_matrix(shape: tuple[int, int], dtype: torch.dtype, quantizer: Quantizer) -> Tensor:
    """Rows of many sizes, hard numbers in some: tiles of zeros, tiny ones, lost ones, near ties and usual ones."""
    rows, columns = shape
    x = torch.randn(shape, generator=torch.Generator().manual_seed(rows), dtype=torch.float32, device="cpu")
    x *= torch.exp2(torch.arange(rows, dtype=torch.float32, device="cpu") * 7 % 60 - 30)[:, None]
    if columns > 16 and rows > 3:
        x[1] = hard(columns, format=quantizer.format)
        x[2, : columns // 2] = 0
        x[3] *= 2.0**-110
        x[-1] = hard(4 * columns, format=quantizer.format)[-columns:]
    return x.to(dtype)


def tied(rows: int, columns: int) -> Tensor:
    """Tiles of 16 columns that `four_over_six` takes to 6 with the multiplier 256, or to 4 with 384, with equal errors;
    the third 16 rows of 48 have smaller ones by 384, the first by 256: by 2^-15 a row."""
    generator = torch.Generator().manual_seed(columns)
    apart = (
        torch.randint(0, 2**20, (rows, columns // 16, 4), generator=generator, dtype=torch.int64, device="cpu")
        * 2.0**-16
    )
    tiny = torch.randn(rows, columns // 16, 7, generator=generator, dtype=torch.float32, device="cpu") * 2.0**-30
    x = torch.cat([torch.full_like(tiny[..., :1], 1536), 160 + apart, -160 + apart, tiny], -1)
    x[..., 1] += (torch.arange(rows, dtype=torch.int64, device="cpu") // 16 % 3 - 1)[:, None] * 2.0**-16
    return x.view(rows, columns)


def quantised(x: Tensor, quantizer: Quantizer, device: torch.device) -> Iterator[Case]:
    """Codes and scales of a tensor."""
    seed = _seed(quantizer)
    if quantizer.outliers is not None:  # whose tensors have sizes of their own
        return
    sizes = layout(quantizer, tuple(x.shape), x.dtype).items()
    tensors = {key: torch.full(size, 7, dtype=kind, device=device) for key, (kind, size) in sizes}  # type: ignore[arg-type]
    if blocks.run(x.to(device), tensors, quantizer, _handed(seed, x, device)):
        expected = quantizer.quantize(x, seed)
        for key, found in tensors.items():
            yield (
                expected.tensors[key],
                found.cpu(),
                torch.empty(0, dtype=torch.float32, device="cpu"),
                words(x, key, str(tuple(x.shape))),
            )


def valued(x: Tensor, quantizer: Quantizer, device: torch.device) -> Iterator[Case]:
    """The values of a tensor, in its own dtype and bf16; of two levels, without the tensor's scale, too."""
    seed = _seed(quantizer)
    for into in dict.fromkeys((x.dtype, torch.bfloat16)):
        out = torch.full(x.shape, 7, dtype=into, device=device)
        if blocks.run_values(x.to(device), out, quantizer, seed):
            expected = quantizer.quantize(x, seed)
            yield expected.dequantize(into), out.cpu(), x, words(x, f"to {into}", str(tuple(x.shape)))
            if "tensor_scale" in expected.tensors:
                scale = torch.zeros((), device=device, dtype=torch.float32)
                blocks.run_values(x.to(device), out, quantizer, seed, scale)
                yield (
                    expected.tensors["tensor_scale"],
                    scale.cpu(),
                    torch.empty(0, dtype=torch.float32, device="cpu"),
                    words(x, "tensor's scale"),
                )
                expected.tensors["tensor_scale"].fill_(1)
                yield expected.dequantize(into), out.cpu(), x, words(x, "without the tensor's scale")


def dequantised(x: Tensor, quantizer: Quantizer, device: torch.device) -> Iterator[Case]:
    """Values of codes and scales, half of the rows of codes that nothing was rounded to."""
    made = quantizer.quantize(x, _SEED)
    codes = torch.randint(
        0, 256, made.codes.shape, generator=torch.Generator().manual_seed(1), dtype=torch.int64, device="cpu"
    )
    made.codes[::2] = codes[::2].to(made.codes.dtype)
    tensors = {key: tensor.to(device) for key, tensor in made.tensors.items()}
    out = torch.full(x.shape, 7, dtype=x.dtype, device=device)
    if dequantize.run(tensors, out, quantizer):
        yield (
            made.dequantize(),
            out.cpu(),
            torch.empty(0, dtype=torch.float32, device="cpu"),
            words(x, "dequantised", str(tuple(x.shape))),
        )


def both(x: Tensor, quantizer: Quantizer, device: torch.device, form: str, outer: bool) -> Iterator[Case]:
    """Codes and scales of a matrix and of its transpose; by a seed, the transpose has the matrix's codes."""
    seed = _seed(quantizer)
    if layouts.told(x, quantizer) is None:
        return
    along, turned = layouts.empty(x.to(device), quantizer, form, outer)
    layouts.run(x.to(device), quantizer, along, turned, _handed(seed, x, device))
    expected = quantizer.quantize(x, seed).tensors
    other = _transposed(expected, x, quantizer) if seed else quantizer.quantize(x.t().contiguous()).tensors
    for copy, made, which in ((along, expected, "as it lies"), (turned, other, "transposed")):
        for key, found in copy.items():
            wanted = made[key]
            if key == "scale" and form == "number":
                apart = {"scale": wanted, "tensor_scale": torch.ones((), dtype=torch.float32, device="cpu")}
                wanted = quantizer.scales.rule.multiplier(apart, quantizer.format)  # type: ignore[union-attr]
            if key == "scale" and form == "swizzled":
                wanted = _swizzled(wanted)
            yield (
                wanted,
                found.cpu(),
                torch.empty(0, dtype=torch.float32, device="cpu"),
                words(x, key, which, form, str(tuple(x.shape))),
            )


def _times(
    x: Tensor, quantizer: Quantizer, factor: Tensor, seed: Seed | None, along: Tensor, turned: Tensor, scale: Tensor
) -> Iterator[Case]:
    """What was made of x times a factor. The sign of a NaN that was multiplied is the processor's."""
    nothing = torch.empty(0, dtype=torch.float32, device="cpu")
    expected = Quantizer(quantizer.format, quantizer.rounding).quantize(x.float() * factor, seed).codes
    lost = decode(expected, quantizer.format).isnan()
    for found, wanted, given, where in (
        (along.cpu(), expected, x, ""), (turned.cpu().t(), expected, nothing, ", transposed"),
    ):  # fmt: skip
        unsigned = torch.where(lost, found & 0x7F, found)
        yield torch.where(lost, wanted & 0x7F, wanted), unsigned, given, words(x, f"times a factor{where}")
    yield factor.reciprocal(), scale.cpu(), nothing, words(x, "one over the factor")


def formed(x: Tensor, quantizer: Quantizer, device: torch.device) -> Iterator[Case]:
    """The same times a factor that the kernel forms: of the largest magnitude, where there is none, or it is 0."""
    for size in (1.0, 2.0**-130, 0.0, float("inf"), float("nan")):
        known = x.nan_to_num(1.0, 2.0, 2.0) * size if size in (1.0, 2.0**-130) else torch.full_like(x, size)
        largest = known.float().abs().amax()
        for state in (None, 0.0, 0.25) if size == 1.0 else (None,):
            factor = (
                current.factor_of(largest, quantizer.format)
                if not state
                else torch.tensor(state, dtype=torch.float32, device="cpu")
            )
            held = None if state is None else torch.tensor(state, dtype=torch.float32, device=device)
            seed = _seed(quantizer)
            handed = _handed(seed, x, device)
            made = layouts.codes(known.to(device), quantizer, handed, held, None, largest.to(device))
            yield from _times(known, quantizer, factor, seed, *made)


def given(x: Tensor, quantizer: Quantizer, device: torch.device) -> Iterator[Case]:
    """Both copies of a matrix times a factor that is given; NaN and infinity, too, and the largest magnitude."""
    x[0, :8] = torch.tensor(
        [float("nan"), float("inf"), -float("inf"), 1e30, -0.0, 0.0, 1e-30, 3.0], dtype=torch.float32, device="cpu"
    ).to(x.dtype)
    for known in (x, x.nan_to_num(1.0, 2.0, 2.0)):
        factor, amax, seed = (
            torch.tensor(3.7, dtype=torch.float32, device="cpu"),
            torch.full((), 0.5, device=device, dtype=torch.float32),
            _seed(quantizer),
        )
        handed = _handed(seed, x, device)
        along, turned, scale = layouts.codes(known.to(device), quantizer, handed, factor.to(device), amax)
        yield from _times(known, quantizer, factor, seed, along, turned, scale)
        largest = torch.maximum(known.float().abs().amax(), torch.tensor(0.5, dtype=torch.float32, device="cpu"))
        yield largest, amax.cpu(), torch.empty(0, dtype=torch.float32, device="cpu"), words(x, "largest magnitude")


def _seed(quantizer: Quantizer) -> int | None:
    return _SEED if quantizer.rounding == "stochastic" else None


def _handed(seed: int | None, x: Tensor, device: torch.device) -> Seed | None:
    """The seed as a number; for float32 in the GPU's memory."""
    return seed if seed is None or x.dtype != torch.float32 else cell(seed, device)


def cell(seed: int, device: torch.device) -> Tensor:
    """A seed in the GPU's memory, where the replays of a CUDA graph read it."""
    return torch.full((), seed - (seed >> 63 << 64), device=device, dtype=torch.int64)


def _transposed(made: dict[str, Tensor], x: Tensor, quantizer: Quantizer) -> dict[str, Tensor]:
    bits, first = quantizer.format.bits, quantizer.format.high_nibble_first
    codes = unpack(made["codes"], bits, x.shape[1], first)
    return made | {"codes": pack(codes.t().contiguous(), bits, first), "scale": made["scale"].t()}


def _swizzled(scales: Tensor) -> Tensor:
    """By the formula of PyTorch's documentation, entry by entry."""
    (rows, across), groups = scales.shape, -(-scales.shape[1] // 4)
    out = torch.zeros(-(-rows // 128) * groups * 512, dtype=scales.dtype, device="cpu")
    row, column = (
        torch.arange(rows, dtype=torch.int64, device="cpu")[:, None],
        torch.arange(across, dtype=torch.int64, device="cpu")[None, :],
    )
    block = (row // 128) * groups + column // 4
    out[block * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4] = scales
    return out


def _each(
    test: Callable[[Tensor, Quantizer, torch.device], Iterator[Case]], name: str, device: torch.device
) -> Iterator[Case]:
    for dtype, shape in _INPUTS + (_GROUPS if "double" in name else ()):
        yield from test(hard_matrix(shape, dtype, _QUANTIZERS[name]), _QUANTIZERS[name], device)


def _quantised(name: str, device: torch.device) -> Iterator[Case]:
    yield from _each(quantised, name, device)
    if "four_over_six" in name:
        yield from quantised(tied(48, 144), _QUANTIZERS[name], device)


def _valued(name: str, device: torch.device) -> Iterator[Case]:
    return _each(valued, name, device)


def _dequantised(name: str, device: torch.device) -> Iterator[Case]:
    return _each(dequantised, name, device)


def _both(name: str, device: torch.device) -> Iterator[Case]:
    quantizer = _QUANTIZERS[name]
    for (dtype, shape), (form, outer) in zip(_MATRICES, _FORMS, strict=True):
        yield from both(hard_matrix(shape, dtype, quantizer), quantizer, device, form, outer)


def _formed(name: str, device: torch.device) -> Iterator[Case]:
    for dtype, shape in ((torch.bfloat16, (130, 144)), (torch.float32, (36, 20))):
        yield from formed(hard_matrix(shape, dtype, _QUANTIZERS[name]), _QUANTIZERS[name], device)


def _given(name: str, device: torch.device) -> Iterator[Case]:
    for dtype, shape in ((torch.bfloat16, (130, 144)), (torch.float32, (36, 20))):
        yield from given(hard_matrix(shape, dtype, _QUANTIZERS[name]), _QUANTIZERS[name], device)


def _replayed(name: str, device: torch.device) -> Iterator[Case]:
    """The same launches twice, with seeds that are drawn into the GPU's memory before each run: two eager steps."""
    quantizer = _QUANTIZERS[name]
    x = hard_matrix((130, 144), torch.float32, quantizer)
    ours, theirs = (torch.Generator().manual_seed(7) for _ in range(2))
    draws, outs = Draws(), [torch.full(x.shape, 7.0, device=device, dtype=torch.float32) for _ in range(2)]
    cells = [draws.cells(lambda: [int(draw_seed(ours))], 1, device)[0] for _ in outs]
    for run in ("first", "second"):
        draws.fill()
        for out, seed in zip(outs, cells, strict=True):
            blocks.run_values(x.to(device), out, quantizer, seed)
        for out in outs:
            yield quantizer.quantize(x, theirs).dequantize(), out.cpu(), x, words(x, f"replayed, {run} time")


TESTS: tuple[tuple[str, tuple[str, ...], Callable[[str, torch.device], Iterator[Case]]], ...] = (
    ("tiles", tuple(_QUANTIZERS), _quantised),
    ("tile values", _VALUES, _valued),
    ("tiles dequantised", _VALUES, _dequantised),
    ("both layouts", _BOTH, _both),
    ("both layouts of a factor", ("e4m3fn whole current", "e5m2 whole rceil"), _given),
    ("both layouts by the largest", ("e4m3fn whole current",), _formed),
    ("replays", ("mxfp4 1x32 rceil", "nvfp4 1x16 up"), _replayed),
)
