"""The steps of an optimizer's tensors on a GPU: one launch finds the numbers of each, one more a kind moves them all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep import formats
from halfstep.errors import OptimizerError
from halfstep.formats import Codebook, Float
from halfstep.kernels.cpu import element_codes, elements
from halfstep.kernels.cpu.coded import Coded
from halfstep.kernels.cpu.element_codes import Coding, Decoding
from halfstep.kernels.cpu.elements import Rounding
from halfstep.kernels.cpu.masters import KEPT
from halfstep.kernels.gpu import table
from halfstep.kernels.gpu.launch import KINDS, functions, launch, lies_plain


BLOCK = 1024
"""Elements of a program."""
TENSORS = 128
"""Tensors of a program that finds numbers."""
LONGEST = 1 << 20
"""Entries that a table of bias corrections may have: a beta of 0.99997 has them all 1 by then."""

_KEPT = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int16: "int16"}


class Options(NamedTuple):
    """What a rule does with a group's tensors, in the words of torch.optim; all numbers are float64's."""

    rule: str
    """adam, lion, momentum, or descent."""
    lr: float | Tensor
    """A number, or a tensor on the GPU."""
    sign: float = 1.0
    """-1 to maximize."""
    beta1: float = 0.0
    rest1: float = 0.0
    """1 - beta1; of momentum, 1 - dampening."""
    beta2: float = 0.0
    l2: float = 0.0
    """Weight decay that is added to the gradient."""
    decay: float = 0.0
    """Weight decay that, times lr, is taken from the weight."""
    eps: float = 0.0
    nesterov: bool = False

    @property
    def kind(self) -> tuple[Any, ...]:
        """What other functions are compiled for."""
        return self.rule, bool(self.l2), self.nesterov


class Tensors(NamedTuple):
    """What one update takes: a weight, what its master keeps, its gradient and its moments."""

    weight: Tensor
    grad: Tensor
    step: Tensor
    """How many steps it has taken, a float32 scalar that the step counts on."""
    master: str
    kept: Mapping[str, Tensor]
    moments: Sequence[Tensor | Coded]
    """At most two."""
    residual: Tensor | None
    """What the second moment, of 16 bits, leaves over."""
    rounding: str
    place: tuple[int, int, int] | None
    """Where a part of a tensor lies in the whole: START, RUN and STRIDE of `table`; None: this is all of it."""
    seed: int
    """The run's one seed, of which each step makes its own for tensor number `index`."""
    index: int
    group: int

    @property
    def all(self) -> tuple[Tensor, ...]:
        """Every tensor of the weight's size, codes among them."""
        numbers = [moment.parts["codes"] if isinstance(moment, Coded) else moment for moment in self.moments]
        return self.weight, self.grad, *self.kept.values(), *numbers, *([] if self.residual is None else [self.residual])


class Kind(NamedTuple):
    """What one function is compiled for, beside how the two moments are kept."""

    rule: str
    l2: bool
    nesterov: bool
    weight: str
    grad: str
    master: str
    kept: str | None
    residual: bool
    noisy: bool
    spread: bool
    aligned: bool
    """Whether all tensors begin at multiples of 16 bytes."""


class Moment(NamedTuple):
    """How a moment is kept: as numbers of a dtype, or as codes of a byte with a scale for each `tile` of them."""

    kind: str
    tile: int = 0
    largest: int = 0
    """The bits of the format's largest value."""


def takes(tensors: Tensors, options: Options) -> bool:
    """Whether `Steps` can move these, of dense tensors anywhere."""
    weight, moments = tensors.weight, tensors.moments
    numbers = [moment for moment in moments if isinstance(moment, Tensor)]
    return (
        tensors.master in KEPT
        and all(lies_plain(t) for t in (weight, tensors.grad, *numbers))
        and all(lies_plain(t, *_KEPT) for t in tensors.kept.values())
        and all(t.numel() == weight.numel() and t.device == weight.device for t in tensors.all)
        and all(_knows(moment) for moment in moments if isinstance(moment, Coded))
        and (tensors.residual is None or (lies_plain(tensors.residual) and isinstance(moments[-1], Tensor)))
        and (tensors.rounding == "nearest_even" or _is_noisy(tensors))
        and (options.rule != "adam" or max(_count(options.beta1), _count(options.beta2)) <= LONGEST)
    )


def _is_noisy(tensors: Tensors) -> bool:
    return tensors.rounding == "stochastic" and tensors.weight.dtype == torch.bfloat16 and tensors.master == "none"


def _knows(moment: Coded) -> bool:
    """Whether kernels read and write these codes: a byte each, in tiles of the flat tensor whose scale is their largest
    magnitude over the largest element."""
    quantizer, scales = moment.quantizer, moment.quantizer.scales
    if scales is None or not scales.rule.quotient or quantizer.rounding != "nearest_even" or quantizer.outliers:
        return False
    tile, columns = scales.tile, moment.shape[-1] if moment.shape else 1
    whole = math.prod(moment.shape) == columns or (tile.columns and columns % tile.columns == 0)
    known = tile.rows == 1 and tile.columns in (32, 64, 128, 256, 512, 1024) and whole
    plain = all(lies_plain(moment.parts[part], dtype) for part, dtype in _PARTS.items())
    return bool(known and plain and moment.parts.keys() == _PARTS.keys() and _knows_format(quantizer.format))


