"""Products on a GPU's FP8 and FP4 tensor cores, through torch.nn.functional.scaled_mm."""

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
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
    """A matrix of FP8 numbers, `values` times `scale`: a float32 scalar, or one number a row or column."""

    @property
    def values(self) -> Tensor: ...

    @property
    def scale(self) -> Tensor | None: ...


class Tiles(NamedTuple):
    """Codes and scales of a matrix as `Quantized` has them, but that the scales of tensor cores that read numbers may
    be what elements are multiplied by, in float32."""

    quantizer: Quantizer
    matrix_shape: tuple[int, ...]
    dtype: torch.dtype
    """Of the matrix."""
    tensors: dict[str, Tensor]

    @property
    def codes(self) -> Tensor:
        return self.tensors["codes"]

    @property
    def scale(self) -> Tensor:
        return self.tensors["scale"]


def outer_dtype(quantizer: Quantizer, device: torch.device) -> torch.dtype | None:
    """The dtype in which tensor cores there take operands of that quantizer, with one scale a tensor or a row, which
    multiplies the sum; None where they do not, where there are none, and for smaller tiles."""
    native = is_there(device) and not is_tiled(quantizer) and refusal(quantizer, device) is None
    return dtype_of(quantizer.format) if native else None


def is_there(device: torch.device) -> bool:
    """Whether there may be such tensor cores."""
    return capability(device) != (0, 0)


def refusal(quantizer: Quantizer, device: torch.device) -> str | None:
    """Why operands of that quantizer are not multiplied by tensor cores for their format there; None where they are."""
    if (why := _lacks_units(device)) is not None:
        return why
    format, kind = quantizer.format, kind_of(quantizer)
    if kind is not NV and format.key not in FP8:
        if format.key not in FP4:
            return f"{format.name}: FP8 tensor cores take float8_e4m3fn and float8_e5m2"
        return f"{format.name} with {quantizer.scales}: FP4 tensor cores take tiles of 1x16 with two levels of scales"
    apart = quantizer.clamp is not None or quantizer.outliers is not None
    if apart or (quantizer.scales is not None and quantizer.scales.rule.inner is not None):
        return (
            f"{quantizer.scales} with numbers kept apart, or by a rule of several steps: tensor cores take codes and "
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
    """Why a product of operands of those quantizers is not computed by tensor cores there, whatever its sizes; None
    where it is. Tiles lie as `recipe.Matmul` has them: along the shared dimension."""
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
    """Why tensor cores do not take sizes (rows, shared, columns) of a product of those operands; None where they do."""
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
    """Whether tensor cores there compute a product (rows, shared, columns) of operands of those quantizers, in `dtype`;
    `multiplied`, times a number that is no power of two."""
    if not is_there(device) or lhs is None or rhs is None or product_refusal(lhs, rhs, device) is not None:
        return False
    whole, taken = kind_of(lhs) is TENSORS and kind_of(rhs) is TENSORS, not (multiplied and kind_of(lhs) is MX)
    return taken and dtype in _results(whole) and misfit(lhs, rhs, sizes) is None  # no scale of MX takes the number


def _on_the_right(device: torch.device) -> tuple[torch.dtype, ...]:
    """The dtypes on the right of a product with a scale a row: but on 9.x E4M3 alone (CUTLASS)."""
    return (torch.float8_e4m3fn, torch.float8_e5m2) if _found(device)[0] == 9 else (torch.float8_e4m3fn,)


def _results(whole: bool) -> tuple[torch.dtype, ...]:
    return (torch.bfloat16, torch.float16) if whole else (torch.bfloat16,)


def _lacks_units(device: torch.device) -> str | None:
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm; 2.10 and newer do"
    if _found(device) == (0, 0):
        return f"no FP8 tensor cores on {device.type} here"
    if _found(device) < (8, 9):
        return f"compute capability {_text(_found(device))}: FP8 tensor cores came with 8.9"
    return None


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


capability = gpu.capability
"""Of a GPU that may have such tensor cores. Tests replace it, to be on another."""


def _found(device: torch.device) -> tuple[int, int]:
    """`capability`, where a graph may be traced."""
    return capability(device)


# A traced graph takes their answers. Of two tuples, one an answer, torch 2.8 traces no comparison.
is_there._dynamo_marked_constant = True  # type: ignore[attr-defined]
_found._dynamo_marked_constant = True  # type: ignore[attr-defined]


@constant
def _toolkit() -> tuple[int, int]:
    """The CUDA that torch is built with; a newer one than any that is asked for where torch does not tell."""
    major, minor = (int(part) for part in (torch.version.cuda or "99.0").split(".")[:2])
    return major, minor


@constant
def _torch() -> tuple[int, int]:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return major, minor


def run(
    lhs: Operand, rhs: Operand, bias: Tensor | None, dtype: torch.dtype, multiplier: float | None = None
) -> Tensor | None:
    """lhs (rows, shared) times rhs (shared, columns), each times its scale, times multiplier, plus bias, rounded to
    dtype. None where there is no native product: it takes FP8 tensor cores' dtypes, not both E5M2, and aligned sides.

    Tensor cores want the rows of lhs and the columns of rhs one after another in memory; what does not lie so is
    copied. They sum with an accuracy of their own; torch is asked for the accurate accumulation, not for the fast one.
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
    """lhs (rows, shared) times the transpose of rhs (columns, shared), both in codes with tiles along the shared
    dimension, times multiplier, plus bias, rounded to dtype. Nothing is copied but scales that do not lie as units
    read them. None where tensor cores do not compute it (`takes`)."""
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
    """What the elements of each tile are multiplied by, in float32: the scales themselves where they are numbers."""
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
