"""An input that several layers read (attention's q, k and v; an MLP's gate and up): rounded or cast, and kept, once."""

import weakref
from typing import Any

import torch
from torch import Tensor

from halfstep.ops.function import run
from halfstep.quant.tracing import has_memory


class LastInput:
    """What a model's last layer rounded its input to, as long as that tensor lives. A copy begins with nothing.

    It is for inputs that a differentiated operation made. What came from outside may be written to with no version that
    tells of it, and a CUDA graph reads it again.
    """

    _last: tuple[weakref.ref[Tensor], Any, Any] | None = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return LastInput, ()

    def find(self, x: Tensor, key: Any) -> Any:
        """What was noted of x, with its numbers as they are, by a layer with an equal key on this stream; else None."""
        last = self._last
        return last[2] if last is not None and last[0]() is x and last[1] == _place(x, key) else None

    def note(self, x: Tensor, key: Any, made: Any) -> None:
        """Keep what x was rounded to, in the place of the last one."""
        self._last = weakref.ref(x, self._drop), _place(x, key), made

    def _drop(self, gone: weakref.ref[Tensor]) -> None:
        if self._last is not None and self._last[0] is gone:
            self._last = None


def _place(x: Tensor, key: Any) -> tuple[Any, ...]:
    stream = None
    if x.is_cuda and has_memory(x):
        stream = torch._C._cuda_getCurrentRawStream(x.device.index), torch.cuda.is_current_stream_capturing()
    return x._version, key, stream


def cast_once(x: Tensor, last: LastInput) -> Tensor:
    """x, float32, in autocast's dtype; x itself where autocast would leave it, or a graph or a transform is traced.

    torch casts, and keeps, a copy for each layer that reads x. Here the layers after the first share its copy. Their
    gradients are added in float32, as torch adds them.
    """
    if not isinstance(x, Tensor) or x.dtype != torch.float32 or x.is_leaf or not has_memory(x, or_fake=True):
        return x
    device = x.device.type
    if not torch.is_autocast_enabled(device) or torch._C._get_tracing_state() is not None:
        return x
    dtype = torch.get_autocast_dtype(device)
    found = last.find(x, dtype)
    if found is not None:
        return run(_Shared, x, found)  # type: ignore[no-any-return]
    cast = x.to(dtype)
    last.note(x, dtype, cast.detach())
    return cast


class _Shared(torch.autograd.Function):
    """The cast of a float32 tensor, which is there already."""

    @staticmethod
    def forward(x: Tensor, cast: Tensor) -> Tensor:
        return cast.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.dtype = output.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.float(), None

    @staticmethod
    def tangent(ctx: Any, x: Tensor, cast: None) -> Tensor:
        return x.to(ctx.dtype)
