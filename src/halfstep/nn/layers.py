"""`match`: which layers of a model round the operands of their matmuls under a recipe, by its rules and a filter.

And `projections`: which matrices of linear layers a recipe updates in a subspace.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from halfstep.errors import ModelError, RecipeError, unknown
from halfstep.nn.adapters import attention, convolution, experts, gated, linear, recurrent
from halfstep.nn.adopt import forward_owner, has_forward_of, owner_of
from halfstep.nn.attention import DotProductAttention
from halfstep.nn.paths import adapters_of, blocks_of, is_in, matches, pattern, plain_name
from halfstep.nn.quantized_weights import Kind, Weight
from halfstep.ops.subclasses import foreign
from halfstep.recipe import LinearSpec, Projection, Recipe, Rule
from halfstep.recipe.operands import KEEP
from halfstep.unit import KINDS as KINDS_OF_ROLES, Attention, tag_of


BRANCH_END = "branch_end"
"""The role, in a rule, of the last layer of a residual branch."""
ModuleFilter = Callable[[nn.Module, str], bool]


KINDS = (
    linear.LINEAR, linear.CONV1D, linear.FALCON, attention.ATTENTION, experts.EXPERTS, convolution.CONVOLUTION,
    recurrent.LAYER, recurrent.CELL,
)  # fmt: skip
_BY_OWNER = {owner_of(owner): kind for kind in KINDS for owner in kind.forward_of}

_FEW = 0.1
_NO_MATRIX = ("embed", "pos", "table", "token", "bias", "A_log")  # the last is Mamba's decay of each state
_TABLES = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)  # no matmuls


# ---- matching a recipe's rules ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Matched:
    """What a recipe's rules decide for a model, by path."""

    kinds: dict[str, Kind]
    """The adapter of every layer that could round the operands of its matmuls."""
    specs: dict[str, LinearSpec]
    """The specs of the layers that do."""
    kept: dict[str, str]
    """The reasons why other layers that a rule matches do not."""
    smoothed: tuple[str, ...]
    """The gated MLPs whose gated product is scaled (Smooth-SwiGLU)."""
    attends: tuple[str, ...]
    """The modules whose attention rounds the operands of its matmuls."""
    sought: dict[str, str]
    """Optional rules that round and match no layer: their name (such as attention), and their globs."""
    missed: tuple[str, ...]
    """Modules that a rule would round and no adapter supports, except those that the filter leaves out."""


def match(model: nn.Module, recipe: Recipe, module_filter: ModuleFilter | None) -> Matched:
    """Decide layer by layer: the first rule that matches a path decides.

    Raises:
        RecipeError: a rule, the filter, or the recipe's smoothing selects no layer; the filter is no function.
        ModelError: a rule would round a weight that is another library's tensor.
    """
    if module_filter is not None and not callable(module_filter):
        raise RecipeError(
            f"module_filter = {module_filter!r} found; expected a function of a module and its path, such as "
            "lambda module, path: 'mlp' in path"
        )
    kinds, refused = _sorted(model)
    modules = {path: model.get_submodule(path) for path in (*kinds, *refused)}
    wants = module_filter or (lambda module, path: True)
    chosen = {path for path in kinds if wants(modules[path], path)}
    weights = {path: kind.weights(modules[path]) for path, kind in kinds.items()}
    others = {path: why for path, own in weights.items() if (why := _foreign(modules[path], own))}
    is_adapter = adapters_of(model) if recipe.float32_adapters else None
    hits = _first_rules(model, recipe, modules, weights)
    specs: dict[str, LinearSpec] = {}
    kept: dict[str, str] = {}
    for path, rule in hits.items():
        if not rule.linear.rounds:
            kept[path] = rule.why or "kept by the recipe"
        elif path in refused:
            kept[path] = refused[path]
        elif path in chosen and path in others:
            raise ModelError(
                f"recipe {recipe.name!r}: rule {rule.where!r} rounds {path}, whose weight is a {others[path]}: "
                "apply the recipe before another library quantises the model, keep these layers by module_filter, "
                "or take a recipe without rules, such as bf16-mixed"
            )
        elif is_adapter is not None and is_adapter(path):
            kept[path] = "an adapter; rules reach it where the recipe has float32_adapters = false"
        elif rule.linear.accumulates and any(own.layout for own in weights[path]):
            kept[path] = "a convolution: torch sums in its own order, but the rule sets an accumulator"
        elif rule.linear.rotates and any(own.layout for own in weights[path]):
            kept[path] = "a convolution: its window sums over positions that the rule's Hadamard transform would mix"
        else:
            specs[path] = rule.linear
    if specs and not chosen & specs.keys():
        raise RecipeError(
            f"recipe {recipe.name!r}: module_filter selects none of the {len(specs)} layers its rules match"
        )
    specs = {path: spec for path, spec in specs.items() if path in chosen}
    smoothed, rough = _gated(model, recipe, specs) if recipe.smooth_glu is not None else ((), {})
    return Matched(
        kinds={path: kind for path, kind in kinds.items() if path not in others},  # their library does these matmuls
        specs=specs,
        kept=kept | rough,
        smoothed=smoothed,
        attends=_attends(model, recipe),
        sought=_unmatched_optional(recipe, [rule for path, rule in hits.items() if path in kinds]),
        missed=tuple(p for p in refused if p in hits and hits[p].linear.rounds and wants(modules[p], p)),
    )


