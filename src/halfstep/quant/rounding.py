"""Rounding modes, on magnitudes measured in steps of the format; noise and seeds; and draws for CUDA graphs.

Each mode takes r >= 0 in float64, exact, and whether the value is negative, and returns integers in float64. The caller
restores the sign, so `toward_zero` is a floor here.

A captured step reads drawn seeds from GPU memory, to which each replay writes its own.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.errors import QuantizationError, one_of
from halfstep.formats.exact import ROUNDINGS


Seed = int | Tensor
"""A 64-bit seed: an int, or an int64 scalar on the GPU, which the replays of a CUDA graph read."""
NOISE_BITS = 32
"""Bits of noise that stochastic rounding adds to the remainder; see `noise_bits`."""
NOISE_CHUNK = 1 << 14
"""Elements that share a pair of noise keys; see `noise_bits`."""


# ---- rounding to nearest, and in a direction -------------------------------------------------------------------------


def nearest_away(r: Tensor, negative: Tensor) -> Tensor:
    """Round to the nearest integer, ties to the larger magnitude (IEEE 754 roundTiesToAway)."""
    down = torch.floor(r)
    return down + (r - down >= 0.5)


def nearest_up(r: Tensor, negative: Tensor) -> Tensor:
    """Round to the nearest integer, ties toward +infinity: as a lookup among thresholds that belong to the upper
    side."""
    down = torch.floor(r)
    rest = r - down
    return down + torch.where(negative, rest > 0.5, rest >= 0.5)


_MODES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nearest_even": lambda r, negative: torch.round(r),  # IEEE 754 roundTiesToEven
    "nearest_away": nearest_away,
    "nearest_up": nearest_up,
    "toward_zero": lambda r, negative: torch.floor(r),  # IEEE 754 roundTowardZero
    "up": lambda r, negative: torch.where(negative, torch.floor(r), torch.ceil(r)),  # IEEE 754 roundTowardPositive
    "down": lambda r, negative: torch.where(negative, torch.ceil(r), torch.floor(r)),  # IEEE 754 roundTowardNegative
}


# ---- stochastic rounding ---------------------------------------------------------------------------------------------


def stochastic(r: Tensor, noise: Tensor) -> Tensor:
    """Round up with the probability of the remainder, else down; integers stay.

    `noise` holds integers, uniform on [0, 2^32). Up if and only if remainder + noise / 2^32 >= 1, which has probability
    floor(remainder * 2^32) / 2^32: exact whenever the remainder has at most 32 bits.
    """
    down = torch.floor(r)
    return down + ((r - down) * 2.0**NOISE_BITS + noise >= 2.0**NOISE_BITS)


def noise_bits(seed: Seed, start: int, count: int, device: torch.device | None = None) -> Tensor:
    """`count` integers uniform on [0, 2^32), a function of (seed, element index) alone.

    Element i of a tensor draws hash(seed, start + i), so the result depends on neither the number of threads nor the
    order of work, and a kernel that computes the same hash gives the same bits. Every NOISE_CHUNK elements share two
    32-bit keys, `noise_keys`; within them the hash is `lowbias32` of (first key + index), with the second key XORed in
    between its two multiplications. Source: the `lowbias32` constants found by Wellons' hash prospector (bias 0.17).
    """
    index = torch.arange(start, start + count, dtype=torch.int64, device=device)
    first = start // NOISE_CHUNK
    chunks = torch.arange(first, (start + max(count, 1) - 1) // NOISE_CHUNK + 1, dtype=torch.int64, device=device)
    one, two = (key[index // NOISE_CHUNK - first] for key in noise_keys(seed, chunks))
    return _noise(index, one, two)


def noise_at(seed: Seed, index: Tensor) -> Tensor:
    """`noise_bits` for elements at any indices: a shard gets the noise of its elements in the whole tensor."""
    return _noise(index, *noise_keys(seed, index // NOISE_CHUNK))


def _noise(index: Tensor, one: Tensor, two: Tensor) -> Tensor:
    x = one + index % NOISE_CHUNK & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF ^ two
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def noise_keys(seed: Seed, chunk: Tensor) -> tuple[Tensor, Tensor]:
    """The two keys of a chunk's noise: a 64-bit mix of the 64-bit seed and the chunk's number."""
    low = seed + 0x9E3779B9 & 0xFFFFFFFF
    low = _mix(low if isinstance(low, Tensor) else torch.full((), low, device=chunk.device, dtype=torch.int64))
    high = _mix(low ^ (seed >> 32 & 0xFFFFFFFF))
    left = _mix(low ^ (chunk & 0xFFFFFFFF))
    one = _mix(left + high + (chunk >> 32) * 0x9E3779B9 & 0xFFFFFFFF)
    return one, _mix(one ^ left)


def _mix(x: Tensor) -> Tensor:
    """lowbias32 on int64 tensors that hold 32-bit values."""
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


# ---- seeds -----------------------------------------------------------------------------------------------------------


def derive_seed(seed: int, *keys: Any) -> Any:
    """A 64-bit seed hashed from (seed, key, key ...), such as the run's seed, the step and the number of a tensor.

    If the last key is an array of uint64, such as the numbers of several tensors, so is the result: a seed for each.

    Source: the splitmix64 finaliser of Steele, Lea and Flood 2014.
    """
    state = 0
    for key in (seed, *keys):  # the seed is mixed first, or step 3 of run 0 would share its noise with step 2 of run 1
        state = (state ^ key) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state


def draw_seed(source: torch.Generator | Seed | None, device: torch.device | None = None) -> Seed:
    """A 64-bit seed for a tensor on `device`: `source` if it is a seed, else one draw from the generator (None: torch's
    default).

    Raises:
        QuantizationError: it would be drawn while a CUDA graph is captured that is no `halfstep.CUDAGraph`.
    """
    if isinstance(source, (int, Tensor)):
        return source
    return drawn("a seed of stochastic rounding", partial(_drawn_seed, source), 1, device)[0]


def _drawn_seed(source: torch.Generator | None) -> tuple[int]:
    halves = torch.randint(0, 2**32, (2,), generator=source, dtype=torch.int64, device="cpu").tolist()
    return (int(halves[0]) | int(halves[1]) << 32,)


def number(seed: Seed | None) -> int | None:
    """A seed as an int, for rounding on the host, where no seed is a tensor."""
    assert not isinstance(seed, Tensor)
    return seed


# ---- rounding modes by name ------------------------------------------------------------------------------------------


def round_steps(r: Tensor, negative: Tensor, rounding: str, noise: Tensor | None) -> Tensor:
    """`r` rounded by the mode of that name; stochastically if noise is given."""
    return _MODES[rounding](r, negative) if noise is None else stochastic(r, noise)


def carries_to_infinity(rounding: str, negative: Tensor) -> Tensor:
    """Whether a finite value beyond the largest one overflows to infinity (IEEE 754 section 7.4)."""
    sides = {"toward_zero": (False, False), "up": (True, False), "down": (False, True)}
    positive_side, negative_side = sides.get(rounding, (True, True))
    return torch.where(negative, negative_side, positive_side)


def check_rounding(name: str) -> None:
    """Raise QuantizationError, with the nearest names, unless `name` is a rounding mode."""
    one_of("rounding", name, ROUNDINGS, QuantizationError)


# ---- draws in CUDA graphs --------------------------------------------------------------------------------------------

Draw = Callable[[], Sequence[int]]
"""Draws integers of at most 64 bits from a generator."""

_OPEN = "halfstep_draws"
_CELLS = 1024  # int64 cells per part


class _Part(NamedTuple):
    """Draws that are copied to the device together."""

    cells: Tensor
    draws: list[Draw]
    counts: list[int]


class Draws:
    """The draws of one replay of a captured graph, in the order of an eager run, and the GPU memory where the graph
    reads them."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []

    def cells(self, draw: Draw, count: int, device: torch.device) -> Tensor:
        """That many int64 cells on the device; every `fill` writes new draws to them."""
        last = self._parts[-1] if self._parts else None
        if last is None or last.cells.device != device or sum(last.counts) + count > len(last.cells):
            last = _Part(torch.empty(max(count, _CELLS), dtype=torch.int64, device=device), [], [])
            self._parts.append(last)
        start = sum(last.counts)
        last.draws.append(draw)
        last.counts.append(count)
        return last.cells[start : start + count]

    def fill(self) -> None:
        """Draw for one replay and copy to the device, without synchronizing; the copy is ordered before what follows on
        the stream."""
        for cells, draws, _ in self._parts:
            numbers = torch.tensor(
                [n - (n >> 63 << 64) for draw in draws for n in draw()], device="cpu", dtype=torch.int64
            )
            numbers = numbers.pin_memory() if cells.is_cuda else numbers  # torch keeps it until it is copied
            cells[: len(numbers)].copy_(numbers, non_blocking=True)


