"""Many paths of modules in a few lines: `model.layers.0-31.self_attn.{k,q,v}_proj`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from math import prod


def grouped(paths: Iterable[str]) -> dict[str, int]:
    """Patterns that together name exactly these paths, and how many each names, in the paths' order.

    >>> grouped(["h.0.q_proj", "h.0.k_proj", "h.1.q_proj", "h.1.k_proj", "head"])
    {'h.0-1.{q,k}_proj': 4, 'head': 1}
    """
    numbered: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for path in paths:
        parts = path.split(".")
        shape = tuple("#" if part.isdecimal() else part for part in parts)
        numbered.setdefault(shape, []).append(tuple(int(part) for part in parts if part.isdecimal()))
    alike: dict[tuple[str, str], list[str]] = {}
    counts: dict[tuple[str, str], int] = {}
    for shape, found in numbered.items():
        for numbers in _products(found):
            texts = iter([_ranges(column) for column in numbers])
            *above, last = (next(texts) if part == "#" else part for part in shape)
            key = ".".join(above), "" if shape[-1] != "#" else last
            alike.setdefault(key, []).append(last)
            counts[key] = counts.get(key, 0) + prod(map(len, numbers))
    return {f"{above}.{_braced(names)}".lstrip("."): counts[above, key] for (above, key), names in alike.items()}


def _products(found: Sequence[tuple[int, ...]]) -> list[tuple[list[int], ...]]:
    """Sets of numbers, one for each place, whose combinations are the tuples: one choice where they are all of them."""
    columns = tuple(sorted(set(column)) for column in zip(*found, strict=True))
    if prod(map(len, columns)) == len(found):
        return [columns]
    rest = groupby(sorted(found), key=lambda numbers: numbers[0])
    return [([first], *tail) for first, same in rest for tail in _products([numbers[1:] for numbers in same])]


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 as `0-2,5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _braced(names: Sequence[str]) -> str:
    """Several names in one, and what follows their last underscore once where it is the same."""
    if len(names) == 1:
        return names[0]
    tail = f"_{names[0].rpartition('_')[2]}"
    tail = tail if all(name.endswith(tail) for name in names) else ""
    return "{" + ",".join(name.removesuffix(tail) for name in names) + "}" + tail
