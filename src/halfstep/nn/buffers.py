"""What casts leave in a model's buffers: `model.bfloat16()` rounds them too, and no recipe gives the bits back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from halfstep.bits.origin import narrowed, progression
from halfstep.bits.scan import scan
from halfstep.bits.values import InMemory
from halfstep.errors import ModelError, RecipeError, unknown
from halfstep.nn.paths import matches


RECOMPUTE = (
    "compute them again in float32 (transformers' rotary embeddings: m.inv_freq = type(m)(m.config).inv_freq, and so "
    "m.original_inv_freq)"
)
"""What to do about buffers that a cast rounded."""

_SHIFT = 2.0**-5
"""By how many standard deviations rounding a norm's running mean may move what it returns. Its input in bf16 is off by
as much where the mean is eight times the deviation."""


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """The floating-point buffers of a model by name that a cast to 16 bits may harm: not the scales beside integer
    codes, and not a norm's running statistics where rounding them moves what it returns by less than its input's bits.
    """
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if not module._buffers:
            continue
        own = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        beside = (*own.values(), *(p for p in module._parameters.values() if p is not None))
        if any(not t.is_floating_point() and t.dtype != torch.bool and t.numel() > 1 for t in beside):
            continue
        harmless = _STATISTICS if _harmless(module, own) else ()
        floating = {name: b for name, b in own.items() if b.is_floating_point() and name not in harmless}
        found |= {f"{path}.{name}" if path else name: buffer for name, buffer in floating.items()}
    return found


_STATISTICS = ("running_mean", "running_var")


def _harmless(module: nn.Module, own: Mapping[str, Tensor]) -> bool:
    """Whether a norm's running mean and variance may be rounded to bf16."""
    mean, var = (own.get(name) for name in _STATISTICS)
    if mean is None or var is None or not _readable(mean) or not _readable(var):
        return False
    deviation = (var.double() + float(getattr(module, "eps", 0.0))).sqrt()
    return bool((mean.double().abs() * 2.0**-8 <= _SHIFT * deviation).all())


def _readable(buffer: Tensor) -> bool:
    """Whether it has values of its own: a fake tensor has none."""
    return type(buffer) is Tensor and buffer.layout == torch.strided and not buffer.is_meta


def _rounded_to(buffer: Tensor) -> str | None:
    """The 16-bit type that a buffer's values were rounded to, whichever dtype it is stored in now."""
    if not _readable(buffer):
        return None
    return narrowed(scan(InMemory(buffer)), str(buffer.dtype).removeprefix("torch.")) or progression(buffer)


def rounded(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that are stored in 16 bits and hold values that were rounded to them."""
    found = {name: b for name, b in buffers(model).items() if b.dtype in (torch.bfloat16, torch.float16)}
    return {name: buffer for name, buffer in found.items() if _rounded_to(buffer)}


def check_float32(model: nn.Module, globs: Sequence[str], recipe: str) -> None:
    """Refuse a model whose buffers of those paths are not float32, or hold values that were rounded to 16 bits.

    Raises:
        RecipeError: a glob matches no floating-point buffer.
        ModelError: such a buffer.
    """
    own = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    for glob in globs:
        if not any(matches(name, glob) for name in own):
            raise RecipeError(f"recipe {recipe!r}: float32_buffers: {unknown('buffer', glob, own)}")
    for name, buffer in own.items():
        if not any(matches(name, glob) for glob in globs):
            continue
        if said := _rounded_to(buffer):
            raise ModelError(
                f"{type(model).__name__}: the buffer {name} in {buffer.dtype} holds values rounded to {said}, "
                f"and {recipe!r} names it among its float32_buffers; {RECOMPUTE}, or load the model in float32"
            )
        if buffer.dtype != torch.float32:
            raise ModelError(
                f"{type(model).__name__}: the buffer {name} is {buffer.dtype}, and {recipe!r} names it among its "
                "float32_buffers: expected torch.float32. Cast parameters alone (for p in model.parameters(): p.data = "
                "p.data.bfloat16()), or load the model in float32"
            )
