"""Casts, codes and scales: memory-bound kernels, as a fraction of a copy's speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import halfstep
from halfstep import formats
from halfstep.kernels.gpu import cast, layouts
from halfstep.ops import amax_of
from halfstep.quant import Quantizer, Scales, get_quantizer
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import TENSOR
from on_gpu import peers
from on_gpu.bench import Bench, Row, Run, fitting, power, race


E4M3 = "float8_e4m3fn"
_WIDTH = 8192
_CURRENT = Quantizer(formats.get(E4M3), scales=Scales(TENSOR, get_scaling("current")))
Made = Callable[[Tensor], Run]


def rows(bench: Bench) -> Iterator[Row]:
    """The rows of the table of bars, in its order."""
    single, half = torch.float32, torch.bfloat16
    yield _row(
        bench, "cast: float32 to float32, nearest", single, 8, _rounding(),
        {"torch's float8 and back": lambda x: lambda: x.to(torch.float8_e4m3fn).float()},
    )  # fmt: skip
    yield _row(bench, "cast: bf16 to bf16, nearest", half, 4, _rounding())
    yield _row(
        bench, "cast: float32, stochastic", single, 8, _rounding("stochastic"),
        {"torchao's bf16 stochastic rounding, compiled": peers.stochastic},
    )  # fmt: skip
    yield _row(bench, "cast: bf16, stochastic", half, 4, _rounding("stochastic"))
    yield _row(
        bench, "codes: bf16 to E4M3", half, 3, _by_conversion,
        {"torch's to(float8_e4m3fn)": lambda x: lambda: x.to(torch.float8_e4m3fn)},
    )  # fmt: skip
    yield _row(bench, "codes: bf16 to E4M3, by integers", half, 3, _by_integers)
    theirs: dict[str, Made] = {
        "torch's amax of abs": lambda x: lambda: x.abs().amax(),
        "torch's aminmax": lambda x: lambda: torch.aminmax(x),
    }
    yield _row(bench, "amax: bf16", half, 2, lambda x: lambda: amax_of(x), theirs)
    yield _row(
        bench, "tensor scale: amax and codes", half, 5, lambda x: lambda: halfstep.quantize(x, _CURRENT),
        {"torchao's tensorwise cast, compiled": peers.tensorwise},
    )  # fmt: skip
    yield _row(
        bench, "two layouts: 128x128", half, 4.03, _both("fp8_128x128"),
        {"torchao's two kernels": lambda x: peers.two_kernels(x, "weight_quant_rhs", "weight_quant_transposed_rhs")},
    )  # fmt: skip
    yield _row(bench, "two layouts: MX", half, 4.06, _both("mxfp8_e4m3"))
    yield _row(
        bench, "two layouts: 1x128 and 128x1", half, 4.06, _both("fp8_1x128"),
        {"torchao's two kernels": lambda x: peers.two_kernels(x, "act_quant_lhs", "act_quant_transposed_lhs")},
    )  # fmt: skip
    yield _row(
        bench, "norm: RMSNorm and codes", half, 3.1, _norm(compiled=False),
        {"torch's norm, compiled, then our cast": _norm(compiled=True)},
    )  # fmt: skip


def _row(
    bench: Bench, name: str, dtype: torch.dtype, traffic: float, ours: Made, others: Mapping[str, Made] | None = None
) -> Row:
    """A row of a kernel with `traffic` bytes per element."""

    def measure() -> dict[str, Any]:
        elements = fitting(bench, bench.sizes.elements, 4 * dtype.itemsize + 12)
        width = min(_WIDTH, 128 if elements < 1 << 20 else _WIDTH)
        x = bench.normal(elements // width, width, dtype=dtype)
        runs = {peer: lambda make=make: make(x) for peer, make in (others or {}).items()}
        return race(bench, ours(x), runs, int(traffic * elements)) | {"shape": power(elements)}

    return Row(name, measure)


def _rounding(rounding: str = "nearest_even") -> Made:
    """Rounding to E4M3 values, to nearest; or stochastically, float32 to bf16 values and bf16 to E4M3 values."""

    def made(x: Tensor) -> Run:
        out = torch.empty_like(x)
        format = "bf16" if rounding == "stochastic" and x.dtype == torch.float32 else E4M3
        return lambda: halfstep.round_to(x, format, rounding, generator=7, out=out)

    return made


def _by_conversion(x: Tensor) -> Run:
    """Encoding by the GPU's own conversion instruction, which a dry run does not have."""
    if x.is_cuda and cast.instruction(formats.get(E4M3), "nearest_even", "saturate", x.device) is None:
        raise LookupError("GPUs convert to E4M3 by an instruction from compute capability 8.9 on")
    out = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    return lambda: halfstep.encode(x, E4M3, out=out)


def _by_integers(x: Tensor) -> Run:
    out, format = torch.empty(x.shape, dtype=torch.uint8, device=x.device), formats.get(E4M3)
    return lambda: cast.run_codes(x, out, format, "nearest_even", "saturate", None, by_integers=True)


def _both(name: str) -> Made:
    """Codes and scales of a matrix and of its transpose, in tiles along the rows of each, in one pass."""
    quantizer = get_quantizer(name)

    def made(x: Tensor) -> Run:
        along, turned = layouts.empty(x, quantizer)
        return lambda: layouts.run(x, quantizer, along, turned)

    return made


def _norm(compiled: bool) -> Made:
    """RMSNorm, then codes with 1x128 scales: halfstep has no kernel that does both."""

    def made(x: Tensor) -> Run:
        weight = torch.ones(x.shape[1], dtype=x.dtype, device=x.device)
        norm = torch.compile(F.rms_norm, dynamic=False) if compiled else F.rms_norm
        return lambda: halfstep.quantize(norm(x, (x.shape[1],), weight, 1e-6), "fp8_1x128")

    return made
