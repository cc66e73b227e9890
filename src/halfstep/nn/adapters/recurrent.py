"""Adapters of `nn.RNN`, `nn.LSTM`, `nn.GRU` and their cells: matmuls with their weights round their operands.

The inputs of all steps are one matmul; the hidden state of each step is one, and so is its projection, if any. The rest
is computed as torch does, in the dtype of the matmuls' results (autocast's if it is on). A weight is rounded once a
forward, and its gradient is accumulated over the steps in float32. Each matmul has scaling states of its own, which
record the largest amax over the steps.

`nn.LSTM` that no rule matches: torch.autocast calls oneDNN, which has a bfloat16 kernel on some CPUs and no float16
kernel that trains on any. Without a kernel, the LSTM rounds its weights, inputs and states once to 16 bits, runs in
float32, and rounds its outputs once, forward and backward, as emulated matmuls do. Packed sequences, projections and
16-bit inputs take torch's own kernels, as `nn.GRU` and `nn.RNN` do.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from halfstep.errors import ModelError
from halfstep.nn.adopt import is_stock, twin
from halfstep.nn.product import product, repeated_weight, spec_of, weight_of
from halfstep.nn.quantized_weights import Kind, Weight
from halfstep.ops.linear_passes import product_dtype


_WHOLE = (
    "torch lists a recurrent layer's weights beside its parameters, so they stay whole and are rounded at every call"
)

State = tuple[Tensor, ...]
"""(hidden state,) or, for an LSTM, (hidden state, cell state)."""


def weights(module: Any) -> tuple[Weight, ...]:
    """The weights of input, hidden state and projection, by layer and direction."""
    names = [name for name in module._flat_weights_names if name.startswith("weight_")]
    return tuple(Weight(name, name.removeprefix("weight_"), whole=_WHOLE) for name in names)


def forward(stock: Any, module: Any, input: Tensor | PackedSequence, hx: Any = None) -> Any:
    """torch's forward with the matmuls of `ops.linear`; the stock forward if the spec rounds nothing.

    Raises:
        ModelError: an input without steps, or of another number of dimensions than the states.
    """
    if not spec_of(module).rounds:
        return lstm_forward(stock, module, input, hx) if isinstance(module, nn.LSTM) else stock(module, input, hx)
    if isinstance(input, PackedSequence):
        return _packed(module, input, hx)
    batched = input.dim() == 3
    if input.dim() not in (2, 3) or not input.shape[1 if batched and module.batch_first else 0]:
        raise ModelError(
            f"{type(module).__name__} found an input of shape {tuple(input.shape)}; expected at least one step, as "
            "(time, batch, input), (batch, time, input) with batch_first, or (time, input)"
        )
    if not batched:
        input = input.unsqueeze(0 if module.batch_first else 1)
    state = _state(module, input, hx, input.shape[0 if module.batch_first else 1], batched)
    module.check_forward_args(input, _hx(state), None)
    steps = input.transpose(0, 1) if module.batch_first else input
    time, batch = steps.shape[:2]
    output, state = _layers(module, steps.flatten(0, 1), [batch] * time, state)
    output = output.view(time, batch, output.shape[-1])
    output = output.transpose(0, 1) if module.batch_first else output
    if not batched:
        return output.squeeze(0 if module.batch_first else 1), _hx(tuple(part.squeeze(1) for part in state))
    return output, _hx(state)


def _packed(module: Any, input: PackedSequence, hx: Any) -> tuple[PackedSequence, Any]:
    data, batch_sizes, order, back = input
    state = _state(module, data, hx, int(batch_sizes[0]), True)
    module.check_forward_args(data, _hx(state), batch_sizes)
    if order is not None and hx is not None:
        state = tuple(part.index_select(1, order) for part in state)
    output, state = _layers(module, data, batch_sizes.tolist(), state)
    if back is not None:
        state = tuple(part.index_select(1, back) for part in state)
    return PackedSequence(output, batch_sizes, order, back), _hx(state)


def _hx(state: State) -> Any:
    """A state in torch's form: a tensor, or a tuple for an LSTM."""
    return state if len(state) > 1 else state[0]