def _first_rules(
    model: nn.Module, recipe: Recipe, modules: Mapping[str, nn.Module], weights: Mapping[str, tuple[Weight, ...]]
) -> dict[str, Rule]:
    """The first rule that matches each of these modules, by path.

    Args:
        weights: by path, the weights of those modules that can round.

    Raises:
        RecipeError: a rule that is not optional is the first match of no module that can round; an unknown role.
    """
    rules = [
        (rule, pattern(rule.path).match, None if rule.blocks is None else blocks_of(model, recipe, rule, weights))
        for rule in recipe.rules
    ]
    found: dict[str, Rule] = {}
    for path, module in modules.items():
        names = path, plain_name(path)
        for rule, match, blocks in rules:
            if (
                any(map(match, names))
                and (blocks is None or any(is_in(path, block) for block in blocks))
                and (rule.role is None or _has_role(recipe, rule.role, module, weights.get(path)))
            ):
                found[path] = rule
                break
    for rule in recipe.rules:
        if not rule.optional and not any(hit is rule and path in weights for path, hit in found.items()):
            near = get_close_matches(rule.path, weights, n=3, cutoff=0.0)
            raise RecipeError(
                f"recipe {recipe.name!r}: rule {rule.where!r} matched no layer whose matmuls a rule can round. "
                f"Nearest: {', '.join(near) or 'the model has none (linear, convolutional, recurrent, attention)'}"
            )
    return found


def _unmatched_optional(recipe: Recipe, used: Sequence[Rule]) -> dict[str, str]:
    """The names of optional rules that round and match no layer, with their globs. If several rules share a name, one
    that matches is enough."""
    met = {rule.why or rule.where for rule in used}
    sought: dict[str, str] = {}
    for rule in recipe.rules:
        name = rule.why or rule.where
        if rule.optional and rule.linear.rounds and name not in met:
            sought[name] = f"{sought[name]}, {rule.where}" if name in sought else rule.where
    return sought


def warn_of_missed(model: nn.Module, recipe: Recipe, matched: Matched) -> None:
    """Warn if more than a tenth of the weights that rules would round are in modules that no adapter supports."""
    is_adapter = adapters_of(model)
    sizes = {path: _size(model, path, is_adapter) for path in matched.missed}
    missed = sum(sizes.values())
    whole = missed + sum(_size(model, path, is_adapter) for path in matched.specs)
    if missed <= _FEW * whole:
        return
    classes = Counter(type(model.get_submodule(path)).__name__ for path, size in sizes.items() if size)
    first = next(path for path, size in sizes.items() if size)
    warnings.warn(
        f"{type(model).__name__}: recipe {recipe.name!r} does not round {missed / whole:.0%} of the weights that its "
        f"rules are for: those of {', '.join(f'{name} ({count})' for name, count in classes.items())}, such as "
        f"{first}: {matched.kept[first]}. They compute as autocast says. Build these layers of nn.Linear (a subclass "
        "may change anything but forward), or leave them out by module_filter to say that it is meant so",
        stacklevel=4,
    )


def _size(model: nn.Module, path: str, is_adapter: Callable[[str], bool]) -> int:
    """The number of elements of a module's own matrices, without adapters, tables and biases (told by their names)."""
    return sum(
        p.numel()
        for name, p in model.get_submodule(path)._parameters.items()
        if p is not None and p.dim() > 1 and not any(word in name for word in _NO_MATRIX)
        and not is_adapter(f"{path}.{name}")
    )  # fmt: skip


def _has_role(recipe: Recipe, role: str, module: nn.Module, weights: tuple[Weight, ...] | None) -> bool:
    """Whether a weight of the module has the role."""
    known = (*KINDS_OF_ROLES, BRANCH_END)
    if role not in known:
        raise RecipeError(f"recipe {recipe.name!r}: {unknown('role of a rule', role, known)}")
    names = ("weight",) if weights is None else tuple(weight.name for weight in weights)
    tags = [tag for name in names if (tag := tag_of(module, name)) is not None]
    return any(tag.ends_branch if role == BRANCH_END else tag.kind == role for tag in tags)


# ---- layers that can round -------------------------------------------------------------------------------------------


def kind_of(module: nn.Module) -> Kind | None:
    """The adapter whose `forward` can replace the module's own; None if there is none."""
    kind = _BY_OWNER.get(forward_owner(module))
    if kind is None and "down_proj" in module._parameters:
        kind = experts.EXPERTS
    return kind if kind is None or kind.fits is None or kind.fits(module) else None


