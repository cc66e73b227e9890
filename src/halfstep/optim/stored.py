"""What an optimizer keeps of its parameters: moments, masters and step counts, begun, saved, loaded and taken over.

States of bitsandbytes' and torchao's optimizers come under torch's names, with their codes as our storages keep such.
"""

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import formats, ops
from halfstep.errors import OptimizerError
from halfstep.ops.codes import store_zeros
from halfstep.optim.checks import check_state, check_subspace
from halfstep.optim.rules import RULE, UpdateRule, moment_names
from halfstep.optim.shards import is_spread, local, placed, spread_like, start_codes
from halfstep.optim.states import FORMATS, Plan, adopt, foreign, labels, plan_of, widened
from halfstep.optim.update import OWN, CodedWeight
from halfstep.quant import Quantizer, Scales
from halfstep.quant.masters import Master, get_master
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import Tile
from halfstep.recipe import MASTER, PROJECTOR, RECIPE, Origin, Projection, Recipe, Storage, is_master
from halfstep.recipe.spec import ADAM


State = Mapping[str, Any]
Labels = dict[str, str]

_NESTED = "__bnb_optimizer_quant_state__"
"""Where bitsandbytes puts what FSDP must not gather."""
_ENTRIES = ("state", "qmap", "absmax", "max", "new_max")
_BLOCKS = (256, 2048)
"""The blocks of bitsandbytes' versions, which every tensor of at least 4096 elements tells apart."""


# ---- states of another recipe ----------------------------------------------------------------------------------------


class Changed:
    """Takes the states of one recipe's optimizer to another's: moments by value, masters where both keep them alike."""

    def __init__(self, other: str, recipe: Recipe) -> None:
        self._other, self._recipe = other, recipe
        self._dropped = self._begun = self._restarted = 0
        self._rounded: dict[str, str] = {}

    def kept(
        self,
        saved: State,
        plan: Plan,
        master: Master,
        formats: Mapping[str, str] | None,
        coded: Mapping[str, Storage],
        parameter: Tensor,
    ) -> tuple[State, Mapping[str, str]]:
        """What is taken of a parameter's saved state, and its formats. Moments of another subspace are dropped, and so
        is the step count then, by which Adam corrects moments that begin at zero."""
        formats = formats or {}
        masters = {name for name in saved if is_master(name)}
        alike = all(formats.get(name) == own for name, own in labels(coded).items()) and bool(master.keeps)
        for name, dtype in master.keeps.items():
            value = saved.get(name)
            same = isinstance(value, Tensor) and value.dtype == dtype and (coded or value.shape == parameter.shape)
            alike = alike and bool(same)
        state = {name: value for name, value in saved.items() if name not in masters or alike}
        self._dropped += bool(masters) and not alike
        self._begun += bool(master.keeps) and not alike
        try:
            check_subspace(state, plan.kinds, plan.shapes, parameter, "?")
        except OptimizerError:
            self._restarted += 1
            state = {name: value for name, value in state.items() if name in masters}
        for name, kind in plan.kinds.items():
            value, now = state.get(name), labels({name: kind}).get(name)
            was = formats.get(name) or (value.dtype if isinstance(value, Tensor) else None)
            narrower = was != (now or kind.dtype) or (f"{name}_residual" in state and not kind.residual)
            if was is not None and narrower and kind.dtype != torch.float32:
                self._rounded[name] = str(kind)
        return state, {name: format for name, format in formats.items() if name in state}

    def __str__(self) -> str:
        told = [f"{name} is rounded to {kind}" for name, kind in self._rounded.items()]
        if self._dropped:
            told.append(f"the masters of {self._dropped} parameters are dropped, and go on as their stored weights")
        if self._begun:
            told.append(f"masters of {self._begun} parameters begin from the present weights")
        if self._restarted:
            told.append(f"moments and step counts of {self._restarted} parameters begin at zero")
        if self._recipe.codes is not None or self._recipe.weights != "fp32":
            kept = self._recipe.weights if self._recipe.codes is None else str(self._recipe.codes.weights)
            told.append(f"weights that were kept in more bits are rounded to {kept}")
        return (
            f"the optimizer's state was saved under {self._other}, and goes on under {self._recipe.name!r}, as "
            f"recipe_change='allow' asks: {'; '.join(told) or 'all of it is taken as it is'}"
        )


# ---- states of other libraries ---------------------------------------------------------------------------------------


