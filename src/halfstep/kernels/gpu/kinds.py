"""Which tensors the kernels of optimizers take, and what each kind of them is compiled for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep import formats
from halfstep.formats import Codebook, Float
from halfstep.kernels.cpu import element_codes, elements, expansion
from halfstep.kernels.cpu.coded import Coded
from halfstep.kernels.cpu.element_codes import Coding, Decoding
from halfstep.kernels.cpu.elements import Rounding
from halfstep.kernels.cpu.masters import KEPT
from halfstep.kernels.gpu.launch import KINDS, lies_plain
from halfstep.quant.scaling.expansion import Expansion


LONGEST = 1 << 20
"""Steps after which bias corrections must be 1: those of a beta of 0.99996 are."""

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
    def kind(self) -> tuple[str, bool, bool]:
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
    """The run's one seed, of which each step makes its own for tensor number `number`."""
    number: int
    group: int

    @property
    def all(self) -> tuple[Tensor, ...]:
        """Every tensor of the weight's size, codes among them."""
        numbers = [moment.parts["codes"] if isinstance(moment, Coded) else moment for moment in self.moments]
        return (
            self.weight,
            self.grad,
            *self.kept.values(),
            *numbers,
            *([] if self.residual is None else [self.residual]),
        )


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
    range: int = 0
    """Of an expanded range the bits of its log2, and of the largest value's log2."""
    top: int = 0
    sixteenths: bool = False
    """Whether exponents are whole sixteenths."""


def takes(tensors: Tensors, options: Options) -> bool:
    """Whether `optimizer.Steps` can move these, of dense tensors anywhere."""
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
        and (options.rule != "adam" or max(steps_to_one(options.beta1), steps_to_one(options.beta2)) <= LONGEST)
    )


def _is_noisy(tensors: Tensors) -> bool:
    return tensors.rounding == "stochastic" and tensors.weight.dtype == torch.bfloat16 and tensors.master == "none"


def _knows(moment: Coded) -> bool:
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
        values = format.values()
        rising = all(format.decode(code) == value for code, value in enumerate(values))
        return len(values) == 256 and rising and format.ties == "lower"
    return isinstance(format, Float) and format.bits == 8 and element_codes.knows(format)


def steps_to_one(beta: float) -> int:
    """After how many steps 1 - beta^t is 1."""
    if not 0 <= beta < 1:
        return LONGEST + 1
    return 1 if beta == 0 else math.ceil(-54 / math.log2(beta)) + 1


# ---- what functions are compiled for ---------------------------------------------------------------------------------


def kind_of(t: Tensors, options: Options) -> tuple[Any, ...]:
    """The kind of a tensor, and the formats of its moments."""
    kept = next((_KEPT[kept.dtype] for kept in t.kept.values()), None)
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in t.all)
    noisy = t.rounding == "stochastic"
    rule, l2, nesterov = options.kind
    kind = Kind(
        rule, l2, nesterov, KINDS[t.weight.dtype], KINDS[t.grad.dtype], t.master, kept, t.residual is not None, noisy,
        noisy and t.place is not None, aligned,
    )  # fmt: skip
    moments: list[Any] = [
        (moment.quantizer.format, moment.quantizer.scales) if isinstance(moment, Coded) else moment.dtype
        for moment in t.moments
    ]
    return kind, *[*moments, None, None][:2]


def constants_of(key: tuple[Any, ...], device: torch.device) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """What a launch of that kind is given beside tables."""
    kind, *moments = key
    looked_up: list[Tensor | None] = []
    constants: dict[str, Any] = {"K": kind, "HALF": _half()}
    for number, kept in enumerate(moments, 1):
        moment = rounding = coding = decoding = found = None
        if isinstance(kept, torch.dtype):
            moment = Moment(KINDS[kept])
        elif kept is not None:
            format, scales = kept
            moment = Moment("codes", scales.tile.columns, elements.float_bits(format.max))
            if isinstance(scales.rule, Expansion):
                span, top = (elements.float_bits(number) for number in expansion.scalars(format, scales.rule)[:2])
                moment = Moment("expanded", moment.tile, 0, span, top, scales.rule.sixteenths)
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
