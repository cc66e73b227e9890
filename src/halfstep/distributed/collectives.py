"""Collectives of one process group that count the bytes sent, time out, and name the ranks that did not answer."""

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
"""How long ranks wait for all others to call `Exchange.agree`, before the first reduction."""

_MOMENT = timedelta(seconds=5)  # for the other ranks to report that their collective failed too


@dataclass(frozen=True)
class Pending:
    """A collective that was started and may not be finished."""

    works: Sequence[Any]
    what: str
    exchange: Exchange

    def wait(self) -> None:
        """Wait for the collective. On a GPU only the current stream waits, not the host.

        Raises:
            ModelError: it failed, or took longer than the group's timeout; the message names the ranks that reported
                no failure.
        """
        try:
            for work in self.works:
                work.wait()
        except Exception as error:
            raise ModelError(self.exchange.failed(self.what, error)) from error


class Buffers:
    """A pool of tensors for reuse: allocating and freeing them in each step would cost as much as the rounding."""

    def __init__(self) -> None:
        self._free: dict[Any, list[Tensor]] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized tensor, from the pool if it has one of that shape, dtype and device."""
        free = self._free.setdefault((shape, dtype, device), [])
        return free.pop() if free else torch.empty(shape, dtype=dtype, device=device)

    def release(self, *tensors: Tensor) -> None:
        """Return tensors to the pool; the caller must not use them any more."""
        for tensor in tensors:
            self._free.setdefault((tuple(tensor.shape), tensor.dtype, tensor.device), []).append(tensor)


class Exchange:
    """The all-to-all and all-gather of one process group (None: the default one), from which reductions are built.

    Attributes:
        sent: bytes that this rank has sent; a tensor that goes to several ranks counts once for each.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.sent, self.buffers = 0, Buffers()
        self._pairwise = dist.get_backend(group) == "gloo"

    def all_to_all(self, out: Tensor, given: Tensor) -> Pending:
        """Send row r of `given` to rank r and receive rank r's row into `out[r]`. The caller has already written this
        rank's own row to `out[rank]`; `given[rank]` may be overwritten."""
        self.sent += given[0].nbytes * (self.ranks - 1)
        if self._pairwise:
            return self._between_pairs("all-to-all", out, list(given))
        given[self.rank] = out[self.rank]
        return self._begin("all-to-all", lambda: [_ALL_TO_ALL(out, given, group=self.group, async_op=True)])

    def all_gather(self, out: Tensor) -> Pending:
        """Send `out[rank]`, which the caller has written, to all ranks, and receive rank r's row into `out[r]`."""
        given = out[self.rank]
        self.sent += given.nbytes * (self.ranks - 1)
        if self._pairwise:
            return self._between_pairs("all-gather", out, [given] * self.ranks)
        flat, row = out.view(-1), given.view(-1)
        return self._begin("all-gather", lambda: [_ALL_GATHER(flat, row, group=self.group, async_op=True)])

    def _between_pairs(self, what: str, out: Tensor, given: Sequence[Tensor]) -> Pending:
        """Send and receive with one isend and one irecv per other rank, all at once. gloo's own all-to-all sends first
        and then receives, which takes twice as long on a full-duplex link."""
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
        """The error message for a failed collective. Each rank that sees the failure sets a key in the store; the
        message names the ranks without one, which were killed or are elsewhere in their program."""
        missing = self._missing("failed", _MOMENT)
        who = "all ranks saw it fail" if not missing else f"{_named(missing)} reported nothing since"
        why = " ".join(str(error).split())[:200]
        return (
            f"rank {self.rank} of {self.ranks}: the {what} of gradients failed ({type(error).__name__}: {why}); {who}: "
            "look there first. Restart from the last checkpoint (torchrun --max-restarts)"
        )

    def agree(self, text: str, limit: timedelta = LIMIT) -> None:
        """Check that all ranks pass the same text, which describes the reductions to come. Every rank calls it once
        before its first reduction.

        Raises:
            ModelError: another rank passed another text, or did not call within the limit.
        """
        store = c10d._get_default_store()
        turn = store.add(f"{self._key('agree', 0, self.rank)}/turns", 1)  # how often this rank has called agree
        store.set(self._key("agree", turn, self.rank), text)
        missing = self._waited("agree", turn, limit)
        if missing:
            raise ModelError(
                f"rank {self.rank} of {self.ranks} is going to send {text}; {_named(missing)} made no such call within "
                f"{limit}: call halfstep.distributed.compress, or reduce_gradients, on all ranks"
            )
        for rank in range(self.ranks):
            theirs = store.get(self._key("agree", turn, rank)).decode()
            if theirs != text:
                raise ModelError(
                    f"rank {rank} is going to send {theirs}; rank {self.rank} {text}: give all ranks one model, one "
                    "recipe and one communication. Nothing was sent"
                )

    def _missing(self, kind: str, limit: timedelta) -> Sequence[int]:
        try:
            c10d._get_default_store().set(self._key(kind, 0, self.rank), "")
            return self._waited(kind, 0, limit)
        except Exception:  # the process that hosts the store (rank 0) is the one that died
            return [0] if self.rank else []

    def _waited(self, kind: str, turn: int, limit: timedelta) -> Sequence[int]:
        """The other ranks that have not set their key within the limit."""
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
