"""Which tensors the optimizer kernels support, and the constants that each kind of update is compiled for."""

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
from halfstep.kernels.gpu import KINDS, cast, is_dense, quantizers, table
from halfstep.quant import Scales
from halfstep.quant.scaling import Scaling
from halfstep.quant.scaling.expansion import Expansion
from halfstep.quant.tile import TENSOR


LONGEST = 1 << 20
"""The step after which scalars that depend on the step number must be constant: bias corrections of a beta of 0.99996
are."""

_BYTES = "uint8"
_KEPT = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int16: "int16", torch.int8: _BYTES}
_TILES = (32, 64, 128, 256, 512, 1024)
_SCALED = (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes of codes that hold elements under one power-of-two scale: the smallest that brings all elements in range."""


class Options(NamedTuple):
    """The options of a parameter group that a formula takes; all numbers are float64."""

    program: Program
    sign: float
    """The factor on gradients: -1 to maximize."""
    numbers: tuple[float | Tensor, ...]
    """The values of the last of `program.names`; a tensor must be on the GPU."""
    by_step: Callable[[int, Mapping[str, Any]], Mapping[str, float]]
    """From a step number and `settings` to the scalars whose names follow `step`. From some step on they are
    constant."""
    settings: tuple[tuple[str, Any], ...]

    @property
    def rows(self) -> tuple[tuple[float, ...], ...] | None:
        """The values of `by_step` from step 1 to the first from which they are constant; None if they are not by step
        `LONGEST`."""
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
    """The tensors of one parameter's update: weight, master, gradient and moments, each a tensor or codes (`Coded`)."""

    weight: Tensor | Coded
    grad: Tensor | Coded
    step: Tensor
    """The number of steps done, a float32 scalar that the kernel increments."""
    master: str
    kept: Mapping[str, Tensor | Coded]
    moments: Sequence[Tensor | Coded]
    """Zero to two."""
    residual: Tensor | None
    """The rounding error of the second moment in 16 bits, kept beside it."""
    rounding: str
    place: tuple[int, int, int] | None
    """For a shard, its START, RUN and STRIDE in the whole tensor (see `table`); None for a whole tensor."""
    seed: int
    """The run's seed, from which each step derives its own for tensor number `number`."""
    number: int
    group: int
    shared: Sequence[Tensor] = ()
    """Moments that are one scalar per tensor."""

    @property
    def all(self) -> tuple[Tensor, ...]:
        """Every tensor with as many elements as the weight, codes among them."""
        residual = [] if self.residual is None else [self.residual]
        return *map(codes_of, (self.weight, self.grad, *self.kept.values(), *self.moments)), *residual


def codes_of(numbers: Tensor | Coded) -> Tensor:
    """The tensor with as many elements as the weight: the tensor itself, or its codes."""
    return numbers.parts["codes"] if isinstance(numbers, Coded) else numbers


class Kind(NamedTuple):
    """The constants of a compiled update, besides how codes are read and written."""

    weight: str
    grad: str
    master: str
    kept: str | None
    residual: bool
    noisy: bool
    spread: bool
    aligned: bool
    """Whether all tensors are 16-byte aligned."""


class Form(NamedTuple):
    """How a tensor is stored: in a dtype; as one-byte codes with a scale per `tile` elements; or as codes (bytes or a
    dtype) under one scale of the tensor, computed from its amax by `rule`."""

    kind: str
    tile: int = 0
    quotient: quantizers.Rule | None = None
    """The rule of tiles whose scale is their amax over the format's largest value."""
    range: int = 0
    """For range expansion, the float32 bits of the log2 of the format's range; `top`: of the log2 of its largest
    value."""
    top: int = 0
    sixteenths: bool = False
    """Whether exponents are multiples of 1/16."""
    rule: quantizers.Rule | None = None
    element: quantizers.Element | None = None
    decoding: element_codes.Decoding | None = None
    """For one-byte float codes."""
    instruction: str | None = None
    """The GPU's own conversion to these codes (`cast.instruction`)."""
    container: str = "uint8"
    """The type in which kernels load codes under one scale."""


def _form_of(coded: Coded) -> Form | None:
    """The `Form` of codes. None where kernels do not support it: codes need one float32 scale per tensor, or tiles of
    the flat tensor as in `_form`."""
    form, codes = _form(_kept(coded)), coded.parts["codes"]
    scales = ("scale", "exponent", "center") if form is not None and form.kind == "expanded" else ("scale",)
    if (
        form is None
        or not is_dense(codes, codes.dtype)
        or coded.parts.keys() != {"codes", *scales}
        or not all(is_dense(coded.parts[part], torch.float32) for part in scales)
    ):
        return None
    if form.rule is not None:
        return form if coded.parts["scale"].numel() <= 1 else None
    columns = coded.shape[-1] if coded.shape else 1
    return form if math.prod(coded.shape) == columns or columns % form.tile == 0 else None


# ---- what functions are compiled for ---------------------------------------------------------------------------------


def kind_of(t: Tensors, options: Options) -> Any:
    """The key of an update's launch: its program, `Kind`, and how weight, master, gradient and two moments are coded.
    None where `optimizer.Steps` does not support it; the tensors may be on any device."""
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
    """Whether these are dense tensors and codes that kernels support, of one size on one device."""
    weight, grad, moments, kept = t.weight, t.grad, t.moments, t.kept.values()
    size, device = codes_of(weight).numel(), codes_of(weight).device
    forms = [_form_of(one) for one in (weight, grad, *kept) if isinstance(one, Coded)]
    noisy = t.rounding == "stochastic" and codes_of(weight).dtype == torch.bfloat16 and t.master == "none"
    return (
        t.master in (KEPT if isinstance(weight, Tensor) else ("codes",))
        and (isinstance(grad, Tensor) or isinstance(weight, Coded))
        and len(kept) <= 1
        and all(form is not None and form.rule is not None for form in forms)
        and all(is_dense(one) for one in (weight, grad, *moments) if isinstance(one, Tensor))
        and all(is_dense(one, *_KEPT) for one in kept if isinstance(one, Tensor))
        and all(one.numel() == size and one.device == device for one in t.all)
        and all(_form_of(one) is not None for one in moments if isinstance(one, Coded))
        and len(moments) <= 2
        and (t.residual is None or (is_dense(t.residual) and isinstance([*moments, None, None][1], Tensor)))
        and (t.rounding == "nearest_even" or noisy)
        and all(is_dense(one, torch.float32) and one.numel() == 1 and one.device == device for one in t.shared)
    )


def _container(numbers: Tensor | Coded) -> str:
    """The type in which a kernel loads them."""
    dtype = codes_of(numbers).dtype
    return _BYTES if dtype.itemsize == 1 else KINDS.get(dtype) or _KEPT[dtype]


def _kept(numbers: Tensor | Coded | None) -> Any:
    """The quantizer and the codes' dtype; None for a plain tensor."""
    return (numbers.quantizer, codes_of(numbers).dtype) if isinstance(numbers, Coded) else None


def constants_of(key: tuple[Any, ...], device: torch.device) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """For a key of `kind_of`: the tables that a launch looks values up in, and its constants."""
    _, kind, *kept = key
    looked_up = tuple(quantizers.table(one[0].format, device) if isinstance(one, tuple) else None for one in kept[-2:])
    forms = {name: _form_on(one, device) for name, one in zip(("W", "X", "G", "M1", "M2"), kept, strict=True)}
    return looked_up, {"K": kind, **forms, "HALF": cast.half()}


def has_one_scale(constants: Mapping[str, Any]) -> bool:
    """Whether a launch writes codes under one scale per tensor, so that a launch before it must find the amaxes."""
    forms = (constants[name] for name in ("W", "M1", "M2"))
    return any(form is not None and form.rule is not None for form in forms)


def _form_on(kept: Any, device: torch.device) -> Form | None:
    """The `_form` of `kept`, with that GPU's own conversion to its codes, where it has one."""
    form = _form(kept)
    if form is None or form.element is None:
        return form
    quantizer, container = kept
    quotient, element = quantizers.constants_on(
        quantizer, device, torch.float32, (form.quotient or quantizers.Rule("", 0), form.element)
    )
    made = element.instruction
    if container == torch.float8_e5m2:  # torch's code of NaN differs from the instruction's
        element = form.element
    return form._replace(quotient=form.quotient and quotient, element=element, instruction=made)


@cache
def _form(kept: Any) -> Form | None:
    """How a tensor is stored, as a `Form`; None for codes that kernels do not support. Supported are codes rounded to
    nearest: a dtype's values times a power of two of the tensor; one-byte floats under another scale of the tensor; and
    one byte per element in tiles along rows, with scale amax over the format's largest value, or with expanded
    ranges."""
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
    if container == torch.uint8:  # tiles with infinity or NaN are rounded as zeros, so no NaN is encoded
        element = element._replace(rounding=rounding._replace(nan_above=None))
    else:  # NaN is encoded as torch does
        element = element._replace(coding=coding._replace(nan=0x7F))
    decoding = element_codes.Decoding(*map(int, element_codes.decoding_scalars(format)))
    return form._replace(element=element, decoding=decoding)


def _under_one(format: Format, scaling: Scaling, container: torch.dtype) -> Form | None:
    """The `Form` of float codes under one scale of the tensor."""
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
    """The `Form` of one-byte codes in tiles of the flat tensor."""
    tile, rule = scales.tile, scales.rule
    if tile.rows != 1 or tile.columns not in _TILES or container != torch.uint8:
        return None
    if isinstance(format, Float) and isinstance(rule, Expansion):
        span, top = (elements.float_bits(number) for number in expansion.scalars(format, rule)[:2])
        return Form("expanded", tile.columns, None, span, top, rule.sixteenths)
    known = rule.quotient and isinstance(format, Float | Codebook)
    return Form("codes", tile.columns, quantizers.rule(format, rule)) if known else None