class CUDAGraph(torch.cuda.CUDAGraph):
    """A `torch.cuda.CUDAGraph` whose replays draw noise as eager steps do: for code that rounds stochastically, or
    rotates by signs drawn for each call, without a seed of its own. Layers that follow a recipe draw nothing from a
    generator: they work in any graph.

    Capturing draws nothing. Each replay takes from the generators, on the host, what the captured code would have
    taken, so that replays and eager steps may alternate and `torch.get_rng_state` holds the state of a run. Before each
    replay 8 bytes per draw are copied to the GPU, without synchronizing.

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
    """Set the draws of the graph that is being captured, or None, for this thread and the threads of its backward
    passes."""
    word = [draws]
    counted = sys.getrefcount(word)
    torch._C._stash_obj_in_tls(_OPEN, word)
    if sys.getrefcount(word) == counted:  # torch 2.10 releases a reference that it did not take
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(word))


def capturing() -> bool:
    """Whether a CUDA graph is being captured on this thread's stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def drawn(what: str, draw: Draw, count: int, device: torch.device | None) -> Sequence[int] | Tensor:
    """The `count` integers of `draw`; while a CUDA graph is captured, int64 cells on the device instead.

    Raises:
        QuantizationError: as `check_drawing`.
    """
    if not capturing():
        return draw()
    return check_drawing(what, device).cells(draw, count, torch.device(device or "cpu"))


def check_drawing(what: str, device: torch.device | None) -> Draws:
    """The draws of the graph that is being captured.

    Raises:
        QuantizationError: all replays would reuse one draw: for a tensor on the host, or in a graph of torch's own
            class.
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
