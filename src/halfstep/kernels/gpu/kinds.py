"""Which tensors the kernels of optimizers take, and what each kind of them is compiled for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep import formats
from halfstep.formats import Codebook, Float
from halfstep.kernels.arithmetic import Program
from halfstep.kernels.cpu import element_codes, elements, expansion
from halfstep.kernels.cpu.coded import Coded
from halfstep.kernels.cpu.element_codes import Coding, Decoding
from halfstep.kernels.cpu.elements import Rounding
from halfstep.kernels.cpu.masters import KEPT
from halfstep.kernels.gpu import places, quantizers, table
from halfstep.kernels.gpu.launch import KINDS, lies_plain
from halfstep.kernels.gpu.places import Bins
from halfstep.kernels.gpu.quantizers import Rule
from halfstep.quant.scaling.expansion import Expansion
from halfstep.quant.tile import TENSOR


LONGEST = 1 << 20
"""Steps after which what follows from their number must stay: bias corrections of a beta of 0.99996 do."""

_BYTES = "uint8"
_KEPT = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int16: "int16", torch.int8: _BYTES}
_SCALED = (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
"""Of codes that lie as numbers of a dtype, under the smallest power of two that brings all of them in range."""


class Options(NamedTuple):
    """What a formula is given of a group; all numbers are float64's."""

    program: Program
    sign: float
    """What gradients are multiplied by: -1 to maximize."""
    numbers: tuple[float | Tensor, ...]
    """The last of `program.names`; a tensor is on the GPU."""
    by_step: Callable[[int, Mapping[str, Any]], Mapping[str, float]]
    """The numbers of a step by its number and `settings`: the names after `step`. Beyond some step they stay."""
    settings: tuple[tuple[str, Any], ...]

    @property
    def rows(self) -> tuple[tuple[float, ...], ...] | None:
        """What `by_step` gives from the first step on, until it stays; None where that takes too long."""
        return _rows(self.by_step, self.settings)


@lru_cache(maxsize=256)
def _rows(by_step: Any, settings: tuple[tuple[str, Any], ...]) -> tuple[tuple[float, ...], ...] | None:
    def row(step: int) -> tuple[float, ...]:
        return tuple(by_step(step, dict(settings)).values())

    last, below, at = row(1 << 40), 0, LONGEST
    if row(at) != last:
        return None
    while at - below > 1:
        middle = (at + below) // 2
        below, at = (below, middle) if row(middle) == last else (middle, at)
    return tuple(map(row, range(1, at + 1)))


class Tensors(NamedTuple):
    """What one update takes: a weight, what its master keeps, its gradient and its moments; each numbers or codes."""

    weight: Tensor | Coded
    grad: Tensor | Coded
    step: Tensor
    """How many steps it has taken, a float32 scalar that the step counts on."""
    master: str
    kept: Mapping[str, Tensor | Coded]
    moments: Sequence[Tensor | Coded]
    """At most two."""
    residual: Tensor | None
    """What the second moment, of 16 bits, leaves over."""
    rounding: str
    place: tuple[int, int, int] | None
    """Where a part of a tensor lies in the whole: START, RUN and STRIDE of `table`; None: this is all of it."""
    seed: int
    """The run's one seed, of which each step makes its own for tensor number `number`."""
    number: int
    group: int
    shared: Sequence[Tensor] = ()
    """Moments that are one number of the tensor."""

    @property
    def all(self) -> tuple[Tensor, ...]:
        """Every tensor of the weight's size, codes among them."""
        residual = [] if self.residual is None else [self.residual]
        return *map(codes_of, (self.weight, self.grad, *self.kept.values(), *self.moments)), *residual


def codes_of(numbers: Tensor | Coded) -> Tensor:
    """The tensor of a weight's size: the numbers themselves, or their codes."""
    return numbers.parts["codes"] if isinstance(numbers, Coded) else numbers


class Kind(NamedTuple):
    """What one function is compiled for, beside how codes are read and written."""

    weight: str
    grad: str
    master: str
    kept: str | None
    residual: bool
    noisy: bool
    spread: bool
    aligned: bool
    """Whether all tensors begin at multiples of 16 bytes."""