def _state(module: Any, x: Tensor, hx: Any, batch: int, batched: bool) -> State:
    """The given states, or zeros: (layers and directions, batch, size), in the dtype of the matmuls' results."""
    dtype, is_lstm = product_dtype(x), isinstance(module, nn.LSTM)
    if hx is None:
        sizes = (module.proj_size or module.hidden_size, module.hidden_size)[: 2 if is_lstm else 1]
        lead = module.num_layers * (2 if module.bidirectional else 1), batch
        return tuple(x.new_zeros(*lead, size, dtype=dtype) for size in sizes)
    given = tuple(hx) if is_lstm else (hx,)
    if any(part.dim() != (3 if batched else 2) for part in given):
        raise ModelError(
            f"{type(module).__name__} found states of shapes {[tuple(part.shape) for part in given]}; expected (layers "
            f"and directions, batch, size) with a batched input, and no batch without. The input is "
            f"{'batched' if batched else 'not batched'}"
        )
    return tuple((part if batched else part.unsqueeze(1)).to(dtype) for part in given)


def _layers(module: Any, x: Tensor, sizes: list[int], states: State) -> tuple[Tensor, State]:
    """Run all layers on the rows of all steps; returns the last layer's outputs and the final states.

    Args:
        sizes: the number of rows of x in each step.
    """
    suffixes = ("", "_reverse") if module.bidirectional else ("",)
    finals: list[State] = []
    for layer in range(module.num_layers):
        outputs = []
        for suffix in suffixes:
            start = tuple(part[len(finals)] for part in states)
            output, final = _direction(module, f"l{layer}{suffix}", x, sizes, start, reverse=bool(suffix))
            outputs.append(output)
            finals.append(final)
        x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        if module.dropout and layer < module.num_layers - 1:
            x = F.dropout(x, module.dropout, module.training)
    return x, tuple(torch.stack(parts) for parts in zip(*finals, strict=True))


def _direction(
    module: Any, name: str, x: Tensor, sizes: list[int], start: State, reverse: bool
) -> tuple[Tensor, State]:
    """Run one layer in one direction. Sequences that have ended keep their state; in reverse, long ones start first."""
    ih, hh, hr = (f"{part}_{name}" for part in ("ih", "hh", "hr"))
    input_bias, hidden_bias = (getattr(module, f"bias_{part}") if module.bias else None for part in (ih, hh))
    from_inputs = torch.split(product(module, x, weight_of(module, f"weight_{ih}", x), input_bias, ih), sizes)
    hidden, gates = repeated_weight(module, f"weight_{hh}", x, hh), GATES[module.mode]
    projection = repeated_weight(module, f"weight_{hr}", x, hr) if module.proj_size else None
    order = list(reversed(range(len(sizes)))) if reverse else list(range(len(sizes)))
    state = tuple(part[: sizes[order[0]]] for part in start)
    ended: list[State] = []
    outputs: list[Any] = [None] * len(sizes)
    for step in order:
        size, now = sizes[step], len(state[0])
        if size < now:
            ended.append(tuple(part[size:] for part in state))
            state = tuple(part[:size] for part in state)
        elif size > now:
            state = tuple(torch.cat([part, new[now:size]]) for part, new in zip(state, start, strict=True))
        from_hidden = product(module, state[0], hidden, hidden_bias, hh)
        state = gates(from_inputs[step], from_hidden, state)
        if projection is not None:
            state = product(module, state[0], projection, None, hr), *state[1:]
        outputs[step] = state[0]
    return torch.cat(outputs), tuple(torch.cat(parts) for parts in zip(state, *reversed(ended), strict=True))


