"""The schema of the data files, and a check against it whose messages say what to write instead.

`schema.json` is an ordinary JSON schema, for editors and other tools. Of its vocabulary this file reads what
`schema.json` uses; the tests hold it against the jsonschema library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from halfstep.errors import unknown


_TYPES: Mapping[str, type] = {"string": str, "integer": int, "array": list, "object": dict}


@cache
def schema() -> dict[str, Any]:
    """The JSON schema of a data file."""
    loaded: dict[str, Any] = json.loads(files("halfstep.kb").joinpath("schema.json").read_text(encoding="utf-8"))
    return loaded


def words(name: str, of: str = "entry") -> list[str]:
    """The words that a field may take, as the schema lists them; `of` is the table that has the field."""
    found: list[str] = _resolved(schema()["$defs"][of]["properties"][name])["enum"]
    return found


def uses() -> list[str]:
    """The types that a model can be asked to run in."""
    found: list[str] = schema()["$defs"]["use"]["enum"]
    return found


def problems(value: Any, kind: str, where: str | None = None) -> Iterator[str]:
    """What a value of one kind (entry, failure, text ...) violates, one message each; `where` names it in them."""
    return _problems(value, schema()["$defs"][kind], where or kind)


def _problems(value: Any, rule: Mapping[str, Any], where: str) -> Iterator[str]:
    rule = _resolved(rule)
    wanted = rule.get("description", "something else")
    if "enum" in rule and value not in rule["enum"]:
        yield unknown(where, value, rule["enum"]).replace("unknown", "unknown word for", 1)
        return
    if "type" in rule and (not isinstance(value, _TYPES[rule["type"]]) or isinstance(value, bool)):
        yield f"{where}: found {value!r} of type {type(value).__name__}, expected {wanted}"
        return
    if isinstance(value, str) and not re.search(rule.get("pattern", ""), value):
        yield f"{where}: found {value!r}, expected {wanted}"
    if isinstance(value, int) and not rule.get("minimum", value) <= value <= rule.get("maximum", value):
        yield f"{where}: found {value}, expected {wanted}"
    if isinstance(value, list):
        yield from _list_problems(value, rule, where)
    if isinstance(value, dict):
        yield from _table_problems(value, rule, where)


def _list_problems(value: list[Any], rule: Mapping[str, Any], where: str) -> Iterator[str]:
    if len(value) < rule.get("minItems", 0):
        yield f"{where}: found none, expected {rule['description']}"
    if rule.get("uniqueItems") and any(item in value[:index] for index, item in enumerate(value)):
        yield f"{where}: a value is given twice in {value!r}; give it once"
    for index, item in enumerate(value):
        yield from _problems(item, rule["items"], f"{where}[{index}]")


def _table_problems(value: dict[str, Any], rule: Mapping[str, Any], where: str) -> Iterator[str]:
    known = rule.get("properties", {})
    others = rule.get("additionalProperties", True)
    for name in rule.get("required", ()):
        if name not in value:
            yield f"{where}: {name!r} is missing; expected {_resolved(known[name])['description']}"
    if len(value) < rule.get("minProperties", 0):
        yield f"{where}: found {len(value)} of at least {rule['minProperties']}; expected {rule['description']}"
    for name, item in value.items():
        if "propertyNames" in rule:
            yield from _problems(name, rule["propertyNames"], f"{where} key")
        if name in known:
            yield from _problems(item, known[name], f"{where}.{name}")
        elif others is False:
            yield f"{where}: {unknown('field', name, known)}"
        elif isinstance(others, Mapping):
            yield from _problems(item, others, f"{where}.{name}")


def _resolved(rule: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = rule.get("$ref")
    if reference is None:
        return rule
    found: Mapping[str, Any] = schema()["$defs"][reference.removeprefix("#/$defs/")]
    return found
