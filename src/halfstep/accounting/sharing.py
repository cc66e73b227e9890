"""What one of several devices holds, each role by its own divisor; and the largest batch that fits there."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from halfstep.accounting.account import Account, crossing
from halfstep.errors import AccountError
from halfstep.recipe import Recipe, Storage


BUCKET = 500_000_000
"""Elements of the buckets that gradients are reduced and weights gathered in. Source: DeepSpeed's defaults of
`reduce_bucket_size` and `allgather_bucket_size`."""


@dataclass(frozen=True)
class Share:
    """Bytes by role on one device, whole numbers; parts of a tensor are rounded up."""

    weights: int
    buffers: int
    gradients: int
    master: int
    states: int
    scales: int
    communication: int
    compute_copies: int
    activations: int
    update: int
    """What the optimizer makes for itself while it steps: of whole matrices, over how many devices they may lie."""
    sent: int
    """What it sends to others in a step."""
    peak: int
    """The most at once, from the first operation of the forward pass to the end of the optimizer's step."""

    @property
    def persistent(self) -> int:
        """What is there between the backward pass and the step."""
        model = self.weights + self.buffers + self.gradients + self.scales
        return model + self.master + self.states + self.communication


def check_ranks(ranks: int, zero: int) -> None:
    """Refuse what `share` cannot divide by.

    Raises:
        AccountError: no such stage; fewer than one device; a stage with one device, which has none to share with.
    """
    if zero not in range(4):
        raise AccountError(f"--zero {zero} given; expected a stage from 0 to 3")
    if ranks < 1:
        raise AccountError(f"--dp {ranks} given; expected a number of devices, at least 1")
    if zero and ranks == 1:
        raise AccountError(f"--zero {zero} shards over devices, and there is one: say over how many, such as --dp 8")


