"""`Plan`: how a parameter is updated and its moments are stored; `adopt`: saved states to such moments.

And GaLore (`projected`): an update rule applied in a subspace of a matrix's gradient.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import OptimizerError
from halfstep.ops import codes
from halfstep.optim.rules import Fused, Group, Moments, Step, UpdateRule
from halfstep.optim.shards import fits, is_spread, local, spread_like
from halfstep.optim.update import OWN
from halfstep.quant.description import MALFORMED, from_label, label
from halfstep.quant.masters import Master, get_master
from halfstep.recipe import PROJECTOR, Projection, Recipe, Storage, Subspace, get_storage, is_master


FORMATS = "state_formats"
"""The option of a parameter group that describes its moments stored as codes: `description.label`, by name."""
_FLAT = ", flat"


# ---- moments --------------------------------------------------------------------------------------------------------


def kind_of(recipe: Recipe, name: str | None, shape: tuple[int, ...], parameter: Tensor) -> Storage:
    """The storage of a parameter's moment under a recipe. fp32, with a warning, if the shards of a sharded one are not
    made of whole tiles.

    Args:
        name: `UpdateRule.kept_as` of the moment; None: fp32.
        shape: the moment's shape.

    Raises:
        OptimizerError: as `shards.fits`.
    """
    kind = get_storage("fp32") if name is None else recipe.moment(name, prod(shape))
    return _as_spread(kind, parameter) if hasattr(parameter, "device_mesh") else kind


def _as_spread(kind: Storage, parameter: Tensor) -> Storage:
    if kind.dtype is not None or fits(kind, parameter):
        return kind
    warnings.warn(
        f"moments of sharded parameters of shape {tuple(parameter.shape)} are kept in fp32, not as {kind}: their rows "
        "do not divide among the ranks into whole tiles",
        stacklevel=2,
    )
    return get_storage("fp32")


def encode(kind: Storage, name: str, values: Tensor) -> dict[str, Tensor]:
    """The tensors in which the storage holds float32 values.

    Raises:
        OptimizerError: the values are sharded, and the storage uses codes.
    """
    if kind.dtype is None and is_spread(values):
        raise OptimizerError(
            f"{name} of a sharded parameter of shape {tuple(values.shape)} was saved in another format, and would be "
            f"rounded again, to {kind}. Load it on one rank, save it from there, and load that here"
        )
    return codes.store(kind, name, values)


def labels(kinds: Mapping[str, Storage]) -> dict[str, str]:
    """The value of `FORMATS`: the labels of the storages that use codes, by name."""
    return {n: label(k.quantizer) + _FLAT * k.flat for n, k in kinds.items() if k.dtype is None}


# ---- plans -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How parameters of one shape and dtype are updated, and how their moments are stored."""

    rule: UpdateRule
    kinds: Mapping[str, Storage]
    """The storages of the moments, by name."""
    shapes: Mapping[str, tuple[int, ...]]
    """The shapes of the moments."""
    parts: tuple[str, ...]
    """The names of all tensors that store the moments."""
    held: frozenset[str]
    """The names of all entries of an initialized state, masters aside."""
    coded: bool
    """Whether any moment is stored as codes."""
    master: Master
    """The kind of master weight."""


def plan_of(
    rule: UpdateRule, recipe: Recipe, group: Group, parameter: Tensor, projection: Projection | None, master: Master
) -> Plan:
    """The plan of a parameter.

    Raises:
        OptimizerError, RecipeError: as `projected`.
    """
    shape, rule = tuple(parameter.shape), rule.of(group)
    if projection is not None:
        rule = projected(rule, projection, shape)
    shapes = {name: rule.shape(name, shape) for name in rule.moments(group)}
    kinds: dict[str, Storage] = {}
    parts: list[str] = []
    coded = False
    for name, own in shapes.items():
        kind = kinds[name] = kind_of(recipe, rule.kept_as(name, group), own, parameter)
        parts += (name,) if kind.dtype is not None and not kind.residual else kind.parts(name)
        coded |= kind.dtype is None
    return Plan(rule, kinds, shapes, tuple(parts), frozenset({"step", *kinds}), coded, master)


# ---- saved states ---------------------------------------------------------------------------------------------------


def foreign(saved: Mapping[str, Any], recipe: Recipe, master: Master) -> frozenset[str]:
    """The names of entries in a saved state that belong to masters of other recipes."""
    own = {*get_master(recipe.master).keeps, *master.keeps}
    return frozenset(name for name in saved if is_master(name) and name not in own)


