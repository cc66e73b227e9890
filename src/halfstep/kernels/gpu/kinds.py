"""Which tensors the kernels of optimizers take, and what each kind of them is compiled for."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.formats import Codebook, Float, Format
from halfstep.kernels.arithmetic import Program
from halfstep.kernels.cpu import element_codes, elements, expansion
from halfstep.kernels.cpu.coded import Coded
from halfstep.kernels.cpu.masters import KEPT
from halfstep.kernels.gpu import KINDS, cast, lies_plain, quantizers, table
from halfstep.quant import Scales
from halfstep.quant.scaling import Scaling
from halfstep.quant.scaling.expansion import Expansion
from halfstep.quant.tile import TENSOR


LONGEST = 1 << 20
"""Steps after which what follows from their number must stay: bias corrections of a beta of 0.99996 do."""

_BYTES = "uint8"
_KEPT = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int16: "int16", torch.int8: _BYTES}
_TILES = (32, 64, 128, 256, 512, 1024)
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
    quotient: quantizers.Rule | None = None
    """Of tiles under their largest magnitude over the largest element."""
    range: int = 0
    """Of an expanded range the bits of its log2, and of the largest value's log2."""
    top: int = 0
    sixteenths: bool = False
    """Whether exponents are whole sixteenths."""
    rule: quantizers.Rule | None = None
    element: quantizers.Element | None = None
    decoding: element_codes.Decoding | None = None
    """Of floats of a byte."""
    instruction: str | None = None
    """The GPU's own conversion of these codes (`cast.instruction`)."""
    container: str = "uint8"
    """As what kernels load codes under one scale."""


def _form_of(coded: Coded) -> Form | None:
    """How codes are kept. None where kernels do not read and write them: under one float32 scale of the tensor, or in
    tiles of the flat tensor, as `_form` has them."""
    form, codes = _form(_kept(coded)), coded.parts["codes"]
    scales = ("scale", "exponent", "center") if form is not None and form.kind == "expanded" else ("scale",)
    if (
        form is None
        or not lies_plain(codes, codes.dtype)
        or coded.parts.keys() != {"codes", *scales}
        or not all(lies_plain(coded.parts[part], torch.float32) for part in scales)
    ):
        return None
    if form.rule is not None:
        return form if coded.parts["scale"].numel() <= 1 else None
    columns = coded.shape[-1] if coded.shape else 1
    return form if math.prod(coded.shape) == columns or columns % form.tile == 0 else None


# ---- what functions are compiled for ---------------------------------------------------------------------------------


def kind_of(t: Tensors, options: Options) -> Any:
    """The program and kind of a tensor; and how its weight, master, gradient and its two moments are coded. None where
    `optimizer.Steps` does not move it, of dense tensors anywhere."""
    program = options.program
    taken = program.taken + len(program.normed.results)
    room = taken <= table.NUMBERS - table.TAKEN and len(options.numbers) <= table.OPTIONS - table.GIVEN
    if not room or not _is_dense(t) or len(program.shared) > 1 or options.rows is None:
        return None
    kept = next(iter(t.kept.values()), None)
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in t.all)
    noisy = t.rounding == "stochastic"
    kind = Kind(
        _container(t.weight), _container(t.grad), t.master, None if kept is None else
        _container(kept), t.residual is not None, noisy, noisy and t.place is not None, aligned,
    )  # fmt: skip
    moments: list[Any] = [_kept(moment) or moment.dtype for moment in t.moments]  # type: ignore[union-attr]
    return program, kind, _kept(t.weight), _kept(kept), _kept(t.grad), *[*moments, None, None][:2]


def _is_dense(t: Tensors) -> bool:
    """Whether these are numbers and codes that kernels read and write, all of one size on one device."""
    weight, grad, moments, kept = t.weight, t.grad, t.moments, t.kept.values()
    size, device = codes_of(weight).numel(), codes_of(weight).device
    forms = [_form_of(one) for one in (weight, grad, *kept) if isinstance(one, Coded)]
    noisy = t.rounding == "stochastic" and codes_of(weight).dtype == torch.bfloat16 and t.master == "none"
    return (
        t.master in (KEPT if isinstance(weight, Tensor) else ("codes",))
        and (isinstance(grad, Tensor) or isinstance(weight, Coded))
        and len(kept) <= 1
        and all(form is not None and form.rule is not None for form in forms)
        and all(lies_plain(one) for one in (weight, grad, *moments) if isinstance(one, Tensor))
        and all(lies_plain(one, *_KEPT) for one in kept if isinstance(one, Tensor))
        and all(one.numel() == size and one.device == device for one in t.all)
        and all(_form_of(one) is not None for one in moments if isinstance(one, Coded))
        and len(moments) <= 2
        and (t.residual is None or (lies_plain(t.residual) and isinstance([*moments, None, None][1], Tensor)))
        and (t.rounding == "nearest_even" or noisy)
        and all(lies_plain(one, torch.float32) and one.numel() == 1 and one.device == device for one in t.shared)
    )


