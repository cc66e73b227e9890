"""The spread of every tensor's values in a training step: standard deviations, compared with the ranges of formats."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from halfstep import formats
from halfstep.bits.what_if import Limits, limits_of
from halfstep.errors import DataError, FormatError
from halfstep.probe.batch import Batch, Loss, copied, loss_of, moved, unchanged_generators
from halfstep.probe.observe import MASK, Counts, Range, Site, count, number, observed
from halfstep.probe.trial import blocks, parameter_site, train
from halfstep.recipe import DTYPES


FORMATS = ("fp16", "e4m3fn", "e5m2")
KINDS = ("activation", "activation gradient", "weight", "weight gradient")
GRADIENT = "gradient of the "


@dataclass(frozen=True)
class Moments:
    """The first two moments of some values: their count, their mean, the sum of squares about the mean."""

    values: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def __add__(self, other: "Moments") -> "Moments":
        """The moments of both sets of values together.

        Source: Chan, Golub and LeVeque 1983, on updating variances.
        """
        values = self.values + other.values
        if not values:
            return self
        apart = other.mean - self.mean
        squares = self.squares + other.squares + apart * apart * self.values * other.values / values
        return Moments(values, self.mean + apart * other.values / values, squares)

    @property
    def std(self) -> float:
        """The standard deviation: the root of the mean square about the mean."""
        return math.sqrt(self.squares / self.values) if self.values else 0.0


@dataclass(frozen=True)
class Spread:
    """One tensor of a step, over all batches."""

    site: Site
    kind: str
    """One of `KINDS`."""
    folded: str
    """The module's path, with a star for the index of a repeated block."""
    moments: Moments
    ranges: tuple[Range, ...]
    """The effect of a cast to each format, in the order of the formats."""

    @property
    def std(self) -> float:
        """Its standard deviation; NaN if a value is infinite or NaN."""
        return self.moments.std

    def to_dict(self) -> dict[str, Any]:
        """The spread as JSON data."""
        return {
            "module": self.site.module,
            "folded": self.folded,
            "class": self.site.kind,
            "tensor": self.site.role.removeprefix(GRADIENT),
            "kind": self.kind,
            "values": self.moments.values,
            "mean": number(self.moments.mean),
            "std": number(self.std),
            "largest": number(self.ranges[0].counts.largest),
            "formats": {
                found.limits.format.name: {
                    "beyond": found.share_beyond,
                    "subnormal": found.share_subnormal,
                    "zero": found.share_vanished,
                }
                for found in self.ranges
            },
        }


@dataclass(frozen=True)
class Scales:
    """Every tensor of a training step: activations and their gradients in the order of execution, then weights."""

    model: str
    """The model's class."""
    parameters: int
    data: str
    """A description of the data."""
    loss: str
    """The loss that was differentiated, in words."""
    steps: int
    """The number of optimizer steps taken before."""
    learning_rate: float
    formats: tuple[str, ...]
    spreads: tuple[Spread, ...]

    def of(self, kind: str) -> list[Spread]:
        """The tensors of one of `KINDS`."""
        return [spread for spread in self.spreads if spread.kind == kind]

    @property
    def moment(self) -> str:
        """When it was measured, in words."""
        after = f"after {self.steps} step{'s' * (self.steps > 1)} of AdamW at {self.learning_rate:g}"
        return after if self.steps else "at the start"

    def to_dict(self) -> dict[str, Any]:
        """The scales as JSON data."""
        return {
            "model": self.model,
            "parameters": self.parameters,
            "data": self.data,
            "loss": self.loss,
            "steps": self.steps,
            "learning_rate": self.learning_rate if self.steps else None,
            "formats": list(self.formats),
            "tensors": [spread.to_dict() for spread in self.spreads],
        }


