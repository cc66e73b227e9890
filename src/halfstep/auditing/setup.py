"""The plain tensors of a setup with their roles: stepped parameters, masters, averages, frozen norms."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from inspect import getclosurevars, isfunction, unwrap
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.bits.scan import Scan, readable, scan
from halfstep.bits.values import TYPES, InMemory, runs
from halfstep.inspection.roles import role_of
from halfstep.nn.codes import buffers
from halfstep.nn.scaling import states_of
from halfstep.ops import CodeTensor
from halfstep.ops.part import parts_of
from halfstep.ops.subclasses import check_initialized
from halfstep.optim import LowBit
from halfstep.recipe.spec import MASTER, is_master


PIECE = 1 << 22
"""The number of values compared at once."""


def leaves(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Every plain tensor in a value, with its path: this rank's shard of a DTensor, the codes and scales of a quantised
    state, the members of lists and dictionaries. Other values have none."""
    if isinstance(value, Tensor):
        yield from _plain(value.detach(), path)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from leaves(one, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from leaves(one, f"{path}.{number}")


def _plain(tensor: Tensor, path: str) -> Iterator[tuple[str, Tensor]]:
    if hasattr(tensor, "__tensor_flatten__"):  # torch's protocol for wrapper subclasses
        named = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
        parts = {name: part for name, part in named.items() if isinstance(part, Tensor)}  # a DTensor lists its mesh too
        for name, part in parts.items():
            yield from _plain(part, path if len(parts) == 1 else f"{path}.{name}")
    elif tensor.layout == torch.sparse_coo:
        yield from ((f"{path}.indices", tensor._indices()), (f"{path}.values", tensor._values()))
    else:
        yield path, tensor


def name_of(dtype: torch.dtype) -> str:
    """torch's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def size(tensor: Tensor) -> int:
    """The bytes of a plain tensor: of an expanded one those of its storage, of a freed one none."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def values(tensor: Tensor) -> int:
    """The number of values that a plain tensor stores: of an expanded one those of its storage, of a freed one those it
    had."""
    return size(tensor) // tensor.element_size() or tensor.numel()


def place(tensor: Tensor) -> tuple[object, ...] | None:
    """The address and layout of a plain tensor's bytes, equal for two names of the same bytes; None if it has none."""
    if tensor.device.type == "meta" or not size(tensor):
        return None
    return tensor.device, tensor.data_ptr(), size(tensor)


def scanned(tensor: Tensor) -> Scan | None:
    """The scan of a plain tensor's bits; None if it is not floating point, or freed."""
    if place(tensor) is None or name_of(tensor.dtype) not in TYPES:
        return None
    once = InMemory(tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())])
    return scan(once) if readable(once) else None


def rounds_to(full: Tensor, narrow: Tensor) -> bool:
    """Whether `narrow` equals `full` rounded to `narrow`'s dtype."""
    wide, few = list(leaves(full, "")), list(leaves(narrow, ""))
    pairs = list(zip(wide, few, strict=False))
    if len(wide) != len(few) or any(
        a.shape != b.shape or place(a) is None or place(b) is None for (_, a), (_, b) in pairs
    ):
        return False
    pieces = ((a, b) for (_, one), (_, two) in pairs for a, b in zip(runs(one, PIECE), runs(two, PIECE), strict=True))
    return all(torch.equal(a.to(b.dtype).to(b.device), b) for a, b in pieces)


_DECAYS = {"exp_avg": ("betas", 0), "exp_avg_sq": ("betas", 1), "square_avg": ("alpha", None)}
"""The option of torch's optimizers that holds the decay of a state."""


