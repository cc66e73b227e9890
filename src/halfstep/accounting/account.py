"""The bytes of training by a recipe, and of inference, by role: the recipe is run on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from halfstep.accounting.subject import Subject, blank, loss_of, sequence_of
from halfstep.distributed.sharded import shared
from halfstep.errors import AccountError, one_of
from halfstep.memory import Live, StepBytes, measure_persistent, measure_step, measure_update, parts_of
from halfstep.nn import apply
from halfstep.optim import Lamb, Lion
from halfstep.preparation import prepare
from halfstep.recipe import OPERANDS, Communication, Recipe, get_recipe, get_storage


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "lion": Lion,
    "lamb": Lamb,
}
"""Optimizers by name; `sgd` has no momentum, and `momentum` is SGD with one."""


@dataclass(frozen=True)
class Account:
    """The bytes of one recipe on one device that holds everything."""

    recipe: str
    parameters: int
    """How many there are; tied ones count once."""
    trained: int
    """How many of them have a gradient."""
    bytes: StepBytes
    passes: bool
    """Whether a pass was run: where not, activations are unknown, and count nothing."""
    across: Communication | None = None
    """In which formats gradients and sharded weights cross from device to device; None: as they are stored."""

    @property
    def per_parameter(self) -> float:
        """Persistent bytes a parameter."""
        return self.bytes.persistent / self.parameters


def account(
    subject: Subject,
    recipe: str | Recipe,
    *,
    batch: int = 1,
    sequence: int | None = None,
    optimizer: str = "adamw",
    checkpointing: str = "none",
    per_layer: bool = False,
) -> Account:
    """Build the model without memory, have it follow the recipe, run a forward and a backward pass, and count.

    Args:
        recipe: a name, a file, or a `Recipe`: one's own too.
        batch, sequence: examples, and tokens in each (None: the subject's usual number).
        optimizer: a key of `OPTIMIZERS`.
        checkpointing: a key of `checkpointing.CHECKPOINTING`.
        per_layer: the optimizer steps within the backward pass, and each gradient is dropped when it has arrived.

    Of a recipe with stages it is the account of the stage that holds the most at once: what such a run takes.

    Raises:
        AccountError: an unknown optimizer or checkpointing; a longer sequence than the model has positions for; a
            recipe that keeps linear layers otherwise, of a checkpoint.
        RecipeError, ModelError, OptimizerError: as `halfstep.prepare`; a model that cannot be run without values.
    """
    recipe = get_recipe(recipe)
    one_of("optimizer", optimizer, OPTIMIZERS, AccountError)
    length = sequence_of(subject, sequence)
    if recipe.stages:
        options: dict[str, Any] = {"batch": batch, "sequence": sequence, "optimizer": optimizer}
        options |= {"checkpointing": checkpointing, "per_layer": per_layer}
        each = [account(subject, stage, **options) for stage in recipe.by_stage]
        most = max(each, key=lambda account: max(account.bytes.peak, account.bytes.persistent + account.bytes.update))
        return replace(most, recipe=recipe.name)
    if not subject.has_layers:
        recipe = _without_layers(subject, recipe)
    with blank(subject):
        model = subject.build()
        wrapped = checkpointed(model, checkpointing) if subject.batch is not None else model
        parameters = list(model.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        model, low_bit, scaler = prepare(wrapped, OPTIMIZERS[optimizer](trained), recipe, generator=0)
        if subject.batch is None:
            found = measure_persistent(model, low_bit, per_layer)
        else:
            data = subject.batch(model, batch, length)
            found = measure_step(
                model, low_bit, lambda: loss_of(data.call(model), data), data.tensors, scaler.scale, per_layer
            )
        update = measure_update(model, low_bit)
    # Steps within the pass come while activations are there: at most so much on top.
    found = replace(found, update=update, peak=found.peak + (update if per_layer else 0))
    counts = sum(p.numel() for p in parameters), sum(p.numel() for p in trained)
    return Account(recipe.name, *counts, found, subject.batch is not None, crossing(recipe))


def crossing(recipe: Recipe) -> Communication | None:
    """In which formats gradients and weights cross: as the recipe says. Gradients that are kept as codes are not, where
    several devices train."""
    across = recipe.communication
    if across is not None and across.weights == OPERANDS and not any(shared(rule.linear) for rule in recipe.rules):
        across = None if across.gradients is None else replace(across, weights=None)
    if recipe.codes is None or recipe.codes.grads is None or (across is not None and across.gradients is not None):
        return across
    return Communication(get_storage("fp32"), across.weights if across is not None else None)


def _without_layers(subject: Subject, recipe: Recipe) -> Recipe:
    """What a recipe keeps of parameters alone, whose layers are not known: rounded products keep nothing."""
    if recipe.codes is not None or recipe.projection is not None:
        raise AccountError(
            f"{subject.name} does not say which of its matrices are linear layers', and recipe {recipe.name!r} keeps "
            "those otherwise than others; give the model's config.json or its folder, or module:function"
        )
    return replace(recipe, rules=(), attention=None, smooth_glu=None, saved=None)


@dataclass(frozen=True)
class InferenceBytes:
    """Bytes by role on one device, whole numbers."""

    weights: int
    scales: int
    buffers: int
    kv_cache: int
    """Keys and values of all tokens of all examples; 0 for a model that keeps none."""
    peak: int
    """The most held at once while all of the tokens are read in one pass."""

    @property
    def persistent(self) -> int:
        """What is there between two tokens."""
        return self.weights + self.scales + self.buffers + self.kv_cache


def inference(subject: Subject, recipe: str | Recipe, *, batch: int = 1, sequence: int | None = None) -> InferenceBytes:
    """Build the model without memory, have it follow the recipe, read a batch of tokens, and count what it keeps.

    The cache is that of a Hugging Face model (`use_cache`).

    Raises:
        AccountError: a checkpoint, which cannot run; a recipe with stages; as `account`.
        RecipeError, ModelError: as `halfstep.apply`.
    """
    recipe = get_recipe(recipe)
    if recipe.stages:
        raise AccountError(
            f"recipe {recipe.name!r} has stages, and inference has none: ask for one of them, such as "
            f"{recipe.by_stage[-1].name!r}"
        )
    if subject.batch is None:
        raise AccountError(f"{subject.name}: a checkpoint alone cannot be run; give its config.json, or its folder")
    length = sequence_of(subject, sequence)
    with blank(subject), torch.no_grad():
        model = subject.build().eval()
        apply(model, recipe)
        data = subject.batch(model, batch, length).without("labels")
        caches = hasattr(getattr(model, "config", None), "use_cache")
        with Live() as live:
            live.give("weights", model.parameters())
            live.give("buffers", model.buffers())
            output = data.call(model, **({"use_cache": True} if caches else {}))
            kept = getattr(output, "past_key_values", None)
            del output
            live.give("cache", _tensors(kept))
    scales = [part for p in model.parameters() for name, part in parts_of(p).items() if name not in ("", "codes")]
    beside = sum(part.untyped_storage().nbytes() for part in scales)
    weights, buffers, cache = (live.bytes_of(role) for role in ("weights", "buffers", "cache"))
    return InferenceBytes(weights - beside, beside, buffers, cache, live.peak.total())


def _tensors(cache: Any) -> list[torch.Tensor]:
    """The keys and values of a Hugging Face cache, whose layers hold them."""
    layers = getattr(cache, "layers", ())
    found = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def checkpointed(model: nn.Module, how: str) -> nn.Module:
    """The model with checkpoints. Blocks are those of the list of alike modules that has the most parameters.

    Args:
        how: `none`; `selective`: scaled dot-product attention is computed again; `full`: each block is, from its input.

    Raises:
        AccountError: no such way; or the model has no blocks.
    """
    return CHECKPOINTING[one_of("checkpointing", how, CHECKPOINTING, AccountError)](model)


def _full(model: nn.Module) -> nn.Module:
    for block in _blocks(model):
        block.forward = _again(block.forward)
    return model


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    def again(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return again


def _blocks(model: nn.Module) -> list[nn.Module]:
    lists = [
        [*found]
        for found in model.modules()
        if isinstance(found, (nn.ModuleList, nn.Sequential))
        and len({type(part) for part in found}) == 1
        and any(True for _ in found[0].children())
    ]
    if not lists:
        raise AccountError(
            f"{type(model).__name__} has no list of alike blocks (torch.nn.ModuleList or Sequential) to compute again; "
            "account for it without checkpointing"
        )
    return max(lists, key=lambda blocks: sum(p.numel() for block in blocks for p in block.parameters()))


class _AttentionAgain(TorchFunctionMode):
    found = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            self.found = True
            return _again(func)(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _selective(model: nn.Module) -> nn.Module:
    forward = model.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        with _AttentionAgain() as attention:
            output = forward(*args, **kwargs)
        if not attention.found:
            raise AccountError(
                f"{type(model).__name__} calls no torch.nn.functional.scaled_dot_product_attention to compute again; "
                "account for it with full checkpointing, or without"
            )
        return output

    model.forward = watched
    return model


CHECKPOINTING: dict[str, Callable[[nn.Module], nn.Module]] = {
    "none": lambda model: model,
    "selective": _selective,
    "full": _full,
}
"""Ways of checkpointing, by name."""