def cell_forward(stock: Any, module: Any, input: Tensor, hx: Any = None) -> Any:
    """One step of the cell with the matmuls of `ops.linear`; the stock forward if the spec rounds nothing.

    Raises:
        ModelError: the state's shape does not match the input's.
    """
    if not spec_of(module).rounds:
        return stock(module, input, hx)
    is_lstm = isinstance(module, nn.LSTMCell)
    state = _cell_state(module, input, hx, 2 if is_lstm else 1)
    from_input = product(module, input, weight_of(module, "weight_ih", input), module.bias_ih, "ih")
    from_hidden = product(module, state[0], weight_of(module, "weight_hh", input), module.bias_hh, "hh")
    mode = "LSTM" if is_lstm else "GRU" if isinstance(module, nn.GRUCell) else f"RNN_{module.nonlinearity.upper()}"
    state = GATES[mode](from_input, from_hidden, state)
    return state if is_lstm else state[0]


def _cell_state(module: Any, input: Tensor, hx: Any, parts: int) -> State:
    """The given state, or zeros, in the dtype of the matmuls' results."""
    dtype, expected = product_dtype(input), (*input.shape[:-1], module.hidden_size)
    given = (input.new_zeros(expected),) * parts if hx is None else tuple(hx) if parts > 1 else (hx,)
    shapes = [tuple(part.shape) for part in given]
    if input.dim() not in (1, 2) or shapes != [expected] * parts:
        raise ModelError(
            f"{type(module).__name__}({module.input_size}, {module.hidden_size}) found an input of shape "
            f"{tuple(input.shape)} and states of shapes {shapes}; expected (batch, {module.input_size}) and {parts} of "
            f"(batch, {module.hidden_size}), or the same without batch"
        )
    return tuple(part.to(dtype) for part in given)


def lstm(from_input: Tensor, from_hidden: Tensor, state: State) -> State:
    """The next (h, c) of an LSTM, from the matmuls of input and hidden state, with biases."""
    into, forget, new, out = (from_input + from_hidden).chunk(4, -1)
    cell = forget.sigmoid() * state[1] + into.sigmoid() * new.tanh()
    return out.sigmoid() * cell.tanh(), cell


def gru(from_input: Tensor, from_hidden: Tensor, state: State) -> State:
    """The next (h,) of a GRU, from the matmuls of input and hidden state, with biases."""
    reset, update, new = from_input.chunk(3, -1)
    reset_hidden, update_hidden, new_hidden = from_hidden.chunk(3, -1)
    new = (new + (reset + reset_hidden).sigmoid() * new_hidden).tanh()
    return ((state[0] - new) * (update + update_hidden).sigmoid() + new,)


GATES: dict[str, Callable[[Tensor, Tensor, State], State]] = {
    "LSTM": lstm,
    "GRU": gru,
    "RNN_TANH": lambda from_input, from_hidden, state: ((from_input + from_hidden).tanh(),),
    "RNN_RELU": lambda from_input, from_hidden, state: ((from_input + from_hidden).relu(),),
}
"""Functions that compute the next state, by torch's names for the modes of recurrent layers."""


def lacks_kernel(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN has no LSTM kernel for that 16-bit dtype on this CPU."""
    if device.type != "cpu":
        return False
    return dtype == torch.float16 or (dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported())


def lstm_forward(
    stock: Any, module: Any, input: Tensor | PackedSequence, hx: tuple[Tensor, Tensor] | None = None
) -> Any:
    """The stock forward; if oneDNN has no kernel for it, in float32 with weights, inputs and states rounded to 16
    bits."""
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


LAYER = Kind("recurrent layer", (nn.RNN, nn.LSTM, nn.GRU), weights, forward, is_stock)
CELL = Kind(
    "recurrent cell",
    (nn.RNNCell, nn.LSTMCell, nn.GRUCell),
    lambda module: (Weight("weight_ih", "ih"), Weight("weight_hh", "hh")),
    cell_forward,
    is_stock,
)
