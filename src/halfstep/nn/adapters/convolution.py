"""Adapter of convolution layers, through `ops.convolution`.

Layers that no rule matches run in float32 where a machine has no matrix units for 16-bit convolutions.
"""

from typing import Any

from torch import Tensor, nn

from halfstep import ops, unit
from halfstep.nn.adopt import beneath
from halfstep.nn.noise import states_and_key
from halfstep.nn.product import records, spec_of, weight_of
from halfstep.nn.quantized_weights import Kind, Weight
from halfstep.ops.places import filters


_KINDS: tuple[Any, ...] = (
    unit.Conv1d, unit.Conv2d,
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
)  # fmt: skip


def fits(module: nn.Module) -> bool:
    """Whether its `_conv_forward`, which its forward calls, is torch's."""
    stock: Any = next(kind for kind in _KINDS if isinstance(module, kind))
    own = getattr(beneath(module), "_conv_forward", None)
    return "_conv_forward" not in vars(module) and own is getattr(stock, "_conv_forward", None)


def weights(module: Any) -> tuple[Weight, ...]:
    """The filters."""
    layout = filters(module.groups, module.transposed)
    return (Weight("weight", layout=layout, whole="a convolution's weight stays whole and is rounded at every call"),)


def forward(stock: Any, module: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
    """The module's convolution, padding included, by `ops.convolution`."""
    weight, spec = weight_of(module, "weight", input), spec_of(module)
    window = _window(module, input, output_size)
    return ops.convolution(input, weight, module.bias, window, spec, states_and_key(module), records(module))


def _window(module: Any, input: Tensor, output_size: list[int] | None) -> ops.Window:
    stride, padding, dilation, groups = module.stride, module.padding, module.dilation, module.groups
    if module.transposed:
        sizes, dimensions = module.kernel_size, len(module.kernel_size)
        beyond = module._output_padding(input, output_size, stride, padding, sizes, dimensions, dilation)
        return ops.Window(stride, padding, dilation, groups, True, tuple(beyond))
    if module.padding_mode != "zeros":
        none, mode = (0,) * len(module.kernel_size), module.padding_mode
        return ops.Window(stride, none, dilation, groups, margins=_margins(module), mode=mode)
    if isinstance(padding, str):  # "same": as in torch, an odd number of zeros has one more at the end
        margins = _margins(module)
        padding = tuple(reversed(margins[::2]))
        ends = tuple(
            width for left, right in zip(margins[::2], margins[1::2], strict=True) for width in (0, right - left)
        )
        return ops.Window(stride, padding, dilation, groups, margins=ends)
    return ops.Window(stride, padding, dilation, groups)


def _margins(module: Any) -> tuple[int, ...]:
    """The module's padding in the order of `torch.nn.functional.pad`: the last dimension first."""
    return tuple(module._reversed_padding_repeated_twice)


CONVOLUTION = Kind("convolution", _KINDS, weights, forward, fits)