@dataclass(frozen=True)
class Setup:
    """A model and its optimizer. Parameters are named by the model's first name for them."""

    every: tuple[tuple[str, nn.Parameter], ...]
    """Every name in the model; tied parameters under each of their names."""
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    roles: Mapping[str, str]
    """The roles of parameters and buffers, from their names or their modules' classes."""
    groups: Mapping[str, Mapping[str, Any]] | None
    """The optimizer's group of each parameter that it steps; None without an optimizer."""
    states: tuple[tuple[str, str, Any], ...]
    """Parameter, name and value of the optimizer's states; masters are named "master"."""
    by_hand: Mapping[str, Tensor]
    """float32 parameters of the optimizer that are not in the model, and round to one of the model's narrower ones."""
    foreign: Mapping[str, Tensor]
    """Other parameters of the optimizer that are not in the model."""
    steps: Mapping[str, int]
    stochastic: Collection[str]
    """The parameters whose updates an optimizer rounds stochastically."""
    saved: Mapping[str, bool]
    """The floating-point buffers, without scales of codes, and whether state dicts contain them."""
    decays: Mapping[str, float]
    """The decays of averages among the parameters and buffers."""
    products: Collection[str]
    """The weights of linear layers and convolutions, without tied ones."""
    frozen_norms: tuple[str, ...]

    @cached_property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that require a gradient."""
        return {name: p for name, p in self.parameters.items() if p.requires_grad}

    @cached_property
    def masters(self) -> dict[str, Any]:
        """The tensors that receive the update instead of a parameter, or in addition to it."""
        kept = {name: value for name, kind, value in self.states if kind == MASTER or kind.startswith(f"{MASTER} (")}
        return {**kept, **self.by_hand}

    def steps_on(self, kind: str, name: str) -> bool:
        """Whether a tensor of that kind receives the updates of the parameter of that name."""
        taker = "parameters" if name not in self.masters else MASTER
        return kind == taker and name in self.trained and name in (self.groups or {})

    def decay(self, kind: str, name: str) -> float | None:
        """An average's decay per step; None for other tensors, and for averages that store their rounding errors."""
        if kind in ("parameters", "buffers"):
            return None if name in (self.groups or {}) else self.decays.get(name)
        group = (self.groups or {}).get(name, {})
        if kind not in _DECAYS or any((one, key) == (name, f"{kind}_residual") for one, key, _ in self.states):
            return None
        key, place = _DECAYS[kind]
        said = group.get(key)
        return None if said is None else float(said[place] if place is not None else said)

    @cached_property
    def narrow(self) -> dict[str, nn.Parameter]:
        """Trained parameters narrower than float32 that receive their updates directly, rounded to nearest."""
        stepped, masters = self.groups or {}, self.masters
        return {
            name: p
            for name, p in self.trained.items()
            if p.is_floating_point() and kept_as(p).itemsize < 4 and name in stepped and name not in masters
            and not (name in self.stochastic and p.dtype == torch.bfloat16)
        }  # fmt: skip


def kept_as(parameter: Tensor) -> torch.dtype:
    """The dtype in which a parameter is stored: that of its codes, if it is stored as codes."""
    return parameter.codes.dtype if isinstance(parameter, CodeTensor) else parameter.dtype


