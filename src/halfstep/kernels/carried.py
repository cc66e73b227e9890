"""16-bit matmuls emulated in float32, for CPUs without 16-bit matrix units.

The product of two fp16 or two bf16 values is exact in float32, so widening the operands, multiplying in float32 and
rounding the result once is what 16-bit matrix units do: exact products, float32 accumulation, one rounding. On a CPU
without such units torch's own 16-bit matmuls are slower than its float32 ones, up to a hundred times for fp16.
"""

from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.gpu import cast, is_dense, plain
from halfstep.kernels.operator import Operator, plus, times


_UNITS = {torch.bfloat16: ("amx_bf16", "avx512_bf16"), torch.float16: ("amx_fp16", "avx512_fp16")}
_ASKED = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


def supports(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether matmuls of that dtype should run in float32 here: on an x86 CPU without matrix units for it."""
    return device.type == "cpu" and dtype in CARRIED


def _lacks_matrix_units(dtype: torch.dtype) -> bool:
    """Whether this is an x86 CPU without matrix units for the dtype, or oneDNN, torch's backend, is set not to use
    them."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # not in torch before 2.13
    if capabilities.get("architecture") != "x86_64":
        return False
    used = getattr(torch.ops.mkldnn, _ASKED[dtype], bool)()
    return not used or not any(capabilities.get(unit) for unit in _UNITS[dtype])


CARRIED = frozenset(filter(_lacks_matrix_units, _UNITS))  # evaluated once, at import: torch.compile cannot trace it
"""The dtypes whose matmuls run in float32 on this machine's CPU. Tests replace it to simulate another CPU."""


def run(
    lhs: Tensor,
    rhs: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    multiplier: float | None = None,
) -> Tensor:
    """lhs (rows, shared) @ rhs (shared, columns), times scale and multiplier, plus bias, in float32, then rounded to
    dtype."""
    dtype = dtype or lhs.dtype
    wide = torch.promote_types(torch.promote_types(lhs.dtype, rhs.dtype), torch.float32)
    lhs, rhs = lhs.to(wide), rhs.to(wide)
    if scale is None:
        if multiplier is not None:
            product = _multiplied(lhs, rhs, bias, multiplier)
        else:
            product = torch.mm(lhs, rhs) if bias is None else torch.addmm(bias.to(wide), lhs, rhs)
    else:
        product = times(torch.mm(lhs, rhs), scale if multiplier is None else scale * multiplier)
        product = product if bias is None else plus(product, bias)
    return product.to(dtype)


def run_native(
    lhs: Tensor, rhs: Tensor, bias: Tensor | None, scale: Tensor | None, multiplier: float | None = None
) -> Tensor:
    """The matmul on matrix units for lhs's dtype: scale and multiplier are its alpha, applied before its one rounding.

    For a scale that is a tensor, alpha would make a GPU synchronize, so there the result is float32 first and is scaled
    and rounded afterwards. On a CPU a traced graph has an opaque operator that reads the scale, so that it sums as an
    eager call does.
    """
    if scale is None:
        return _multiplied(lhs, rhs, bias, 1.0 if multiplier is None else multiplier)
    if multiplier is not None:
        scale = scale * multiplier
    if lhs.device.type == "cpu":
        return _NATIVE_MM(lhs, rhs, bias, scale)  # type: ignore[no-any-return]
    product = (
        torch.mm(lhs, rhs, out_dtype=torch.float32) if lhs.device.type == "cuda" else torch.mm(lhs.float(), rhs.float())
    )
    if plain(product) and (bias is None or is_dense(bias, lhs.dtype)):
        return cast.run_finish(product, scale, bias, lhs.dtype)
    product = times(product, scale)
    return (product if bias is None else product + bias).to(lhs.dtype)


def _multiplied(lhs: Tensor, rhs: Tensor, bias: Tensor | None, alpha: float) -> Tensor:
    if bias is not None:
        return torch.addmm(bias.to(lhs.dtype), lhs, rhs, alpha=alpha)
    # With beta=0 the addend is not read, except by compilers, which multiply by 0: so it holds zeros.
    return torch.addmm(lhs.new_zeros(()), lhs, rhs, beta=0, alpha=alpha)


def _native_mm(lhs: Tensor, rhs: Tensor, bias: Tensor | None, scale: Tensor) -> Tensor:
    into = lhs.new_empty(()) if bias is None else bias.to(lhs.dtype)  # with beta=0 it is not read
    return torch.addmm(into, lhs, rhs, beta=0 if bias is None else 1, alpha=float(scale))


_NATIVE_MM = Operator(
    "native_mm(Tensor lhs, Tensor rhs, Tensor? bias, Tensor scale) -> Tensor",
    _native_mm,
    like=lambda lhs, rhs, bias, scale: lhs.new_empty(lhs.shape[0], rhs.shape[1]),
)


def run_stacked(lhs: Tensor, rhs: Tensor, multiplier: float | None = None) -> Tensor:
    """Batched matmul, (..., rows, shared) @ (..., shared, columns), times multiplier, in float32 (float64 where an
    operand is), not rounded further."""
    if lhs.device.type == "cuda" and lhs.dtype == rhs.dtype and lhs.dtype in _UNITS and lhs.dim() > 2:
        flat = torch.bmm(lhs.flatten(0, -3), rhs.flatten(0, -3), out_dtype=torch.float32)
        flat = flat if multiplier is None else times(flat, multiplier)
        return flat.view(*lhs.shape[:-1], rhs.shape[-1])
    wide = torch.promote_types(torch.promote_types(lhs.dtype, rhs.dtype), torch.float32)
    if multiplier is None or lhs.dim() < 3:
        product = torch.matmul(lhs.to(wide), rhs.to(wide))
        return product if multiplier is None else times(product, multiplier)
    first, second = (operand.to(wide).reshape(-1, *operand.shape[-2:]) for operand in (lhs, rhs))
    product = torch.baddbmm(first.new_zeros(()), first, second, beta=0, alpha=multiplier)
    return product.view(*lhs.shape[:-1], rhs.shape[-1])
