"""Which parameters of a model a recipe projects: the matrices of its linear layers, by their paths."""

from collections.abc import Iterator
from difflib import get_close_matches

from torch import nn

from halfstep.errors import ModelError, RecipeError
from halfstep.nn.adapters import linear
from halfstep.nn.adopt import has_forward_of
from halfstep.nn.paths import matches
from halfstep.recipe import Projection, Recipe
from halfstep.recipe.rule import KEEP


def projections(model: nn.Module, recipe: Recipe) -> dict[nn.Parameter, Projection]:
    """The parameters that are updated in a subspace, and how.

    Raises:
        RecipeError: a glob matches no linear layer; nothing is projected; a rank is larger than a matrix has.
        ModelError: a matrix is sharded.
    """
    projection = recipe.projection
    if projection is None:
        return {}
    layers = dict(_layers(model))
    for glob in projection.paths:
        if not any(matches(path, glob) for path in layers):
            near = ", ".join(get_close_matches(glob, layers, n=3, cutoff=0.0)) or "the model has none"
            raise RecipeError(
                f"recipe {recipe.name!r}: projection path {glob!r} matched no linear layer. Nearest: {near}"
            )
    found = {}
    for path, matrices in layers.items():
        for name, parameter in matrices.items():
            if _chosen(path, projection) and (projection.paths or not _tied(model, parameter)):
                _check(f"{path}.{name}" if path else name, parameter, projection, recipe)
                found[parameter] = projection
    if not any(projection.subspace(tuple(parameter.shape)) for parameter in found):
        raise RecipeError(
            f"recipe {recipe.name!r} projects the gradients of linear layers, and {type(model).__name__} has none to "
            f"project ({projection}). Name them by the projection's `paths`, or take a recipe without one: "
            "'adamw-8bit', 'bf16-mixed'"
        )
    return found


def _layers(model: nn.Module) -> Iterator[tuple[str, dict[str, nn.Parameter]]]:
    """The matrices of every linear layer, and of attention's projections, by path."""
    for path, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.MultiheadAttention)) or has_forward_of(module, linear.CONV1D.forward_of):
            matrices = {name: p for name, p in module._parameters.items() if p is not None and p.dim() == 2}
            if matrices:
                yield path, matrices


def _chosen(path: str, projection: Projection) -> bool:
    if projection.paths:
        return any(matches(path, glob) for glob in projection.paths)
    return not any(matches(path, rule.path) for rule in KEEP)


def _tied(model: nn.Module, parameter: nn.Parameter) -> bool:
    return any(isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.weight is parameter for m in model.modules())


def _check(name: str, parameter: nn.Parameter, projection: Projection, recipe: Recipe) -> None:
    if hasattr(parameter, "device_mesh"):
        raise ModelError(
            f"recipe {recipe.name!r}: {name} is sharded, and the subspace of its updates is spanned by vectors of its "
            "whole gradient, which no rank has. Train under DDP, or take a recipe without a projection: "
            "'bf16-mixed', 'bf16-master'"
        )
    try:
        projection.subspace(tuple(parameter.shape))
    except RecipeError as error:
        raise RecipeError(f"recipe {recipe.name!r}: {name}: {error}") from error
