"""An input that several layers read (attention's q, k and v; an MLP's gate and up): rounded once, and kept once."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from halfstep.quant.memory import has_memory


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