def scales(
    model: nn.Module,
    data: Sequence[Batch],
    *,
    to: Sequence[object] = FORMATS,
    loss: Loss | None = None,
    steps: int = 0,
    learning_rate: float = 1e-4,
    described: str = "the batches given",
    progress: Callable[[str], None] = lambda stage: None,
) -> Scales:
    """The standard deviation of every activation, weight and gradient of a step, and the effect of casts to formats.

    Runs a copy of the model unchanged, whatever recipe it follows, in training mode; the model and the random
    generators do not change. A tensor that several modules pass on counts once, where it appears first. Inside a
    module, the matmuls and the logits of fused attention are observed.

    Args:
        data: batches; a mapping gives the model's arguments by name, a tuple by position, a tensor is the only one.
        to: formats: names, `Format`s or dtypes. fp16, bf16 and fp32 overflow; others saturate, as quantizers do.
        loss: loss(model, batch) to differentiate; None takes the model's own, or a stand-in (`batch.loss_of`).
        steps: how many steps of AdamW at `learning_rate` are taken before, over the batches in turn.
        described: a description of the data, for the report.
        progress: called with the name of each stage.

    Raises:
        FormatError: unknown format, one for blocks or without negative values, or none.
        DataError: no batches.
        ModelError: the model has no parameters, cannot be copied, does not take the data, or returns no loss.
    """
    limits = [_limits(each) for each in to]
    if not limits:
        raise FormatError("no format given to hold the scales against; expected at least one, such as 'fp16'")
    if not data:
        raise DataError("no batches to run the model on; expected at least one")
    own = copied(model)
    device = next(own.parameters()).device
    batches = [moved(batch, device) for batch in data]
    with unchanged_generators(device):
        torch.manual_seed(0)
        if steps:
            train(own, batches, loss, steps, learning_rate, progress)
        own.train()
        progress("measuring")
        gauge = _Collector(own, limits)
        words = [gauge.run(batch, loss) for batch in batches]
    return Scales(
        model=type(model).__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        data=described,
        loss=words[0],
        steps=steps,
        learning_rate=learning_rate,
        formats=tuple(each.format.name for each in limits),
        spreads=tuple(gauge.spreads()),
    )


@dataclass
class _Stats:
    """The moments and counts of one tensor so far."""

    kind: str
    moments: Moments = field(default_factory=Moments)
    counts: list[Counts] = field(default_factory=list)


class _Collector:
    """Collects the moments and counts of every tensor over passes."""

    def __init__(self, model: nn.Module, limits: Sequence[Limits]) -> None:
        self._model, self._limits = model, limits
        self._held: dict[Site, _Stats] = {}
        self._versions: Any = WeakIdKeyDictionary()
        """The version counters of the observed tensors when they were observed."""

    def run(self, batch: Batch, loss: Loss | None) -> str:
        """Run one step over a batch, without an update; return the description of its loss."""
        self._model.zero_grad()
        with observed(self._model, self._see):
            value, words = loss_of(self._model, batch, loss)
            value.backward()  # type: ignore[no-untyped-call]
        for name, parameter in self._model.named_parameters():
            if parameter.is_floating_point():
                self._take(parameter_site(self._model, name), "weight", parameter)
                if parameter.grad is not None:
                    self._take(parameter_site(self._model, name, True), "weight gradient", parameter.grad)
        self._model.zero_grad()
        return words

    def spreads(self) -> Iterable[Spread]:
        """All spreads: activations and their gradients in the order of execution, then weights and theirs."""
        repeated = blocks(self._model)
        for order, (site, held) in enumerate(self._held.items()):
            ranges = (Range(site, order, *pair) for pair in zip(held.counts, self._limits, strict=True))
            yield Spread(site, held.kind, _folded(site.module, repeated), held.moments, tuple(ranges))

    def _see(self, site: Site, tensor: Tensor) -> None:
        if tensor.dim() == 0:
            return
        if site.backward:
            made = replace(site, role=site.role.removeprefix(GRADIENT), backward=False)
            if made in self._held and made.role != "product":  # a product is part of a gradient recorded separately
                self._take(site, "activation gradient", tensor)
            return
        if self._versions.get(tensor) != tensor._version:
            self._versions[tensor] = tensor._version
            self._take(site, "activation", tensor)

    def _take(self, site: Site, kind: str, tensor: Tensor) -> None:
        held = self._held.setdefault(site, _Stats(kind, counts=[Counts()] * len(self._limits)))
        held.moments += moments(tensor)
        held.counts = [one + count(tensor, each) for one, each in zip(held.counts, self._limits, strict=True)]


