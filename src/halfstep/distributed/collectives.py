"""Collectives of one process group that count the bytes they send, wait only so long, and say which rank is missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from halfstep.errors import ModelError


LIMIT = timedelta(minutes=5)
"""How long ranks wait for one that has not begun to reduce gradients as they do."""

_MOMENT = timedelta(seconds=5)  # for ranks whose collective failed as well to say so


@dataclass(frozen=True)
class Pending:
    """A collective that is under way."""

    works: Sequence[Any]
    what: str
    exchange: Exchange

    def wait(self) -> None:
        """Wait until it is done, on a GPU without the host.

        Raises:
            ModelError: it failed, or took longer than the group's time limit; it names the ranks that said nothing.
        """
        try:
            for work in self.works:
                work.wait()
        except Exception as error:
            raise ModelError(self.exchange.failed(self.what, error)) from error


class Buffers:
    """Memory that is used again: what a reduction allocates and drops in each step costs as much as its rounding."""

    def __init__(self) -> None:
        self._free: dict[Any, list[Tensor]] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of any values."""
        free = self._free.setdefault((shape, dtype, device), [])
        return free.pop() if free else torch.empty(shape, dtype=dtype, device=device)

    def give(self, *tensors: Tensor) -> None:
        """Take tensors back, which are no longer used."""
        for tensor in tensors:
            self._free.setdefault((tuple(tensor.shape), tensor.dtype, tensor.device), []).append(tensor)


class Exchange:
    """The collectives that reductions are made of, in one process group (None: the default one).

    Attributes:
        sent: bytes that this rank has sent to others, each as often as it crosses.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.sent, self.buffers = 0, Buffers()
        self._pairwise = dist.get_backend(group) == "gloo"

    def all_to_all(self, out: Tensor, given: Tensor) -> Pending:
        """Row r of `given` goes to rank r, whose row comes into row r of `out`, where this rank's own row is."""
        self.sent += given[0].nbytes * (self.ranks - 1)
        if self._pairwise:
            return self._between_pairs("all-to-all", out, list(given))
        given[self.rank] = out[self.rank]
        return self._begin("all-to-all", lambda: [_ALL_TO_ALL(out, given, group=self.group, async_op=True)])

    def all_gather(self, out: Tensor) -> Pending:
        """Every rank's row of `out`, where this rank's own row is."""
        given = out[self.rank]
        self.sent += given.nbytes * (self.ranks - 1)
        if self._pairwise:
            return self._between_pairs("all-gather", out, [given] * self.ranks)
        flat, row = out.view(-1), given.view(-1)
        return self._begin("all-gather", lambda: [_ALL_GATHER(flat, row, group=self.group, async_op=True)])

    def _between_pairs(self, what: str, out: Tensor, given: Sequence[Tensor]) -> Pending:
        """Each rank sends to every other one at once. gloo's own all-to-all sends, and then receives: on a link that
        does both at once it takes twice the time."""
        others = [rank for rank in range(self.ranks) if rank != self.rank]

        def begin() -> list[Any]:
            receiving = [dist.irecv(out[rank], group_src=rank, group=self.group) for rank in others]
            return [*receiving, *(dist.isend(given[rank], group_dst=rank, group=self.group) for rank in others)]

        return self._begin(what, begin)

    def _begin(self, what: str, begin: Callable[[], list[Any]]) -> Pending:
        try:
            return Pending(begin(), what, self)
        except Exception as error:
            raise ModelError(self.failed(what, error)) from error

    def failed(self, what: str, error: Exception) -> str:
        """What to say of a collective that failed. Ranks that see it fail say so in the group's store; one that was
        killed, or is somewhere else, does not."""
        missing = self._missing("failed", _MOMENT)
        who = "all ranks saw it fail" if not missing else f"{_named(missing)} said nothing since"
        why = " ".join(str(error).split())[:200]
        return (
            f"rank {self.rank} of {self.ranks}: the {what} of gradients failed ({type(error).__name__}: {why}); {who}: "
            "look there first. Restart from the last checkpoint (torchrun --max-restarts)"
        )

    def agree(self, said: str, limit: timedelta = LIMIT) -> None:
        """Called once on every rank before the first reduction, with what it is going to do.

        Raises:
            ModelError: another rank is going to do something else, or has not come here within the limit.
        """
        store = c10d._get_default_store()
        turn = store.add(f"{self._key('agree', 0, self.rank)}/turns", 1)  # how often this rank has come so far
        store.set(self._key("agree", turn, self.rank), said)
        missing = self._waited("agree", turn, limit)
        if missing:
            raise ModelError(
                f"rank {self.rank} of {self.ranks} is going to send {said}, and in {limit} {_named(missing)} "
                "did not come so far: call halfstep.distributed.compress, or reduce_gradients, on all ranks"
            )
        for rank in range(self.ranks):
            theirs = store.get(self._key("agree", turn, rank)).decode()
            if theirs != said:
                raise ModelError(
                    f"rank {rank} is going to send {theirs}; rank {self.rank} {said}: give all ranks one model, one "
                    "recipe and one communication. Nothing was sent"
                )

    def _missing(self, kind: str, limit: timedelta) -> Sequence[int]:
        try:
            c10d._get_default_store().set(self._key(kind, 0, self.rank), "")
            return self._waited(kind, 0, limit)
        except Exception:  # the store's process is the one that is gone
            return [0] if self.rank else []

    def _waited(self, kind: str, turn: int, limit: timedelta) -> Sequence[int]:
        """The ranks that have said nothing within the limit."""
        store, others = c10d._get_default_store(), [rank for rank in range(self.ranks) if rank != self.rank]
        try:
            store.wait([self._key(kind, turn, rank) for rank in others], limit)
        except Exception:
            return [rank for rank in others if not store.check([self._key(kind, turn, rank)])]
        return []

    def _key(self, kind: str, turn: int, rank: int) -> str:
        group = c10d._world.pg_names.get(self.group, "") if self.group is not None else ""
        return f"halfstep/{kind}/{group}/{turn}/{rank}"


def _named(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


_ALL_TO_ALL: Any = dist.all_to_all_single
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
