"""What leaves a model: its floating tensors in float32, however they are nested."""

import copy
from collections.abc import Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution


def to_float32(output: Any) -> Any:
    """The same structure with every 16-bit floating tensor in float32: tuples, named tuples, lists, dicts, dataclasses,
    torch.distributions.

    A loss on the outputs is then computed in float32. Other objects (a key-value cache, say) pass untouched.
    """
    if isinstance(output, Tensor):
        return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*map(to_float32, output))
    if isinstance(output, (tuple, list)):
        return type(output)(map(to_float32, output))
    if isinstance(output, MutableMapping):  # Hugging Face's ModelOutput, also a dataclass, keeps both views in step
        result = copy.copy(output)
        for key, value in output.items():
            result[key] = to_float32(value)
        return result
    if isinstance(output, Mapping):
        return type(output)({key: to_float32(value) for key, value in output.items()})  # type: ignore[call-arg]
    if is_dataclass(output) and not isinstance(output, type):
        widened = copy.copy(output)
        for field in fields(output):
            object.__setattr__(widened, field.name, to_float32(getattr(output, field.name)))
        return widened
    if isinstance(output, Distribution):  # made of tensors, and of other distributions
        same: Any = copy.copy(output)
        vars(same).update({name: to_float32(value) for name, value in vars(output).items()})
        return same
    return output