@torch.no_grad()
def moments(x: Tensor) -> Moments:
    """The moments of a floating-point tensor, in float32, without the values of attention masks."""
    values = x.detach().float().reshape(-1)
    if values.numel() and float(values.min()) <= -MASK:
        values = values[~(values <= -MASK)]
    if not values.numel():
        return Moments()
    variance, mean = torch.var_mean(values, correction=0)
    return Moments(values.numel(), float(mean), float(variance) * values.numel())


def _limits(to: object) -> Limits:
    format = formats.get(to)
    if not format.signed:
        raise FormatError(f"{format.name} has no negative values; give one that can hold activations, such as e4m3fn")
    return limits_of(format, stored=format.name in DTYPES)


def _folded(path: str, repeated: set[str]) -> str:
    """The path with a star instead of the index of every repeated block that it goes through."""
    parts = path.split(".")
    return ".".join("*" if ".".join(parts[: i + 1]) in repeated else part for i, part in enumerate(parts))


@dataclass(frozen=True)
class Row:
    """One tensor of a module, or of the corresponding modules of repeated blocks, with its gradient."""

    module: str
    """The module's path, with a star for the index of repeated blocks."""
    kind: str
    """The class of the module."""
    tensor: str
    """The name of its tensor; empty for output and weight."""
    spreads: tuple[tuple[Spread, ...], ...]
    """One entry for each of `KINDS`."""


_BEFORE = {"input": 0, "product": 1, "attention logits": 1, "": 2}
"""The order of a module's tensors; parameters other than its weight come last."""


def rows(found: Scales) -> list[Row]:
    """The modules in the order of execution."""
    # Activations come first.
    places = {folded: place for place, folded in enumerate(dict.fromkeys(spread.folded for spread in found.spreads))}
    table: dict[tuple[int, int, str], list[list[Spread]]] = {}
    for spread in found.spreads:
        name = _tensor(spread)
        cells = table.setdefault((places[spread.folded], _BEFORE.get(name, 3), name), [[] for _ in KINDS])
        cells[KINDS.index(spread.kind)].append(spread)
    firsts = {key: next(cell[0] for cell in cells if cell) for key, cells in table.items()}
    return [
        Row(firsts[key].folded, firsts[key].site.kind, key[2], tuple(map(tuple, cells)))
        for key, cells in sorted(table.items())
    ]


def _tensor(spread: Spread) -> str:
    role = spread.site.role.removeprefix(GRADIENT)
    return "" if role in ("output", "weight") else role


def deviations(found: Scales) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The headings and the rows of a table of standard deviations; for repeated blocks, the smallest and the
    largest."""
    return ("tensor", "module", *KINDS), [
        (
            (row.module or "the model") + (f": {row.tensor}" if row.tensor else ""),
            row.kind,
            *(_ends([spread.std for spread in cell]) for cell in row.spreads),
        )
        for row in rows(found)
    ]


def _ends(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys([f"{value:.2g}" for value in (min(values), max(values))] if values else ["-"]))


def shares(found: Scales) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The headings and the rows of a table: the effect of a cast to each format on each kind of tensor."""
    heads = tuple(
        f"{name.removeprefix('float8_')}: {what}" for name in found.formats for what in ("zero", "subnormal", "beyond")
    )
    return ("values of", *heads), [(kind, *_shares_of(found, kind)) for kind in KINDS]


def _shares_of(found: Scales, kind: str) -> Iterator[str]:
    """The shares that are zero, subnormal and beyond the range in each format."""
    for place in range(len(found.formats)):
        total = sum((spread.ranges[place].counts for spread in found.of(kind)), Counts())
        yield from (_share(part, total.nonzero) for part in (total.vanished, total.subnormal))
        yield _share(total.beyond, total.values)


def _share(part: int, whole: int) -> str:
    value = part / whole if whole else 0.0
    return "-" if not part else f"{value:.1g}" if value < 0.001 else f"{value:.1%}"
