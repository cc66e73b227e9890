"""Stock forwards of torch's without fast paths that no recipe can follow.

`nn.TransformerEncoder` and its layers have one that calls no module and so rounds nothing. It is taken in evaluation,
and converts padded batches to nested tensors. torch's switch for it is the whole process's; the modules have attributes
of their own that decide too, and mean nothing else.

`nn.LSTM`: torch.autocast hands it to oneDNN, whatever the CPU. There is a kernel for bfloat16 on some CPUs, and none
that trains in float16 on any. Without, an LSTM runs in float32 between one rounding of its weights, inputs and states
to 16 bits and one of what comes out, both ways, as carried products do; in between nothing is rounded. Packed
sequences, projections and inputs that are 16-bit already take kernels of torch's own, as `nn.GRU` and `nn.RNN` do.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from halfstep.nn.adopt import twin
from halfstep.ops.linear_passes import product_dtype


ENCODERS = (nn.TransformerEncoder, nn.TransformerEncoderLayer)
NESTS = nn.TransformerEncoder
"""What converts padded batches to nested tensors, on which torch's layers fail under autocast on a CPU where their
weights are in float32."""


def encoder_forward(stock: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
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


def lacks_kernel(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN refuses an LSTM of that 16-bit dtype on this CPU."""
    if device.type != "cpu":
        return False
    return dtype == torch.float16 or (dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported())


def lstm_forward(
    stock: Any, module: Any, input: Tensor | PackedSequence, hx: tuple[Tensor, Tensor] | None = None
) -> Any:
    """The stock forward; where oneDNN has no kernel for it, of a twin with rounded weights in float32."""
    if isinstance(input, PackedSequence) or module.proj_size:
        return stock(module, input, hx)
    dtype = product_dtype(input)
    if input.dtype == dtype or not lacks_kernel(dtype, input.device):
        return stock(module, input, hx)
    names = module._flat_weights_names
    with torch.autocast(input.device.type, enabled=False):
        weights = [getattr(module, name).to(dtype).float() for name in names]
        wide = twin(module, type(module), _flat_weights=weights, _flat_weight_refs=[None] * len(names))
        states = None if hx is None else tuple(state.to(dtype).float() for state in hx)
        output, (h, c) = stock(wide, input.to(dtype).float(), states)
    return output.to(dtype), (h.to(dtype), c.to(dtype))