def _container(numbers: Tensor | Coded) -> str:
    """As what a kernel loads them."""
    dtype = codes_of(numbers).dtype
    return _BYTES if dtype.itemsize == 1 else KINDS.get(dtype) or _KEPT[dtype]


def _kept(numbers: Tensor | Coded | None) -> Any:
    """Quantizer and container of what is codes."""
    return (numbers.quantizer, codes_of(numbers).dtype) if isinstance(numbers, Coded) else None


def constants_of(key: tuple[Any, ...], device: torch.device) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """What a launch of that kind is given beside tables."""
    _, kind, *kept = key
    looked_up = tuple(quantizers.table(one[0].format, device) if isinstance(one, tuple) else None for one in kept[-2:])
    forms = {name: _told(one, device) for name, one in zip(("W", "X", "G", "M1", "M2"), kept, strict=True)}
    return looked_up, {"K": kind, **forms, "HALF": cast.half()}


def has_one_scale(constants: Mapping[str, Any]) -> bool:
    """Whether what a launch writes must be seen as a whole first: it is codes under one scale."""
    forms = (constants[name] for name in ("W", "M1", "M2"))
    return any(form is not None and form.rule is not None for form in forms)


def _told(kept: Any, device: torch.device) -> Form | None:
    """The `_form` of what is kept, by that GPU's own conversion to its codes where it has one."""
    form = _form(kept)
    if form is None or form.element is None:
        return form
    quantizer, container = kept
    quotient, element = quantizers.told(
        quantizer, device, torch.float32, (form.quotient or quantizers.Rule("", 0), form.element)
    )
    made = element.instruction
    if container == torch.float8_e5m2:  # whose NaN is not torch's
        element = form.element
    return form._replace(quotient=form.quotient and quotient, element=element, instruction=made)


@cache
def _form(kept: Any) -> Form | None:
    """None of what is no codes, and of codes that kernels do not read and write. They do those that are rounded to
    nearest: numbers of a dtype times a power of two of the tensor, or bytes of a float under another scale of it; a
    byte each in tiles along rows, under their largest magnitude over the largest element, or with expanded ranges."""
    if kept is None or isinstance(kept, torch.dtype):
        return None if kept is None else Form(KINDS[kept])
    quantizer, container = kept
    format, scales = quantizer.format, quantizer.scales
    if scales is None or quantizer.rounding != "nearest_even" or quantizer.outliers is not None:
        return None
    form = _under_one(format, scales.rule, container) if scales.tile == TENSOR else _in_tiles(format, scales, container)
    if form is None or form.container in KINDS.values():
        return form
    element = quantizers.element(format, quantizer.rounding)
    if element is None or format.bits != 8:
        return None
    if isinstance(format, Codebook):
        return form._replace(kind="places", element=element)
    rounding, coding = quantizers.pair(format)
    if container == torch.uint8:  # of what is lost, 0 is rounded
        element = element._replace(rounding=rounding._replace(nan_above=None))
    else:  # a NaN has torch's own code
        element = element._replace(coding=coding._replace(nan=0x7F))
    decoding = element_codes.Decoding(*map(int, element_codes.decoding_scalars(format)))
    return form._replace(element=element, decoding=decoding)


def _under_one(format: Format, scaling: Scaling, container: torch.dtype) -> Form | None:
    """Codes of a float under one scale of the tensor."""
    rule = quantizers.rule(format, scaling)
    if (
        rule is None
        or rule.part is not None
        or rule.kind not in ("power", "reciprocal", "quotient")
        or not isinstance(format, Float)
        or container not in (_SCALED if rule.kind == "power" else (torch.uint8,))
    ):
        return None
    name = KINDS.get(container)
    return Form("codes", rule=rule) if name is None else Form(name, rule=rule, container=name)


def _in_tiles(format: Format, scales: Scales, container: torch.dtype) -> Form | None:
    """A byte each, in tiles of the flat tensor."""
    tile, rule = scales.tile, scales.rule
    if tile.rows != 1 or tile.columns not in _TILES or container != torch.uint8:
        return None
    if isinstance(format, Float) and isinstance(rule, Expansion):
        span, top = (elements.float_bits(number) for number in expansion.scalars(format, rule)[:2])
        return Form("expanded", tile.columns, None, span, top, rule.sixteenths)
    known = rule.quotient and isinstance(format, Float | Codebook)
    return Form("codes", tile.columns, quantizers.rule(format, rule)) if known else None
