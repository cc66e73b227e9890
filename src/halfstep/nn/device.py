"""Where a module computes."""

from __future__ import annotations

from torch import nn

from halfstep.errors import ModelError


def device_type_of(module: nn.Module) -> str:
    """The type of the device of its first parameter, or of its first buffer where it has none."""
    for held in ("_parameters", "_buffers"):
        waiting = [module]
        while waiting:  # torch finds names too, which takes longer than a layer
            inner = waiting.pop()
            for tensor in getattr(inner, held).values():
                if tensor is not None:
                    return str(tensor.device.type)
            waiting += [child for child in reversed(inner._modules.values()) if child is not None]
    raise ModelError(f"{type(module).__name__} has neither parameters nor buffers, and so no device")