def adopt(
    saved: Mapping[str, Any],
    parameter: Tensor,
    kinds: Mapping[str, Storage],
    shapes: Mapping[str, tuple[int, ...]],
    masters: Iterable[Master],
    formats: Mapping[str, str] | None,
    number: object,
    refused: Callable[[str], bool],
) -> dict[str, Any]:
    """A parameter's saved state with moments in the storages `kinds`, on the parameter's device, in new memory.

    A state with a master alone means that no step was taken. torch.optim.SGD counts no steps: if there is a momentum
    buffer, `step` is set to 1.

    Args:
        kinds: the storages of the rule's moments, and of the master of a CodeTensor, by name.
        shapes: the shapes of moments that differ from the parameter's.
        masters: masters whose tensors are loaded in the dtypes that they declare.
        formats: the saved groups' description of states that are codes (`labels`).
        refused: whether an unused entry of that name belongs to another optimizer.

    Raises:
        OptimizerError: the state belongs to a parameter of another shape or to another optimizer, or holds codes of
            another format.
    """
    state: dict[str, Any] = {}
    keeps = {name: dtype for master in masters for name, dtype in master.keeps.items()}
    coded = {name: format for name, format in (formats or {}).items() if isinstance(saved.get(name), Tensor)}
    sources = {name: _source(format, name, saved) for name, format in coded.items()}
    made = [*kinds.items(), *((name, source) for name, source in sources.items() if source is not None)]
    # The names of all tensors that may store a moment, with a residual and without.
    parts = {part for name, kind in made for part in Storage(kind.quantizer, residual=True).parts(name)}
    own = [name for name in kinds if not is_master(name)]
    if _has_stepped(saved) and not all(isinstance(saved.get(name), Tensor) for name in own):
        raise OptimizerError(_of_another(saved, kinds, number))
    for name in coded.keys() - kinds.keys():
        why = _of_another(saved, kinds, number) if refused(name) else _other_codes(name, coded[name], "values", number)
        raise OptimizerError(why)
    for name, kind in kinds.items():
        if isinstance(saved.get(name), Tensor):
            shape = shapes.get(name, parameter.shape)
            like = parameter if parameter.shape == shape else parameter.detach().new_empty(shape)
            state |= _kept(saved, name, kind, like, coded.get(name), number)
    for name, value in saved.items():
        if name in parts or value is None:
            continue
        if name == "step":
            state[name] = torch.as_tensor(value, device="cpu").detach().to(torch.float32, copy=True)
        elif name not in keeps and refused(name):
            raise OptimizerError(_of_another(saved, kinds, number))
        elif not isinstance(value, Tensor):
            state[name] = value
        else:
            if value.shape != parameter.shape and value.dim():
                raise OptimizerError(_other_shape(value, parameter, name, number))
            state[name] = value.detach().to(parameter.device, keeps.get(name, value.dtype), copy=True)
    if "step" not in state and any(name in kinds for name in state):
        state["step"] = torch.ones((), dtype=torch.float32, device="cpu")
    return state


def _has_stepped(saved: Mapping[str, Any]) -> bool:
    """Whether a saved state has entries other than masters, which exist before the first step."""
    beside = (value for name, value in saved.items() if name != "step" and not is_master(name))
    return any(value is not None for value in beside) or bool(saved.get("step"))


def _of_another(saved: Mapping[str, Any], kinds: Iterable[str], number: object) -> str:
    found, expected = (
        ", ".join(sorted(name for name in names if not is_master(name))) for names in (saved, {"step", *kinds})
    )
    return (
        f"the state of parameter {number} holds {found}; expected {expected}: it was saved by another optimizer. "
        "Load it into that one, or load the weights alone and start this one from zero"
    )


def _kept(
    saved: Mapping[str, Any], name: str, kind: Storage, parameter: Tensor, format: str | None, number: object
) -> dict[str, Tensor]:
    value: Tensor = saved[name]
    own = labels({name: kind}).get(name)
    if value.dtype == torch.float32 and value.shape == parameter.shape and f"{name}_scale" not in saved:
        format = None  # a moment too small to be stored as codes
    if not value.is_floating_point() or format is not None or f"{name}_scale" in saved:
        source = kind if format == own else _source(format, name, saved)
        if format is None or source is None or (is_master(name) and format != own):
            raise OptimizerError(_other_codes(name, format, kind, number))
        expected = source.layout(name, tuple(parameter.shape))
        for part, (dtype, shape) in expected.items():
            found = saved.get(part)
            if not isinstance(found, Tensor) or (found.dtype, tuple(found.shape)) != (dtype, shape):
                what = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
                raise OptimizerError(
                    f"the state of parameter {number} holds {part} as {what}, expected {dtype} {shape}: it belongs to "
                    "another model"
                )
        parts = {part: saved[part].detach().to(parameter.device, copy=True) for part in expected}
        if format == own:
            return parts
        if kind.dtype != torch.float32:
            warnings.warn(f"{name} was saved as {source}, and is rounded again, to {kind}", stacklevel=2)
        return encode(kind, name, codes.read(source, name, parts, tuple(parameter.shape)))
    if value.shape != parameter.shape:
        raise OptimizerError(_other_shape(value, parameter, name, number))
    twice = Storage(kind.quantizer, residual=True).numbers(name)
    found = {part: saved[part].detach() for part in twice if isinstance(saved.get(part), Tensor)}
    if kind.dtype is not None and found.keys() == set(kind.numbers(name)):
        return {part: number.to(parameter.device, kind.dtype, copy=True) for part, number in found.items()}
    numbers = [number.to(parameter.device, torch.float32) for number in found.values()]
    return encode(kind, name, sum(numbers[1:], numbers[0]))


