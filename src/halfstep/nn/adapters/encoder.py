"""`nn.TransformerEncoder` and its layers: without torch's fast path, which calls no module and so rounds nothing.

The path is taken in evaluation, and converts padded batches to nested tensors. torch's switch for it is the whole
process's; the modules have attributes of their own that decide too, and mean nothing else.
"""

from typing import Any

from torch import nn


FORWARD_OF = (nn.TransformerEncoder, nn.TransformerEncoderLayer)
NESTS = nn.TransformerEncoder
"""What converts padded batches to nested tensors, on which torch's layers fail under autocast on a CPU where their
weights are in float32."""


def forward(stock: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """The stock forward, module by module."""
    return stock(_Slow(module), *args, **kwargs)


class _Slow:
    """A module that does not take the fast path."""

    use_nested_tensor = False
    activation_relu_or_gelu = 0

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