def as_ours(
    saved: Mapping[str, Any], moments: Collection[str], shape: tuple[int, ...], number: object
) -> tuple[Mapping[str, Any], Labels]:
    """A parameter's saved state, and what it says of its codes: bitsandbytes' two moments as Adam's, torchao's by their
    parts or values; anything else as it is.

    Args:
        moments: the names of those that the rule keeps.
        shape: the parameter's.

    Raises:
        OptimizerError: a state of bitsandbytes that is not its Adam's, AdamW's or LAMB's, or where the rule does not
            keep Adam's moments.
    """
    found = {name: value for name, value in saved.items() if name != _NESTED} | dict(saved.get(_NESTED) or {})
    if "state1" in found:
        _check_bitsandbytes(found, moments, shape, number)
        own = {part + digit for part in _ENTRIES for digit in "12"} | {"unorm_vec", "gnorm_vec"}
        kept = {name: value for name, value in found.items() if name not in own}
        made = [_of_bitsandbytes(name, found, digit, number) for name, digit in zip(ADAM, "12", strict=True)]
    else:
        kept = {name: value for name, value in found.items() if not _decodes(value)}
        made = [_of_torchao(name, value) for name, value in found.items() if name not in kept]
    said: Labels = {}
    for tensors, label in made:
        kept |= tensors
        said |= label
    return kept, said


def _check_bitsandbytes(
    saved: Mapping[str, Any], moments: Collection[str], shape: tuple[int, ...], number: object
) -> None:
    held = {name: tuple(saved[name].shape) for name in ("state1", "state2") if isinstance(saved.get(name), Tensor)}
    if list(held.values()) == [shape] * len(ADAM) and set(ADAM) <= set(moments):
        return
    raise OptimizerError(
        f"the state of parameter {number} is one of bitsandbytes' optimizers, and does not say of which: "
        f"{', '.join(f'{name} of shape {found}' for name, found in held.items())}. Those of its Adam and AdamW, two of "
        f"shape {shape}, load into an optimizer that keeps {' and '.join(ADAM)}; this one keeps "
        f"{', '.join(sorted(moments)) or 'none'}. Load the weights alone, and start the optimizer from zero"
    )


