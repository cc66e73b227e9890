"""What is drawn for CUDA graphs: a captured step reads it from the GPU's memory, where each replay puts its own."""

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.errors import QuantizationError


Draw = Callable[[], Sequence[int]]
"""Takes whole numbers of at most 64 bits from a generator."""

_OPEN = "halfstep_draws"
_CELLS = 1024  # of a part


class _Part(NamedTuple):
    """Numbers that are sent together."""

    cells: Tensor
    draws: list[Draw]
    counts: list[int]


class Draws:
    """What one run of a captured graph draws, in the order of an eager run, and where the graph reads it."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []

    def cells(self, draw: Draw, count: int, device: torch.device) -> Tensor:
        """Memory of that many int64s, which have what is drawn from the next `fill` on."""
        last = self._parts[-1] if self._parts else None
        if last is None or last.cells.device != device or sum(last.counts) + count > len(last.cells):
            last = _Part(torch.empty(max(count, _CELLS), dtype=torch.int64, device=device), [], [])
            self._parts.append(last)
        start = sum(last.counts)
        last.draws.append(draw)
        last.counts.append(count)
        return last.cells[start : start + count]

    def fill(self) -> None:
        """Draw for a run, and send it: the host waits for nothing, and the GPU's stream has it before what follows."""
        for cells, draws, _ in self._parts:
            numbers = torch.tensor(
                [n - (n >> 63 << 64) for draw in draws for n in draw()], device="cpu", dtype=torch.int64
            )
            numbers = numbers.pin_memory() if cells.is_cuda else numbers  # which torch keeps until it was read
            cells[: len(numbers)].copy_(numbers, non_blocking=True)


class CUDAGraph(torch.cuda.CUDAGraph):
    """A `torch.cuda.CUDAGraph` whose replays draw noise as eager steps do: for code that rounds stochastically, or
    rotates by signs that are drawn for each call, without a seed of its own. Layers that follow a recipe draw nothing
    from a generator: any graph takes them.

    Capturing draws nothing. Each replay takes from the generators, on the host, what the captured code would have taken
    in that place, so that replays and eager steps may follow each other and `torch.get_rng_state` says where a run is.
    A copy of 8 bytes a draw goes to the GPU before each replay; nothing waits for it.

        graph = halfstep.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graph.replay()

    Raises:
        QuantizationError: this torch was built without CUDA.
    """

    _draws: Draws | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> "CUDAGraph":
        if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            raise QuantizationError(
                f"torch {torch.__version__} was built without CUDA, whose graphs these are; expected a torch for CUDA "
                "and an NVIDIA GPU. Without them run the step itself: it draws the same noise"
            )
        return super().__new__(cls, *args, **kwargs)

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        super().capture_begin(*args, **kwargs)
        self._draws = Draws()
        opened(self._draws)

    def capture_end(self) -> None:
        opened(None)
        super().capture_end()

    def replay(self) -> None:
        if self._draws is not None:
            self._draws.fill()
        super().replay()


def opened(draws: Draws | None) -> None:
    """From here on these draws are those of the graph that is captured; None: of none. It is a word to this thread, and
    to the threads of its backward passes."""
    word = [draws]
    counted = sys.getrefcount(word)
    torch._C._stash_obj_in_tls(_OPEN, word)
    if sys.getrefcount(word) == counted:  # torch 2.8 gives back a reference that it did not take
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(word))


def capturing() -> bool:
    """Whether a CUDA graph is being captured on this thread's stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def drawn(what: str, draw: Draw, count: int, device: torch.device | None) -> Sequence[int] | Tensor:
    """The `count` numbers that `draw` gives; as cells of int64 there, where a CUDA graph is being captured.

    Raises:
        QuantizationError: as `check_drawing`.
    """
    if not capturing():
        return draw()
    return check_drawing(what, device).cells(draw, count, torch.device(device or "cpu"))


def check_drawing(what: str, device: torch.device | None) -> Draws:
    """The draws of the graph that is captured.

    Raises:
        QuantizationError: all its replays would use what was drawn once, on the host, for the host's tensors or by a
            graph of torch's own class.
    """
    on_gpu = device is not None and device.type == "cuda"
    draws: Draws | None = torch._C._get_obj_in_tls(_OPEN)[0] if torch._C._is_key_in_tls(_OPEN) else None
    if draws is None or not on_gpu:
        raise QuantizationError(
            f"{what} would be drawn on the host while a CUDA graph is captured, and every replay of the graph would "
            f"round with the same noise. {_OURS if on_gpu else _HOST}"
        )
    return draws


_OURS = (
    "Capture into halfstep.CUDAGraph() in the place of torch.cuda.CUDAGraph(): it draws for each replay. Where torch "
    "makes the graph (make_graphed_callables, mode='reduce-overhead'), leave these calls out of it, or give them a "
    "seed as a number, which is taken as it is"
)
_HOST = (
    "The tensor is not on the GPU: round it outside of the graph, or give a seed as a number, which is taken as it is"
)