def _source(format: str | None, name: str, saved: Mapping[str, Any]) -> Storage | None:
    """The storage that saved codes were written by, from their label; None if it cannot be parsed."""
    try:
        quantizer = from_label((format or "").removesuffix(_FLAT))
    except MALFORMED:
        return None
    return Storage(quantizer, residual=f"{name}_residual" in saved, flat=(format or "").endswith(_FLAT))


def _other_codes(name: str, format: str | None, kind: object, number: object) -> str:
    found = _source(format, name, {}) or format or "of a format it does not name"
    return (
        f"the state of parameter {number} holds {name} as codes ({found}); this "
        f"recipe keeps it as {kind}. Resume under the recipe that it was saved under, or load the weights alone and "
        "start the optimizer from zero"
    )


def _other_shape(value: Tensor, parameter: Tensor, name: str, number: object) -> str:
    return (
        f"the state of parameter {number} holds {name} of shape {tuple(value.shape)}, "
        f"expected {tuple(parameter.shape)}: it belongs to another model"
    )


def widened(state: Mapping[str, Any], kinds: Mapping[str, Storage], parameter: Tensor) -> dict[str, Any]:
    """A parameter's state as in torch's optimizers: moments in float32, without masters."""
    parts = {part for name, kind in kinds.items() for part in kind.parts(name)}
    own = {name: local(value) if isinstance(value, Tensor) else value for name, value in state.items()}
    moments = {
        name: spread_like(codes.read(kind, name, own, tuple(local(parameter).shape)).clone(), parameter)
        for name, kind in kinds.items()
    }
    return {name: value for name, value in state.items() if name not in parts and not is_master(name)} | moments


def projected(rule: UpdateRule, projection: Projection, shape: tuple[int, ...]) -> UpdateRule:
    """The rule in a subspace of the gradient of a matrix of that shape; `rule` itself if the projection does not apply
    to the shape.

    Raises:
        OptimizerError: the rule's step depends on norms or signs of the whole tensor.
        RecipeError: the rank exceeds the matrix's, and no share is given.
    """
    if rule.decay is None:
        raise OptimizerError(
            f"a projection of {rule.name}, whose step depends on norms or signs of the whole. Expected Adagrad, "
            "Adam, AdamW, NAdam, RMSprop or SGD; for others take a recipe without a projection"
        )
    subspace = projection.subspace(shape)
    if subspace is None:
        return rule
    own = _Projected(rule, rule.decay, projection, subspace)
    return replace(
        rule,
        moments=lambda group: (*rule.moments(group), PROJECTOR),
        update=own.update,
        fused=own.fused,
        numbers=lambda *numbers: numbers,
        shape=own.shape,
        look=own.look,
        lower=own.lower if own.shape("", shape) != shape else None,
        elementwise=False,
    )


