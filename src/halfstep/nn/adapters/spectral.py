"""Spectral norms and orthogonal weights: computed in float32 from weights that are stored in 16 bits.

Power iterations and matrix exponentials need more than 16 bits, and torch's kernels refuse them beside float32
buffers. What comes out is the layer's weight, in the dtype that the layer's product takes it in.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm

from halfstep.nn.adopt import extend


FORWARD_OF = (parametrizations._SpectralNorm, parametrizations._Orthogonal)


def forward(stock: Any, module: Any, weight: Tensor) -> Tensor:
    """The stock forward in float32, rounded to the weight's dtype."""
    with torch.autocast(weight.device.type, enabled=False):
        return stock(module, weight.float()).to(weight.dtype)  # type: ignore[no-any-return]


def widen_hooked(module: nn.Module) -> None:
    """Let the hook of `torch.nn.utils.spectral_norm` (the older one) read its weight in float32."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            extend(module, _Widened(f"{hook.name}_orig"))


@dataclass(frozen=True)
class _Widened:
    """The members that show a parameter in float32."""

    name: str

    def __call__(self, stock: type[nn.Module]) -> dict[str, Any]:
        return {self.name: property(partial(_in_float32, name=self.name))}


def _in_float32(module: Any, name: str) -> Tensor:
    return module._parameters[name].float()  # type: ignore[no-any-return]
