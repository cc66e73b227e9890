"""`Stored`: an optimizer's states (moments, masters, step counts): created, saved, loaded, taken over from torch's.

States of bitsandbytes' and torchao's optimizers are converted to torch's names and to our storages of their codes.
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
"""The entry in which bitsandbytes stores tensors that FSDP must not gather."""
_ENTRIES = ("state", "qmap", "absmax", "max", "new_max")
_BLOCKS = (256, 2048)
"""The block sizes of bitsandbytes' versions; the number of scales of a tensor of 4096 or more elements tells which."""


# ---- states of another recipe ----------------------------------------------------------------------------------------


class Changed:
    """Converts the states of one recipe's optimizer to another's: moments by value, masters if both are of one kind;
    its text says what became of them."""

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
        """The entries of a parameter's saved state that are used, and their formats. Moments of another subspace are
        dropped, and with them the step count, by which Adam corrects moments that start at zero."""
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
    """A parameter's saved state under torch's names, and the labels of its codes: bitsandbytes' two moments as Adam's,
    torchao's as codes or values; other states unchanged.

    Args:
        moments: the names of the rule's moments.
        shape: the parameter's shape.

    Raises:
        OptimizerError: a state of bitsandbytes that is not its Adam's, AdamW's or LAMB's, or a rule without Adam's
            moments.
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
    """Whether a tensor is a subclass with a `dequantize` of its own, as torchao's are."""
    return isinstance(value, Tensor) and type(value).dequantize is not Tensor.dequantize


