"""Recipes of one's own: from a TOML file, or from a Python module or file."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from halfstep.errors import RecipeError, unknown
from halfstep.recipe.data import from_data, is_name
from halfstep.recipe.operands import At
from halfstep.recipe.spec import Recipe
from halfstep.recipe.written import to_data
from halfstep.registry import load_module


def is_reference(name: str) -> bool:
    """Whether that names a file or module rather than a recipe: `my.toml`, `package.module:name`, `path.py:name`."""
    return name.endswith(".toml") or ":" in name


def read(name: str, named: Callable[[str], Recipe]) -> Recipe:
    """The recipe in a file or module; `named` finds the recipes that come with halfstep.

    Raises:
        RecipeError: it is not there or is not a recipe; with the file and the line where that can be said.
    """
    path, _, attribute = name.rpartition(":")
    return read_toml(Path(name), named) if name.endswith(".toml") else _from_python(path, attribute)


def read_toml(path: Path, named: Callable[[str], Recipe]) -> Recipe:
    """The recipe of a TOML file (docs/adding_a_recipe.md).

    Raises:
        RecipeError: the file cannot be read, is not TOML, or a key or value in it is not what was expected.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # a byte order mark, as some editors write, is no TOML
        return from_data(tomllib.loads(text), named)
    except At as error:
        raise RecipeError(f"{path}, line {line_of(text, error.path)}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path} is not TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not UTF-8 text ({error}); save it as UTF-8, which TOML is in") from error
    except OSError as error:
        raise RecipeError(f"{path} cannot be read ({error}); expected a recipe's TOML file") from error


def to_toml(recipe: Recipe) -> str:
    """The text of a TOML file that `read_toml` makes this recipe of.

    Raises:
        RecipeError: it has a scaling of one's own, which data do not hold.
    """
    data = to_data(recipe)
    rules, keeps, stages = data.pop("rules"), data.pop("keep_heads"), data.pop("stages", [])
    lines = [f"{key} = {_toml(value)}" for key, value in data.items()]
    if rules or keeps:
        lines.append(f"keep_heads = {_toml(keeps)}")
    if keeps and not rules:
        lines.append("rules = []")
    for header, tables in (("rules", rules), ("stages", stages)):
        for table in tables:
            lines += ["", f"[[{header}]]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)  # JSON's strings, numbers and booleans are TOML's


def _key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else json.dumps(key)


def line_of(text: str, path: tuple[str | int, ...]) -> int:
    """The line of the last of these keys that the text says, from 1.

    >>> line_of("name = 'a'\\n[[rules]]\\npath = '*'", ("rules", 0, "path"))
    3
    """
    table: tuple[str | int, ...] = ()
    found: tuple[str | int, ...]
    counts: dict[str, int] = {}
    best, depth = 1, 0
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\[\s*([\w.-]+)\s*\]\]", line):
            counts[header[1]] = counts.get(header[1], -1) + 1
            found = table = (header[1], counts[header[1]])
        elif header := re.match(r"\s*\[\s*([\w. -]+?)\s*\]\s*(#.*)?$", line):
            first, *rest = re.split(r"\s*\.\s*", header[1])
            found = table = (first, *([counts[first]] if first in counts else []), *rest)
        elif key := re.match(r"\s*([\w.\" -]+?)\s*=", line):
            found = (*table, *re.split(r"\s*\.\s*", key[1].replace('"', "")))
        else:
            continue
        if found == path[: len(found)] and len(found) > depth:
            best, depth = number, len(found)
    return best


def _from_python(path: str, name: str) -> Recipe:
    module = load_module(path, RecipeError)
    value = getattr(module, name, None)
    if not isinstance(value, Recipe):
        own = [key for key, found in vars(module).items() if isinstance(found, Recipe)]
        kind = "" if value is None else f" ({name} is {type(value).__name__})"
        raise RecipeError(f"{path}: {unknown('recipe', name, own)}{kind}")
    if not is_name(value.name):
        raise RecipeError(f"{path}: {name} is called {value.name!r}; expected letters, digits and - _ . +")
    return value
