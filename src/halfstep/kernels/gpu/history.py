"""States of delayed scaling on a GPU, moved on by one launch for all that are alike."""

from functools import cache

import torch

from halfstep.formats import Format
from halfstep.kernels.gpu import Launch, bits, functions
from halfstep.kernels.gpu.quantizers import rule
from halfstep.quant.scaling.delayed import Delayed


def places(addresses: list[int], device: torch.device) -> torch.Tensor:
    """Where states are: what `run` takes."""
    cells = torch.tensor(addresses, dtype=torch.int64, device="cpu")
    return cells if device.type == "cpu" else cells.pin_memory().to(device, non_blocking=True)


def run(places: torch.Tensor, scaling: Delayed, element: Format, skipped: torch.Tensor | None) -> None:
    """`scaling.advance` of the states at these places, which are of one format; where `skipped`, a float32 scalar, is
    above 0 their amaxes are forgotten, and nothing else changes."""
    _launch(scaling, element, places.device)(len(places), places, None if skipped is None else bits(skipped))


@cache
def _launch(scaling: Delayed, element: Format, device: torch.device) -> Launch:
    assert scaling.first is not None
    return Launch(
        functions("history").advance, device, H=scaling.history, R=rule(element, scaling.first),
        WARMUP=scaling.warmup, RECENT=scaling.algorithm == "most_recent", RESTART=scaling.restart,
        B=max(1 << (scaling.history - 1).bit_length(), 16),
    )  # fmt: skip