class Form(NamedTuple):
    """How numbers are kept: in a dtype; as codes of a byte with a scale for each `tile` of them; or as codes of a byte
    or a dtype under one scale of the tensor, which follows from its largest magnitude by a `rule`."""

    kind: str
    tile: int = 0
    largest: int = 0
    """The bits of the format's largest value."""
    range: int = 0
    """Of an expanded range the bits of its log2, and of the largest value's log2."""
    top: int = 0
    sixteenths: bool = False
    """Whether exponents are whole sixteenths."""
    rule: Rule | None = None
    rounding: Rounding | None = None
    coding: Coding | None = None
    decoding: Decoding | None = None
    """Of floats of a byte."""
    container: str = "uint8"
    """As what kernels load codes under one scale."""
    bins: Bins | None = None
    """Of a codebook."""


def takes(tensors: Tensors, options: Options) -> bool:
    """Whether `optimizer.Steps` can move these, of dense tensors anywhere."""
    weight, moments, grad = tensors.weight, tensors.moments, tensors.grad
    numbers = [one for one in (weight, grad, *moments) if isinstance(one, Tensor)]
    one_scale = [one for one in (weight, grad, *tensors.kept.values()) if isinstance(one, Coded)]
    size, device = codes_of(weight).numel(), codes_of(weight).device
    return (
        tensors.master in (KEPT if isinstance(weight, Tensor) else ("codes",))
        and (isinstance(grad, Tensor) or isinstance(weight, Coded))
        and len(tensors.kept) <= 1
        and all(map(lies_plain, numbers))
        and all(_knows_one_scale(one) for one in one_scale)
        and all(lies_plain(t, *_KEPT) for t in tensors.kept.values() if isinstance(t, Tensor))
        and all(t.numel() == size and t.device == device for t in tensors.all)
        and all(_knows_one_scale(one) or _knows_tiles(one) for one in moments if isinstance(one, Coded))
        and (tensors.residual is None or (lies_plain(tensors.residual) and _is_second(moments)))
        and (tensors.rounding == "nearest_even" or _is_noisy(tensors))
        and len(moments) <= 2
        and all(lies_plain(t, torch.float32) and t.numel() == 1 and t.device == device for t in tensors.shared)
        and _fits(options)
    )


def _is_second(moments: Sequence[Tensor | Coded]) -> bool:
    return len(moments) == 2 and isinstance(moments[1], Tensor)


def _fits(options: Options) -> bool:
    """Whether the tables have room for what a formula is given."""
    program = options.program
    taken = len(program.scalars.results) - len(program.shared)
    room = taken <= table.NUMBERS - table.TAKEN and len(options.numbers) <= table.OPTIONS - table.GIVEN
    return room and len(program.shared) <= 1 and options.rows is not None


def _is_noisy(tensors: Tensors) -> bool:
    bf16 = codes_of(tensors.weight).dtype == torch.bfloat16
    return tensors.rounding == "stochastic" and bf16 and tensors.master == "none"


def _knows_one_scale(coded: Coded) -> bool:
    """Whether kernels read and write these codes under one float32 scale of the tensor, rounded to nearest: numbers of
    a dtype times a power of two, or bytes of a float under a scale that is no power."""
    quantizer, scales, codes = coded.quantizer, coded.quantizer.scales, coded.parts["codes"]
    if (
        scales is None
        or scales.tile != TENSOR
        or quantizer.rounding != "nearest_even"
        or quantizer.outliers is not None
    ):
        return False
    rule, scale = quantizers.rule(quantizer.format, scales.rule), coded.parts["scale"]
    if rule is None or rule.part is not None or (codes.dtype == torch.uint8 and not _knows_format(quantizer.format)):
        return False
    lies = lies_plain(codes, *(_SCALED if rule.kind == "power" else (torch.uint8,)))
    bytes = isinstance(quantizer.format, Float) and rule.kind in ("power", "reciprocal", "quotient")
    return bytes and lies and len(coded.parts) == 2 and lies_plain(scale, torch.float32) and scale.numel() <= 1


