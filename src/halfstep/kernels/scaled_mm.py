"""Matmuls on a GPU's FP8 and FP4 tensor cores, through torch.nn.functional.scaled_mm."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from halfstep.constant import constant
from halfstep.kernels import gpu
from halfstep.kernels.units_mm import (
    BLOCKS,
    FP4,
    FP8,
    MX,
    NV,
    PAIRS,
    ROWS,
    TENSORS,
    Side,
    dtype_of,
    in_dtype,
    is_tiled,
    kind_of,
    unfit,
    units_mm,
)  # fmt: skip
from halfstep.quant import Quantized, Quantizer


class Operand(Protocol):
    """An FP8 matrix, `values` times `scale`: a float32 scalar, or one per row or column."""

    @property
    def values(self) -> Tensor: ...

    @property
    def scale(self) -> Tensor | None: ...


class Tiles(NamedTuple):
    """Codes and scales of a matrix, as in `Quantized`, except that for tensor cores that take float32 scales `scale`
    may be the float32 multiplier of each tile's elements."""

    quantizer: Quantizer
    matrix_shape: tuple[int, ...]
    dtype: torch.dtype
    """The dtype of the matrix."""
    tensors: dict[str, Tensor]

    @property
    def codes(self) -> Tensor:
        return self.tensors["codes"]

    @property
    def scale(self) -> Tensor:
        return self.tensors["scale"]


def outer_dtype(quantizer: Quantizer, device: torch.device) -> torch.dtype | None:
    """The dtype of operands that tensor cores there take for that quantizer, with one scale per tensor or row applied
    after the sum. None where they do not take them, where there are no tensor cores, and for smaller tiles."""
    native = may_have_tensor_cores(device) and not is_tiled(quantizer) and refusal(quantizer, device) is None
    return dtype_of(quantizer.format) if native else None


def may_have_tensor_cores(device: torch.device) -> bool:
    """Whether the device may have FP8 or FP4 tensor cores."""
    return capability(device) != (0, 0)


def refusal(quantizer: Quantizer, device: torch.device) -> str | None:
    """Why tensor cores there do not multiply operands of that quantizer natively; None where they do."""
    if (why := _lacks_tensor_cores(device)) is not None:
        return why
    format, kind = quantizer.format, kind_of(quantizer)
    if kind is not NV and format.key not in FP8:
        if format.key not in FP4:
            return f"{format.name}: FP8 tensor cores take float8_e4m3fn and float8_e5m2"
        return f"{format.name} with {quantizer.scales}: FP4 tensor cores take tiles of 1x16 with two levels of scales"
    apart = quantizer.clamp is not None or quantizer.outliers is not None
    if apart or (quantizer.scales is not None and quantizer.scales.rule.inner is not None):
        return (
            f"{quantizer.scales} with outliers kept apart, or a rule of several steps: tensor cores take codes and "
            "scales"
        )
    if kind is None:
        tile = "no scale" if quantizer.scales is None else f"tiles of {quantizer.scales.tile} ({quantizer.scales.rule})"
        return f"{tile}: tensor cores take one scale a tensor or a row, tiles of 1x128 and 128x128, of 1x32, of 1x16"
    found, verb = _found(device), "need" if is_tiled(quantizer) else "needs"
    if found < kind.since or (kind.majors and found[0] not in kind.majors):
        needed = " or ".join(f"{major}.x" for major in kind.majors) + " alone" if kind.majors else _text(kind.since)
        return f"{kind.words} {verb} compute capability {needed}; {_text(found)} found"
    for major, what, version in kind.wants:
        here = _torch() if what == "torch" else _toolkit()
        if major == found[0] and here < version:
            needed = ("" if what == "torch" else "a torch built with ") + f"{what} {_text(version)} or newer"
            return f"{kind.words} {verb} {needed} on compute capability {_text(found)}; {_text(here)} found"
    return None


def product_refusal(lhs: Quantizer | None, rhs: Quantizer | None, device: torch.device) -> str | None:
    """Why tensor cores there do not compute a matmul of operands of those quantizers, whatever its sizes; None where
    they do. Tiles lie along the shared dimension, as in `recipe.Matmul`."""
    for quantizer in (lhs, rhs):
        if quantizer is not None and (why := refusal(quantizer, device)) is not None:
            return why
    if lhs is None or rhs is None:
        return "one operand of a product is not rounded: tensor cores take both in few bits"
    one, other = kind_of(lhs), kind_of(rhs)
    assert one is not None
    assert other is not None
    if (one, other) not in PAIRS:
        return f"{one.words} times {other.words}: tensor cores take no such pair"
    if dtype_of(lhs.format) == dtype_of(rhs.format) == torch.float8_e5m2:
        return "E5M2 times E5M2: FP8 tensor cores take E4M3 on one side at least"
    if ROWS in (one, other) and dtype_of(rhs.format) not in _on_the_right(device):
        return f"E5M2 on the right with a scale a row: on compute capability {_text(_found(device))} it is E4M3"
    return None


def misfit(lhs: Quantizer, rhs: Quantizer, sizes: tuple[int, int, int]) -> str | None:
    """Why tensor cores do not take the sizes (rows, shared, columns) of a matmul of those operands; None where they
    do."""
    one, other = kind_of(lhs), kind_of(rhs)
    assert one is not None
    assert other is not None
    return unfit(one, other, *sizes)


