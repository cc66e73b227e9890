"""Run a model in float32 to measure its ranges; under a recipe to compare every module; and with perturbed weights."""

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from halfstep.bits.what_if import Limits
from halfstep.errors import ModelError
from halfstep.nn import apply
from halfstep.nn.adapters import experts
from halfstep.probe.batch import Batch, Loss, loss_of
from halfstep.probe.observe import FLOOR, Counts, Range, Site, count, number, observed
from halfstep.recipe import Recipe
from halfstep.tracking import ExponentHistogram, exponents, first_nonfinite


@dataclass(frozen=True)
class Measured:
    """The measurements of a model's tensors."""

    ranges: tuple[Range, ...]
    """In the order of execution: weights, then the forward, then the backward."""
    histograms: dict[Site, ExponentHistogram]
    """Exponents of the gradients of activations and of matrices. (A bias's gradient is a sum of its output's gradients,
    and may be only float32's rounding error; the output's gradient is examined instead.)"""
    loss: str
    """A description of the loss."""
    unreached: tuple[str, ...]
    """Members of lists of modules, and fused experts, that got no gradient: how many, of how many, where."""


class Meter:
    """Collects ranges over any number of passes."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._counts: dict[Site, Counts] = {}
        self._bins: dict[Site, Counter[int]] = {}
        self._known: Any = WeakIdKeyDictionary()
        self._loss = ""
        self._reached: dict[str, Tensor] = {}

    def run(self, model: nn.Module, batches: Sequence[Batch], loss: Loss | None) -> None:
        """One pass over the batches; gradients are computed for each batch separately.

        Raises:
            ModelError: the model raised, returns no loss, or is not finite in float32 either.
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
        """The measurements so far."""
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
    """Parts of a mixture that got no gradient, given which rows of each parameter got one (for a vector: whether it
    did)."""
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
    """The paths of repeated blocks: members of a list of modules of one class that contain modules."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        for name, block in module.named_children()
        if any(block.children()) and sum(type(one) is type(block) for one in module) > 1
    }


OUTPUT_ERROR = 0.1
"""The largest relative error of the model's output (Euclidean norms) that passes."""
GRADIENT_ERROR = 0.5
"""The largest relative error of the gradient of a matrix of weights that passes."""

_MASK = 1e38  # attention masks differ between dtypes, and are not activations


@dataclass(frozen=True)
class Reference:
    """float32's results for the first batch."""

    outputs: dict[Site, list[Tensor]]
    """Each module's outputs, call by call."""
    gradients: dict[str, Tensor]
    noise: frozenset[str] = frozenset()
    """Parameters whose gradients are only float32's rounding errors."""

    def counts(self, name: str) -> bool:
        """Whether a recipe's gradient of that parameter is compared: it is a matrix, its gradient changes a weight, and
        is not noise."""
        gradient = self.gradients[name]
        return gradient.dim() > 1 and name not in self.noise and bool((gradient.abs() >= FLOOR).any())


@dataclass(frozen=True)
class Failure:
    """The first thing that went wrong, in the order of execution."""

    site: Site
    what: str
    crashed: bool = False
    """Whether torch could not run it, which says nothing about the values."""


