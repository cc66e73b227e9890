"""Whether a tensor's numbers can be read where they are."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter


def has_memory(tensor: Tensor) -> bool:
    """Whether code that runs now can read the tensor's numbers from its memory. It cannot while a graph is traced, nor
    within a transform of torch.func; and what a subclass's memory holds (a FakeTensor's, a DTensor's) is its own."""
    readable = type(tensor) in (Tensor, Parameter) and not torch.compiler.is_compiling()
    return readable and torch._C._has_storage(tensor)
