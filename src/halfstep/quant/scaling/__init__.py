"""Scaling rules: how the scale of a tile is computed, one kind of rule per file, found by name.

Dequantizing multiplies by the scale, except for a `NonlinearScaling`, which defines its own inverse.
"""

import json
from dataclasses import replace
from functools import cache
from typing import Any

from halfstep.errors import QuantizationError, one_of, unknown
from halfstep.quant.scaling.base import NonlinearScaling, Scaling, StatefulScaling
from halfstep.registry import family


__all__ = ["NonlinearScaling", "Scaling", "StatefulScaling", "from_text", "get_scaling", "named"]

_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a word"}


_by_name = family("halfstep.quant.scaling", Scaling)  # type: ignore[type-abstract]


def get_scaling(name: str | Scaling, **options: Any) -> Scaling:
    """The rule of that name, with these options; a `Scaling` is returned as it is, but for the options.

    Raises:
        QuantizationError: no rule has that name (the nearest are shown), or the rule has no such option, or the option
            is of another type.

    >>> print(get_scaling("rceil", margin=3))
    rceil margin=3
    """
    if not isinstance(name, Scaling) and name not in _by_name():
        base, *words = str(name).split() or [""]
        said = f". Options stand beside the name {base!r}: {', '.join(words)}" if base in _by_name() else ""
        raise QuantizationError(unknown("scale rule", name, _by_name()) + said)
    rule = name if isinstance(name, Scaling) else _by_name()[name]
    for option, value in options.items():
        one_of(f"option of scale rule {rule.name}", option, rule.options, QuantizationError)
        kind = type(rule.options[option])
        if type(value) is not kind and (type(value), kind) != (int, float):
            wanted = _WORDS.get(kind, kind.__name__)
            raise QuantizationError(f"option {option} = {value!r} of scale rule {rule.name} found; expected {wanted}")
    return replace(rule, **options) if options else rule


@cache
def from_text(text: str) -> Scaling:
    """The rule with this `Scaling.text`."""
    return get_scaling(**json.loads(text))


def named(rule: Scaling) -> tuple[str, dict[str, Any]]:
    """The name and the options with which `get_scaling` makes this rule, for files and traced graphs.

    Raises:
        QuantizationError: a rule of the user's own, which is not found by name.
    """
    found = _by_name().get(rule.name)
    if found is None or type(found) is not type(rule) or replace(found, **rule.options) != rule:
        raise QuantizationError(
            f"the scale rule {rule.name!r} is one of your own: files and traced graphs take rules by name, from a file "
            "in halfstep/quant/scaling (docs/adding_a_scaling.md)"
        )
    return rule.name, rule.options