def _of_bitsandbytes(
    name: str, saved: Mapping[str, Any], digit: str, number: object
) -> tuple[dict[str, Tensor], Labels]:
    codes, entries, largest = saved[f"state{digit}"], saved.get(f"qmap{digit}"), saved.get(f"absmax{digit}")
    if codes.is_floating_point():
        return {name: codes}, {}
    if codes.dtype == torch.uint8 and isinstance(entries, Tensor) and isinstance(largest, Tensor):
        size = next((size for size in _BLOCKS if largest.numel() == -(-codes.numel() // size)), None)
        if entries.numel() == 256 and size is not None:
            return _coded(name, codes, entries, largest, size)
    raise OptimizerError(
        f"the state of parameter {number} holds state{digit} of bitsandbytes as {codes.dtype}; expected uint8, a map "
        f"qmap{digit} of 256 numbers, and absmax{digit}, one for {' or '.join(map(str, _BLOCKS))} codes. Load the "
        "weights alone, and start the optimizer from zero"
    )


def _decodes(value: Any) -> bool:
    """Whether a tensor is a subclass that knows the values of its codes, as torchao's are."""
    return isinstance(value, Tensor) and type(value).dequantize is not Tensor.dequantize


def _of_torchao(name: str, value: Any) -> tuple[dict[str, Tensor], Labels]:
    if hasattr(value, "qmap") and value.qmap.numel() == 256:
        return _coded(name, value.codes, value.qmap, value.scale, value.codes.numel() // value.scale.numel())
    return {name: value.dequantize()}, {}


def _coded(name: str, codes: Tensor, entries: Tensor, largest: Tensor, size: int) -> tuple[dict[str, Tensor], Labels]:
    """Codes of a map, in blocks of a tensor laid out flat that share their largest magnitude: as such a storage keeps
    them where the map is one of ours, and as values where it is not."""
    values, flat = entries.detach().float(), codes.detach().reshape(1, -1)
    for format in (formats.get("dynamic8"), formats.get("dynamic8_unsigned")):
        if [format.decode(code) for code in range(256)] == values.tolist():
            storage = Storage(Quantizer(format, scales=Scales(Tile(1, size), get_scaling("absmax"))), flat=True)
            own = storage.names(name)
            return {own["codes"]: flat, own["scale"]: largest.detach().float().reshape(1, -1)}, labels({name: storage})
    scales_of_codes = largest.detach().float().flatten().repeat_interleave(size)[: codes.numel()]
    return {name: (values[flat[0].long()] * scales_of_codes).view(codes.shape)}, {}


# ---- the states of an optimizer --------------------------------------------------------------------------------------

SEED = "rounding_seed"
"""The option of a parameter group by which a state that was saved here is known from torch's."""
NO_MASTER = (
    "the state of {} parameters was saved under a recipe that keeps nothing beside their weights, and recipe {!r} "
    "keeps masters, which start from the present weights: the run goes on under another recipe than before. "
    "Resume under that one; or, to change recipes on purpose, load what its optimizer.float32_state_dict() gives"
)


class Stored(torch.optim.Optimizer):
    """The states of an optimizer: what its rule and its recipe say is kept of each parameter."""

    rule: UpdateRule
    recipe: Recipe
    origin: Origin | None = None
    """What its state dicts say of the recipe; None where no model follows one."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        rule: UpdateRule,
        recipe: Recipe,
        defaults: dict[str, Any],
        projections: Mapping[Any, Projection] | None = None,
    ) -> None:
        self.rule = rule
        self.recipe = recipe
        self.projections = dict(projections or {})
        self._plans: dict[object, Plan] = {}
        self._labels: dict[object, dict[str, str]] = {}
        super().__init__(groups, defaults)

    group_projection: Callable[[Mapping[str, Any]], Projection | None] | None = None
    """How a group's options say that its parameters are projected; None where `projections` says it of each."""

    def varies(self, group: Mapping[str, Any]) -> tuple[tuple[UpdateRule, tuple[str, ...]], Projection | None]:
        """What a group's options say beside numbers: rule and moments, and how its parameters are projected."""
        rule = self.rule.of(group)
        return (rule, rule.moments(group)), self.group_projection(group) if self.group_projection else None

    def plan(self, parameter: Tensor, group: Mapping[str, Any], varies: Any = None) -> Plan:
        """How a parameter of that group is updated and kept."""
        names, projection = varies or self.varies(group)
        projection = projection or self.projections.get(parameter)
        shape = tuple(parameter.shape)
        spread = placed(parameter) if hasattr(parameter, "device_mesh") else None
        key = (names, shape, spread, projection, parameter.dtype, type(parameter))
        if key not in self._plans:
            self._plans[key] = plan_of(self.rule, self.recipe, group, parameter, projection, self._master(parameter))
        return self._plans[key]

    @torch.no_grad()
    def full(self, parameter: Tensor) -> Tensor:
        """All that is stored of a parameter, its master included, as a float32 tensor of its own."""
        master, state, weight = self._master(parameter), self.state.get(parameter, {}), local(parameter.detach())
        if not master.keeps or not master.keeps.keys() <= state.keys():
            return spread_like(master.stored(weight), parameter)
        kept = {name: local(state[name]).clone() for name in master.keeps}
        ops.follow(master, weight, kept)
        return spread_like(master.value(weight, kept), parameter)

    def _start(self, parameter: Tensor, full: Tensor | None) -> None:
        """Start a parameter's master from its float32 values, or from its stored ones."""
        master, weight = self._master(parameter), local(parameter)  # torch's views of a DTensor's bits are wrong
        kept = master.start(weight, master.stored(weight) if full is None else local(full))
        self.state[parameter].update({name: spread_like(value, parameter) for name, value in kept.items()})

    def _master(self, weight: Tensor) -> Master:
        """What takes the weight's update."""
        if isinstance(weight, ops.CodeTensor):
            assert self.recipe.codes is not None
            return CodedWeight("codes", self.recipe.codes)
        name = None if weight.dtype == torch.float32 else self.recipe.master
        return _own(self.recipe.update_rounding) if name is None else get_master(name)

    def _master_kind(self, weight: Tensor) -> dict[str, Storage]:
        """How the master of a weight that is codes is kept, if it has one."""
        codes = self.recipe.codes
        return {MASTER: codes.master} if codes and codes.master and isinstance(weight, ops.CodeTensor) else {}

    def _name_formats(self) -> None:
        """Let the groups, which are saved, say how moments that are codes are kept."""
        for group in self.param_groups:
            rule, names = key = self.varies(group)[0]
            if key not in self._labels:
                kept = {name: rule.kept_as(name, group) for name in names}
                self._labels[key] = labels({n: self.recipe.moment(own) for n, own in kept.items() if own is not None})
            formats = dict(self._labels[key])
            if self.recipe.codes is not None and self.recipe.codes.master is not None:
                for parameter in group["params"]:
                    formats |= labels(self._master_kind(parameter))
            if formats:
                group[FORMATS] = formats
            else:
                group.pop(FORMATS, None)

    def _begin_state(self, parameter: Tensor, plan: Plan) -> None:
        """Give a parameter's state a step count and moments of zero where there are none yet."""
        state: dict[str, Any] = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        spread = plan.coded and is_spread(parameter)
        for name, kind in plan.kinds.items():
            if state.get(name) is not None:
                continue
            if kind.dtype is None and spread:
                state.update(start_codes(kind, name, parameter))
                continue
            shape = plan.shapes[name]
            like = parameter if parameter.shape == shape else parameter.detach().new_empty(shape)
            if kind.dtype is None:
                state.update(store_zeros(kind, name, tuple(like.shape), like.device))
                continue
            for number in kind.numbers(name) if kind.residual else (name,):
                state[number] = torch.zeros_like(like, dtype=kind.dtype)

    def _begin(self) -> None:
        """Begin the states of all parameters that are trained. torch.distributed.checkpoint loads into states that are
        there: it takes an optimizer with any for one that has all, and makes one without take a step of zeros."""
        self._name_formats()
        for group in self.param_groups:
            varies = self.varies(group)
            for parameter in group["params"]:
                if parameter.requires_grad or self.state.get(parameter):
                    self._begin_state(parameter, self.plan(parameter, group, varies))

    def state_dict(self) -> dict[str, Any]:
        """torch's, whose groups name the recipe and its digest."""
        state = super().state_dict()
        for group in state["param_groups"]:
            if self.origin is not None:
                group[RECIPE] = self.origin.mark
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this class, or of the torch optimizer with the same rule, returned.

        Moments and masters keep this optimizer's own dtypes: torch's loader would cast them to the parameter's.
        A master copy that the state lacks (a torch optimizer has none) is the present one; where an optimizer of ours
        saved the state, that one followed another recipe, and a warning says so. Of a state that names another recipe,
        where `recipe_change="allow"` was given, another warning tells what becomes of it.

        The moments of bitsandbytes' Adam and AdamW, and of torchao's, are decoded and kept as this one keeps them.

        Raises:
            RecipeError: the state names another recipe, and no change was asked for. Nothing was changed.
            OptimizerError: the groups differ; a state belongs to a parameter of another shape or to another update
                rule, or holds what this optimizer would leave unused (AMSGrad's maximum, another recipe's master).
                Nothing was changed.
        """
        state_dict = dict(state_dict)  # which hooks may change
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            hooked = before(self, state_dict)
            state_dict = state_dict if hooked is None else hooked
        saved = [len(group["params"]) for group in state_dict["param_groups"]]
        own = [len(group["params"]) for group in self.param_groups]
        if saved != own:
            raise OptimizerError(
                f"the state holds parameter groups of sizes {saved}, this optimizer has {own}; "
                "build the optimizer over the same parameters first"
            )
        extra = state_dict["state"].keys() - {n for group in state_dict["param_groups"] for n in group["params"]}
        if extra:
            raise OptimizerError(
                f"the state holds {len(extra)} entries of parameters that none of its groups names, such as "
                f"{min(map(repr, extra))}: expected those of its {sum(saved)} alone. Load it as it was saved"
            )
        states: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        lost, changed = 0, self._changed(state_dict["param_groups"])
        for group, mine in zip(state_dict["param_groups"], self.param_groups, strict=True):
            self._check_saved_group(group, mine)
            for number, parameter in zip(group["params"], mine["params"], strict=True):
                if number in state_dict["state"]:
                    saved_state, options = state_dict["state"][number], {**mine, **group}
                    formats = group.get(FORMATS)
                    if changed is not None:
                        plan, master = self.plan(parameter, options), self._master(parameter)
                        kept = changed.kept(saved_state, plan, master, formats, self._master_kind(parameter), parameter)
                        saved_state, formats = kept
                    state = self._adopt(parameter, saved_state, options, number, formats, SEED in group)
                    keeps, present = self._master(parameter).keeps.keys(), self.state.get(parameter, {})
                    if not keeps <= state.keys() and keeps <= present.keys():
                        state.update({name: present[name] for name in keeps})
                        lost += SEED in group and changed is None
                    states[parameter] = state
        if lost:
            warnings.warn(NO_MASTER.format(lost, self.recipe.name), stacklevel=2)
        if changed is not None:
            warnings.warn(str(changed), stacklevel=2)
        others = ("params", RECIPE) if changed is None else ("params", RECIPE, SEED)
        for group, mine in zip(state_dict["param_groups"], self.param_groups, strict=True):
            mine.update({name: copy.deepcopy(value) for name, value in group.items() if name not in others})
        # The groups stay the same objects: a scheduler built before `convert` holds them.
        self.__setstate__({"state": states, "param_groups": self.param_groups})
        self._begin()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _check_saved_group(self, group: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
        """Refuse the options of a saved group that the rule of that group here does not take, and another rule's."""
        own = self.rule.of(mine)
        own.check({**group, "params": mine["params"]})
        if (saved := group.get(RULE, own.name)) != own.name:
            raise OptimizerError(
                f"the state holds a parameter group that {saved} updated, and here {own.name} does: combine the same "
                "optimizers in the same order as when it was saved"
            )

    def _changed(self, groups: list[dict[str, Any]]) -> Changed | None:
        """What is to be told of a state, if it was saved under another recipe and may be loaded all the same."""
        if self.origin is None:
            return None
        names = (self.origin.differs(group.get(RECIPE), "this optimizer's state") for group in groups)
        other = next((name for name in names if name is not None), None)
        return None if other is None else Changed(other, self.recipe)

    @torch.no_grad()
    def _adopt(
        self,
        parameter: Tensor,
        saved: Mapping[str, Any],
        group: Mapping[str, Any],
        number: object,
        formats: Mapping[str, str] | None = None,
        ours: bool = True,
    ) -> dict[str, Any]:
        """A parameter's saved state in this optimizer's dtypes. What wrappers put into states that are `ours` stays."""
        master = self._master(parameter)
        plan, masters = self.plan(parameter, group), (get_master(self.recipe.master), master)
        kinds = {**plan.kinds, **self._master_kind(parameter)}
        saved, said = as_ours(saved, plan.kinds, tuple(parameter.shape), number)
        check_subspace(saved, plan.kinds, plan.shapes, parameter, number)
        refused = moment_names().__contains__ if ours else lambda name: not is_master(name)
        state = adopt(saved, parameter, kinds, plan.shapes, masters, {**(formats or {}), **said}, number, refused)
        check_state(saved, plan.rule, foreign(saved, self.recipe, master))
        return state

    @torch.no_grad()
    def float32_state_dict(self) -> dict[str, Any]:
        """As `state_dict`, with all moments in float32 and no masters: for torch's optimizer with the same rule, or one
        of ours in another format. What a master has beyond its weight, `full` alone gives.

        Raises:
            OptimizerError: moments are of a subspace, which torch's optimizers have none of.
        """
        saved, found = self.state_dict(), {}
        for group, numbers in zip(self.param_groups, saved["param_groups"], strict=True):
            for option in (FORMATS, SEED, RECIPE):
                numbers.pop(option, None)
            for number, parameter in zip(numbers["params"], group["params"], strict=True):
                if number in saved["state"]:
                    plan = self.plan(parameter, group)
                    check_subspace(saved["state"][number], {}, {}, parameter, number)
                    found[number] = widened(saved["state"][number], plan.kinds, parameter)
        return {**saved, "state": found}

    def torch_state_dict(self) -> dict[str, Any] | None:
        """What torch's optimizer goes on with, where it would take `state_dict`'s moments for other values than they
        are: those of codes in float32, none of a subspace. None where it reads them as they are."""
        plans = [self.plan(p, group) for group in self.param_groups for p in group["params"]]
        if any(PROJECTOR in plan.kinds for plan in plans):
            return {**self.state_dict(), "state": {}}
        plain = all({*kind.parts(name)} == {name} for plan in plans for name, kind in plan.kinds.items())
        return None if plain else self.float32_state_dict()

    @torch.no_grad()
    def take_over(self, states: dict[Tensor, Any], masters: Mapping[nn.Parameter, Tensor]) -> None:
        """Empty a torch optimizer's states into this one, and start masters from float32 values: those of sharded
        weights from the weights as they are stored, here already, since DCP loads into states that are there."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in states:
                    self.state[parameter] = self._adopt(parameter, states[parameter], group, "?")
        for parameter, full in masters.items():
            self._start(parameter, full)
        for parameter in [p for group in self.param_groups for p in group["params"] if hasattr(p, "device_mesh")]:
            if parameter.requires_grad and not self._master(parameter).keeps.keys() <= self.state[parameter].keys():
                self._start(parameter, None)
        self._begin()
        states.clear()


@cache
def _own(rounding: str) -> Master:
    """The weight itself takes the update, rounded so."""
    return OWN if rounding == "nearest_even" else replace(OWN, rounding=rounding)
