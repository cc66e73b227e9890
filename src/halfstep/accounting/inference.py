"""The bytes of inference: weights, and the keys and values that are kept of the tokens so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from halfstep.accounting.account import blank, sequence_of
from halfstep.accounting.subject import Subject
from halfstep.errors import AccountError
from halfstep.memory import Live, parts_of
from halfstep.nn import apply
from halfstep.recipe import Recipe, get_recipe


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
