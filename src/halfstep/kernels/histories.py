"""States of delayed scaling, moved on where they lie by one kernel for all that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from halfstep.formats import Format
from halfstep.kernels.cpu import history as on_cpu
from halfstep.kernels.gpu import history as on_gpu, launch
from halfstep.quant.captured import capturing
from halfstep.quant.scaling import StatefulScaling
from halfstep.quant.scaling.delayed import Delayed


_LONGEST = 1 << 13
Group = tuple[Sequence[Tensor], StatefulScaling, Format]
"""States that are alike, their rule, and the format of their operands."""


def found(groups: Sequence[Group]) -> Histories | None:
    """What moves all of these on; None where one of them is not a dense tensor of a CPU or a GPU, or of a rule that
    needs more than amaxes; and in a CUDA graph that is being captured, which takes no copy from the host."""
    kinds = set()
    for states, rule, _ in groups:
        if type(rule) is not Delayed or rule.first is None or rule.history > _LONGEST:
            return None
        for state in states:
            kinds.add((type(state), state.device.type, state.dtype, state.is_contiguous(), state.is_neg()))
    if kinds == {(Tensor, "cpu", torch.float32, True, False)}:
        return Histories(groups, on_cpu)
    on_a_gpu = kinds == {(Tensor, "cuda", torch.float32, True, False)} and launch.missing() is None
    return Histories(groups, on_gpu) if on_a_gpu and not capturing() else None


class Histories:
    """States of delayed scaling that one call moves on for each group of them."""

    def __init__(self, groups: Sequence[Group], kernel: Any) -> None:
        self._groups, self._kernel = groups, kernel
        self._states = list(chain.from_iterable(map(itemgetter(0), groups)))
        self._device, self._addresses = self._states[0].device, [0]

    def advance(self, skipped: bool | Tensor) -> None:
        """End an optimizer step for all of them: of a `skipped` one only the amaxes are forgotten."""
        now = list(map(Tensor.data_ptr, self._states))
        if now != self._addresses:
            places, start, self._places, self._addresses = self._kernel.places(now, self._device), 0, [], now
            for states, _, _ in self._groups:
                self._places.append(places[start : start + len(states)])
                start += len(states)
        says = None
        if isinstance(skipped, Tensor):
            says = skipped.to(self._device, torch.float32)
        elif skipped:
            says = torch.ones((), dtype=torch.float32, device=self._device)
        for (_, rule, element), places in zip(self._groups, self._places, strict=True):
            self._kernel.run(places, rule, element, says)
