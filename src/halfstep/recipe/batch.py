"""Whether a sample's results depend on what it is computed with: what scales, clamps and noise are taken over."""

from __future__ import annotations

from collections.abc import Iterable

from halfstep.quant import Quantizer
from halfstep.recipe.products import AttentionSpec
from halfstep.recipe.rule import Rule


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
