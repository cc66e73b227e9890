"""`quant.decode` of CUDA tensors: the values of codes of at most 16 bits, of any format, packed or not."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from halfstep.formats import Format, Integer
from halfstep.kernels.cpu import element_codes, packing
from halfstep.kernels.cpu.element_codes import Decoding
from halfstep.kernels.gpu.launch import BLOCK, KINDS, bits, functions, launch, lies_plain


def run(codes: Tensor, out: Tensor, format: Format, packed: bool = False) -> bool | None:
    """Write the values of `codes` to `out`. False: there is a code with more bits than the format has; this is asked
    where a container has such bits, and the host waits for the answer. None where that is not done here: it takes dense
    contiguous tensors, values in fp32, bf16 or fp16."""
    known = format.bits <= 16 and lies_plain(out) and lies_plain(codes, codes.dtype)
    if not known or not packing.lie_in(codes, out, format, packed):
        return None
    n, found, table, numbers = out.numel(), None, None, _numbers(format, out.dtype)
    if not packed and format.bits != format.storage_bits and n:
        found = torch.zeros((), dtype=torch.int32, device=out.device)
    if numbers is None:
        table = bits(_table(format, out.dtype, out.device))
    launch(
        functions("decode").decode, -(-n // BLOCK),
        bits(codes), bits(out), table, found, n, (1 << format.bits) - 1,
        device=out.device, D=numbers, WHOLE=isinstance(format, Integer), TARGET=KINDS[out.dtype],
        PACKED=tuple(map(int, packing.shifts(format) or ())) if packed else None, B=BLOCK,
    )  # fmt: skip
    return found is None or not int(found) >> format.bits


@cache
def _numbers(format: Format, dtype: torch.dtype) -> Any:
    """What decodes a code by arithmetic; None where its value needs a table, or rounding onto the dtype."""
    found = element_codes.decoding_scalars(format, dtype)
    if found is None:
        return None
    numbers = tuple(map(int, found))
    return numbers if isinstance(format, Integer) else Decoding(*numbers)


@cache
def _table(format: Format, dtype: torch.dtype, device: torch.device) -> Tensor:
    return element_codes.table(format, dtype).to(device)
