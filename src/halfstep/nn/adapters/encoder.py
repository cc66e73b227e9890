"""`nn.TransformerEncoder` and its layers: without torch's fast path, which calls no module and so rounds nothing.

The path is taken in evaluation, and converts padded batches to nested tensors.
"""

from typing import Any

import torch
from torch import nn


_KINDS = (nn.TransformerEncoder, nn.TransformerEncoderLayer)


def fits(module: nn.Module) -> bool:
    """Whether the module would take the fast path."""
    return "forward" not in vars(module) and any(type(module).forward is kind.forward for kind in _KINDS)


def forward(stock: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """The stock forward, module by module; torch's switch for the fast path is as it was afterwards.

    Training never takes that path. In evaluation torch.compile breaks its graph at the switch (no `fullgraph`).
    """
    if all(part.training for part in module.modules()):
        return stock(module, *args, **kwargs)
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return stock(module, *args, **kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
