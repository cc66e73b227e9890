"""Whether a tensor's numbers can be read where they are."""

import torch
from torch import Tensor
from torch.nn import Parameter

from halfstep.quant.tracing import inlined


@inlined
def has_memory(tensor: Tensor, or_fake: bool = False) -> bool:
    """Whether code that runs now can read the tensor's numbers from its memory. It cannot while a graph is traced, nor
    within a transform of torch.func; and what a subclass's memory holds (a DTensor's) is its own.

    Args:
        or_fake: a FakeTensor counts too, if no graph is traced: an account of bytes runs calls with them.
    """
    if torch.compiler.is_compiling():
        return False
    if type(tensor) in (Tensor, Parameter):
        return torch._C._has_storage(tensor)
    return or_fake and hasattr(tensor, "fake_mode")
