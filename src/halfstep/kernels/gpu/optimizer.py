"""Optimizer steps on a GPU: one launch computes each tensor's scalars, then one per kind of tensor updates them all."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.errors import OptimizerError
from halfstep.kernels.arithmetic import SQUARES, Program
from halfstep.kernels.cpu.coded import Coded
from halfstep.kernels.gpu import Launch, functions, prepared, source, table
from halfstep.kernels.gpu.kinds import Options, Tensors, codes_of, constants_of, has_one_scale, kind_of


BLOCK = SQUARES
"""Elements per program: one block of `arithmetic.norm`."""
EACH, MANY = 4, 1 << 14
"""Blocks that one program updates one after another, so that their addresses stay in the L1 cache, where there are at
least MANY blocks. On an H200 one block per program takes 1.05 of the time, but 0.84 for moments in codebooks, which are
looked up."""
TENSORS = 128
"""Tensors per program of the launch that computes scalars."""


# ---- tables ----------------------------------------------------------------------------------------------------------


class Steps:
    """The launches that step these tensors, valid while their addresses do not change.

    All that changes from step to step is on the GPU: step counts, learning rates, the divisor of gradients, and whether
    one of them overflowed. So the host never synchronizes, and a CUDA graph may capture the launches.
    """

    def __init__(self, tensors: Sequence[Tensors], options: Sequence[Options]) -> None:
        self._device = codes_of(tensors[0].weight).device
        self._options: list[Options | None] = [None] * len(options)
        self._settings: list[Any] = []
        self._captures = [(own.program, own.rows) for own in options]
        self._table = torch.empty(len(options), table.OPTIONS, dtype=torch.float64, device=self._device)
        self._grads = [codes_of(t.grad).data_ptr() for t in tensors]
        self._coded = [number for number, t in enumerate(tensors) if isinstance(t.grad, Coded)]
        rows = [_row(t) for t in tensors]
        self._host = torch.tensor(rows, dtype=torch.int64, device="cpu")
        self._scales = [rows[number][table.GRAD_SCALE] for number in self._coded]
        self._rows = self._sent(self._host)
        self._numbers = torch.empty(len(tensors), table.NUMBERS, device=self._device, dtype=torch.float32)
        # For a graph that is captured when gradients have moved: it gets a table of addresses of its own.
        self._spare = self._pair() if self._device.type == "cuda" else None
        self._kept: list[Tensor] = []
        self._captured = False
        """Whether a captured CUDA graph reads the current table of addresses."""
        self.held = False
        """Whether a captured CUDA graph reads any of these tensors."""
        kinds: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        programs: dict[Program, list[int]] = {}
        for number, t in enumerate(tensors):
            places = kinds.setdefault(kind_of(t, options[t.group]), [])
            places += [(number, block) for block in range(-(-codes_of(t.weight).numel() // BLOCK))]
            programs.setdefault(options[t.group].program, []).append(number)
        made = [(key[0], places, *constants_of(key, self._device)) for key, places in kinds.items()]
        self._most = None
        if any(has_one_scale(constants) for *_, constants in made):
            self._most = torch.empty(len(tensors), table.MOST, dtype=torch.int32, device=self._device)
        self._prepare: list[tuple[Launch, Tensor]] = []
        for program, numbers in programs.items():
            given = options[tensors[numbers[0]].group].numbers
            find = functions("generated").made(source.finding, program, len(program.names) - 1 - len(given))
            launch = prepared(functions("optimizer").prepare, self._device, FIND=find, B=TENSORS)
            self._prepare.append((launch, self._sent(torch.tensor(numbers, dtype=torch.int32, device="cpu"))))
        self._kinds: list[tuple[Launch, int, tuple[Any, ...]]] = []
        for program, places, elements, constants in made:
            moved = functions("generated").made(source.moving, program)
            blocks = self._sent(torch.tensor(places, dtype=torch.int32, device="cpu").view(-1, 2))
            # One scale per tensor needs the amax of all new values, so a first launch computes them without writing.
            twice = has_one_scale(constants)
            arguments = (blocks, self._numbers, self._most if twice else None, *elements, len(places))
            each = EACH if len(places) >= MANY and elements == (None, None) else 1
            if program.normed.results:
                self._kinds += self._norms(program, places, blocks, elements, constants)
            for foresees in (True, False) if twice else (False,):
                options_of = {**constants, "MOVED": moved, "FORESEES": foresees, "EACH": each, "B": BLOCK}
                launch = prepared(functions("optimizer").update, self._device, **options_of)
                self._kinds.append((launch, -(-len(places) // each), arguments))
        self.set(options)

    def _norms(
        self, program: Program, places: list[tuple[int, int]], blocks: Tensor, elements: Any, constants: Any
    ) -> list[tuple[Launch, int, tuple[Any, ...]]]:
        """The launches that compute the norms of the tensors of these blocks."""
        made, count = functions("optimizer"), len(program.normed.results)
        sums = torch.empty(len(places), count, dtype=torch.float64, device=self._device)
        begin = [(number, place) for place, (number, block) in enumerate(places) if not block]
        each = self._sent(torch.tensor(begin, dtype=torch.int32, device="cpu").view(-1, 2))
        normed, first = functions("generated").made(source.norming, program), table.TAKEN + program.taken
        square = prepared(made.square, self._device, **constants, NORMED=normed, COUNT=count, B=BLOCK)
        norm = prepared(made.norm, self._device, FIRST_NORM=first, COUNT=count, B=BLOCK)
        return [
            (square, len(places), (blocks, self._numbers, sums, *elements)),
            (norm, len(begin), (each, sums, self._numbers)),
        ]

    def set(self, options: Sequence[Options]) -> None:
        """Set the options of the parameter groups; their `kind_of` must not have changed."""
        if not all(map(_same, options, self._options)):
            self._check_capture("its options have changed")
            settings = [(own.by_step, own.settings) for own in options]
            if settings != self._settings:
                self._places, by_step = _by_step(options)
                self._settings = settings
                self._by_step = self._sent(torch.tensor(by_step, dtype=torch.float64, device="cpu"))
            rows = [_given(own, place) for own, place in zip(options, self._places, strict=True)]
            self._table.copy_(self._pinned(torch.tensor(rows, dtype=torch.float64, device="cpu")), non_blocking=True)
            self._options = list(options)
        for group, own in enumerate(options):
            for place, number in enumerate(own.numbers):
                if isinstance(number, Tensor):
                    self._table[group, table.GIVEN + place].copy_(number)

    def takes(self, options: Sequence[Options]) -> bool:
        """Whether a CUDA graph that captured these launches would follow these options, once they are `set`."""
        return [(own.program, own.rows) for own in options] == self._captures

    def find(self, grads: list[int], scales: list[int]) -> None:
        """Set the addresses of the gradients, of the same kinds as before, and of the scales of those that are
        codes."""
        if grads == self._grads and scales == self._scales:
            return
        self._grads, self._scales = grads, scales
        # Through numpy: torch takes three times as long to convert a list of ints.
        self._host[:, table.GRAD] = torch.tensor(np.array(grads), dtype=torch.int64, device="cpu")
        if scales:
            self._host[self._coded, table.GRAD_SCALE] = torch.tensor(np.array(scales), dtype=torch.int64, device="cpu")
        if self._capturing:
            if self._spare is None:
                raise OptimizerError(_CAPTURE.format("its gradients have moved"))
            (pinned, self._rows), self._spare = self._spare, None
            pinned.copy_(self._host)
            self._rows.copy_(pinned, non_blocking=True)
            self._kept.append(pinned)
        elif self._captured:  # a graph reads the old table, which must not change
            self._rows, self._spare = self._sent(self._host), self._spare or self._pair()
            self._captured = False
        else:
            self._rows.copy_(self._pinned(self._host), non_blocking=True)

    def run(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Take a step with gradients divided by `grad_scale`, unless `found_inf` is not 0: float32 scalars on the
        device."""
        if self._capturing:
            self.held = self._captured = True
            self._kept += [self._rows, self._by_step]
        for find, which in self._prepare:
            find(
                -(-which.numel() // TENSORS), self._rows, which, self._table, self._by_step, self._numbers, self._most,
                grad_scale, found_inf, which.numel(),
            )  # fmt: skip
        for launch, grid, arguments in self._kinds:
            launch(grid, self._rows, *arguments)

    def _pair(self) -> tuple[Tensor, Tensor]:
        return torch.empty_like(self._host).pin_memory(), torch.empty_like(self._host, device=self._device)

    def _sent(self, host: Tensor) -> Tensor:
        self._check_capture("a table of it is not there yet")
        return host.clone() if self._device.type == "cpu" else self._pinned(host).to(self._device, non_blocking=True)

    def _pinned(self, host: Tensor) -> Tensor:
        """A pinned copy, which torch keeps until the GPU has read it; on a CPU `host` itself."""
        return host if self._device.type == "cpu" else host.pin_memory()

    @property
    def _capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _check_capture(self, what: str) -> None:
        if self._capturing:
            raise OptimizerError(_CAPTURE.format(what))


_CAPTURE = (
    "this optimizer is being captured in a CUDA graph, and {} since its last step outside of one: take a step with all "
    "gradients and the options that the graph is to have, then capture"
)


def _same(one: Options, other: Options | None) -> bool:
    """Whether two options are equal, apart from the values of those that are tensors."""
    return other is not None and _without_tensors(one) == _without_tensors(other)


def _without_tensors(own: Options) -> Options:
    return own._replace(numbers=tuple([0.0 if isinstance(n, Tensor) else n for n in own.numbers]))


def _by_step(options: Sequence[Options]) -> tuple[list[tuple[float, float]], list[float]]:
    """For each group, the offset of its first value in a flat list of all `Options.rows` and its number of rows; and
    that list."""
    places, all_ = [], [0.0]
    for own in options:
        rows = own.rows or ((),)
        places.append((float(len(all_)), float(len(rows))))
        all_ += [number for row in rows for number in row]
    return places, all_


def _given(own: Options, place: tuple[float, float]) -> list[Any]:
    """A group's row of the table of options."""
    numbers = _without_tensors(own).numbers
    return [own.sign, *place, *numbers, *[0.0] * (table.OPTIONS - table.GIVEN - len(numbers))]


def _row(t: Tensors) -> list[int]:
    """A tensor's row of the table of addresses and sizes (`table`)."""
    row = [0] * table.COLUMNS
    kept = next(iter(t.kept.values()), None)
    for numbers, place, scale in (
        (t.weight, table.WEIGHT, table.WEIGHT_SCALE),
        (t.grad, table.GRAD, table.GRAD_SCALE),
        (kept, table.KEPT, table.KEPT_SCALE),
    ):
        if numbers is not None:
            row[place] = codes_of(numbers).data_ptr()
        if isinstance(numbers, Coded):
            row[scale] = numbers.parts["scale"].data_ptr()
    for at, moment in zip((table.FIRST, table.SECOND), t.moments, strict=False):
        parts = moment.parts if isinstance(moment, Coded) else {"codes": moment}
        for offset, part in enumerate(("codes", "scale", "exponent", "center")):
            row[at + offset] = parts[part].data_ptr() if part in parts else 0
    row[table.STEP] = t.step.data_ptr()
    for shared in t.shared:
        row[table.SHARED] = shared.data_ptr()
    row[table.RESIDUAL] = 0 if t.residual is None else t.residual.data_ptr()
    row[table.SIZE], row[table.INDEX], row[table.GROUP] = codes_of(t.weight).numel(), t.number, t.group
    row[table.START], row[table.RUN], row[table.STRIDE] = t.place or (0, 1, 1)
    row[table.SEED] = t.seed - (t.seed >> 63 << 64)
    return row
