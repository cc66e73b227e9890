"""`nn.RNNCell`, `nn.LSTMCell` and `nn.GRUCell`: their two products, of input and hidden state, round their operands.

What lies between the products is as torch computes it, in the dtype that they come in (autocast's where it is on).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from halfstep.errors import ModelError
from halfstep.nn.adopt import is_stock
from halfstep.nn.product import product, spec_of, weight_of
from halfstep.nn.quantized_weights import Weight
from halfstep.ops.linear_passes import product_dtype


NAME = "recurrent cell"
FORWARD_OF = (nn.RNNCell, nn.LSTMCell, nn.GRUCell)
fits = is_stock

State = tuple[Tensor, ...]
"""The hidden state; an LSTM's is followed by its cell state."""


def weights(module: nn.Module) -> tuple[Weight, ...]:
    """What the two products multiply by."""
    return Weight("weight_ih", "ih"), Weight("weight_hh", "hh")


def forward(stock: Any, module: Any, input: Tensor, hx: Any = None) -> Any:
    """One step of the cell with `ops.linear`'s products; the stock forward where nothing is rounded.

    Raises:
        ModelError: the state's shape is not the input's.
    """
    if not spec_of(module).rounds:
        return stock(module, input, hx)
    is_lstm = isinstance(module, nn.LSTMCell)
    state = _state(module, input, hx, 2 if is_lstm else 1)
    from_input = product(module, input, weight_of(module, "weight_ih", input), module.bias_ih, "ih")
    from_hidden = product(module, state[0], weight_of(module, "weight_hh", input), module.bias_hh, "hh")
    mode = "LSTM" if is_lstm else "GRU" if isinstance(module, nn.GRUCell) else f"RNN_{module.nonlinearity.upper()}"
    state = GATES[mode](from_input, from_hidden, state)
    return state if is_lstm else state[0]


def _state(module: Any, input: Tensor, hx: Any, parts: int) -> State:
    """The state given, or zeros, in the dtype that the products come in."""
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
    """The next (h, c) of an LSTM, from the two products with their biases."""
    into, forget, new, out = (from_input + from_hidden).chunk(4, -1)
    cell = forget.sigmoid() * state[1] + into.sigmoid() * new.tanh()
    return out.sigmoid() * cell.tanh(), cell


def gru(from_input: Tensor, from_hidden: Tensor, state: State) -> State:
    """The next (h,) of a GRU."""
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
"""By torch's names for the kinds of recurrent layers: the next state."""