def set_up(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Setup:
    """Describe a model and the optimizers that step it.

    Raises:
        ModelError: a parameter has no shape yet.
    """
    check_initialized(model)
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    stepped = [(p, group) for one in optimizers for group in one.param_groups for p in group["params"]]
    groups: dict[str, Mapping[str, Any]] = {names[id(p)]: group for p, group in stepped if id(p) in names}
    strangers = [(number, p, group) for number, (p, group) in enumerate(stepped) if id(p) not in names]
    by_hand: dict[str, Tensor] = {}
    foreign: dict[str, Tensor] = {}

    for number, parameter, group in strangers:
        name = _rounded(parameter, {n: p for n, p in parameters.items() if n not in groups})
        if name is None:
            name = f"optimizer parameter {number}"
            foreign[name] = parameter
        else:
            groups[name], by_hand[name] = group, parameter
        names[id(parameter)] = name
    states = [
        (names.get(id(parameter), f"state {number} of no group"), key, value)
        for number, (parameter, state) in enumerate(chain.from_iterable(one.state.items() for one in optimizers))
        for key, value in state.items()
    ]
    counted = [
        *((name, value) for name, key, value in states if key == "step"),
        *((name, group["step"]) for name, group in groups.items() if "step" in group),
    ]

    return Setup(
        every=tuple(model.named_parameters(remove_duplicate=False)),
        parameters=parameters,
        buffers=dict(model.named_buffers()),
        roles=dict(_roles(model)),
        groups=groups if optimizers else None,
        states=tuple((name, _kind(key), value) for name, key, value in states),
        by_hand=by_hand,
        foreign=foreign,
        steps={name: int(value) for name, value in counted},
        stochastic={
            names[id(p)]
            for one in optimizers
            if _stochastic(one)
            for group in one.param_groups
            for p in group["params"]
        },
        saved=saved(model),
        decays=decays(model),
        products=products(model),
        frozen_norms=tuple(frozen_norms(model)),
    )


def _stochastic(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer, halfstep's or torchao's, rounds its updates stochastically."""
    if isinstance(optimizer, LowBit):
        return optimizer.recipe.update_rounding == "stochastic"
    return bool(getattr(optimizer, "bf16_stochastic_round", False))


def _roles(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The role of each parameter and buffer, under every name it has."""
    for path, module in model.named_modules():
        states = {id(state) for state in states_of(module).values()}
        by_class = role_of(type(module).__name__)
        for name, tensor in chain(module._parameters.items(), module._buffers.items()):
            full = f"{path}.{name}" if path else name
            found = role_of(full)
            yield full, "scales" if id(tensor) in states else by_class if found == "other" else found


def _rounded(full: Tensor, candidates: Mapping[str, nn.Parameter]) -> str | None:
    """The first parameter that equals `full` rounded to a narrower dtype."""
    narrower = {name: p for name, p in candidates.items() if p.is_floating_point() and p.itemsize < full.itemsize}
    return next((name for name, p in narrower.items() if p.shape == full.shape and rounds_to(full, p)), None)


def _kind(key: str) -> str:
    """The kind of a state: its name, or "master" or "master (name)" if it stores more bits of a weight than the
    weight."""
    return MASTER if role_of(key) == MASTER else f"{MASTER} ({key})" if is_master(key) else key


_AVERAGED = (nn.modules.batchnorm._NormBase,)


def saved(model: nn.Module) -> dict[str, bool]:
    """The floating-point buffers that are not scales of codes, and whether state dicts contain them."""
    parents = dict(model.named_modules())
    places = ((name, *name.rpartition(".")[::2]) for name in buffers(model))
    return {name: last not in parents[path]._non_persistent_buffers_set for name, path, last in places}


def decays(model: nn.Module) -> dict[str, float]:
    """The decays of averages a <- d a + (1 - d) x in a model, by the name of a: running statistics, and the copies of
    models and the buffers of modules with a `decay`, such as torch's AveragedModel with its function."""
    found: dict[str, float] = {}
    for path, module in model.named_modules():
        dot = f"{path}." if path else ""
        if isinstance(module, _AVERAGED):
            if module.track_running_stats and module.momentum is not None:
                found |= dict.fromkeys((f"{dot}running_mean", f"{dot}running_var"), 1 - module.momentum)
        elif (decay := _decay(module)) is not None:
            found |= {dot + name: decay for name, _ in chain(module.named_parameters(), module.named_buffers())}
    return found


def _decay(module: nn.Module) -> float | None:
    """The decay of a module: its attribute, or a value in the closure of its averaging function."""
    said: list[Any] = [vars(module).get(name) for name in ("decay", "ema_decay", "beta")]
    functions = filter(isfunction, (vars(module).get("multi_avg_fn"), vars(module).get("avg_fn")))
    said += [getclosurevars(unwrap(function)).nonlocals.get("decay") for function in functions]
    return next((value for value in said if isinstance(value, float) and 0 < value < 1), None)


def products(model: nn.Module) -> set[str]:
    """The weights that only one layer has and multiplies by."""
    used = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    return {
        f"{path}.weight" if path else "weight"
        for path, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) and used[id(module._parameters.get("weight"))] == 1
    }


def frozen_norms(model: nn.Module) -> Iterator[str]:
    """The parameters of norms that are frozen in blocks where everything else trains. Norms with running statistics are
    excluded, since they are frozen on purpose, and so are those of a base in codes whose adapters train."""
    if any(getattr(own.applied, "adapts", False) for _, _, own in parts_of(model)):
        return
    norms = {module for module in model.modules() if _is_norm(module)}
    for path, parent in model.named_modules():
        own = {name: child for name, child in parent.named_children() if child in norms}
        beside = {p for child in parent.children() if child not in norms for p in _outside(child, norms)}
        if beside and all(p.requires_grad for p in beside):
            for name, norm in own.items():
                if not any(p.requires_grad for p in norm.parameters()):
                    yield from (name for name, _ in norm.named_parameters(f"{path}.{name}" if path else name))


def _outside(module: nn.Module, norms: set[nn.Module]) -> Iterator[nn.Parameter]:
    return (p for part in module.modules() if part not in norms for p in part._parameters.values() if p is not None)


def _is_norm(module: nn.Module) -> bool:
    statistics = isinstance(module, _AVERAGED) or "running_mean" in module._buffers
    return role_of(type(module).__name__) == "norm" and not statistics and not [*module.children()]
