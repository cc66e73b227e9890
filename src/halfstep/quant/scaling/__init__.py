"""How the scale of a tile is chosen: one rule a file, found by name. A scale is always multiplied to get back."""

from dataclasses import fields, replace
from functools import cache
from typing import Any

from halfstep.errors import QuantizationError, unknown
from halfstep.quant.scaling.base import Scaling, StatefulScaling
from halfstep.registry import collect


__all__ = ["Scaling", "StatefulScaling", "get_scaling", "options_of", "with_options"]


@cache
def _by_name() -> dict[str, Scaling]:
    return collect("halfstep.quant.scaling", Scaling)  # type: ignore[type-abstract]


def get_scaling(name: str | Scaling) -> Scaling:
    """The rule of that name, which may carry options: `rceil margin=2`.

    Raises:
        QuantizationError: no rule has that name (the nearest are shown), or the rule has no such option.
    """
    if isinstance(name, Scaling):
        return name
    return _by_name()[name] if name in _by_name() else _parsed(name)


@cache
def _parsed(name: str) -> Scaling:
    base, *given = str(name).split() or [""]
    if base not in _by_name():
        raise QuantizationError(unknown("scale rule", name, _by_name()))
    kinds = {option: type(value) for option, value in options_of(_by_name()[base]).items()}
    options: dict[str, Any] = {}
    for text in given:
        option, _, value = text.partition("=")
        if option not in kinds:
            raise QuantizationError(unknown(f"option of scale rule {base}", option, kinds))
        options[option] = _value(text, kinds[option], value)
    return replace(_by_name()[base], name=name, **options)


def _value(option: str, kind: type[Any], value: str) -> Any:
    words = {"true": True, "false": False}
    try:
        return words[value.lower()] if kind is bool else kind(value)
    except (KeyError, ValueError) as error:
        wanted = {bool: "true or false", int: "a whole number"}[kind]
        raise QuantizationError(f"option {option!r} of a scale rule found; expected {wanted}") from error


def options_of(scaling: Scaling) -> dict[str, int | str]:
    """The numbers and words that a rule takes beside its name, such as a history or a margin."""
    values = {field.name: getattr(scaling, field.name) for field in fields(scaling) if field.name != "name"}
    return {name: value for name, value in values.items() if isinstance(value, (int, str))}


def with_options(name: str, **options: int | str) -> Scaling:
    """The rule of that name with these options; its own name then says those that are not the usual ones.

    >>> with_options("rceil", margin=2).name
    'rceil margin=2'
    """
    usual = options_of(get_scaling(name))
    changed = [f"{option}={value}" for option, value in options.items() if usual.get(option) != value]
    return get_scaling(" ".join([name, *changed]))
