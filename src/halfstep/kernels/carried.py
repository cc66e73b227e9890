"""Products of 16-bit operands carried in float32, for CPUs that have no 16-bit matrix units.

A product of two fp16 or two bf16 values is exact in float32, so widening the operands, multiplying in float32 and
rounding the result once is what 16-bit matrix units do: exact products, float32 accumulation, one rounding. On a CPU
without such units torch's own 16-bit products are slower than float32's, up to a hundred times for fp16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


_UNITS = {torch.bfloat16: ("amx_bf16", "avx512_bf16"), torch.float16: ("amx_fp16", "avx512_fp16")}


def supports(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of that dtype are better carried here: an x86 CPU without units for it."""
    return device.type == "cpu" and dtype in _CARRIED


def _lacks_units(dtype: torch.dtype) -> bool:
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch before 2.13 does not tell
    return capabilities.get("architecture") == "x86_64" and not any(capabilities.get(u) for u in _UNITS[dtype])


_CARRIED = frozenset(filter(_lacks_units, _UNITS))  # asked once, here: torch.compile cannot trace the question


def run(lhs: Tensor, rhs: Tensor, bias: Tensor | None = None) -> Tensor:
    """lhs (rows, shared) times rhs (shared, columns), plus bias (columns), rounded once to lhs's dtype."""
    product = (
        torch.mm(lhs.float(), rhs.float()) if bias is None else torch.addmm(bias.float(), lhs.float(), rhs.float())
    )
    return product.to(lhs.dtype)