def takes(
    lhs: Quantizer | None,
    rhs: Quantizer | None,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    multiplied: bool = False,
) -> bool:
    """Whether tensor cores there compute a matmul (rows, shared, columns) of operands of those quantizers, in `dtype`;
    with `multiplied`, times a scalar that is no power of two."""
    if not may_have_tensor_cores(device) or lhs is None or rhs is None or product_refusal(lhs, rhs, device) is not None:
        return False
    whole, taken = kind_of(lhs) is TENSORS and kind_of(rhs) is TENSORS, not (multiplied and kind_of(lhs) is MX)
    return taken and dtype in _results(whole) and misfit(lhs, rhs, sizes) is None  # MX scales are powers of two


def _on_the_right(device: torch.device) -> tuple[torch.dtype, ...]:
    """The dtypes that rhs may have in a matmul with a scale per row: E4M3 alone, except on 9.x (CUTLASS)."""
    return (torch.float8_e4m3fn, torch.float8_e5m2) if _found(device)[0] == 9 else (torch.float8_e4m3fn,)


def _results(whole: bool) -> tuple[torch.dtype, ...]:
    return (torch.bfloat16, torch.float16) if whole else (torch.bfloat16,)


def _lacks_tensor_cores(device: torch.device) -> str | None:
    if _found(device) == (0, 0):
        return f"no FP8 tensor cores on {device.type} here"
    if _found(device) < (8, 9):
        return f"compute capability {_text(_found(device))}: FP8 tensor cores came with 8.9"
    return None


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


capability = gpu.capability
"""The compute capability of a GPU. Tests replace it to simulate another GPU."""


def _found(device: torch.device) -> tuple[int, int]:
    """`capability`, callable where a graph may be traced."""
    return capability(device)


# A traced graph takes their results as constants.
may_have_tensor_cores._dynamo_marked_constant = True  # type: ignore[attr-defined]
_found._dynamo_marked_constant = True  # type: ignore[attr-defined]


@constant
def _toolkit() -> tuple[int, int]:
    """The CUDA version that torch is built with; newer than any required one where torch does not say."""
    major, minor = (int(part) for part in (torch.version.cuda or "99.0").split(".")[:2])
    return major, minor


@constant
def _torch() -> tuple[int, int]:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return major, minor


def run(
    lhs: Operand, rhs: Operand, bias: Tensor | None, dtype: torch.dtype, multiplier: float | None = None
) -> Tensor | None:
    """lhs (rows, shared) @ rhs (shared, columns), each times its scale, times multiplier, plus bias, rounded to dtype.
    None where no FP8 tensor cores do it: they take their own dtypes, not both E5M2, and aligned sizes.

    Tensor cores need lhs with contiguous rows and rhs with contiguous columns; other layouts are copied. They
    accumulate with an accuracy of their own; torch is asked for the accurate accumulation, not the fast one.
    """
    dtypes = {lhs.values.dtype, rhs.values.dtype}
    if not dtypes <= set(FP8.values()) or dtypes == {torch.float8_e5m2}:
        return None
    one, two = (TENSORS if side.scale is not None and side.scale.dim() == 0 else ROWS for side in (lhs, rhs))
    whole = one is TENSORS and two is TENSORS
    (rows, shared), across = lhs.values.shape, rhs.values.shape[1]
    placed = whole or rhs.values.dtype in _on_the_right(rhs.values.device)
    if not placed or dtype not in _results(whole) or unfit(one, two, rows, shared, across) is not None:
        return None
    scale, other = (_scale(side) for side in (lhs, rhs))
    if multiplier is not None:
        scale = scale * multiplier
    kind = ROWS if scale.dim() or other.dim() else TENSORS
    other = other.t() if other.dim() else other
    sides = Side(lhs.values, kind, scale), Side(rhs.values.t(), kind, other)
    return units_mm(*sides, None if bias is None else bias.to(dtype), dtype)


def _scale(side: Operand) -> Tensor:
    return side.values.new_ones((), dtype=torch.float32) if side.scale is None else side.scale


def run_tiled(
    lhs: Quantized | Tiles,
    rhs: Quantized | Tiles,
    bias: Tensor | None,
    dtype: torch.dtype,
    multiplier: float | None = None,
) -> Tensor | None:
    """lhs (rows, shared) @ the transpose of rhs (columns, shared), both codes with tiles along the shared dimension,
    times multiplier, plus bias, rounded to dtype. None where tensor cores do not compute it (`takes`). Nothing is
    copied but scales that are not in the layout of tensor cores."""
    sizes = (lhs.matrix_shape[0], lhs.matrix_shape[1], rhs.matrix_shape[0])
    if not takes(lhs.quantizer, rhs.quantizer, sizes, dtype, lhs.codes.device, multiplier is not None):
        return None
    one, other = (_handed(side) for side in (lhs, rhs))
    if multiplier is not None:
        one = (
            one._replace(scale=one.scale * multiplier)
            if one.whole is None
            else one._replace(whole=one.whole * multiplier)
        )
    return units_mm(one, other, None if bias is None else bias.to(dtype), dtype)


def multiplier(side: Quantized | Tiles) -> Tensor:
    """The float32 factor on the elements of each tile: the scales themselves where they are float32."""
    if side.scale.dtype == torch.float32:
        return side.scale
    return side.quantizer.tiling.rule.multiplier(side.tensors, side.quantizer.format).float()


def _handed(side: Quantized | Tiles) -> Side:
    quantizer, kind = side.quantizer, kind_of(side.quantizer)
    assert kind is not None
    codes = in_dtype(side.codes, quantizer.format)
    if kind in BLOCKS:
        return Side(codes, kind, multiplier(side))
    scales, high = side.scale, quantizer.tiling.tile.rows
    scales = scales if high == 1 else scales.repeat_interleave(high, 0).narrow(0, 0, side.matrix_shape[0])
    return Side(codes, kind, scales, side.tensors.get("tensor_scale"))
