"""A running setup: which updates of its steps left their values unchanged, its audit, and a fix."""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from textwrap import fill
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from halfstep.auditing.audit import audit
from halfstep.auditing.report import COLUMNS, SCHEMA, Audit, folded
from halfstep.auditing.setup import Setup, kept_as, leaves, name_of, set_up
from halfstep.errors import OptimizerError, RunError
from halfstep.ops import CodeTensor
from halfstep.optim import rule_of
from halfstep.recipe import get_recipe, is_master
from halfstep.text import grouped, percent


SAMPLE = 1 << 16
"""The largest number of values compared per tensor, evenly spaced."""

_WRAPPED = ("module", "_orig_mod")
"""The attribute under which DDP, FSDP and torch.compile keep the wrapped module."""


@dataclass(frozen=True)
class Moved:
    """The effect of one step on the compared values of one parameter."""

    step: int
    rate: float
    highest: float
    """The learning rate, or a higher one that a torch schedule will reach."""
    wanted: Tensor
    """The number of values with a non-zero gradient that were finite after the step."""
    lost: Tensor
    """The number of these where neither the value nor a master changed."""


class Watch:
    """Compares values before and after each step of every optimizer, and changes nothing. A context manager.

    For each parameter it keeps the result of one step: the last one whose learning rate was at least half of the
    highest so far. Adam's first steps are larger than later ones, and those at the end of a schedule are too small to
    be informative.

    Args:
        steps: `enough` is called before an optimizer takes more steps than this.
    """

    def __init__(self, steps: int | None = None, enough: Callable[[], None] = lambda: None) -> None:
        self.moved: dict[Tensor, Moved] = {}
        self.trainer: type | None = None
        """The class of the transformers Trainer whose optimizer steps, if any."""
        self._limit, self._enough = steps, enough
        self.counted: dict[torch.optim.Optimizer, int] = {}
        """The number of steps of each optimizer."""
        self._models: dict[torch.optim.Optimizer, nn.Module | None] = {}
        self._before: dict[Tensor, list[Tensor]] = {}
        self._rates: dict[Tensor, float] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> "Watch":
        disable: Any = torch.compiler.disable
        before, after = disable(self._note), disable(self._compare)
        self._handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def steps(self) -> int:
        """The largest number of steps that one optimizer has taken."""
        return max(self.counted.values(), default=0)

    @property
    def setups(self) -> list[tuple[nn.Module, list[torch.optim.Optimizer]]]:
        """Each model whose parameters optimizers have stepped on, with these optimizers."""
        self._look()
        return [*grouped((model, one) for one, model in self._models.items() if model is not None).items()]

    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        taken = self.counted.get(optimizer, 0)
        if self._limit is not None and taken >= self._limit:
            self._enough()
        if taken:
            self._look()
        self._before = {
            parameter: [_sample(one).clone() for one in _kept(optimizer, parameter)]
            for group in optimizer.param_groups
            for parameter in group["params"]
            if self._tells(parameter, float(group.get("lr", 0.0))) and not isinstance(parameter, CodeTensor)
        }

    def _compare(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        step = self.counted[optimizer] = self.counted.get(optimizer, 0) + 1
        before, self._before = self._before, {}
        if bool(getattr(optimizer, "found_inf", None) or False):  # set by a loss scaler: the step was skipped
            return
        for group in optimizer.param_groups:
            rate = float(group.get("lr", 0.0))
            highest = max(rate, *(float(group.get(name, 0.0)) for name in ("initial_lr", "max_lr")))
            for parameter in group["params"]:
                if parameter in before and (grad := _gradient(parameter)) is not None:
                    after = [_sample(one) for one in _kept(optimizer, parameter)]
                    self._rates[parameter] = max(rate, self._rates.get(parameter, 0.0))
                    self.moved[parameter] = Moved(step, rate, highest, *_counted(grad, before[parameter], after))
        if step == 1 and len(self.counted) == 1:
            self._look()

    def _tells(self, parameter: Tensor, rate: float) -> bool:
        """Whether a step at this rate is to be kept."""
        return rate > 0 and 2 * rate >= self._rates.get(parameter, 0.0)

    def _look(self) -> None:
        """Find the models of new optimizers, all in one pass, since it iterates over every object."""
        new = [optimizer for optimizer in self.counted if optimizer not in self._models]
        if new:
            objects = gc.get_objects()
            self._models |= models_of(new, objects)
            trainers = [one for one in objects if _is_trainer(type(one)) and self._steps_for(one)]
            self.trainer = self.trainer or next(map(type, trainers), None)

    def _steps_for(self, trainer: Any) -> bool:
        """Whether one of the optimizers, below accelerate's wrapper, is that trainer's."""
        optimizer = getattr(trainer, "optimizer", None)
        while optimizer is not None and not any(optimizer is one for one in self.counted):
            optimizer = getattr(optimizer, "optimizer", None)
        return optimizer is not None


def _kept(optimizer: torch.optim.Optimizer, parameter: Tensor) -> list[Tensor]:
    """The plain tensors that store a parameter's value: its own, and those of its master."""
    state: Mapping[str, Any] = optimizer.state.get(parameter, {})
    own = leaves(parameter, "")
    masters = (leaf for key, value in state.items() if is_master(key) for leaf in leaves(value, ""))
    return [tensor for _, tensor in (*own, *masters) if tensor.is_floating_point() or tensor.numel() > 1]


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // SAMPLE))]


def _gradient(parameter: Tensor) -> Tensor | None:
    """The compared values of a gradient; None if it is not a plain tensor."""
    grad = parameter.grad
    if grad is None or grad.layout != torch.strided:
        return None
    plain = [tensor for _, tensor in leaves(grad, "")]
    return _sample(plain[0]) if len(plain) == 1 else None


def _counted(grad: Tensor, before: Sequence[Tensor], after: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The numbers of wanted and of lost updates. A master created in the step, or stored in tiles, counts as
    changed."""
    wanted = (grad != 0) & after[0].isfinite()
    still = wanted
    if len(after) != len(before) or any(one.shape != grad.shape for one in (*before, *after)):
        still = torch.zeros_like(wanted)
    else:
        for one, other in zip(before, after, strict=True):
            still = still & (one == other)
    return wanted.sum(), still.sum()


def models_of(
    optimizers: Iterable[torch.optim.Optimizer], objects: Iterable[Any]
) -> dict[torch.optim.Optimizer, nn.Module | None]:
    """For each optimizer, the outermost module among `objects` that has most of its parameters, without wrappers."""
    # type(), not isinstance: isinstance reads every object's __class__, and lazy objects would load their modules.
    modules = [one for one in objects if issubclass(type(one), nn.Module)]
    inner = {id(child) for module in modules for child in module._modules.values()}
    roots = [(root, {id(p) for p in root.parameters()}) for root in modules if id(root) not in inner]
    found: dict[torch.optim.Optimizer, nn.Module | None] = {}
    for optimizer in optimizers:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        most = max(roots, key=lambda root: (len(root[1] & stepped), -len(root[1])), default=None)
        found[optimizer] = unwrapped(most[0]) if most is not None and most[1] & stepped else None
    return found


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside DDP, FSDP and torch.compile."""
    while [*module._modules] in ([name] for name in _WRAPPED):
        (module,) = filter(None, module._modules.values())
    return module


def _is_trainer(kind: type) -> bool:
    return any(base.__name__ == "Trainer" and base.__module__ == "transformers.trainer" for base in kind.__mro__)


LOST = 0.01
"""The share of lost updates from which a setup is said to lose them: float32 itself rounds some away."""


@dataclass(frozen=True)
class Updates:
    """The updates of one step to compared values of one dtype that are stored in one way."""

    dtype: str
    kept: str
    """"alone": in the weight, rounded to nearest; "stochastic": in the weight, rounded stochastically; "master": in a
    master."""
    parameters: int
    """The number of the model's parameters stored in this way."""
    step: int
    rate: float
    peak: float
    """The highest rate of a torch schedule; `rate` without one."""
    looked: int
    lost: int
    """Updates after which neither the weight nor a master had changed."""
    roles: dict[str, float]
    """The lost share by role of the weights: embedding, mlp, norm ..."""

    @property
    def share(self) -> float:
        """The lost share."""
        return self.lost / self.looked if self.looked else 0.0

    @property
    def harmful(self) -> bool:
        """Whether at least `LOST` of them are lost; never with stochastic rounding, which loses many without harm."""
        return self.kept != "stochastic" and self.share >= LOST

    def __str__(self) -> str:
        least = f"; a schedule reaches {self.peak:g}" if self.peak > self.rate else ""
        at = f"lr = {self.rate:g} (step {self.step:,}; {self.looked:,} compared{least})"
        held = f"{self.parameters:,} parameters in {self.dtype}"
        lost = percent(self.share) if self.lost else "none"
        if not self.looked:
            return f"No update to compare, {held}: no value is finite with a non-zero gradient."
        if self.kept == "stochastic":
            return f"Your updates arrive, {held}, rounded stochastically: {lost} changed nothing at {at}, by chance."
        held += _MASTERS_TEXT[self.kept, self.dtype == "float32"]
        if not self.harmful:
            return f"Your updates arrive, {held}: {lost} of them were lost at {at}."
        roles = ", ".join(f"{role} {percent(share)}" for role, share in self.roles.items())
        return f"Your updates are being lost: {lost} of them at {at}, {held}. By role: {roles}."


_MASTERS_TEXT = {
    ("alone", False): " without master weights",
    ("alone", True): "",
    ("master", False): " beside master weights",
    ("master", True): " beside master weights",
}


@dataclass(frozen=True)
class Running:
    """A running setup: the fate of its updates, its audit, and a fix. `print(report)` shows it."""

    updates: tuple[Updates, ...]
    audit: Audit
    mend: "Mend | None"
    """None if nothing is lost."""

    @property
    def loses(self) -> bool:
        """Whether updates are being lost."""
        return any(one.harmful for one in self.updates)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        updates = [asdict(one) | {"share": one.share} for one in self.updates]
        made = None if self.mend is None else asdict(self.mend)
        return {"schema": SCHEMA, "loses": self.loses, "updates": updates, "mend": made, "audit": self.audit.to_dict()}

    def __str__(self) -> str:
        said = [fill(str(one), COLUMNS, subsequent_indent="  ", break_on_hyphens=False) for one in self.updates]
        return "\n".join([*said, *([] if self.mend is None else ["", str(self.mend)]), "", str(self.audit)])


def running(watch: Watch) -> tuple[Running, ...]:
    """A report for each model that a watch has seen optimizers step.

    Raises:
        RunError: no optimizer stepped; or no parameter that they step belongs to a module.
    """
    if not watch.steps:
        raise RunError(
            "no torch optimizer took a step, so there are no updates to compare; expected a program that trains: "
            "torch.optim.Optimizer or a subclass, stepped in this process (under torchrun and accelerate, audit "
            "each process: torchrun -m halfstep audit train.py)"
        )
    if not watch.setups:
        names = ", ".join(dict.fromkeys(type(one).__name__ for one in watch.counted))
        raise RunError(
            f"{names} steps no parameter of a module in memory: it has separate copies, flat or sharded, like "
            "DeepSpeed's and Megatron's; expected the model's own parameters. Call halfstep.audit(model, optimizer) in "
            "the script"
        )
    return tuple(_report(model, optimizers, watch) for model, optimizers in watch.setups)


def _report(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], watch: Watch) -> Running:
    report, found = audit(model, optimizers), tuple(_updates(set_up(model, *optimizers), watch))
    lost = [one.dtype for one in found if one.harmful]
    return Running(found, report, mend(report, optimizers, lost, watch.trainer) if lost else None)


def _updates(setup: Setup, watch: Watch) -> Iterator[Updates]:
    """The updates by the way values are stored, the narrowest first."""
    moved = {
        name: (taker, watch.moved[taker])
        for name, parameter in setup.trained.items()
        if (taker := setup.by_hand.get(name, parameter)) in watch.moved
    }
    sets = grouped(((name_of(kept_as(taker)), _storage_of(setup, name)), name) for name, (taker, _) in moved.items())
    for (dtype, how), names in sorted(sets.items(), key=lambda pair: pair[0][0] == "float32"):
        yield _summed(dtype, how, setup, {name: moved[name][1] for name in names})


def _storage_of(setup: Setup, name: str) -> str:
    """How the values of a trained parameter are stored, as a value of `Updates.kept`."""
    if name in setup.stochastic and setup.trained[name].dtype == torch.bfloat16:
        return "stochastic"
    return "master" if name in setup.masters and name not in setup.by_hand else "alone"


def _summed(dtype: str, how: str, setup: Setup, moved: Mapping[str, Moved]) -> Updates:
    looked, lost = Counter[str](), Counter[str]()
    for name, one in moved.items():
        looked[setup.roles[name]] += int(one.wanted)
        lost[setup.roles[name]] += int(one.lost)
    parameters = sum(setup.trained[name].numel() for name in moved)
    shares = {role: lost[role] / count for role, count in looked.items() if count}
    step, rate, peak = (
        max(ends) for ends in zip(*((one.step, one.rate, one.highest) for one in moved.values()), strict=True)
    )
    return Updates(dtype, how, parameters, step, rate, peak, looked.total(), lost.total(), shares)


MEASURED = {"bfloat16": {1e-5: 0.14, 1e-4: 0.83}, "float16": {1e-5: 0.65, 1e-4: 0.98}}
"""By dtype and learning rate, the share of fp32's improvement that fine-tuning without masters reached: the recipes
`bf16-nomaster` and `fp16-nomaster` of benchmarks/results/which_bf16_finetune.json."""

_RECIPES = {"bfloat16": ("bf16-6byte", "bf16-master"), "float16": ("fp16-master",)}
_FIX = {"bfloat16": "stochastic rounding or master weights", "float16": "master weights"}
_MIXED = 16
"""Bytes of float32 weights, gradients and Adam's two moments."""


@dataclass(frozen=True)
class Mend:
    """Lines of code that fix a setup."""

    dtype: str
    now: float
    """Bytes per parameter, as audited."""
    lines: tuple[str, ...]
    recipes: dict[str, float]
    """Bytes per parameter by recipe; the first recipe is the one in `lines`."""

    def __str__(self) -> str:
        return "\n".join([*self._measured(), *self._mended()])

    def _measured(self) -> list[str]:
        if (shares := MEASURED.get(self.dtype)) is None:
            return []
        reached = " and ".join(f"{share:.0%} at {rate:g}" for rate, share in shares.items())
        return [
            folded(
                f"The cost: fine-tuned this way, a small GPT reached {reached} of what float32 gains; with "
                f"{_FIX[self.dtype]} 99% or more (three seeds, docs/which_bf16.md)."
            )
        ]

    def _mended(self) -> list[str]:
        if not self.recipes:
            return [folded(_float32(self.dtype))]
        first, *others = self.recipes.items()
        beside = "".join(f'; recipe="{name}" takes {size:.3g}' for name, size in others)
        when = "once the optimizer is made, " if self.lines[0] == "import halfstep" else ""
        head = f"Two lines fix it, {when}at {first[1]:.3g} bytes a parameter in all (now {self.now:.3g}{beside}):"
        return [folded(head), *(f"    {line}" for line in self.lines), folded(_float32(self.dtype))]


def _float32(dtype: str) -> str:
    if dtype == "float32":
        return "Raise the learning rate: float32 itself rounds such updates away."
    return (
        f"Without halfstep: keep the weights in float32 (from_pretrained(..., dtype=torch.float32)) and compute in "
        f"{dtype} under torch.autocast (Trainer's bf16=True or fp16=True), {_MIXED} bytes with Adam."
    )


def mend(
    report: Audit, optimizers: Sequence[torch.optim.Optimizer], dtypes: Sequence[str], trainer: type | None = None
) -> Mend:
    """The fix for a setup that loses updates of values in these dtypes; `trainer` is the class of transformers'
    Trainer, if any."""
    dtype = next((one for one in dtypes if one in _RECIPES), dtypes[0])
    recipes = {}
    if dtype in _RECIPES and len(optimizers) == 1 and (moments := _moments(optimizers[0])) is not None:
        recipes = {name: get_recipe(name).bytes_per_parameter(moments).total for name in _RECIPES[dtype]}
    lines = tuple(_lines(next(iter(recipes)), trainer)) if recipes else ()
    return Mend(dtype, report.nbytes / (report.trained or 1), lines, recipes)


def _moments(optimizer: torch.optim.Optimizer) -> tuple[str, ...] | None:
    """The moments that halfstep would store for the optimizer; None if it has no counterpart."""
    try:
        return rule_of(optimizer).moments(optimizer.param_groups[0])
    except OptimizerError:
        return None


def _lines(recipe: str, trainer: type | None) -> list[str]:
    if trainer is None:
        scale = get_recipe(recipe).loss_scale
        scaled = scale is not None and scale.scales
        made = "model, optimizer, scaler" if scaled else "model, optimizer, _"
        after = "  # step by the scaler: docs/start.md" if scaled else ""
        return ["import halfstep", f'{made} = halfstep.prepare(model, optimizer, recipe="{recipe}"){after}']
    if trainer.__name__ == "Trainer":
        return [
            "from halfstep.integrations.transformers import HalfstepTrainer as Trainer",
            f'trainer = Trainer(..., recipe="{recipe}")  # and neither bf16=True nor fp16=True',
        ]
    return [
        "from halfstep.integrations.transformers import HalfstepMixin",
        f'class Tuner(HalfstepMixin, {trainer.__name__}): ...  # Tuner(..., recipe="{recipe}"), no bf16=True',
    ]
