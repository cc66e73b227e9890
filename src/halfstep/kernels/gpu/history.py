"""States of delayed scaling on a GPU, moved on by one launch for all that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from halfstep.formats import Format
from halfstep.kernels.gpu.launch import Launch, bits, functions, lies_plain, plain
from halfstep.kernels.gpu.quantizers import rule
from halfstep.quant.scaling import StatefulScaling
from halfstep.quant.scaling.delayed import Delayed


_LONGEST = 1 << 13
Group = tuple[Sequence[Tensor], StatefulScaling, Format]
"""States that are alike, their rule, and the format of their operands."""


def takes(states: Sequence[Tensor], scaling: StatefulScaling) -> bool:
    """Whether `run` moves these on, wherever they are: dense, by a rule of amaxes alone."""
    known = type(scaling) is Delayed and scaling.first is not None and scaling.history <= _LONGEST
    return known and all(lies_plain(state, torch.float32) for state in states)


def found(groups: Sequence[Group]) -> Histories | None:
    """What moves all of these on; None where one group is not CUDA tensors that `run` takes."""
    there = all(takes(states, scaling) and all(map(_is_there, states)) for states, scaling, _ in groups)
    return Histories(groups) if there else None


class Histories:
    """States of delayed scaling that one launch moves on for each group of them."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._find()

    def _find(self) -> None:
        self._addresses = self._now()
        self._places = [places(states) for states, _, _ in self._groups]

    def _now(self) -> list[int]:
        return [state.data_ptr() for states, _, _ in self._groups for state in states]

    def advance(self, skipped: bool | Tensor) -> None:
        """End an optimizer step for all of them: of a `skipped` one only the amaxes are forgotten."""
        if self._now() != self._addresses:
            self._find()
        for (_, scaling, element), places in zip(self._groups, self._places, strict=True):
            says = skipped if isinstance(skipped, Tensor) else places.new_ones(()) if skipped else None
            assert isinstance(scaling, Delayed)
            run(places, scaling, element, None if says is None else says.to(places.device, torch.float32))


def places(states: Sequence[Tensor]) -> Tensor:
    """Where states are: what `run` takes."""
    addresses = torch.tensor([state.data_ptr() for state in states], dtype=torch.int64, device="cpu")
    device = states[0].device
    return addresses if device.type == "cpu" else addresses.pin_memory().to(device, non_blocking=True)


def run(places: Tensor, scaling: Delayed, element: Format, skipped: Tensor | None) -> None:
    """`scaling.advance` of the states at these places, which are of one format; where `skipped`, a float32 scalar, is
    above 0 their amaxes are forgotten, and nothing else changes."""
    launch = _launch(scaling, element, places.device)
    launch(len(places), places, None if skipped is None else bits(skipped))


def _is_there(state: Tensor) -> bool:
    return plain(state, torch.float32)


@cache
def _launch(scaling: Delayed, element: Format, device: torch.device) -> Launch:
    assert scaling.first is not None
    return Launch(
        functions("history").advance, device, H=scaling.history, R=rule(element, scaling.first),
        WARMUP=scaling.warmup, RECENT=scaling.algorithm == "most_recent", RESTART=scaling.restart,
        B=max(1 << (scaling.history - 1).bit_length(), 16),
    )  # fmt: skip
