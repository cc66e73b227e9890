"""Norms over the last dimensions and activation functions: what autograd saves of their inputs may live in few bits.

torch's LayerNorm, RMSNorm, GELU and SiLU, and those of Hugging Face's models, which have forwards of their own. ReLU is
left alone: its gradient asks which outputs are 0, and in few bits small ones would be.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from halfstep.nn.keeping import around


_KINDS = (nn.LayerNorm, nn.RMSNorm, nn.GELU, nn.SiLU)
_NORMS = ("layernorm", "rmsnorm")
_ACTIVATIONS = ("gelu", "silu")


def fits(module: nn.Module) -> bool:
    """Whether the module is one of these by its class, or by its class's name and make."""
    if isinstance(module, torch.jit.ScriptModule) or next(module.children(), None) is not None:
        return False
    if isinstance(module, _KINDS):
        return True
    name, parameters = type(module).__name__.lower(), [p for p in module.parameters() if p is not None]
    if name.endswith(_NORMS):
        return all(p.dim() == 1 for p in parameters)
    return not parameters and any(word in name for word in _ACTIVATIONS)


def forward(stock: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """The stock forward."""
    x = args[0] if args else next(iter(kwargs.values()), None)
    with around(module, x):
        return stock(module, *args, **kwargs)