def _of_torchao(name: str, value: Any) -> tuple[dict[str, Tensor], Labels]:
    if hasattr(value, "qmap") and value.qmap.numel() == 256:
        return _coded(name, value.codes, value.qmap, value.scale, value.codes.numel() // value.scale.numel())
    return {name: value.dequantize()}, {}


def _coded(name: str, codes: Tensor, entries: Tensor, largest: Tensor, size: int) -> tuple[dict[str, Tensor], Labels]:
    """Codes into a table of values, scaled by the amax of blocks of a flattened tensor: as tensors of our storage if
    the table is one of our formats, else decoded."""
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
"""An option of parameter groups whose presence tells states saved here from torch's."""
NO_MASTER = (
    "the state of {} parameters was saved under a recipe that keeps nothing beside their weights, and recipe {!r} "
    "keeps masters, which start from the present weights: the run goes on under another recipe than before. "
    "Resume under that one; or, to change recipes on purpose, load what its optimizer.float32_state_dict() gives"
)


class Stored(torch.optim.Optimizer):
    """An optimizer's states, as its rule and its recipe say; without steps."""

    rule: UpdateRule
    recipe: Recipe
    origin: Origin | None = None
    """The recipe that state dicts name; None if no model follows one."""

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
    """A function that returns the projection of a group's parameters, from its options; None: `projections` has it."""

    def varies(self, group: Mapping[str, Any]) -> tuple[tuple[UpdateRule, tuple[str, ...]], Projection | None]:
        """((rule, names of moments), projection) of a group, as its options say."""
        rule = self.rule.of(group)
        return (rule, rule.moments(group)), self.group_projection(group) if self.group_projection else None

    def plan(self, parameter: Tensor, group: Mapping[str, Any], varies: Any = None) -> Plan:
        """The plan of a parameter of that group, cached."""
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
        """The stored value of a parameter, including its master, as a new float32 tensor."""
        master, state, weight = self._master(parameter), self.state.get(parameter, {}), local(parameter.detach())
        if not master.keeps or not master.keeps.keys() <= state.keys():
            return spread_like(master.stored(weight), parameter)
        kept = {name: local(state[name]).clone() for name in master.keeps}
        ops.follow(master, weight, kept)
        return spread_like(master.value(weight, kept), parameter)

    def _start(self, parameter: Tensor, full: Tensor | None) -> None:
        """Create a parameter's master from float32 values, or, for None, from the stored weight."""
        master, weight = self._master(parameter), local(parameter)  # torch's views of a DTensor's bits are wrong
        kept = master.start(weight, master.stored(weight) if full is None else local(full))
        self.state[parameter].update({name: spread_like(value, parameter) for name, value in kept.items()})

    def _master(self, weight: Tensor) -> Master:
        """The kind of master of a weight."""
        if isinstance(weight, ops.CodeTensor):
            assert self.recipe.codes is not None
            return CodedWeight("codes", self.recipe.codes)
        name = None if weight.dtype == torch.float32 else self.recipe.master
        return _own(self.recipe.update_rounding) if name is None else get_master(name)

    def _master_kind(self, weight: Tensor) -> dict[str, Storage]:
        """The storage of a CodeTensor's master, by name; empty if it has none."""
        codes = self.recipe.codes
        return {MASTER: codes.master} if codes and codes.master and isinstance(weight, ops.CodeTensor) else {}

    def _name_formats(self) -> None:
        """Set the option `FORMATS` of all groups: the labels of moments and masters that are stored as codes."""
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
        """Add a step count and moments of zeros to a parameter's state where they are missing."""
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
        """Create the states of all trained parameters. torch.distributed.checkpoint loads into existing states: it
        takes an optimizer with some for one with all, and makes one without any take a step with gradients of zero."""
        self._name_formats()
        for group in self.param_groups:
            varies = self.varies(group)
            for parameter in group["params"]:
                if parameter.requires_grad or self.state.get(parameter):
                    self._begin_state(parameter, self.plan(parameter, group, varies))

    def state_dict(self) -> dict[str, Any]:
        """As torch's; the groups also name the recipe and its digest."""
        state = super().state_dict()
        for group in state["param_groups"]:
            if self.origin is not None:
                group[RECIPE] = self.origin.mark
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of this class, or of the torch optimizer with the same rule.

        Moments and masters have this optimizer's dtypes; torch's loader would cast them to the parameter's. If the
        state has no masters (a torch optimizer's has none), the present ones stay, with a warning if halfstep saved
        the state, under another recipe. If the state names another recipe and `recipe_change="allow"` was given, a
        warning says what became of it.

        The moments of bitsandbytes' Adam and AdamW, and of torchao's, are decoded and stored as this optimizer's.

        Raises:
            RecipeError: the state names another recipe, and no change is allowed. Nothing was changed.
            OptimizerError: the groups differ; a state belongs to a parameter of another shape or to another update
                rule, or has entries that this optimizer would ignore (AMSGrad's maximum, another recipe's master).
                Nothing was changed.
        """
        state_dict = dict(state_dict)  # a copy, since hooks may change it
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
        # The groups stay the same objects, which schedulers built before `convert` refer to.
        self.__setstate__({"state": states, "param_groups": self.param_groups})
        self._begin()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _check_saved_group(self, group: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
        """Check that a saved group's options suit the rule of the group here, and that it had the same rule."""
        own = self.rule.of(mine)
        own.check({**group, "params": mine["params"]})
        if (saved := group.get(RULE, own.name)) != own.name:
            raise OptimizerError(
                f"the state holds a parameter group that {saved} updated, and here {own.name} does: combine the same "
                "optimizers in the same order as when it was saved"
            )

    def _changed(self, groups: list[dict[str, Any]]) -> Changed | None:
        """The conversion of a state that was saved under another recipe, if a change is allowed; else None."""
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
        """A parameter's saved state in this optimizer's storages. If halfstep saved it (`ours`), entries that wrappers
        added are kept."""
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
        """As `state_dict`, with all moments in float32 and without masters: for torch's optimizer with the same rule,
        or one of ours in another format. Only `full` returns the bits that a master has beyond its weight.

        Raises:
            OptimizerError: moments are in a subspace, which torch's optimizers do not support.
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
        """A state dict for torch's optimizer, if it would misread `state_dict`'s: with moments in float32, or without
        moments if they are in a subspace. None if torch's optimizer can read `state_dict`."""
        plans = [self.plan(p, group) for group in self.param_groups for p in group["params"]]
        if any(PROJECTOR in plan.kinds for plan in plans):
            return {**self.state_dict(), "state": {}}
        plain = all({*kind.parts(name)} == {name} for plan in plans for name, kind in plan.kinds.items())
        return None if plain else self.float32_state_dict()

    @torch.no_grad()
    def take_over(self, states: dict[Tensor, Any], masters: Mapping[nn.Parameter, Tensor]) -> None:
        """Move a torch optimizer's states into this one, and create masters from float32 values. Masters of sharded
        weights are created from the stored weights, since torch.distributed.checkpoint loads into existing states."""
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
    """No master weights, with updated weights rounded by `rounding`."""
    return OWN if rounding == "nearest_even" else replace(OWN, rounding=rounding)