_PARTS = {"codes": torch.uint8, "scale": torch.float32}


@cache
def _knows_format(format: Any) -> bool:
    if isinstance(format, Codebook):
        values = format.values()
        rising = all(format.decode(code) == value for code, value in enumerate(values))
        return len(values) == 256 and rising and format.ties == "lower"
    return isinstance(format, Float) and format.bits == 8 and element_codes.knows(format)


# ---- bias corrections ------------------------------------------------------------------------------------------------


def _count(beta: float) -> int:
    """After how many steps 1 - beta^t is 1."""
    if not 0 <= beta < 1:
        return LONGEST + 1
    return 1 if beta == 0 else math.ceil(-54 / math.log2(beta)) + 1


@cache
def _first_corrections(beta: float) -> tuple[float, ...]:
    """1 - beta^t, from t = 1 until it is 1."""
    return tuple(1 - beta**t for t in range(1, _count(beta) + 1))


@cache
def _second_corrections(beta: float) -> tuple[float, ...]:
    """1 / sqrt(1 - beta^t), from t = 1 until it is 1."""
    return tuple(1 / math.sqrt(1 - beta**t) for t in range(1, _count(beta) + 1))


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
            places = kinds.setdefault(_constants(t, options[t.group]), [])
            places += [(number, block) for block in range(-(-t.weight.numel() // BLOCK))]
        self._kinds = [
            (self._sent(torch.tensor(places, dtype=torch.int32).view(-1, 2)), len(places), _constexprs(key, self._device))
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
        return isinstance(one.lr, Tensor) and isinstance(other.lr, Tensor) and one._replace(lr=0.0) == other._replace(lr=0.0)
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
        for offset, part in enumerate(("codes", "scale")):
            row[at + offset] = parts[part].data_ptr() if part in parts else 0
    row[table.RESIDUAL] = 0 if t.residual is None else t.residual.data_ptr()
    row[table.SIZE], row[table.INDEX], row[table.GROUP] = t.weight.numel(), t.index, t.group
    row[table.START], row[table.RUN], row[table.STRIDE] = t.place or (0, 1, 1)
    row[table.SEED] = t.seed - (t.seed >> 63 << 64)
    return row


# ---- what functions are compiled for ---------------------------------------------------------------------------------


def _constants(t: Tensors, options: Options) -> tuple[Any, ...]:
    """The kind of a tensor, and the formats of its moments."""
    kept = next((_KEPT[kept.dtype] for kept in t.kept.values()), None)
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in t.all)
    noisy = t.rounding == "stochastic"
    kind = Kind(
        *options.kind, KINDS[t.weight.dtype], KINDS[t.grad.dtype], t.master, kept, t.residual is not None, noisy,
        noisy and t.place is not None, aligned,
    )  # fmt: skip
    moments: list[Any] = [
        (moment.quantizer.format, moment.quantizer.scales.tile.columns)  # type: ignore[union-attr]
        if isinstance(moment, Coded)
        else moment.dtype
        for moment in t.moments
    ]
    return kind, *(moments + [None, None])[:2]


def _constexprs(key: tuple[Any, ...], device: torch.device) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """What a launch of that kind is given beside tables."""
    kind, *moments = key
    looked_up: list[Tensor | None] = []
    constants: dict[str, Any] = {"K": kind, "HALF": _half()}
    for number, kept in enumerate(moments, 1):
        moment = rounding = coding = decoding = found = None
        if isinstance(kept, torch.dtype):
            moment = Moment(KINDS[kept])
        elif kept is not None:
            format, tile = kept
            moment = Moment("codes", tile, elements.float_bits(format.max))
            if isinstance(format, Codebook):
                moment, found = moment._replace(kind="places"), _elements(format, device)
            else:
                one, two = element_codes.scalars(format, "nearest_even", "saturate")
                rounding, coding = Rounding(*map(int, one)), Coding(*map(int, two))
                decoding = Decoding(*map(int, element_codes.decoding_scalars(format)))
        looked_up.append(found)
        names = (f"M{number}", f"P{number}", f"C{number}", f"D{number}")
        constants |= dict(zip(names, (moment, rounding, coding, decoding), strict=True))
    return tuple(looked_up), constants


def _half() -> Rounding:
    """float16's rounding as torch's conversions do it."""
    return Rounding(*map(int, elements.scalars(formats.get("fp16"), "nearest_even", "ieee", torch.float16)))


def _elements(format: Codebook, device: torch.device) -> Tensor:
    """The values of a codebook, then the cuts between them."""
    cuts = element_codes.cut_points(format, with_values=False)
    return torch.tensor([*format.values(), *map(float, cuts)], dtype=torch.float32, device=device)
