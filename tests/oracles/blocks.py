"""Every block format from its definition: scales tile by tile in Python, elements by their format's oracle.

Nothing here reads halfstep. Scale rules are written as in their sources, in fractions where exact, otherwise in numpy's
float32 with each operation rounded once. Inputs are matrices in float32 or float64; inexact quotients are computed in
the input's dtype."""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from oracles import formats


E4M3 = "float8_e4m3fn"
# name: element, rows and columns of a tile (0: all), default rule
BLOCKS = {
    "mxfp8_e4m3": (E4M3, (1, 32), "floor"),
    "mxfp8_e5m2": ("float8_e5m2", (1, 32), "floor"),
    "mxfp6_e3m2": ("float6_e3m2fn", (1, 32), "floor"),
    "mxfp6_e2m3": ("float6_e2m3fn", (1, 32), "floor"),
    "mxfp4": ("float4_e2m1fn", (1, 32), "floor"),
    "mxint8": ("ocp_int8", (1, 32), "floor"),
    "nvfp4": ("float4_e2m1fn", (1, 16), "two_level"),
    "fp8_1x128": (E4M3, (1, 128), "absmax"),
    "fp8_128x128": (E4M3, (128, 128), "absmax"),
    "nf4": ("nf4", (1, 64), "absmax"),
    "bnb_fp4": ("bnb_fp4", (1, 64), "absmax"),
    "af4": ("af4", (1, 64), "absmax"),
    "dynamic8": ("dynamic8", (1, 256), "absmax"),
    "int8_tensor": ("int8", (0, 0), "absmax"),
    "int8_row": ("int8", (1, 0), "absmax"),
    "llm_int8": ("int8", (1, 0), "absmax"),
    "int4_64": ("int4", (1, 64), "absmax"),
    "uint8_row": ("uint8", (1, 0), "affine"),
    "uint4_64": ("uint4", (1, 64), "affine"),
}
POWERS_OF_TWO = ("floor", "ceil", "even", "rceil")
MX = [name for name in BLOCKS if name.startswith("mx")]
# Mantissa bits that the `even` rule keeps of amax.
MANTISSA = {E4M3: 3, "float8_e5m2": 2, "float6_e3m2fn": 2, "float6_e2m3fn": 3, "float4_e2m1fn": 1, "ocp_int8": 6}
HIGH_NIBBLE_FIRST = ("nf4", "bnb_fp4", "af4")
OUTLIER = 6.0


@dataclass
class Expected:
    """The expected result of quantizing a matrix."""

    codes: np.ndarray
    """One code per element, unpacked."""
    stored: dict[str, np.ndarray]
    values: np.ndarray
    """The dequantized matrix in float64, computed as code times scale in float32 (float64 for float64 input)."""


def quantize(name: str, x: np.ndarray, rule: str | None = None) -> Expected:
    """The matrix quantized to a block format."""
    element, tile, default = BLOCKS[name]
    rule, format = rule or default, formats.listed(element)
    columns = []
    if name == "llm_int8":
        columns = [c for c in range(x.shape[1]) if (np.abs(x[:, c]) >= OUTLIER).any()]
        kept, x = x[:, columns].copy(), x.copy()
        x[:, columns] = 0
    with np.errstate(all="ignore"):
        result = _TILED[rule](x, tile, format, rule)
    if name == "llm_int8":
        result.stored |= {"outlier_columns": np.array(columns, np.int64), "outliers": kept}
        result.values[:, columns] = kept
    return result


def tiles(x: np.ndarray, tile: tuple[int, int]) -> list[list[tuple[slice, slice]]]:
    """The slices of each tile, one list per row of tiles; the last tiles may be smaller."""
    high, wide = tile[0] or max(x.shape[0], 1), tile[1] or max(x.shape[1], 1)
    return [
        [(slice(i, i + high), slice(j, j + wide)) for j in range(0, x.shape[1], wide)]
        for i in range(0, x.shape[0], high)
    ]


def amax_of(part: np.ndarray) -> float:
    """The largest magnitude, or NaN if a value is infinite or NaN."""
    return float(np.abs(part).max()) if np.isfinite(part).all() else math.nan


def exponent_for(amax: float, format: formats.Listed, rule: str) -> int:
    """The exponent of the power-of-two scale for a positive amax, before clamping."""
    size, top = Fraction(amax), Fraction(format.max)
    of_max = formats.floor_log2(top)
    if rule == "floor":
        return formats.floor_log2(size) - of_max
    if rule == "ceil":
        exponent = formats.floor_log2(size)
        return exponent + (size != Fraction(2) ** exponent) - of_max
    if rule == "even":
        step = Fraction(2) ** (formats.floor_log2(size) - MANTISSA[format.name])
        rounded = (size / step + Fraction(1, 2)) // 1 * step  # half up
        return formats.floor_log2(rounded) - of_max
    exponent = formats.floor_log2(size / top) - 1
    while size / Fraction(2) ** exponent > top:
        exponent += 1
    return exponent