@dataclass(frozen=True)
class _Projected:
    """The functions of a rule that is applied in a subspace (GaLore)."""

    rule: UpdateRule
    decay: Callable[[Group], tuple[float, float]]
    projection: Projection
    subspace: Subspace

    def shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if name == PROJECTOR:
            return self.subspace.projector(shape)
        return self.rule.shape(name, self.subspace.moment(shape))

    def down(self, projector: Tensor, grad: Tensor) -> Tensor:
        """Project a gradient: R = P^T G, or G Q."""
        return projector.T @ grad if self.subspace.left else grad @ projector

    def up(self, projector: Tensor, low: Tensor) -> Tensor:
        """Project a step back: P R, or R Q^T."""
        return projector @ low if self.subspace.left else low @ projector.T

    # ---- the subspace -------------------------------------------------------------------------------------------

    def look(self, step: Step, name: Callable[[], str]) -> None:
        """Choose a new subspace from the gradient if it is due, or if there is none yet (a projector of zeros).

        Raises:
            OptimizerError: the gradient is not finite; or its SVD did not converge, and there is no earlier subspace.
        """
        projector = step.moments[PROJECTOR]
        begun = bool(projector.any())
        if begun and (step.number - 1) % self.projection.gap:
            return
        grad = step.grad.float() * step.grad_scale
        if bool(grad.isfinite().logical_not().any()):  # False for empty and fake tensors
            raise OptimizerError(
                f"{name()} has a gradient that is not finite, at step {step.number}, which chooses the subspace of its "
                "updates: skip such steps (a loss scaler does), or clip. No weight was moved"
            )
        if bool(grad.eq(0).all()):
            return  # a gradient of zeros spans no subspace: keep the old one, or wait for the next gradient
        try:
            vectors = singular_vectors(grad, self.subspace)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            if not begun:
                raise OptimizerError(
                    f"{name()}: the singular vectors of its gradient of shape {tuple(grad.shape)} were not found "
                    f"({error}), and there are no earlier ones: train the first steps without a projection, or leave "
                    "it out of the projection's paths. No weight was moved"
                ) from error
            text = f"{name()}: the singular vectors of its gradient were not found; those of an earlier step stay"
            warnings.warn(text, stacklevel=2)
        else:
            projector.copy_(vectors)

    def lower(self, step: Step) -> Tensor:
        """The gradient projected to the subspace."""
        grad = step.grad.float()
        return self.down(step.moments[PROJECTOR].float(), -grad if step.group.get("maximize") else grad)

    # ---- one step -----------------------------------------------------------------------------------------------

    def update(self, weight: Tensor, grad: Tensor, moments: Moments, step: int, group: Group) -> tuple[Tensor, Moments]:
        """w <- keep w + scale P u, where u is the rule's step from a weight of zero with R = P^T (g + l2 w)."""
        projector = moments[PROJECTOR]
        low = self._low(weight, grad, projector, group)
        inner = {name: moments[name] for name in moments if name != PROJECTOR}
        moved, new = self.rule.update(torch.zeros_like(low), low, inner, step, _bare(group))
        return self._moved(weight, projector, moved, group), new

    def fused(self, step: Step) -> Fused | None:
        if step.master is not OWN or step.weight.dtype != torch.float32:
            return None
        return partial(self._advance, replace(step, grad=step.weight))

    def _advance(self, step: Step, grad: Tensor, numbers: tuple[int, Group, float], seed: int | None) -> bool:
        number, options, grad_scale = numbers
        projector = step.moments[PROJECTOR].float()
        grad = grad.float() if grad_scale == 1.0 else grad.float() * grad_scale
        low = self._low(step.weight, grad, projector, options)
        inner = {name: tensor for name, tensor in step.moments.items() if name != PROJECTOR}
        kinds = {name: kind for name, kind in step.kinds.items() if name != PROJECTOR}
        zeros, group = torch.zeros_like(low), _bare(options)
        if not self.rule.advance(Step(zeros, OWN, {}, low, inner, number, group, 1.0, kinds, step.coded)):
            return False
        step.weight.copy_(self._moved(step.weight, projector, zeros, options))
        return True

    def _low(self, weight: Tensor, grad: Tensor, projector: Tensor, group: Group) -> Tensor:
        l2, _ = self.decay(group)
        if grad.shape != weight.shape:  # projected already
            return grad + self.down(projector, weight * l2) if l2 else grad
        grad = -grad if group.get("maximize") else grad
        return self.down(projector, grad + weight * l2 if l2 else grad)

    def _moved(self, weight: Tensor, projector: Tensor, moved: Tensor, group: Group) -> Tensor:
        _, keep = self.decay(group)
        return weight * keep + self.up(projector, moved) * self.projection.scale


def singular_vectors(grad: Tensor, subspace: Subspace) -> Tensor:
    """The first singular vectors of a float32 matrix as columns, by descending singular value. The sign of each makes
    its element of largest magnitude (the first of equal ones) positive.

    Raises:
        torch.linalg.LinAlgError: the SVD did not converge.
    """
    left, _, right = torch.linalg.svd(grad, full_matrices=False)
    vectors = left[:, : subspace.rank] if subspace.left else right[: subspace.rank].T
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    signed: Tensor = vectors * torch.where(largest < 0, -1.0, 1.0)
    return signed.contiguous()


def _bare(group: Group) -> Group:
    """A group's options without weight decay and `maximize`, which are applied outside of the subspace."""
    return {**group, "weight_decay": 0.0, "maximize": False}
