"""What casts leave in a model's buffers: `model.bfloat16()` rounds them too, and no recipe gives the bits back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfstep.bits.memory import InMemory
from halfstep.bits.narrowed import narrowed
from halfstep.bits.scan import scan


ANEW = (
    "compute them anew in float32 (transformers' rotary embeddings: m.inv_freq = type(m)(m.config).inv_freq, and so "
    "m.original_inv_freq)"
)
"""What to do about buffers that a cast rounded."""


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """The floating-point buffers of a model by name, without those that lie beside integer codes: their scales."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if not module._buffers:
            continue
        own = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        beside = (*own.values(), *(p for p in module._parameters.values() if p is not None))
        if any(not t.is_floating_point() and t.dtype != torch.bool and t.numel() > 1 for t in beside):
            continue
        floating = {name: buffer for name, buffer in own.items() if buffer.is_floating_point()}
        found |= {f"{path}.{name}" if path else name: buffer for name, buffer in floating.items()}
    return found


def rounded(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that are stored in 16 bits and hold values that were rounded to them."""
    return {
        name: buffer
        for name, buffer in buffers(model).items()
        if buffer.dtype in (torch.bfloat16, torch.float16)
        and type(buffer) is Tensor  # a fake one has no values
        and buffer.layout == torch.strided
        and not buffer.is_meta
        and narrowed(scan(InMemory(buffer)), str(buffer.dtype).removeprefix("torch."))
    }