@dataclass(frozen=True)
class Ran:
    """The result of running a model."""

    failure: Failure | None
    """None: it passed."""
    errors: dict[str, float]
    """The relative error of each module's output on the first batch, in the order of execution; the model's comes
    last."""

    @property
    def passed(self) -> bool:
        """Whether nothing went wrong."""
        return self.failure is None

    @property
    def output_error(self) -> float:
        """The relative error of the model's output."""
        return self.errors.get("", math.inf)

    def told(self, named: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
        """The result as JSON data: `named`, the outcome, and `more`."""
        failure = self.failure
        return {
            **named,
            "passed": self.passed,
            "crashed": failure is not None and failure.crashed,
            "failure": None if failure is None else f"{failure.site}: {failure.what}",
            **more,
            "output_error": number(self.output_error),
            "errors": {path: number(error) for path, error in self.errors.items()},
        }


@dataclass(frozen=True)
class Trial(Ran):
    """The result of running a recipe."""

    recipe: Recipe
    loss_scale: float | None
    """The loss scale at which the backward was finite; None if there was none, or it was not reached."""
    gradient_errors: dict[str, float]
    """The relative error of each parameter's gradient on the first batch."""
    rounded: tuple[str, ...] = ()
    """The layers whose operands the recipe rounds."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        named = {"recipe": self.recipe.name, "float32_modules": list(self.recipe.float32_modules)}
        return self.told(named, {"loss_scale": self.loss_scale})


def reference(model: nn.Module, batch: Batch, loss: Loss | None) -> Reference:
    """The results of a float32 pass over a batch."""
    outputs: dict[Site, list[Tensor]] = {}

    def keep(site: Site, tensor: Tensor) -> None:
        if site.role == "output":
            outputs.setdefault(site, []).append(tensor.detach().clone())

    with observed(model, keep):
        value, _ = loss_of(model, batch, loss)
    value.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Reference(outputs, gradients)


def trial(
    model: nn.Module,
    batches: Sequence[Batch],
    recipe: Recipe,
    loss: Loss | None,
    expected: Reference,
    start: float,
) -> Trial:
    """Apply the recipe to a copy of the model and run it forward and backward over all batches.

    A dynamic loss scale starts at `start`, is halved when a gradient is not finite, and fails below 1. The trial also
    fails at the first module whose output is not finite, if the model's output is off by more than `OUTPUT_ERROR`, and
    if the gradient of a matrix is off by more than `GRADIENT_ERROR`.
    """
    model = copy.deepcopy(model)
    report, run = apply(model, recipe), Run(model, loss, expected)
    scale = recipe.loss_scale
    dynamic = scale is not None and scale.dynamic
    factor = start if dynamic else scale.init if scale is not None else 1.0
    for position, batch in enumerate(batches):
        while not run.step(batch, factor, compare=position == 0) and dynamic and factor > 1 and not run.forward:
            factor /= 2
        if run.forward or run.backward:
            break
    reached = None if run.forward or run.backward else factor
    return Trial(run.failure(), run.outputs.by_module, recipe, reached, run.gradient_errors, report.quantized)


class Run:
    """Passes over a model under a recipe, with their results."""

    def __init__(self, model: nn.Module, loss: Loss | None, expected: Reference) -> None:
        self._model, self._loss, self._expected = model, loss, expected
        self.outputs = Outputs(expected)
        self.forward: Failure | None = None
        self.backward: Failure | None = None
        self.gradient_errors: dict[str, float] = {}

    def step(self, batch: Batch, factor: float, compare: bool) -> bool:
        """One forward and backward; whether all of it was finite."""
        self.backward = None
        if compare:
            self.outputs = Outputs(self._expected)

        def look(site: Site, tensor: Tensor) -> None:
            if site.backward:
                if self.backward is None and not finite(tensor):
                    self.backward = Failure(site, f"not finite at loss scale {factor:g}")
                return
            if self.forward is None and not finite(tensor) and (site.role != "input" or tensor.requires_grad):
                self.forward = Failure(site, "not finite")
            if compare:
                self.outputs.compare(site, tensor)

        self._model.zero_grad()
        for name, parameter in self._model.named_parameters():
            if self.forward is None and not finite(parameter):
                dtype = str(parameter.dtype).removeprefix("torch.")
                self.forward = Failure(parameter_site(self._model, name), f"not finite in {dtype}")
        with observed(self._model, look):
            try:
                value, _ = loss_of(self._model, batch, self._loss)
            except ModelError as error:
                self.forward = self.forward or crash(self._model, error)
                return False
            if self.forward is not None or not finite(value):
                self.forward = self.forward or Failure(model_site(self._model, "loss"), "not finite")
                return False
            (value * factor).backward()  # type: ignore[no-untyped-call]
        for name, parameter in self._model.named_parameters():
            if parameter.grad is None:
                continue
            if self.backward is None and not finite(parameter.grad):
                self.backward = Failure(parameter_site(self._model, name, True), f"not finite at loss scale {factor:g}")
            if compare and (expected := self._expected.gradients.get(name)) is not None:
                self.gradient_errors[name] = relative_error(parameter.grad.float() / factor, expected)
        return self.backward is None

    def failure(self) -> Failure | None:
        """The first failure: a non-finite tensor, or too large an error."""
        found = self.forward or self.backward or self.outputs.failure()
        if found is not None:
            return found
        for name, error in reversed(list(self.gradient_errors.items())):
            if not error <= GRADIENT_ERROR and self._expected.counts(name):
                return Failure(parameter_site(self._model, name, True), f"off by {error:.0%} on the first batch")
        return None


class Outputs:
    """The relative errors of modules' outputs for the first batch."""

    def __init__(self, expected: Reference) -> None:
        self.errors: dict[Site, float] = {}
        """For each module the largest relative error of its calls, in the order of execution; the model's comes
        last."""
        self._expected = expected
        self._calls: Counter[Site] = Counter()

    def compare(self, site: Site, tensor: Tensor) -> None:
        """Compare a module's output; other tensors are ignored."""
        wanted = self._expected.outputs.get(site, [])
        if self._calls[site] < len(wanted):
            self.errors[site] = max(self.errors.pop(site, 0.0), relative_error(tensor, wanted[self._calls[site]]))
            self._calls[site] += 1

    @property
    def by_module(self) -> dict[str, float]:
        """The errors by the modules' paths."""
        return {site.module: error for site, error in self.errors.items()}

    def failure(self) -> Failure | None:
        """The first output with too large an error, if the model's own error is too large."""
        off = [site for site, error in self.errors.items() if not error <= OUTPUT_ERROR]
        if all(site.module for site in off):
            return None
        return Failure(off[0], f"off by {self.errors[off[0]]:.0%} on the first batch")


def parameter_site(model: nn.Module, name: str, backward: bool = False) -> Site:
    """The site of a parameter, or of its gradient."""
    path, _, role = name.rpartition(".")
    said = f"gradient of the {role}" if backward else role
    return Site(path, type(model.get_submodule(path)).__name__, said, backward)


def model_site(model: nn.Module, role: str) -> Site:
    """A site of the model itself."""
    return Site("", type(model).__name__, role)


def crash(model: nn.Module, error: ModelError) -> Failure:
    """The failure of a model that torch could not run, from `batch.call`'s error."""
    return Failure(model_site(model, "forward"), str(error.__cause__ or error), crashed=True)


def finite(tensor: Tensor) -> bool:
    """Whether all values of a tensor are finite."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor.detach())  # one pass; with a NaN both are NaN
    return math.isfinite(low) and math.isfinite(high)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|, Euclidean norms; infinite if a value is not finite."""
    if found.shape != expected.shape:
        return math.inf
    one, two = found.detach().float(), expected.float()
    if two.numel() and float(two.min()) < -_MASK:
        one, two = one[two > -_MASK], two[two > -_MASK]
    norm = torch.linalg.vector_norm
    off, size = float(norm(one - two, dtype=torch.float64)), float(norm(two, dtype=torch.float64))
    return (off / size if size else math.inf if off else 0.0) if math.isfinite(off) else math.inf


_SEED = 0x5EED  # not a seed that initialises weights, so that noise does not repeat them

FLOAT32 = 2.0**-23
"""float32's rounding error: another order of summing changes results by it, or by half of it."""


@dataclass(frozen=True)
class Sensitivity:
    """A comparison of the float32 model with a copy whose weights w are w (1 + size u), u uniform in [-1, 1]."""

    size: float
    output_error: float
    """The relative error of the output on the first batch, as `Trial.output_error`."""
    gradient_errors: dict[str, float]
    """The relative error of each gradient that a trial compares."""

    @property
    def unstable(self) -> frozenset[str]:
        """The parameters whose gradients change by more than the limit of a trial."""
        return frozenset(name for name, error in self.gradient_errors.items() if not error <= GRADIENT_ERROR)

    @property
    def output_is_stable(self) -> bool:
        """Whether the output changes by no more than the limit of a trial."""
        return self.output_error <= OUTPUT_ERROR


def sensitivity(model: nn.Module, batch: Batch, loss: Loss | None, expected: Reference, size: float) -> Sensitivity:
    """The effect of a relative perturbation of all weights on the first batch; a copy of the model is perturbed."""
    moved = copy.deepcopy(model)
    noise = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in moved.parameters():
            if parameter.is_floating_point():
                uniform = 2 * torch.rand(parameter.shape, generator=noise, dtype=torch.float32, device="cpu") - 1
                parameter.mul_(1 + size * uniform.to(parameter.device))
    run = Run(moved, loss, expected)
    run.step(batch, 1.0, compare=True)
    compared = {name: error for name, error in run.gradient_errors.items() if expected.counts(name)}
    return Sensitivity(size, run.outputs.by_module.get("", math.inf), compared)
