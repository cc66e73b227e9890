"""An optimizer step over tensors of one kind in one pass over memory, for any update rule that is a formula.

Weights and gradients are fp32, bf16 or fp16, moments these or codes. Per element: decode to float32, update, round,
store. The arithmetic is the formula's (`kernels.arithmetic`) operation by operation, so results are equal bit for bit
(no fast-math, no contraction). A tensor's dtype is encoded in its numpy type, as numpy has no bfloat16: float32 is
itself, bfloat16 is viewed as uint16, float16 as int16. Moments that are 8-bit codes in equal tiles are read and written
tile by tile (`optimizer_loops`), others chunk by chunk (`kernels.cpu.coded`). Norms of the whole tensor that a formula
takes, and the amaxes of moments with one scale, each take a pass before, which writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from halfstep.kernels.arithmetic import Part, Program
from halfstep.kernels.cpu import coded
from halfstep.kernels.cpu.arrays import array
from halfstep.kernels.cpu.coded import BlockCoding, Coded, arguments, coding_of, has_safe_scale
from halfstep.kernels.cpu.compiled import CHUNK
from halfstep.kernels.cpu.masters import KEPT, PLAIN
from halfstep.kernels.cpu.optimizer_loops import find_norms, note_largest, step
from halfstep.kernels.cpu.optimizer_types import Like, LikeType, like_type
from halfstep.kernels.operator import blank


Moment = Tensor | Coded
"""A moment as an optimizer stores it."""
Names = tuple[tuple[str, ...], tuple[str, ...]]

_FLOATS = {torch.float32, torch.bfloat16, torch.float16}
_PLAIN = (Tensor, torch.nn.Parameter)
_dtype = attrgetter("dtype")


class Codes(NamedTuple):
    """A moment stored as codes that kernels support."""

    coding: BlockCoding
    parts: Mapping[str, Tensor]


class Numbers(NamedTuple):
    """The scalars of a step."""

    program: Program
    scale: Any
    """The factor on the stored gradient, a float32: 1/S, times the clipping coefficient, times -1 to maximize."""
    given: tuple[float, ...]
    """The values of `program.names`."""
    taken: tuple[Any, ...] | None
    """The scalars that elements take; None where they depend on scalar moments of the tensor."""


def prepare(
    names: Names, weight: Tensor, master: str, kept: Mapping[str, Tensor], grad: Tensor,
    moments: Mapping[str, Moment], rounding: str,
) -> Callable[[Tensor, Numbers, int | None], bool] | None:  # fmt: skip
    """The in-place update of a weight, its master and its moments, valid while their addresses stay the same: a
    function of the gradient, the `Numbers` of the step, and the seed that keys the noise of stochastic rounding
    (`quant.noise_bits`; None rounds to nearest even).

    None unless all are dense contiguous CPU tensors, rounded to nearest (bf16: stochastic too). The function returns
    False, having written nothing, where a moment with one scale is not finite or too large for the kernel. `names` are
    those of moments with one scalar per tensor, and of moments per element; gradients must be like `grad`.
    """
    (one_each, each), size, twice = names, weight.numel(), master == "none"
    floats, shared, parts = [weight, grad], [], list[Tensor]()
    taken: dict[str, Tensor | Codes] = {}
    for name, moment in moments.items():
        if name in one_each and isinstance(moment, Tensor):
            shared.append(moment)
        elif isinstance(moment, Tensor):
            floats.append(moment)
            taken[name] = moment
            twice = twice and name in each  # moments with a residual have no pass that finds amaxes alone
        elif name in each:
            codes, columns = moment.parts["codes"], moment.shape[-1] if moment.shape else 1
            coding = coding_of(moment.quantizer, columns, codes.dtype)
            if coding is None or codes.numel() != size:
                return None
            parts += moment.parts.values()
            taken[name] = Codes(coding, moment.parts)
        else:
            return None
    odd = rounding != "nearest_even" and (rounding != "stochastic" or weight.dtype != torch.bfloat16)
    if odd or master not in KEPT or grad.is_neg():
        return None
    for t in (*floats, *kept.values(), *parts):
        if (type(t) not in _PLAIN and not hasattr(t, "fake_mode")) or not t.is_cpu or t.layout != torch.strided:
            return None
        if not t.is_contiguous():
            return None
    for one in shared:
        if not one.is_cpu or one.dtype != torch.float32:
            return None
    if {*map(Tensor.numel, (*floats, *kept.values()))} != {size} or not {*map(_dtype, floats)} <= _FLOATS:
        return None
    own, rests, tiles, coded, alone = {}, {}, set[Any](), list[int | None](), True
    for name in each:
        held = own[name] = taken[name]
        rests[name] = taken.get(name + REST)
        coded.append(id(held.coding.quantizer) if isinstance(held, Codes) else None)
        tiles.add(held.coding.tile if isinstance(held, Codes) else None)
        if isinstance(held, Codes) and held.coding.whole:
            if not twice or not has_safe_scale(*held):  # checked last: for a CUDA tensor it synchronizes
                return None
            alone = False
    if hasattr(weight, "fake_mode"):
        return lambda grad, numbers, seed: blank(grad, weight, *kept.values())
    beside, tile = _NOTHING, tiles.pop() if len(tiles) == 1 else None
    if kept:
        beside = tuple([array(kept[name], PLAIN[kept[name].dtype]) if name in kept else None for name in _BESIDE])
    arguments = _taken(own, rests, {}) if alone else None
    kind = None if shared or not alone else (master, *map(_dtype, (*floats, *kept.values())), *coded)
    return Update(array(weight, PLAIN[weight.dtype]), beside, shared, own, rests, arguments, tile, kind)


@dataclass(frozen=True, eq=False)
class Update:
    """The update that `prepare` returns."""

    weight: Any
    kept: Any
    shared: list[Tensor]
    moments: Mapping[str, Tensor | Codes]
    rests: Mapping[str, Any]
    arguments: tuple[Any, ...] | None
    """The kernels' arguments for the moments; None where some have one scale, which changes with each step."""
    tile: Any
    """The `BlockCoding.tile` that all moments share; None where they do not."""
    kind: tuple[Any, ...] | None
    """Updates of the same kind may be run together; None: only alone."""

    def __call__(self, grad: Tensor, numbers: Numbers, seed: int | None) -> bool:
        element, taken, after = numbers.program.element, numbers.taken, tuple[Any, ...]()
        if taken is None:
            taken, after = numbers.program.numbers(numbers.given, [one.item() for one in self.shared])
        taken, factors = (numbers.scale, *taken), dict[str, Tensor]()
        if self.arguments is None:  # a moment's scale is among the scalars and changes each step
            run = Updates([(self.weight, self.kept, _taken(self.moments, self.rests, {}))], self.tile)
        else:
            run = self._alone
        if (normed := numbers.program.normed).results:
            taken += run.norms(grad, normed, taken)
        if self.arguments is None:
            found = self._factors(run, grad, element, taken)
            if found is None:
                return False
            factors, moments = found, _taken(self.moments, self.rests, found)
            run = Updates([(self.weight, self.kept, moments)], self.tile)
        run([grad], element, taken, None if seed is None else [seed])
        for name, factor in factors.items():
            self.moments[name].parts["scale"].copy_(factor.reciprocal())  # type: ignore[union-attr]
        for one, now in zip(self.shared, after, strict=True):
            one.fill_(float(now))
        return True

    @cached_property
    def _alone(self) -> Updates:
        return Updates([(self.weight, self.kept, self.arguments)], self.tile)

    def _factors(self, run: Updates, grad: Tensor, element: Part, taken: tuple[Any, ...]) -> dict[str, Tensor] | None:
        """The factors on new moments with one scale; None where they cannot be written."""
        codes = {name: moment for name, moment in self.moments.items() if isinstance(moment, Codes)}
        if not all(has_safe_scale(*moment) for moment in codes.values()):  # scales may have changed
            return None
        factors: dict[str, Tensor] = {}
        for name, amax in zip(self.moments, run.largest(grad, element, taken, len(self.moments)), strict=True):
            if name in codes and not np.isfinite(amax):
                return None
            if name in codes and codes[name].coding.whole:
                factor = coded.whole_factor(codes[name].coding.quantizer, amax)
                if factor is None:
                    return None
                factors[name] = factor
        return factors


