"""Matmuls of a few rows in evaluation (of a generated token), with weights stored as codes or as rounded values.

Both sum in the order of `kernels.cpu.few_rows`. So a model that is quantized for inference gives the same bits as in
evaluation before, and takes as long as reading its codes takes.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.kernels.cpu import few_rows, tokens
from halfstep.kernels.cpu.arrays import array, plain, widened
from halfstep.kernels.cpu.tokens import Rounded
from halfstep.ops.casts import E4M3_BITS, Quantized, carrier, tile_carrier
from halfstep.ops.operand import Operand, decoded, is_whole, scale_of
from halfstep.quant import Quantizer
from halfstep.quant.tracing import has_memory
from halfstep.recipe import Matmul


_USUAL = 2.0**127  # below it, the product of two float32 in double, rounded to float32, is their float32 product


class _Known(NamedTuple):
    """The kernel's arguments for a stored weight, valid as long as its tensors are the ones recorded in `tensors`."""

    tensors: tuple[tuple[weakref.ref[Tensor], int, torch.dtype, torch.Size], ...]
    """A reference, the address, dtype and shape of each tensor of the weight."""
    given: Any
    """The kernel's arguments; None if the kernel does not read such tensors."""
    whole: bool
    """Whether one scale multiplies the whole weight."""


class _Way(NamedTuple):
    """The function that rounds the inputs of a stored weight, and the matmul and dtypes for which it was chosen."""

    product: Matmul
    given: torch.dtype
    """The input's dtype."""
    dtype: torch.dtype
    """The dtype of the matmul's result."""
    rounder: Callable[[Tensor], Rounded | None] | None
    """None if `operand` rounds the input."""


class Reader:
    """A cache of what the kernel needs to multiply by one stored weight, recomputed if one of the weight's tensors is
    another object, or has another address, dtype or shape. It keeps no tensor alive; copies and pickles are empty."""

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._asked: tuple[Quantizer, tuple[int, ...], bool] | None = None
        self._way: _Way | None = None

    def __reduce__(self) -> Any:
        return Reader, ()

    def supports(self, quantizer: Quantizer, shape: tuple[int, ...]) -> bool:
        """`kernels.cpu.few_rows.supports` for the quantizer and the weight's shape, cached."""
        asked = self._asked
        if asked is None or asked[0] is not quantizer or asked[1] != shape:
            self._asked = asked = quantizer, shape, few_rows.supports(quantizer.plain, *shape)
        return asked[2]

    def read(self, weight: "StoredWeight") -> _Known:
        """The kernel's arguments for the weight. One reader serves one weight, whose tensors may be replaced."""
        known, tensors = self._known, weight.tensors.values()
        if known is None or not all(map(_is_same, known.tensors, tensors)):
            self._known = known = self._find(weight)
        return known

    def rounder(
        self, weight: "StoredWeight", product: Matmul, given: torch.dtype
    ) -> Callable[[Tensor], Rounded | None] | None:
        """The function that rounds a few rows of dtype `given` for a matmul with the weight; None if `operand` rounds
        them, or if the few-rows kernel does not compute that matmul."""
        way = self._way
        if way is None or way.product is not product or way.given is not given or way.dtype is not weight.dtype:
            known = product.multiplier is None and _takes(product, weight)
            rounder = _rounder(product.lhs, weight.shape[1], weight.dtype) if known else None
            self._way = way = _Way(product, given, weight.dtype, rounder)
        return way.rounder

    def _find(self, weight: "StoredWeight") -> _Known:
        quantizer, tensors = weight.quantizer, weight.quantized.tensors  # `quantized` checks them
        whole = is_whole(quantizer)
        codes, scale = tensors["codes"], None if whole else tensors.get("scale")
        given = few_rows.weight_arguments(codes, scale, quantizer)
        return _Known(tuple((weakref.ref(t), t.data_ptr(), t.dtype, t.shape) for t in tensors.values()), given, whole)


