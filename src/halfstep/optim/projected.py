"""GaLore: any rule whose step depends on gradients alone, taken in a subspace of a matrix's gradient."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from halfstep.errors import OptimizerError
from halfstep.optim.rules.base import Fused, Group, Moments, Step, UpdateRule
from halfstep.optim.update import OWN
from halfstep.recipe import PROJECTOR, Projection, Subspace


def projected(rule: UpdateRule, projection: Projection, shape: tuple[int, ...]) -> UpdateRule:
    """The rule for a matrix of that shape: the same one where the projection leaves the matrix out.

    Raises:
        OptimizerError: the rule's step depends on more than gradients.
        RecipeError: the rank is larger than the matrix has, and no share is given.
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
    """What a rule does in a subspace."""

    rule: UpdateRule
    decay: Callable[[Group], tuple[float, float]]
    projection: Projection
    subspace: Subspace

    def shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if name == PROJECTOR:
            return self.subspace.projector(shape)
        return self.rule.shape(name, self.subspace.moment(shape))

    def down(self, projector: Tensor, grad: Tensor) -> Tensor:
        """R = P^T G, or G Q."""
        return projector.T @ grad if self.subspace.left else grad @ projector

    def up(self, projector: Tensor, low: Tensor) -> Tensor:
        """P R, or R Q^T."""
        return projector @ low if self.subspace.left else low @ projector.T

    # ---- the subspace -------------------------------------------------------------------------------------------

    def look(self, step: Step, name: Callable[[], str]) -> None:
        """Choose the subspace of the gradient where it is time to, and where there is none yet: zeros span none.

        Raises:
            OptimizerError: the gradient is not finite, or its singular vectors are not found and there are no old ones.
        """
        projector = step.moments[PROJECTOR]
        begun = bool(projector.any())
        if begun and (step.number - 1) % self.projection.gap:
            return
        grad = step.grad.float() * step.grad_scale
        if bool(grad.isfinite().logical_not().any()):  # so asked, tensors without values have none
            raise OptimizerError(
                f"{name()} has a gradient that is not finite, at step {step.number}, which chooses the subspace of its "
                "updates: skip such steps (a loss scaler does), or clip. No weight was moved"
            )
        if bool(grad.eq(0).all()):
            return  # it spans nothing: the next gradient's, or the old one
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
        """R of the gradient."""
        grad = step.grad.float()
        return self.down(step.moments[PROJECTOR].float(), -grad if step.group.get("maximize") else grad)

    # ---- one step -----------------------------------------------------------------------------------------------

    def update(self, weight: Tensor, grad: Tensor, moments: Moments, step: int, group: Group) -> tuple[Tensor, Moments]:
        """w <- keep w + scale P u, u being the rule's step from zero on R = P^T (g + l2 w)."""
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
        if grad.shape != weight.shape:  # R already
            return grad + self.down(projector, weight * l2) if l2 else grad
        grad = -grad if group.get("maximize") else grad
        return self.down(projector, grad + weight * l2 if l2 else grad)

    def _moved(self, weight: Tensor, projector: Tensor, moved: Tensor, group: Group) -> Tensor:
        _, keep = self.decay(group)
        return weight * keep + self.up(projector, moved) * self.projection.scale


def singular_vectors(grad: Tensor, subspace: Subspace) -> Tensor:
    """The first singular vectors of a float32 matrix as columns, largest singular value first; of each the number of
    largest magnitude, of equals the first, is positive.

    Raises:
        torch.linalg.LinAlgError: the decomposition did not converge.
    """
    left, _, right = torch.linalg.svd(grad, full_matrices=False)
    vectors = left[:, : subspace.rank] if subspace.left else right[: subspace.rank].T
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    signed: Tensor = vectors * torch.where(largest < 0, -1.0, 1.0)
    return signed.contiguous()


def _bare(group: Group) -> Group:
    """Options of a step from zero: the decay is the whole weight's, and the sign of the gradient was seen to."""
    return {**group, "weight_decay": 0.0, "maximize": False}
