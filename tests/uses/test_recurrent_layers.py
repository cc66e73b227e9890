"""Recurrent layers: LSTM, GRU, RNN and their cells."""

import torch
from torch import nn
from ways import StockFailsToo, assert_near_fp32, both, steps, way

from halfstep.recipe import get_recipe
from tiny import model_for


class Recurrent(nn.Module):
    """Reads a sequence of four steps of two values by a recurrent layer."""

    def __init__(self, kind, name):
        super().__init__()
        self.inner, self.read = nn.Linear(2, 8), kind(8, 8, batch_first=True)
        self.head = model_for(name)

    def forward(self, x):
        output, _ = self.read(self.inner(x.view(-1, 4, 2)))
        return self.head(output[:, -1])


class Cells(Recurrent):
    def forward(self, x):
        state = None
        for part in self.inner(x.view(-1, 4, 2)).unbind(1):
            state = self.read(part, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


def lstm_cell(*sizes, batch_first):
    return nn.LSTMCell(*sizes)


def rnn_cell(*sizes, batch_first):
    return nn.RNNCell(*sizes)


def gru_cell(*sizes, batch_first):
    return nn.GRUCell(*sizes)


def raise_if_stock_fails(kind, dtype):
    """Raise StockFailsToo if torch cannot train such a model under its own autocast."""
    model = Recurrent(kind, "fp32")
    try:
        with torch.autocast("cpu", dtype):
            loss = model(torch.randn(3, 8)).float().sum()
        loss.backward()
    except RuntimeError as error:
        raise StockFailsToo(str(error)) from error


def compared(name, kind, model=Recurrent):
    def make():
        torch.manual_seed(3)
        return model(kind, name)

    try:
        start, found, expected = both(name, steps, make)
    except RuntimeError:
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(get_recipe(name).compute)
        if dtype is not None and model is Recurrent:
            raise_if_stock_fails(kind, dtype)
        raise
    codes = get_recipe(name).codes
    stored_in_8_bits = (
        codes is not None and codes.weights.bytes == 1
    )  # fp32's weights, rounded to 8 bits, are 0.27 away
    assert_near_fp32(name, start, found, expected, slack=3 if stored_in_8_bits else 2)


@way()
def test_lstm(name):
    """LSTM: nn.LSTM and nn.LSTMCell, as always; rules round the matmuls of inputs and states."""
    compared(name, nn.LSTM)
    compared(name, lstm_cell, Cells)


@way()
def test_gru(name):
    """GRU: nn.GRU and nn.GRUCell, as always; rules round the matmuls of inputs and states."""
    compared(name, nn.GRU)
    compared(name, gru_cell, Cells)


@way()
def test_rnn(name):
    """RNN: nn.RNN and nn.RNNCell, as always; rules round the matmuls of inputs and states."""
    compared(name, nn.RNN)
    compared(name, rnn_cell, Cells)