def _taken(
    moments: Mapping[str, Tensor | Codes], rests: Mapping[str, Any], factors: Mapping[str, Tensor]
) -> tuple[Any, ...]:
    """The kernels' arguments for the moments."""
    taken = []
    for name, moment in moments.items():
        if isinstance(moment, Codes):
            taken.append((*arguments(*moment, float(factors.get(name, 1.0))), None))
        else:
            rest = rests[name]
            beside = array(rest, PLAIN[rest.dtype]) if isinstance(rest, Tensor) else None
            taken.append((array(moment, PLAIN[moment.dtype]), *coded.PLAIN, beside))
    return tuple(taken)


class Updates:
    """Updates of one kind, run by one kernel call, valid while the tensors' addresses stay the same.

    Args:
        tensors: for each update the weight, its master's tensors and the kernels' arguments for the moments.
        tile: as `Update.tile`.
        counts: the tensors' step counts (float32 scalars), which a step increases by 1; empty: they are not changed.
    """

    def __init__(self, tensors: Sequence[tuple[Any, ...]], tile: Any, counts: Sequence[Tensor] = ()) -> None:
        self._first, self._tile, rows = tensors[0], tile, list[list[int]]()
        for lies in tensors:
            row, left = [0, lies[0].size], list[Any]([lies])  # addresses and sizes, the gradient's first
            kinds, numbers = list[Any](), list[bytes]()
            while left:
                part = left.pop()
                if isinstance(part, tuple):
                    kinds += type(part), len(part)
                    left += part[::-1]
                elif isinstance(part, np.ndarray):
                    kinds += part.dtype, part.ndim, part.flags.writeable
                    row += part.__array_interface__["data"][0], part.size
                else:
                    kinds.append(type(part))
                    numbers += [] if part is None else [np.asarray(part).tobytes().ljust(8, b"\0")]
            rows.append(row)
        self._kinds, self._numbers = tuple(kinds), np.frombuffer(b"".join(numbers) + b"\0", np.uint8)  # all alike
        self._likes: dict[tuple[Part, torch.dtype], Like] = {}
        self._rows, self._starts = np.array(rows), np.zeros(len(rows) + 1, np.int64)
        np.cumsum(np.maximum(-(-self._rows[:, 1] // CHUNK), 1), out=self._starts[1:])  # an empty tensor counts too
        self._counts = np.array(list(map(Tensor.data_ptr, counts)) or [0] * len(rows))
        self._size = int(self._rows[:, 1].sum())

    def __call__(self, grads: Sequence[Tensor], element: Part, taken: tuple[Any, ...], seeds: Any) -> None:
        """Take a step with these gradients, the scalars `taken` and 64-bit seeds of noise, or None."""
        like = self._with(grads, element)
        keys = None if seeds is None else np.asarray(seeds, np.uint64).view(np.uint32).reshape(-1, 2)  # low half first
        step(self._size, self._starts, self._rows, self._counts, like, taken, keys, self._tile)

    def norms(self, grad: Tensor, normed: Part, taken: tuple[Any, ...]) -> tuple[Any, ...]:
        """The norms over the single tensor of this object that elements take."""
        found = np.empty(len(normed.results), np.float32)
        find_norms(self._size, self._rows, self._with([grad], normed), taken, found)
        return tuple(found)

    def largest(self, grad: Tensor, element: Part, taken: tuple[Any, ...], moments: int) -> Any:
        """The amaxes of the new moments of the single tensor of this object."""
        found = np.zeros((self._starts[-1], moments), np.uint32)
        note_largest(self._size, self._rows, self._with([grad], element), taken, found)
        return found.max(0, initial=0).view(np.float32)

    def _with(self, grads: Sequence[Tensor], element: Part) -> Like:
        """The kernels' argument for the tensors' types; sets the addresses of the gradients."""
        places, dtype = list(map(Tensor.data_ptr, grads)), grads[0].dtype
        if 0 in places:
            list(map(array, grads))  # raises for those that are not empty but have no storage
        self._rows[:, 0] = places
        like = self._likes.get((element, dtype))
        if like is None:
            key = element, dtype, self._kinds
            if key not in _TYPES:
                _TYPES[key] = like_type(element, (array(grads[0], PLAIN[dtype], kept=False), *self._first))
            like = self._likes[element, dtype] = Like(_TYPES[key], self._numbers, self._numbers.ctypes.data)
        return like


_TYPES: dict[tuple[Any, ...], LikeType] = {}
"""Cached by rule, the gradient's dtype and the types of the other tensors."""
REST = "_residual"
"""The suffix of the name of a moment's residual."""
_BESIDE = [name for name in KEPT.values() if name]
_NOTHING = (None,) * len(_BESIDE)