def _power_of_two(x: np.ndarray, tile: tuple[int, int], format: formats.Listed, rule: str) -> Expected:
    grid = tiles(x, tile)
    scale = np.zeros((len(grid), len(grid[0]) if grid else 0), np.uint8)
    codes, values = np.zeros(x.shape, np.int64), np.zeros(x.shape)
    for i, row in enumerate(grid):
        for j, where in enumerate(row):
            amax = amax_of(x[where])
            if math.isnan(amax):
                scale[i, j], codes[where], values[where] = 255, -1, math.nan
                continue
            exponent = min(max(exponent_for(amax, format, rule), -127), 127) if amax else -127
            scale[i, j] = exponent + 127
            quotient = np.ldexp(x[where].astype(np.float64), -exponent)  # exact, or too small to matter
            rounded = format.round(quotient, "nearest_even", "saturate")
            codes[where] = format.encode(rounded)
            values[where] = np.ldexp(rounded, exponent)
    return Expected(codes, {"scale": scale}, values)


def _elements(x: np.ndarray, multiplier: float, format: formats.Listed) -> tuple[np.ndarray, np.ndarray]:
    """The codes of x / multiplier, and their values times the multiplier."""
    if math.isnan(multiplier):
        return np.full(x.shape, -1), np.full(x.shape, math.nan)
    if multiplier == 0:
        return format.encode(format.round(np.zeros(x.shape), "nearest_even", "saturate")), np.zeros(x.shape)
    quotient = (x / x.dtype.type(multiplier)).astype(np.float64)
    rounded = format.round(quotient, "nearest_even", "saturate")
    return format.encode(rounded), times(rounded, multiplier, x.dtype)


def times(values: np.ndarray, multiplier: float, dtype: np.dtype) -> np.ndarray:
    """values * multiplier in a dtype's arithmetic, clamped to its finite range, as float64."""
    limit = np.finfo(dtype).max
    return np.clip(values.astype(dtype) * dtype.type(multiplier), -limit, limit).astype(np.float64)


def _tile_by_tile(x: np.ndarray, tile: tuple[int, int], format: formats.Listed, multiplier_of) -> Expected:
    """Codes and values for given multipliers of tiles."""
    codes, values = np.zeros(x.shape, np.int64), np.zeros(x.shape)
    for i, row in enumerate(tiles(x, tile)):
        for j, where in enumerate(row):
            codes[where], values[where] = _elements(x[where], float(multiplier_of[i, j]), format)
    return Expected(codes, {}, values)


