"""The states of delayed scaling on a GPU, advanced in place by one launch per group with one layout."""

from functools import cache

import torch

from halfstep.formats import Format
from halfstep.kernels.gpu import Launch, bits, functions
from halfstep.kernels.gpu.quantizers import rule
from halfstep.quant.scaling.delayed import Delayed


def places(addresses: list[int], device: torch.device) -> torch.Tensor:
    """The addresses of states, as a tensor on the device, for `run`."""
    cells = torch.tensor(addresses, dtype=torch.int64, device="cpu")
    return cells if device.type == "cpu" else cells.pin_memory().to(device, non_blocking=True)


def run(places: torch.Tensor, scaling: Delayed, element: Format, skipped: torch.Tensor | None) -> None:
    """`scaling.advance` of the states at these addresses, whose operands have one format. Where `skipped`, a float32
    scalar, is above 0 they only drop the amax of that step."""
    _launch(scaling, element, places.device)(places.numel(), places, None if skipped is None else bits(skipped))


@cache
def _launch(scaling: Delayed, element: Format, device: torch.device) -> Launch:
    assert scaling.first is not None
    return Launch(
        functions("history").advance, device, H=scaling.history, R=rule(element, scaling.first),
        WARMUP=scaling.warmup, RECENT=scaling.algorithm == "most_recent", RESTART=scaling.restart,
        B=max(1 << (scaling.history - 1).bit_length(), 16),
    )  # fmt: skip