def _is_same(seen: tuple[weakref.ref[Tensor], int, torch.dtype, torch.Size], tensor: Tensor) -> bool:
    found, pointer, dtype, shape = seen
    same = found() is tensor and tensor.data_ptr() == pointer and tensor.dtype == dtype and tensor.shape == shape
    return same and tensor.is_contiguous()


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """A matrix (out, in) stored as codes, whose rows a matmul decodes as it reads them."""

    quantizer: Quantizer
    matrix: tuple[int, ...]
    """Rows and columns of the stored matrix."""
    original: torch.dtype
    """The dtype of the weight before it was quantized."""
    tensors: Mapping[str, Tensor]
    dtype: torch.dtype
    """The dtype of the matmul's result."""
    transposed: bool = False
    reader: Reader | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns, transposed if this is."""
        return self.matrix[::-1] if self.transposed else self.matrix

    @property
    def quantized(self) -> Quantized:
        """The stored matrix as a `Quantized`, whose constructor checks the tensors."""
        return Quantized(self.quantizer, self.matrix, self.original, dict(self.tensors))

    def operand(self) -> Operand:
        """The whole matrix, decoded."""
        matrix = decoded(self.quantized, self.dtype)
        return matrix.t() if self.transposed else matrix

    def t(self) -> "StoredWeight":
        """The transposed matrix."""
        return replace(self, transposed=not self.transposed)

    def __getitem__(self, rows: slice) -> Operand:
        return self.operand()[rows]

    def split(self, rows: int) -> tuple[Operand, ...]:
        """The decoded matrix in pieces of `rows` rows each."""
        return self.operand().split(rows)


def _rounder(
    quantizer: Quantizer | None, columns: int, dtype: torch.dtype
) -> Callable[[Tensor], Rounded | None] | None:
    """A function that rounds a plain tensor with rows of `columns` elements to the values of `ops.operand` for a matmul
    in `dtype`; None if only `operand` can."""
    if quantizer is None:
        return lambda x: (widened(array(x.to(dtype))), None)
    if quantizer.clamp is not None or quantizer.scales is None or quantizer.by_rows or quantizer.inner is not None:
        return None
    format, scales = quantizer.format, quantizer.scales
    if scales.rule.exact:
        into = tile_carrier(format, scales.rule, dtype, torch.device("cpu"))
    else:
        into = carrier(format.key, dtype, E4M3_BITS if scales.rule.two_level else 0)
    rounded = tokens.rounder(quantizer, columns, into)
    return None if rounded is None else lambda x: rounded(array(x))


def _takes(product: Matmul, weight: Operand | StoredWeight, held: bool = True) -> bool:
    """Whether the few-rows kernel multiplies by that weight. The weight's reader is asked only if its tensors are
    `held` in memory."""
    quantizer = product.rhs
    if quantizer is None or quantizer.clamp is not None or product.accumulate is not None:
        return False
    if product.hadamard is not None:
        return False
    if isinstance(weight, StoredWeight) and weight.reader is not None and held:
        return weight.reader.supports(quantizer, weight.shape)
    return few_rows.supports(quantizer.plain, *weight.shape)


def few_rows_product(
    lhs: Operand, weight: Operand | StoredWeight, bias: Tensor | None, dtype: torch.dtype, product: Matmul, shared: int
) -> Tensor | None:
    """lhs (rows, in) times the transpose of the weight (out, in), plus bias (out): in `dtype`, rounded once from
    float32. None if the few-rows kernel does not apply: evaluation and quantized inference decide that alike.

    Args:
        product: how the operands are rounded.
        shared: the size of the shared dimension without the padding of a rotation, for the multiplier.
    """
    rows, columns = lhs.values.shape
    if held := has_memory(lhs.values):
        few = 0 < rows <= few_rows.ROWS
    else:  # a graph with a symbolic number of rows has one matmul for all of them
        few = torch.fx.experimental.symbolic_shapes.statically_known_true(rows <= few_rows.ROWS)
    if (
        not few
        or columns != weight.shape[1]
        or lhs.remainder is not None
        or (lhs.scale is not None and lhs.scale.dim() != 0)
        or lhs.values.device.type != "cpu"
        or lhs.values.dtype not in (torch.float32, torch.bfloat16, torch.float16)
        or (not held and has_memory(lhs.values, or_fake=True))
        or not _takes(product, weight, held)
    ):
        return None
    multiplier = None if product.multiplier is None else product.multiplier.of(rows, shared, weight.shape[0])
    x = (lhs.values if lhs.values.dtype == torch.float32 else lhs.values.float()).contiguous().resolve_neg()
    bias = _wide(bias)
    if held and isinstance(weight, StoredWeight) and not weight.transposed and weight.reader is not None:
        known = weight.reader.read(weight)
        scale = scale_of(lhs, Operand(x, _scale(weight, known.whole)))
        out = torch.empty(len(x), weight.matrix[0], dtype=dtype, device="cpu")
        if known.given is not None:
            values, times = array(x, torch.float32), few_rows.factor(scale, multiplier)
            if few_rows.run(values, known.given, times, bias, out):
                return out
    matrix = weight.operand() if isinstance(weight, StoredWeight) else weight
    values, scale = matrix.values.contiguous().resolve_neg(), scale_of(lhs, matrix)
    out = torch.empty(len(x), len(values), dtype=dtype, device="cpu")
    few_rows.product(x, values, scale, multiplier, bias, out)
    return out


def from_codes(x: Tensor, weight: StoredWeight, bias: Tensor | None, product: Matmul) -> Tensor | None:
    """x (..., in), rounded as `product` says, times the transpose of a weight in codes, plus bias (out): the same bits
    as `few_rows_product`, with less work on the host. None if it does not apply; the caller then takes the usual path.
    """
    across, columns = weight.matrix
    if weight.reader is None or weight.transposed or not has_memory(x) or not plain(x) or x.shape[-1:] != (columns,):
        return None
    rounder = weight.reader.rounder(weight, product, x.dtype)
    if rounder is None or not 0 < x.numel() <= few_rows.ROWS * columns:
        return None
    known = weight.reader.read(weight)
    rounded = None if known.given is None else rounder(x)
    if rounded is None:
        return None
    (values, one), other = rounded, _scale(weight, known.whole)
    times = one if other is None else float(other) if one is None else one * float(other)
    if times is not None and not abs(times) < _USUAL:
        return None
    out = torch.empty((*x.shape[:-1], across), dtype=weight.dtype, device="cpu")
    return out if few_rows.run(values, known.given, times, _wide(bias), out) else None


def _wide(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().float().contiguous().resolve_neg()


def _scale(weight: StoredWeight, whole: bool) -> Tensor | None:
    """The scale that multiplies the result of a matmul with a stored weight; None if there is none."""
    if whole:
        return weight.quantizer.tiling.rule.multiplier(dict(weight.tensors), weight.quantizer.format).view(())
    return weight.tensors.get("tensor_scale")
