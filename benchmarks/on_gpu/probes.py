"""The accumulators of tensor cores: their fraction bits, and how many products they sum before float32 takes over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.kernels import probes
from halfstep.kernels.probes import Product
from on_gpu.bench import Bench, Row


def rows(bench: Bench) -> Iterator[Row]:
    """A row for each kind of GEMM with float32 output, with accurate and with fast accumulation."""
    kinds: dict[str, Product] = {"bf16": half}
    for fast in (False, True):
        how = "fast accumulation" if fast else "accurate accumulation"
        kinds[f"tensor, {how}"] = lambda a, b, f=fast: scaled(a, b, f, by_rows=False)  # type: ignore[misc]
        kinds[f"row, {how}"] = lambda a, b, f=fast: scaled(a, b, f, by_rows=True)  # type: ignore[misc]
    for name, product in kinds.items():
        yield Row(f"sums: {name}", lambda p=product: probe(bench.device, p, bench.sizes.depth))  # type: ignore[misc]


def half(a: Tensor, b: Tensor) -> Tensor:
    """A bf16 GEMM with float32 output, without a final rounding."""
    lhs, rhs = a.bfloat16(), b.bfloat16()
    return torch.mm(lhs, rhs, out_dtype=torch.float32) if a.is_cuda else lhs.float() @ rhs.float()


def scaled(a: Tensor, b: Tensor, fast: bool, by_rows: bool) -> Tensor:
    """A GEMM by FP8 tensor cores, in E4M3 with scales of one."""
    kinds = F.ScalingType  # type: ignore[attr-defined]
    kind = kinds.RowWise if by_rows else kinds.TensorWise
    left, right = (torch.ones(s if by_rows else (), device=a.device) for s in ((a.shape[0], 1), (1, b.shape[1])))
    lhs, rhs = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()
    out = torch.bfloat16 if by_rows and not a.is_cuda else torch.float32  # a CPU's row-wise GEMM only returns bf16
    return F.scaled_mm(lhs, rhs, left, kind, right, kind, output_dtype=out, use_fast_accum=fast).float()  # type: ignore[attr-defined]


def probe(device: torch.device, product: Product, depth: int) -> dict[str, Any]:
    """The precision of one kind of GEMM's accumulation."""

    def on_device(lhs: Tensor, rhs: Tensor) -> Tensor:
        return product(lhs.to(device), rhs.to(device)).cpu()

    bits, found = probes.fraction_bits(on_device), probes.swamping(on_device, depth)
    moved = probes.order(on_device)
    measures = {"fraction bits": bits, "products that a large one swamps": found.lost}
    counts = ", ".join(f"{size}: {count}" for size, count in moved.items())
    words = f"{bits} fraction bits; of {found.terms} small products {found.lost} are lost; results of 256 that change "
    return {"measures": measures, "result": f"{words}with the order of groups of {counts}", "order": counts}
