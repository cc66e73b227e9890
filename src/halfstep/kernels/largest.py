"""The largest magnitude of a tensor: a kernel where one supports the call, else torch; and the same as an operator."""

import torch
from torch import Tensor

from halfstep.kernels.cpu import amax
from halfstep.kernels.gpu import amax as gpu_amax
from halfstep.kernels.gpu.launch import plain
from halfstep.kernels.operator import Operator
from halfstep.quant.memory import has_memory


def amax_of(x: Tensor, unless: Tensor | None = None, found: Tensor | None = None) -> Tensor:
    """max |x|, a float32 scalar: 0 for an empty tensor, NaN where there is one.

    Args:
        unless: where that float32 scalar is not 0, max |x| is not needed: a GPU, and a traced graph, read no x for it.
        found: as `kernels.gpu.amax.run` takes it, which is all that does.
    """
    if not x.numel():
        return x.new_zeros((), dtype=torch.float32)
    if x.is_cpu and has_memory(x) and (found := amax.run(x)) is not None:
        return found
    if plain(x):
        return gpu_amax.run(x, unless, found)
    if unless is None:
        return _by_torch(x)
    out = x.new_empty((), dtype=torch.float32)
    _AMAX(x.detach(), unless, out)
    return out


def _by_torch(x: Tensor) -> Tensor:
    low, high = torch.aminmax(x.detach())  # one pass, at the speed of memory; abs().amax() would be two
    return torch.maximum(-low, high).float()


def _amax(x: Tensor, unless: Tensor, out: Tensor) -> None:
    asked = x.is_cuda or bool(unless == 0)  # a GPU tells its kernel alone
    out.copy_(amax_of(x.contiguous(), unless) if asked else torch.zeros((), dtype=torch.float32, device="cpu"))


_AMAX = Operator(
    "amax(Tensor x, Tensor unless, Tensor(a!) out) -> ()", lambda x, unless, out: out.copy_(_by_torch(x)), _amax
)