def amaxes(x: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    """The amax of each tile, in x's dtype."""
    grid = tiles(x, tile)
    found = [[amax_of(x[where]) for where in row] for row in grid]
    return np.array(found, x.dtype).reshape(len(grid), -1 if x.size else 0)


def _absmax(x: np.ndarray, tile: tuple[int, int], format: formats.Listed, rule: str) -> Expected:
    scale = (amaxes(x, tile) / x.dtype.type(format.max)).astype(np.float32)
    result = _tile_by_tile(x, tile, format, scale)
    result.stored["scale"] = scale
    return result


def _double_absmax(x: np.ndarray, tile: tuple[int, int], format: formats.Listed, rule: str) -> Expected:
    """Scales minus their mean, in groups of 256, as codes of the signed dynamic map; elements use the exact scales."""
    exact = (amaxes(x, tile) / x.dtype.type(format.max)).astype(np.float32)
    flat, book = exact.flatten(), formats.listed("dynamic8")
    total = sum((Fraction(float(s)) for s in flat), Fraction(0))
    offset = np.float32(float(total / len(flat)))
    rest = flat - offset
    group_scale, codes, back = [], [], []
    for start in range(0, len(flat), 256):
        group = rest[start : start + 256]
        top = np.abs(group).max()
        code = book.encode(
            book.round((group / top if top else group * 0).astype(np.float64), "nearest_even", "saturate")
        )
        group_scale.append(top)
        codes.extend(code)
        back.extend(book.decoded[code].astype(np.float32) * top + offset)
    result = _tile_by_tile(x, tile, format, exact)
    limit = np.finfo(np.float32).max
    multiplier = np.clip(np.array(back, np.float32), -limit, limit).reshape(exact.shape)
    for i, row in enumerate(tiles(x, tile)):
        for j, where in enumerate(row):
            result.values[where] = times(format.decoded[result.codes[where]], multiplier[i, j], x.dtype)
    result.stored = {
        "scale": np.array(codes, np.uint8).reshape(exact.shape),
        "scale_scale": np.array(group_scale, np.float32),
        "scale_offset": offset,
    }
    return result


def _affine(x: np.ndarray, tile: tuple[int, int], format: formats.Listed, rule: str) -> Expected:
    """scale = (high - low) / max, zero = round(-low / scale), code = round(x / scale) + zero within the range."""
    grid, top = tiles(x, tile), int(format.max)
    scale = np.zeros((len(grid), len(grid[0])), np.float32)
    zero = np.zeros(scale.shape, np.uint8)
    codes, values = np.zeros(x.shape, np.int64), np.zeros(x.shape)
    for i, row in enumerate(grid):
        for j, where in enumerate(row):
            part = x[where]
            low, high = min(part.min(), x.dtype.type(0)), max(part.max(), x.dtype.type(0))
            scale[i, j] = np.float32((float(high) - float(low)) / top)
            if not scale[i, j]:
                continue
            zero[i, j] = min(max(round(float(-low / x.dtype.type(scale[i, j]))), 0), top)
            steps = np.rint(part / x.dtype.type(scale[i, j])).astype(np.int64)
            codes[where] = np.clip(steps + zero[i, j], 0, top)
            values[where] = times((codes[where] - zero[i, j]).astype(np.float64), scale[i, j], x.dtype)
    return Expected(codes, {"scale": scale, "zero_point": zero}, values)


def _two_level(x: np.ndarray, tile: tuple[int, int], format: formats.Listed, rule: str) -> Expected:
    """NVFP4: a float32 tensor scale and e4m3fn block scales that map each amax to 6, or to 4 or 6."""
    amax = amaxes(x, tile)
    room = 448 if rule == "two_level" else 256
    largest = np.nan_to_num(amax).max() if amax.size else x.dtype.type(0)
    tensor_scale = (largest / x.dtype.type(room * 6)).astype(np.float32) or np.float32(1)
    e4m3 = formats.listed(E4M3)
    choices = []
    for top in (6, 4) if rule == "four_over_six" else (6,):
        wanted = (amax / x.dtype.type(top)).astype(np.float32) / tensor_scale
        block = e4m3.round(wanted.astype(np.float64), "nearest_even", "saturate")
        choices.append((block, (block.astype(np.float32) * tensor_scale)))
    block, multiplier = (c.copy() for c in choices[0])
    if rule == "four_over_six":
        for i, row in enumerate(tiles(x, tile)):
            for j, where in enumerate(row):
                six, four = (_error(x[where], float(m[i, j]), format) for _, m in choices)
                if six > four:
                    block[i, j], multiplier[i, j] = (c[i, j] for c in choices[1])
    result = _tile_by_tile(x, tile, format, multiplier)
    scale = np.where(np.isnan(block), 0x7F, e4m3.encode(block)).astype(np.uint8)
    result.stored = {"scale": scale, "tensor_scale": tensor_scale}
    return result


def _two_level_up(x: np.ndarray, tile: tuple[int, int], format: formats.Listed, rule: str) -> Expected:
    """The smallest E4M3 scales that clip nothing, under the first tensor scale for which they exist."""
    amax, e4m3, top = amaxes(x, tile), formats.listed(E4M3), x.dtype.type(6)
    largest = np.nan_to_num(amax).max() if amax.size else x.dtype.type(0)
    tensor_scale = (largest / x.dtype.type(448 * 6)).astype(np.float32) or np.float32(1)
    tensor_scale = max(tensor_scale, np.float32(2.0**-117))
    while largest / (np.float32(448) * tensor_scale) > top:
        tensor_scale = np.nextafter(tensor_scale, np.float32(np.inf))
    scales = [np.float32(e4m3.decoded[code]) for code in range(0x7F)]
    block = np.full(amax.shape, np.nan)
    for where in zip(*np.nonzero(~np.isnan(amax)), strict=True):
        block[where] = next(s for s in scales if amax[where] == 0 or (s and amax[where] / (s * tensor_scale) <= top))
    result = _tile_by_tile(x, tile, format, block.astype(np.float32) * tensor_scale)
    scale = np.where(np.isnan(block), 0x7F, e4m3.encode(block)).astype(np.uint8)
    result.stored = {"scale": scale, "tensor_scale": tensor_scale}
    return result


def _error(x: np.ndarray, multiplier: float, format: formats.Listed) -> Fraction:
    """The exact sum of absolute errors."""
    if math.isnan(multiplier):
        return Fraction(0)
    values = np.zeros(x.shape)
    if multiplier:
        values = format.round((x / x.dtype.type(multiplier)).astype(np.float64), "nearest_even", "saturate")
    pairs = zip(values.flatten().tolist(), x.flatten().tolist(), strict=True)
    return sum((abs(Fraction(v) * Fraction(multiplier) - Fraction(o)) for v, o in pairs), Fraction(0))


_TILED = dict.fromkeys(POWERS_OF_TWO, _power_of_two) | {
    "absmax": _absmax,
    "double_absmax": _double_absmax,
    "affine": _affine,
    "two_level": _two_level,
    "two_level_up": _two_level_up,
    "four_over_six": _two_level,
}


def pack(codes: np.ndarray, bits: int, high_nibble_first: bool) -> np.ndarray:
    """The codes of each row packed into bytes: a little-endian bit string, or 4-bit codes, high half first."""
    if bits not in (4, 6):
        return codes
    rows = []
    for row in codes.tolist():
        if high_nibble_first:
            row = [code for pair in zip(row[::2], [*row[1::2], 0], strict=False) for code in reversed(pair)]
        word = sum(code << bits * i for i, code in enumerate(row))
        rows.append(
            list(word.to_bytes((codes.shape[1] * bits + 7) // 8 + 1, "little"))[: (codes.shape[1] * bits + 7) // 8]
        )
    return np.array(rows, np.uint8).reshape(codes.shape[0], (codes.shape[1] * bits + 7) // 8)
