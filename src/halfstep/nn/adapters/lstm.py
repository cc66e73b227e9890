"""`nn.LSTM` where oneDNN has no kernel for it: torch.autocast hands it to one, whatever the CPU.

On such CPUs it runs in float32 between one rounding of its weights, inputs and states to 16 bits and one of what comes
out, forward and backward, as carried products do; in between nothing is rounded. Packed sequences, projections and
inputs that are 16-bit already take kernels of torch's own, as `nn.GRU` and `nn.RNN` do.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from halfstep.ops.linear_passes import product_dtype


_ASKED = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


def fits(module: nn.Module) -> bool:
    """Whether `forward` below may stand in for the module's own."""
    return "forward" not in vars(module) and type(module).forward is nn.LSTM.forward


def lacks_kernel(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN refuses an LSTM of that dtype on this CPU."""
    return device.type == "cpu" and dtype in _ASKED and not getattr(torch.ops.mkldnn, _ASKED[dtype])()


def forward(stock: Any, module: Any, input: Tensor | PackedSequence, hx: tuple[Tensor, Tensor] | None = None) -> Any:
    """The stock forward; where oneDNN has no kernel for it, of a twin with rounded weights in float32."""
    if isinstance(input, PackedSequence) or module.proj_size:
        return stock(module, input, hx)
    dtype = product_dtype(input)
    if input.dtype == dtype or not lacks_kernel(dtype, input.device):
        return stock(module, input, hx)
    names = module._flat_weights_names
    with torch.autocast(input.device.type, enabled=False):
        twin = object.__new__(type(module))
        weights = [getattr(module, name).to(dtype).float() for name in names]
        twin.__dict__ |= {**vars(module), "_flat_weights": weights, "_flat_weight_refs": [None] * len(names)}
        states = None if hx is None else tuple(state.to(dtype).float() for state in hx)
        output, (h, c) = stock(twin, input.to(dtype).float(), states)
    return output.to(dtype), (h.to(dtype), c.to(dtype))