def _sorted(model: nn.Module) -> tuple[dict[str, Kind], dict[str, str]]:
    """The adapters of layers that can round the operands of their matmuls, and the reasons why other modules with
    matrices cannot, both by path."""
    kinds: dict[str, Kind] = {}
    refused: dict[str, str] = {}
    for path, module in model.named_modules():
        kind = kind_of(module)
        if kind is not None:
            kinds[path] = kind
        elif (why := _refusal(module)) is not None:
            refused[path] = why
    for path in [path for path in kinds if path.rpartition(".")[2] == "out_proj"]:
        above = path.rpartition(".")[0]
        if above not in kinds and isinstance(model.get_submodule(above), nn.MultiheadAttention):
            del kinds[path]
            refused[path] = "nn.MultiheadAttention reads its weight and never calls it"
    return kinds, refused


def _foreign(module: nn.Module, weights: tuple[Weight, ...]) -> str | None:
    """The class name of a weight that is another library's tensor subclass; None if no weight of the layer is."""
    for weight in weights:
        if (found := foreign(getattr(module, weight.name))) is not None:
            return found
    return None


def _refusal(module: nn.Module) -> str | None:
    """Why a module with a matrix of its own cannot follow a rule; None if it has no such matrix."""
    if isinstance(module, nn.Linear):
        return "its forward is not nn.Linear's"
    if isinstance(module, nn.MultiheadAttention):
        return "its forward, or its out_proj's, is not torch's"
    if isinstance(module, (nn.modules.conv._ConvNd, nn.RNNBase, nn.modules.rnn.RNNCellBase)):
        return "its forward is not torch's"
    if isinstance(module, (*_TABLES, ParametrizationList)):  # parametrizations belong to the layer they compute for
        return None
    own = [name for name, p in module._parameters.items() if p is not None and p.dim() > 1]
    return f"its own code uses {', '.join(own)}, where no adapter sees it" if own else None


# ---- attention and gated MLPs ----------------------------------------------------------------------------------------


def _attends(model: nn.Module, recipe: Recipe) -> tuple[str, ...]:
    """The modules whose attention matmuls round their operands under a recipe.

    Raises:
        RecipeError: the recipe rounds attention, and the model has no such module.
    """
    if recipe.attention is None:
        return ()
    ours = DotProductAttention, Attention
    found = tuple(
        path
        for path, m in model.named_modules()
        if isinstance(m, ours) or kind_of(m) is attention.ATTENTION or _is_hugging_faces(m)
    )
    if not found:
        raise RecipeError(
            f"recipe {recipe.name!r} rounds attention, and {type(model).__name__} has no module that forms it "
            "(nn.MultiheadAttention, halfstep.nn.DotProductAttention, halfstep.unit.Attention): a recipe does not see "
            "functional calls. Form it with one of these, give a model of transformers' "
            f"attn_implementation={HUGGING_FACE!r} (halfstep.integrations.attention), or leave `attention` out of the "
            "recipe"
        )
    return found


HUGGING_FACE = "halfstep"
"""The name of `integrations.attention` as an `attn_implementation` of transformers."""


def _is_hugging_faces(module: nn.Module) -> bool:
    """Whether the module calls `integrations.attention`: its config says so, and it has the `scaling` to pass."""
    config = getattr(module, "config", None)
    return getattr(config, "_attn_implementation", None) == HUGGING_FACE and "scaling" in vars(module)


def _gated(model: nn.Module, recipe: Recipe, specs: Mapping[str, LinearSpec]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The gated MLPs whose down-projection rounds, and the reasons why others cannot be smoothed, by path.

    Raises:
        RecipeError: the model has no gated MLP that can be smoothed.
    """
    found = {path: module for path, module in model.named_modules() if gated.resembles(module)}
    refused = {path: why for path, module in found.items() if (why := gated.refusal(module)) is not None}
    if not found.keys() - refused.keys():
        first = next((f" that fits ({path}: {why})" for path, why in refused.items()), "")
        raise RecipeError(
            f"recipe {recipe.name!r} smooths gated MLPs (modules with gate_proj, up_proj, down_proj and act_fn), and "
            f"{type(model).__name__} has none{first}; take a recipe without smooth_glu, such as fp8-delayed"
        )
    rounds = (path for path in found if path not in refused and f"{path}.down_proj".lstrip(".") in specs)
    return tuple(rounds), refused


# ---- projected parameters --------------------------------------------------------------------------------------------


def projections(model: nn.Module, recipe: Recipe) -> dict[nn.Parameter, Projection]:
    """The parameters that are updated in a subspace of their gradients, with their projection.

    Raises:
        RecipeError: a glob matches no linear layer; nothing is projected; a rank exceeds a matrix's.
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
    """(path, matrices by name) of every linear layer and of attention's projections."""
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
