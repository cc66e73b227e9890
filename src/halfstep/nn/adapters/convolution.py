"""Convolution layers: their 16-bit products are carried in float32 where the machine has no units for them."""

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import ops


_KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = {nn.ConvTranspose1d: F.conv_transpose1d, nn.ConvTranspose2d: F.conv_transpose2d}


def fits(module: nn.Module) -> bool:
    """Whether `forward` below may stand in for the module's own: a subclass or a patch with another is left alone."""
    kinds: tuple[Any, ...] = (*_KINDS, *_TRANSPOSED)
    return "forward" not in vars(module) and any(type(module).forward is kind.forward for kind in kinds)


def forward(stock: Any, module: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
    """The module's own convolution, padding included, through `ops.convolution`."""
    if isinstance(module, _KINDS):
        return ops.convolution(module._conv_forward, input, module.weight, module.bias)
    dimensions = input.dim() - 2
    padding = module._output_padding(
        input, output_size, module.stride, module.padding, module.kernel_size, dimensions, module.dilation
    )
    operation = partial(
        next(function for kind, function in _TRANSPOSED.items() if isinstance(module, kind)),
        stride=module.stride,
        padding=module.padding,
        output_padding=padding,
        groups=module.groups,
        dilation=module.dilation,
    )
    return ops.convolution(operation, input, module.weight, module.bias)
