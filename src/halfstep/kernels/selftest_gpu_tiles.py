"""Every Triton kernel of scaled tiles against the reference, bit for bit: cases of `selftest_gpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from halfstep import formats
from halfstep.kernels.gpu import blocks, dequantize, layouts
from halfstep.kernels.selftest import Case, hard, words
from halfstep.quant import Quantizer, Scales, Tile, get_quantizer
from halfstep.quant.pack import pack, unpack
from halfstep.quant.quantizer import layout
from halfstep.quant.scaling import get_scaling


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SEED = 0x9E3779B97F4A7C15
_QUANTIZERS = {
    "mxfp8 1x32": get_quantizer("mxfp8_e4m3"),
    "mxfp8_e5m2 1x32 even": get_quantizer("mxfp8_e5m2", scale="even", rounding="stochastic"),
    "mxfp6 1x32 ceil": get_quantizer("mxfp6_e3m2", scale="ceil"),
    "mxfp4 1x32 rceil": get_quantizer("mxfp4", scale="rceil", rounding="stochastic"),
    "mxint8 1x32": get_quantizer("mxint8"),
    "nvfp4 1x16": get_quantizer("nvfp4"),
    "nvfp4 1x16 up": get_quantizer("nvfp4", scale="two_level_up", rounding="stochastic"),
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
    "e5m2 2x32": _with("e5m2", Tile(2, 32), "current", "stochastic"),
    "e4m3fn whole current": _with("e4m3fn", Tile(0, 0), "current"),
    "e5m2 rows rceil": _with("e5m2", Tile(1, 0), "rceil", "stochastic"),
    "e4m3fn columns absmax": _with("e4m3fn", Tile(0, 1), "absmax"),
    "e4m3fnuz rows current": _with("e4m3fnuz", Tile(1, 0), "current"),
    "e5m2 whole rceil": _with("e5m2", Tile(0, 0), "rceil", "stochastic"),
    "e5m2 128x128 rceil": _with("e5m2", Tile(128, 128), "rceil", "stochastic"),
}
SHAPES = ((3, 256), (17, 80), (130, 144), (5, 13))


def matrix(shape: tuple[int, int], dtype: torch.dtype, quantizer: Quantizer) -> Tensor:
    """Hard numbers in some rows, of one size in the others: tiles of zeros, lost ones, near ties and usual ones."""
    rows, columns = shape
    x = torch.randn(shape, generator=torch.Generator().manual_seed(rows), dtype=torch.float32)
    x *= torch.exp2(torch.arange(rows, dtype=torch.float32) * 7 % 60 - 30)[:, None]
    if columns > 16 and rows > 3:
        x[1] = hard(columns, format=quantizer.format)
        x[2, : columns // 2] = 0
        x[-1] = hard(4 * columns, format=quantizer.format)[-columns:]
        x[3] *= 2.0**-110
    return x.to(dtype)


def _quantised(name: str, device: torch.device) -> Iterator[Case]:
    quantizer = _QUANTIZERS[name]
    seed = _SEED if quantizer.rounding == "stochastic" else None
    for dtype, shape in ((d, s) for d in _DTYPES for s in SHAPES):
        x = matrix(shape, dtype, quantizer)
        if not blocks.takes(x, quantizer):
            continue
        sizes = layout(quantizer, shape, dtype).items()
        tensors = {key: torch.full(size, 7, dtype=kind, device=device) for key, (kind, size) in sizes}  # type: ignore[arg-type]
        blocks.run(x.to(device), tensors, quantizer, seed)
        expected = quantizer.quantize(x, seed)
        for key, found in tensors.items():
            yield expected.tensors[key], found.cpu(), torch.empty(0), words(x, key, str(shape))


def _values(name: str, device: torch.device) -> Iterator[Case]:
    quantizer = _QUANTIZERS[name]
    seed = _SEED if quantizer.rounding == "stochastic" else None
    for dtype, shape in ((d, s) for d in _DTYPES for s in SHAPES):
        x = matrix(shape, dtype, quantizer)
        expected = quantizer.quantize(x, seed)
        for into in _DTYPES:
            out = torch.full(shape, 7, dtype=into, device=device)
            if blocks.takes_values(x, out, quantizer):
                blocks.run_values(x.to(device), out, quantizer, seed)
                yield expected.dequantize(into), out.cpu(), x, words(x, f"to {into}", str(shape))


def _dequantised(name: str, device: torch.device) -> Iterator[Case]:
    quantizer = _QUANTIZERS[name]
    for shape in SHAPES:
        made = quantizer.quantize(matrix(shape, torch.float32, quantizer), _SEED)
        generator = torch.Generator().manual_seed(1)
        codes = torch.randint(0, 256, made.codes.shape, generator=generator).to(made.codes.dtype)  # all that there are
        made.codes[::2] = codes[::2]
        tensors = {key: tensor.to(device) for key, tensor in made.tensors.items()}
        for into in _DTYPES:
            out = torch.full(shape, 7, dtype=into, device=device)
            if dequantize.takes(tensors, out, quantizer):
                dequantize.run(tensors, out, quantizer)
                yield made.dequantize(into), out.cpu(), torch.empty(0), words(out, "dequantised", str(shape))


_BOTH = (
    "fp8 1x128", "mxfp8 1x32", "fp8 128x128", "nvfp4 1x16", "e2m1fn 16x16 two_level", "e4m3fn whole current",
    "e5m2 whole rceil", "e4m3fnuz rows current", "e5m2 128x128 rceil",
)  # fmt: skip
def swizzled(scales: Tensor) -> Tensor:
    """Scales in blocks of 128 rows and 4 columns, filled with zeros: what `form` `swizzled` is."""
    rows, across = scales.shape
    whole = torch.nn.functional.pad(scales, (0, -across % 4, 0, -rows % 128))
    blocked = whole.view(whole.shape[0] // 128, 4, 32, whole.shape[1] // 4, 4)
    return blocked.permute(0, 3, 2, 1, 4).reshape(-1)


_SQUARE = ((130, 144), (256, 128), (36, 20))
_FORMS = (("stored", False), ("stored", True), ("number", True), ("swizzled", False))


def _both(name: str, device: torch.device) -> Iterator[Case]:
    quantizer = _QUANTIZERS[name]
    seed = _SEED if quantizer.rounding == "stochastic" else None
    for place, (dtype, shape) in enumerate((d, s) for d in _DTYPES for s in _SQUARE):
        x = matrix(shape, dtype, quantizer)
        if not layouts.takes(x, quantizer):
            continue
        form, outer = _FORMS[place % 4]
        along, turned = layouts.empty(x.to(device), quantizer, form, outer)
        layouts.run(x.to(device), quantizer, along, turned, seed)
        expected = quantizer.quantize(x, seed)
        other = expected if seed is not None else quantizer.quantize(x.t().contiguous())
        for copy, made, words_ in ((along, expected, "as it lies"), (turned, other, "transposed")):
            for key, found in copy.items():
                wanted = made.tensors[key]
                if seed is not None and copy is turned:
                    codes = unpack(made.codes, quantizer.format.bits, shape[1], quantizer.format.high_nibble_first)
                    turned_codes = pack(codes.t().contiguous(), quantizer.format.bits, quantizer.format.high_nibble_first)
                    wanted = turned_codes if key == "codes" else wanted.t() if key == "scale" else wanted
                if key == "scale" and form == "number":
                    apart = {"scale": wanted, "tensor_scale": torch.ones(())}
                    wanted = quantizer.scales.rule.multiplier(apart, quantizer.format)  # type: ignore[union-attr]
                if key == "scale" and form == "swizzled":
                    wanted = swizzled(wanted)
                yield wanted, found.cpu(), torch.empty(0), words(x, key, words_, form, str(shape))


TESTS: tuple[tuple[str, tuple[str, ...], Callable[[str, torch.device], Iterator[Case]]], ...] = (
    ("tiles", tuple(_QUANTIZERS), _quantised),
    ("tile values", tuple(_QUANTIZERS), _values),
    ("tiles dequantised", tuple(_QUANTIZERS), _dequantised),
    ("both layouts", _BOTH, _both),
)
