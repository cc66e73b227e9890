"""The ranges of every tensor of a model over some batches, in float32, forward and backward."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from halfstep.bits.limits import Limits
from halfstep.errors import ModelError
from halfstep.nn.adapters import experts
from halfstep.probe.batch import Batch, Loss, loss_of
from halfstep.probe.observe import Counts, Range, Site, count, observed
from halfstep.probe.trial import parameter_site
from halfstep.tracking import ExponentHistogram, exponents, first_nonfinite


@dataclass(frozen=True)
class Measured:
    """What a model's tensors held."""

    ranges: tuple[Range, ...]
    """In the order of execution: weights, then the forward, then the backward."""
    histograms: dict[Site, ExponentHistogram]
    """Exponents of the gradients of activations and of matrices. (A bias's gradient is a sum of its output's, and may
    be nothing but float32's own rounding: the output's is looked at in its place.)"""
    loss: str
    """Which loss was sent back."""
    unreached: tuple[str, ...]
    """Members of lists of modules, and fused experts, that got no gradient: how many, of how many, where."""


class Meter:
    """Gathers ranges over any number of passes."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._counts: dict[Site, Counts] = {}
        self._bins: dict[Site, Counter[int]] = {}
        self._known: Any = WeakIdKeyDictionary()
        self._loss = ""
        self._reached: dict[str, Tensor] = {}

    def run(self, model: nn.Module, batches: Sequence[Batch], loss: Loss | None) -> None:
        """One pass over the batches; gradients are taken of each batch alone.

        Raises:
            ModelError: the model raised, gives no loss, or is not finite in float32 either.
        """
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                self._see(parameter_site(model, name), parameter)
        for batch in batches:
            model.zero_grad()
            with observed(model, self._see):
                value, self._loss = loss_of(model, batch, loss)
                value.backward()  # type: ignore[no-untyped-call]
            for name, parameter in model.named_parameters():
                if (grad := parameter.grad) is not None:
                    self._see(parameter_site(model, name, True), grad, bins=parameter.dim() > 1)
                    rows = grad.flatten(1).any(1) if grad.dim() > 1 else grad.any()[None]
                    self._reached[name] = self._reached.get(name, rows) | rows
            self._check(model, batch, loss)
        model.zero_grad()

    def measured(self, model: nn.Module) -> Measured:
        """All of it."""
        inside = blocks(model)
        ranges = [
            Range(site, order, found, self._limits, site.module in inside and site.role.endswith(("input", "output")))
            for order, (site, found) in enumerate(self._counts.items())
        ]
        histograms = {site: ExponentHistogram(found) for site, found in self._bins.items()}
        return Measured(tuple(ranges), histograms, self._loss, tuple(unreached(model, self._reached)))

    def _see(self, site: Site, tensor: Tensor, bins: bool | None = None) -> None:
        if tensor.dim() == 0:  # a loss, which every recipe keeps in float32
            return
        version, found, histogram = self._known.get(tensor, (None, None, None))
        bins = site.backward and not site.role.endswith("product") if bins is None else bins
        if version != tensor._version or (bins and histogram is None):
            found = count(tensor, self._limits)
            histogram = exponents([tensor]) if bins else None
            self._known[tensor] = tensor._version, found, histogram
        self._counts[site] = self._counts.get(site, Counts()) + found
        if bins:
            self._bins.setdefault(site, Counter()).update(histogram.counts)

    def _check(self, model: nn.Module, batch: Batch, loss: Loss | None) -> None:
        wrong = [site for site, found in self._counts.items() if not found.largest < float("inf")]
        if wrong:
            first = first_nonfinite(model, lambda: loss_of(model, batch, loss)[0]) or str(wrong[0])
            raise ModelError(
                f"{type(model).__name__} is not finite in float32 either, first: {first}. There is nothing to compare "
                "with; repair the model, or give other data"
            )


def train(
    model: nn.Module,
    batches: Sequence[Batch],
    loss: Loss | None,
    steps: int,
    rate: float,
    progress: Callable[[str], None],
) -> None:
    """That many steps of torch.optim.AdamW in float32 with that learning rate, in training mode, batch after batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model.train()
    for step in range(steps):
        progress(f"training step {step + 1} of {steps}")
        optimizer.zero_grad()
        loss_of(model, batches[step % len(batches)], loss)[0].backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    optimizer.zero_grad()
    model.eval()


def unreached(model: nn.Module, reached: Mapping[str, Tensor]) -> Iterator[str]:
    """Where parts of a mixture got no gradient, given which rows of each parameter got one (of a vector: whether)."""
    for path, module in model.named_modules():
        names = [f"{path}.{name}" if path else name for name, p in module.named_parameters() if p.requires_grad]
        if experts.resembles(module) and names:
            count = module.get_parameter("down_proj").shape[0]
            used = [reached[name] for name in names if name in reached and len(reached[name]) == count]
            idle = count - int(torch.stack(used).any(0).sum()) if used else count
        elif isinstance(module, nn.ModuleList):
            parts = [f"{path}.{name}." if path else f"{name}." for name, _ in module.named_children()]
            held = [[name for name in names if name.startswith(part)] for part in parts]
            count = len(parts)
            idle = sum(bool(part) and not any(n in reached and bool(reached[n].any()) for n in part) for part in held)
        else:
            continue
        if idle:
            yield f"{idle} of {count} in {path or 'the model'} ({type(module).__name__})"


def blocks(model: nn.Module) -> set[str]:
    """The paths of repeated blocks: members of a list of modules of one class that have modules of their own."""
    found: set[str] = set()
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        for name, block in module.named_children():
            alike = [m for m in module if type(m) is type(block)]
            if len(alike) > 1 and any(block.children()):
                found.add(f"{path}.{name}" if path else name)
    return found