def _knows_tiles(moment: Coded) -> bool:
    """Whether kernels read and write these codes: a byte each, in tiles of the flat tensor, rounded to nearest, with
    scales that are their largest magnitudes over the largest element, or with expanded ranges."""
    quantizer, scales = moment.quantizer, moment.quantizer.scales
    if scales is None or quantizer.rounding != "nearest_even" or quantizer.outliers is not None:
        return False
    tile, columns = scales.tile, moment.shape[-1] if moment.shape else 1
    along = tile.rows == 1 and tile.columns in (32, 64, 128, 256, 512, 1024)
    flat = math.prod(moment.shape) == columns or bool(tile.columns and columns % tile.columns == 0)
    parts = ("scale", "exponent", "center") if isinstance(scales.rule, Expansion) else ("scale",)
    return (
        along
        and flat
        and (scales.rule.quotient or (isinstance(scales.rule, Expansion) and isinstance(quantizer.format, Float)))
        and _knows_format(quantizer.format)
        and moment.parts.keys() == {"codes", *parts}
        and lies_plain(moment.parts["codes"], torch.uint8)
        and all(lies_plain(moment.parts[part], torch.float32) for part in parts)
    )


@cache
def _knows_format(format: Any) -> bool:
    if isinstance(format, Codebook):
        return places.known(format)
    return isinstance(format, Float) and format.bits == 8 and element_codes.knows(format)


# ---- what functions are compiled for ---------------------------------------------------------------------------------


def kind_of(t: Tensors, options: Options) -> tuple[Any, ...]:
    """The program and kind of a tensor; and how its weight, master, gradient and its two moments are coded."""
    kept = next(iter(t.kept.values()), None)
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in t.all)
    noisy = t.rounding == "stochastic"
    kind = Kind(
        _container(t.weight), _container(t.grad), t.master, None if kept is None else
        _container(kept), t.residual is not None, noisy, noisy and t.place is not None, aligned,
    )  # fmt: skip
    moments: list[Any] = [_kept(moment) or moment.dtype for moment in t.moments]  # type: ignore[union-attr]
    return options.program, kind, _kept(t.weight), _kept(kept), _kept(t.grad), *[*moments, None, None][:2]


def _container(numbers: Tensor | Coded) -> str:
    """As what a kernel loads them."""
    dtype = codes_of(numbers).dtype
    return _BYTES if dtype.itemsize == 1 else KINDS.get(dtype) or _KEPT[dtype]


def _kept(numbers: Tensor | Coded | None) -> Any:
    """Format, scales and container of what is codes."""
    if not isinstance(numbers, Coded):
        return None
    return numbers.quantizer.format, numbers.quantizer.scales, codes_of(numbers).dtype


def constants_of(key: tuple[Any, ...], device: torch.device) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """What a launch of that kind is given beside tables."""
    _, kind, *kept = key
    looked_up = tuple(
        places.table(one[0], device) if isinstance(one, tuple) and isinstance(one[0], Codebook) else None
        for one in kept[-2:]
    )
    forms = dict(zip(("W", "X", "G", "M1", "M2"), map(_form, kept), strict=True))
    return looked_up, {"K": kind, **forms, "HALF": _half()}


def has_one_scale(constants: Mapping[str, Any]) -> bool:
    """Whether what a launch writes must be seen as a whole first: it is codes under one scale."""
    forms = (constants[name] for name in ("W", "M1", "M2"))
    return any(form is not None and form.rule is not None for form in forms)


def _form(kept: Any) -> Form | None:
    if kept is None:
        return None
    if isinstance(kept, torch.dtype):
        return Form(KINDS[kept])
    format, scales, container = kept
    if scales.tile == TENSOR:
        form = Form("codes", rule=quantizers.rule(format, scales.rule))
        if container in KINDS:
            return form._replace(kind=KINDS[container], container=KINDS[container])
    else:
        form = Form("codes", scales.tile.columns, elements.float_bits(format.max))
    if isinstance(scales.rule, Expansion):
        span, top = (elements.float_bits(number) for number in expansion.scalars(format, scales.rule)[:2])
        form = Form("expanded", form.tile, 0, span, top, scales.rule.sixteenths)
    if isinstance(format, Codebook):
        return form._replace(kind="places", bins=places.bins(format))
    rounding, coding = quantizers.pair(format)
    if container == torch.uint8:
        rounding = rounding._replace(nan_above=None)  # of what is lost, 0 is rounded
    else:
        coding = coding._replace(nan=0x7F)  # torch's own
    decoding = Decoding(*map(int, element_codes.decoding_scalars(format)))
    return form._replace(rounding=rounding, coding=coding, decoding=decoding)


def _half() -> Rounding:
    """float16's rounding as torch's conversions do it."""
    return Rounding(*map(int, elements.scalars(formats.get("fp16"), "nearest_even", "ieee", torch.float16)))
