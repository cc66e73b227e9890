"""The states of delayed scaling on a CPU, advanced in place by one call per group with one layout."""

from typing import Any

import numba
import numpy as np
import torch
from numba import types
from torch import Tensor

from halfstep.formats import Format
from halfstep.kernels.cpu.compiled import Kernel, inner
from halfstep.kernels.cpu.lanes import emitted
from halfstep.quant.scaling.delayed import Delayed


_LARGEST = np.finfo(np.float32).max


def places(addresses: list[int], device: torch.device) -> Any:
    """The addresses of states, for `run`."""
    return np.array(addresses, np.int64)


def run(places: Any, scaling: Delayed, element: Format, skipped: Tensor | None) -> None:
    """`scaling.advance` of the float32 states at these addresses, whose operands have one format. Where `skipped`, a
    scalar, is above 0 they only drop the amax of that step."""
    size, left_out = 1 + scaling.history, skipped is not None and bool(skipped > 0)
    recent = scaling.algorithm == "most_recent"
    _advance(
        len(places) * size, places, size, left_out, scaling.warmup, recent, scaling.restart, float(element.max)
    )  # fmt: skip


@emitted(lambda address: types.CPointer(types.float32))
def _at(context, builder, address):
    """In kernels: a pointer to the float32 values at an address."""
    return builder.inttoptr(address.value, context.get_value_type(types.CPointer(types.float32)))


@inner
def _move(state, warmup, recent, restart, most):
    usual, count, largest = np.isfinite(state[1]), 0, np.float32(0)
    for i in range(1, state.size):
        if not np.isfinite(state[i]):  # the amax of this step; a history loaded from an older file may hold more
            state[i] = 0
        count += state[i] != 0
        largest = max(largest, state[i])
    current = state[1]
    amax = current if recent else largest
    if amax > 0 and (count >= warmup or state[0] != 0):
        state[0] = min(most / np.float64(amax), _LARGEST)  # a float64 division rounded to float32 equals float32's
    if current != 0:
        for i in range(2, state.size - 1):
            state[i] = state[i + 1]
        state[state.size - 1] = current
        state[1] = 0
    if restart and not usual:
        state[:] = 0


@Kernel
def _advance(places, size, left_out, warmup, recent, restart, most):
    for i in numba.prange(places.size):
        state = numba.carray(_at(places[i]), size)
        if left_out:
            state[1] = 0
        else:
            _move(state, warmup, recent, restart, most)
