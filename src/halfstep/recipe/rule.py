"""A rule of a recipe: which layers it means, by path and depth, and how they round; the layers left out."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import floor

from halfstep.errors import RecipeError
from halfstep.quant import Quantizer
from halfstep.recipe.products import AttentionSpec, LinearSpec


_PART = re.compile(r"(first|last) (\d+(?:\.\d+)?)(%?)")


def check_blocks(text: str) -> None:
    """Raise RecipeError unless `chosen` takes the text."""
    parts = [_PART.fullmatch(part.strip()) for part in text.split(",")]
    known = [part for part in parts if part and (part[3] or part[2].isdigit()) and Fraction(part[2]) > 0]
    ends = {part[1] for part in known}
    if len(known) != len(parts) or len(ends) != len(parts) or any(p[3] and Fraction(p[2]) > 100 for p in known):
        raise RecipeError(
            f"blocks = {text!r} of a rule; expected numbers or shares of blocks from an end: 'first 2', 'last 15%', "
            "'first 1, last 2'"
        )


def chosen(text: str, count: int) -> frozenset[int]:
    """The numbers, from 0 on, of the blocks that the text means in a model of so many.

    A share is rounded to the nearest number of blocks, halves up, and is one block at least.

    Raises:
        RecipeError: there are fewer blocks than the text numbers.

    >>> sorted(chosen("first 1, last 15%", 12))
    [0, 10, 11]
    """
    found: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        assert match is not None, text
        size = Fraction(match[2])
        number = max(1, floor(size * count / 100 + Fraction(1, 2))) if match[3] else int(size)
        if number > count:
            raise RecipeError(f"blocks = {text!r} of a rule, and the model has {count} blocks")
        found |= set(range(number) if match[1] == "first" else range(count - number, count))
    return frozenset(found)


@dataclass(frozen=True)
class Rule:
    """Layers whose module path matches the glob `path` round their products as `linear` says; the first match wins.
    Several globs are separated by `|`: `*.q_proj|*.k_proj`.

    Linear, convolutional and recurrent ones, and attention's projections: `nn.layers.KINDS`. With a `role` only those
    whose weight has it (`halfstep.unit`): `readout`, `input` ..., or `branch_end`, the last of a residual branch. With
    `blocks` only those in some of the model's repeated blocks, by depth (`nn.paths`): `first 2`, `last 15%`, `first 1,
    last 2`.

    A rule that matches no layer is an error, unless it is `optional`. A rule whose spec rounds nothing keeps its
    layers in the recipe's compute dtype; `why` then says why.
    """

    path: str
    linear: LinearSpec
    optional: bool = False
    why: str = ""
    role: str | None = None
    blocks: str | None = None

    def __post_init__(self) -> None:
        if self.blocks is not None:
            check_blocks(self.blocks)

    @property
    def where(self) -> str:
        """Path, role and blocks, in words."""
        role = "" if self.role is None else f" with role {self.role}"
        return self.path.replace("|", ", ") + role + ("" if self.blocks is None else f" in blocks {self.blocks}")


def shared_in_a_call(rules: Iterable[Rule], attention: AttentionSpec | None, smooth_glu: str | None) -> tuple[str, ...]:
    """What all rows of a call share in a forward pass, so that each row's result depends on the others; () for nothing.

    Weights are the same in every call, and what is formed of gradients alone is in no output.
    """
    found = {f"input of linear {rule.where!r}": rule.linear.output.lhs for rule in rules}
    if attention is not None:
        for name, spec in (("scores", attention.scores), ("mix", attention.mix)):
            found |= {f"first operand of {name}": spec.output.lhs, f"second operand of {name}": spec.output.rhs}
    reasons = [f"{name}: {why}" for name, own in found.items() if own is not None and (why := _over_rows(own))]
    if smooth_glu == "channel":
        reasons.append("products of gated MLPs: a scale of each channel over all rows")
    return tuple(reasons)


def _over_rows(quantizer: Quantizer) -> str | None:
    """What of a matrix's rounding is taken over more than a row."""
    scales = quantizer.scales
    if quantizer.rounding == "stochastic":
        return "noise that is drawn for the call"
    if quantizer.clamp is not None and quantizer.clamp.tile != "row":
        return f"{quantizer.clamp} over all rows"
    if quantizer.outliers is not None:
        return "columns with outliers in any row are kept apart"
    if scales is None or not scales.rule.reads:
        return None
    if scales.rule.two_level:
        return f"{scales.rule.name}, with a scale over all rows"
    return f"{scales.rule.name} scales of {scales.tile}" if scales.tile.rows != 1 else None


HEADS = (
    "lm_head", "*.lm_head", "lm_head.*", "*.lm_head.*", "head", "*.head", "head.fc", "*.head.fc",
    "embed_out", "*.embed_out", "proj_out", "*model.proj_out", "score", "*.score", "qa_outputs", "*.qa_outputs",
    "classifier", "*.classifier", "classifier.*", "*.classifier.*", "*classification_head.*", "*predictions*",
    "*seq_relationship", "*multiple_choice_head.*", "vocab_transform", "vocab_projector",
)  # fmt: skip
"""Output heads: Hugging Face's names for language models and classifiers, and `head`. The layers inside a head are part
of it: RoBERTa's `lm_head.dense` and `lm_head.decoder`."""

ROUTERS = ("router", "*.router", "*.router.*", "gate", "*.gate", "*.shared_expert_gate")
"""Routers of mixtures of experts. A gated MLP's `gate_proj` is not a router."""

ADAPTERS = tuple(f"{before}lora_{which}{after}" for which in "AB" for before in ("", "*.") for after in ("", ".*"))
"""The two factors of LoRA, by PEFT's names: of a few ranks each, so that rounding saves nothing, and trained alone."""

ADAPTER_NAMES = (
    "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "prompt_encoder",
)  # fmt: skip
"""Modules and parameters of adapters, by name: LoRA's and DoRA's, and soft prompts. `Recipe.float32_adapters` means
them, and what a layer declares to be an adapter's, as PEFT's do (`nn.paths`)."""

KEEP = tuple(
    Rule("|".join(paths), LinearSpec(), optional=True, why=why)
    for paths, why in ((ROUTERS, "router"), (HEADS, "output head"), (ADAPTERS, "LoRA adapter"))
)
"""Rules to put before a recipe's own. Embeddings and norms form no products and stay as they are anyway."""