def share(account: Account, ranks: int = 1, zero: int = 0) -> Share:
    """What each of `ranks` devices holds that train on batches of their own.

    Stage 0 copies everything; 1 shards masters and states, 2 gradients too, 3 weights too (ZeRO). Communication is what
    gradients are reduced in: at stage 0 a copy of them (torch's DDP without `gradient_as_bucket_view`); from stage 1 on
    buckets of `BUCKET` elements, for gradients and for weights that are gathered. Error feedback keeps four bytes more
    of each parameter that is trained.

    Raises:
        AccountError: as `check_ranks`.

    Source: Rajbhandari et al. 2020, arXiv 1910.02054, figure 1 and section 5.
    """
    check_ranks(ranks, zero)
    held, parts = account.bytes, [ranks if zero >= stage else 1 for stage in (3, 2, 1)]
    of_weights, of_gradients, of_states = parts

    def divided(size: int, divisor: int) -> int:
        return -(-size // divisor)

    weights, scales = divided(held.weights, of_weights), divided(held.scales, of_weights)
    master, states = divided(held.master, of_states), divided(held.states, of_states)
    state_scales = divided(held.state_scales, of_states)
    communication = _communication(account, ranks, zero)
    fixed = held.weights + held.buffers + held.scales + held.master + held.states + held.state_scales
    passing = max(0, held.peak - held.peak_gradients - fixed)
    kept = weights + held.buffers + scales + master + states + state_scales + communication
    gradients = divided(held.gradients, of_gradients)
    peak = max(kept + divided(held.peak_gradients, of_gradients) + passing, kept + gradients + held.update)
    return Share(
        weights, held.buffers, gradients, master, states, scales + state_scales, communication, held.compute_copies,
        held.activations, held.update, sent_by(account, ranks, zero), peak,
    )  # fmt: skip


def sent_by(account: Account, ranks: int, zero: int) -> int:
    """The bytes that one of the devices sends to others in a step, scales included, by ring or pairwise collectives.

    Gradients are scattered and gathered at stage 0; from stage 1 on they are scattered, and weights are gathered: once,
    at stage 3 for the forward and for the backward pass.
    """
    across, gradients, weights = account.across, account.bytes.gradients, account.bytes.weights
    if across is not None and across.gradients is not None:
        gradients = round(account.trained * across.gradients.bytes)
    if across is not None and across.weights is not None:
        weights = round(account.parameters * _bytes(across.weights))
    return -(-int(_crossings(gradients, weights, zero)) * (ranks - 1) // ranks)


def sent_a_parameter(recipe: Recipe, zero: int) -> float:
    """The bytes of a parameter that one of N devices sends in a step, times N / (N - 1)."""
    across, size = crossing(recipe), recipe.bytes_per_parameter()
    gradients = across.gradients.bytes if across is not None and across.gradients is not None else size.grads
    weights = _bytes(across.weights) if across is not None and across.weights is not None else size.weights
    return _crossings(gradients, weights, zero)


def _bytes(weights: Storage | str) -> float:
    return weights.bytes if isinstance(weights, Storage) else 1.0  # codes of 8 bits, with scales of whole tensors


def _crossings(gradients: float, weights: float, zero: int) -> float:
    return 2 * gradients if zero == 0 else gradients + (2 if zero == 3 else 1) * weights


def _communication(account: Account, ranks: int, zero: int) -> int:
    if ranks == 1:
        return 0
    kept = 4 * account.trained if account.across is not None and account.across.feeds_back else 0
    if zero == 0:
        return account.bytes.gradients + kept
    reduced = account.bytes.gradients * min(account.trained, BUCKET) // max(1, account.trained)
    gathered = account.bytes.weights * min(account.parameters, BUCKET) // account.parameters
    return reduced + gathered + kept


_UNITS = {"GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20, "TB": 10**12, "TiB": 2**40}


def bytes_from(text: str) -> int:
    """The bytes of a size with its unit.

    Raises:
        AccountError: there is no number, or no unit: 80 GB are 74.5 GiB.

    >>> bytes_from("80GB"), bytes_from("80 GiB")
    (80000000000, 85899345920)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if found is None or found[2] not in _UNITS or not float(found[1]):
        raise AccountError(
            f"memory of {text!r} given; expected a number and one of {', '.join(_UNITS)}, such as 80GB (1 GB is 10^9 "
            "bytes, 1 GiB 2^30)"
        )
    return int(float(found[1]) * _UNITS[found[2]])


def largest(peak_of: Callable[[int], int], memory: int, known: tuple[int, int]) -> tuple[int, int]:
    """The largest batch whose peak is at most `memory`, and that peak; (0, peak of a batch of 1) where not even one
    fits.

    The peak grows by as much with every example, but for what is rounded up; so it is guessed by a line through two
    batches and then counted, until a batch fits and the next does not.

    Args:
        peak_of: the peak of a batch, counted again.
        known: a batch and its peak.
    """
    peaks = dict([known])

    def peak(batch: int) -> int:
        if batch not in peaks:
            peaks[batch] = peak_of(batch)
        return peaks[batch]

    low, high = 0, 0  # fits, and does not; 0 is none yet
    guess = 1
    while True:
        if peak(guess) <= memory:
            low = guess
        else:
            high = guess
        if high == low + 1:
            return (low, peak(low)) if low else (0, peak(1))
        guess = _next(peaks, low, high, memory)


def _next(peaks: dict[int, int], low: int, high: int, memory: int) -> int:
    """The batch to try next: where a line through what is known meets the memory, within what is open."""
    first, *_, last = sorted(peaks) if len(peaks) > 1 else (1, 1)
    slope = (peaks[last] - peaks[first]) / (last - first) if last > first else 0.0
    if slope <= 0:
        guess = 2 * max(low, 1)
    else:
        near = min(peaks, key=lambda batch: abs(peaks[batch] - memory))
        guess = near + int((memory - peaks[near]) // slope)
    return max(low + 1, min(guess, high - 1)) if high else max(low + 1, guess)
