"""What a matrix unit's sums keep: how many fraction bits, and after how many products it goes on in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from on_gpu.bench import Bench, Row


Product = Callable[[Tensor, Tensor], Tensor]
"""(m, k) times (n, k) transposed, of float32 matrices whose values the operands' format holds; float32 comes out."""
_SIDE = 16


def rows(bench: Bench) -> Iterator[Row]:
    """For each kind of product that gives float32, by the accurate accumulation and by the fast one."""
    kinds: dict[str, Product] = {"bf16": half}
    for fast in (False, True):
        how = "fast accumulation" if fast else "accurate accumulation"
        kinds[f"tensor, {how}"] = lambda a, b, f=fast: scaled(a, b, f, by_rows=False)  # type: ignore[misc]
        kinds[f"row, {how}"] = lambda a, b, f=fast: scaled(a, b, f, by_rows=True)  # type: ignore[misc]
    for name, product in kinds.items():
        yield Row(f"sums: {name}", lambda p=product: probe(bench.device, p, bench.sizes.depth))  # type: ignore[misc]


def half(a: Tensor, b: Tensor) -> Tensor:
    """By bf16's units, without a last rounding."""
    lhs, rhs = a.bfloat16(), b.bfloat16().t()
    return torch.mm(lhs, rhs, out_dtype=torch.float32) if a.is_cuda else lhs.float() @ rhs.float()


def scaled(a: Tensor, b: Tensor, fast: bool, by_rows: bool) -> Tensor:
    """By FP8 units, E4M3 with scales of one."""
    kinds = F.ScalingType  # type: ignore[attr-defined]
    kind = kinds.RowWise if by_rows else kinds.TensorWise
    left, right = (torch.ones(s if by_rows else (), device=a.device) for s in ((a.shape[0], 1), (1, b.shape[0])))
    lhs, rhs = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    out = torch.bfloat16 if by_rows and not a.is_cuda else torch.float32  # a CPU's row-wise product gives bf16 alone
    return F.scaled_mm(lhs, rhs, left, kind, right, kind, output_dtype=out, use_fast_accum=fast).float()  # type: ignore[attr-defined]


def probe(device: torch.device, product: Product, depth: int) -> dict[str, Any]:
    """What one kind of product keeps."""
    bits, lost = fraction_bits(device, product), swamped(device, product, depth)
    measures = {"fraction bits": bits, "products that a large one swamps": lost}
    return {"measures": measures, "result": f"{bits} fraction bits; of {depth - 1} small products {lost} are lost"}


def fraction_bits(device: torch.device, product: Product, most: int = 26) -> int:
    """The largest j such that 2^p + 2^(p - j) is not 2^p, both products within 32 of the shared side."""
    found = 0
    for j in range(1, most):
        a, b = torch.zeros(_SIDE, 64, device=device), torch.zeros(_SIDE, 64, device=device)
        a[0, 0], b[0, 0] = 2.0**8, 2.0**8
        down = 16 - j  # of the other product, 2^(16 - j): E4M3 has 2^-9 to 2^8
        a[0, 1] = 2.0 ** max(min(down // 2, 8), -9)
        b[0, 1] = 2.0**down / a[0, 1]
        if float(product(a, b)[0, 0]) != 2.0**16:
            found = j
    return found


def swamped(device: torch.device, product: Product, depth: int) -> int:
    """How many of the products 2^-6 beside one of 2^8 leave no trace in a sum of `depth` products."""
    a, b = torch.full((_SIDE, depth), 2.0**-3, device=device), torch.full((_SIDE, depth), 2.0**-3, device=device)
    a[0, 0], b[0, 0] = 2.0**4, 2.0**4
    return depth - 1 - round((float(product(a, b)[0, 0]) - 2.0**8) / 2.0**-6)
