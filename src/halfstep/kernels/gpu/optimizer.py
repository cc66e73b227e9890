"""The steps of an optimizer's tensors on a GPU: one launch finds the numbers of each, one more a kind moves them all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import OptimizerError
from halfstep.kernels.cpu.coded import Coded
from halfstep.kernels.gpu import table
from halfstep.kernels.gpu.kinds import Options, Tensors, constants_of, kind_of, steps_to_one
from halfstep.kernels.gpu.launch import functions, launch


BLOCK = 1024
"""Elements of a program."""
TENSORS = 128
"""Tensors of a program that finds numbers."""
# ---- bias corrections ------------------------------------------------------------------------------------------------


@cache
def _first_corrections(beta: float) -> tuple[float, ...]:
    """1 - beta^t, from t = 1 until it is 1."""
    return tuple(1 - beta**t for t in range(1, steps_to_one(beta) + 1))


@cache
def _second_corrections(beta: float) -> tuple[float, ...]:
    """1 / sqrt(1 - beta^t), from t = 1 until it is 1."""
    return tuple(1 / math.sqrt(1 - beta**t) for t in range(1, steps_to_one(beta) + 1))


# ---- tables ----------------------------------------------------------------------------------------------------------


class Steps:
    """The launches that step these tensors, for as long as they stay where they are.

    All that changes from step to step is in the GPU's memory: counts of steps, learning rates, what gradients are
    divided by, and whether one of them overflowed. Nothing waits for the GPU, and a CUDA graph may hold the launches.
    """

    def __init__(self, tensors: Sequence[Tensors], options: Sequence[Options]) -> None:
        self._device = tensors[0].weight.device
        self._options: list[Options] = []
        self._grads = torch.tensor([t.grad.data_ptr() for t in tensors])
        self._host = torch.tensor([_row(t) for t in tensors])
        self._rows = self._sent(self._host)
        self._numbers = torch.empty(len(tensors), table.NUMBERS, device=self._device)
        # A graph that is captured while gradients are elsewhere takes these for its own.
        self._spare = self._pair() if self._device.type == "cuda" else None
        self._captured: list[tuple[Tensor, Tensor]] = []
        kinds: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        for number, t in enumerate(tensors):
            places = kinds.setdefault(kind_of(t, options[t.group]), [])
            places += [(number, block) for block in range(-(-t.weight.numel() // BLOCK))]
        self._kinds = [
            (
                self._sent(torch.tensor(places, dtype=torch.int32).view(-1, 2)),
                len(places),
                constants_of(key, self._device),
            )
            for key, places in kinds.items()
        ]
        self.set(options)

    def set(self, options: Sequence[Options]) -> None:
        """Take the options of groups as they are now: of the same `kind` as before."""
        if len(options) != len(self._options) or not all(map(_same, options, self._options)):
            self._check_capture("its options have changed")
            corrections: list[float] = [1.0]
            self._table = self._sent(torch.tensor([_numbers(o, corrections) for o in options], dtype=torch.float64))
            self._corrections = self._sent(torch.tensor(corrections, dtype=torch.float64))
            self._options = list(options)
        for group, own in enumerate(options):
            if isinstance(own.lr, Tensor):
                self._table[group, table.LR].copy_(own.lr)

    def find(self, grads: Sequence[int]) -> None:
        """Take gradients of the same dtypes from other addresses."""
        self._grads = torch.tensor(grads)
        self._host[:, table.GRAD] = self._grads
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            if self._spare is None:
                raise OptimizerError(_CAPTURE.format("its gradients have moved"))
            (pinned, rows), self._spare = self._spare, None
            pinned.copy_(self._host)
            rows.copy_(pinned, non_blocking=True)
            self._captured.append((pinned, rows))
            self._rows = rows
        elif any(self._rows is rows for _, rows in self._captured):
            self._rows = self._sent(self._host)
            self._spare = self._spare or self._pair()
        else:
            self._rows.copy_(self._pinned(self._host), non_blocking=True)

    def run(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Take a step, by gradients that are divided by `grad_scale`, unless `found_inf` is not 0: float32 scalars there."""
        kernels, count = functions("optimizer"), self._host.shape[0]
        launch(
            kernels.prepare, -(-count // TENSORS),
            self._rows, self._table, self._corrections, self._numbers, grad_scale, found_inf, count,
            device=self._device, B=TENSORS,
        )  # fmt: skip
        for blocks, grid, (elements, constants) in self._kinds:
            launch(
                kernels.update, grid, self._rows, blocks, self._numbers, *elements,
                device=self._device, **constants, B=BLOCK,
            )  # fmt: skip

    def _pair(self) -> tuple[Tensor, Tensor]:
        return torch.empty_like(self._host).pin_memory(), torch.empty_like(self._host, device=self._device)

    def _sent(self, host: Tensor) -> Tensor:
        self._check_capture("a table of it is not there yet")
        return host.clone() if self._device.type == "cpu" else self._pinned(host).to(self._device, non_blocking=True)

    def _pinned(self, host: Tensor) -> Tensor:
        """A copy of its own, which torch keeps until the GPU has read it."""
        return host if self._device.type == "cpu" else host.pin_memory()

    def _check_capture(self, what: str) -> None:
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise OptimizerError(_CAPTURE.format(what))


_CAPTURE = (
    "this optimizer is being captured in a CUDA graph, and {} since its last step outside of one: take a step with all "
    "gradients and the options that the graph is to have, then capture"
)


def _same(one: Options, other: Options) -> bool:
    """Whether options are the same numbers; which tensor has the learning rate does not matter."""
    if isinstance(one.lr, Tensor) or isinstance(other.lr, Tensor):
        return (
            isinstance(one.lr, Tensor)
            and isinstance(other.lr, Tensor)
            and one._replace(lr=0.0) == other._replace(lr=0.0)
        )
    return one == other


def _numbers(options: Options, corrections: list[float]) -> list[float]:
    """A group's row, its bias corrections added to all."""
    row = [0.0] * table.OPTIONS
    o, row[table.FIRST_COUNT], row[table.SECOND_COUNT] = options, 1.0, 1.0
    row[: table.EPS + 1] = (
        o.sign, o.beta1, o.rest1, o.beta2, 1 - o.beta2, o.l2, o.decay, 0.0 if isinstance(o.lr, Tensor) else o.lr, o.eps
    )  # fmt: skip
    if o.rule == "adam":
        for at, made in (
            (table.FIRST_AT, _first_corrections(o.beta1)), (table.SECOND_AT, _second_corrections(o.beta2)),
        ):  # fmt: skip
            row[at : at + 2] = float(len(corrections)), float(len(made))
            corrections += made
    return row


def _row(t: Tensors) -> list[int]:
    """A tensor's row."""
    row = [0] * table.COLUMNS
    row[table.WEIGHT], row[table.GRAD], row[table.STEP] = t.weight.data_ptr(), t.grad.data_ptr(), t.step.data_ptr()
    for kept in t.kept.values():
        row[table.KEPT] = kept.data_ptr()
    for at, moment in zip((table.FIRST, table.SECOND), t.moments, strict=False):
        parts = moment.parts if isinstance(moment, Coded) else {"codes": moment}
        for offset, part in enumerate(("codes", "scale", "exponent", "center")):
            row[at + offset] = parts[part].data_ptr() if part in parts else 0
    row[table.RESIDUAL] = 0 if t.residual is None else t.residual.data_ptr()
    row[table.SIZE], row[table.INDEX], row[table.GROUP] = t.weight.numel(), t.index, t.group
    row[table.START], row[table.RUN], row[table.STRIDE] = t.place or (0, 1, 1)
    row[table.SEED] = t.seed - (t.seed >> 63 << 64)
    return row


