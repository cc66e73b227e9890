"""Write entries and failure reports as TOML, in the order in which one reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


_WIDTH = 116


def dump_entry(data: Mapping[str, Any]) -> str:
    """An [[entry]] table: plain fields first, then the sub-tables, then the references."""
    plain = {key: value for key, value in data.items() if key != "references" and not isinstance(value, Mapping)}
    lines = ["[[entry]]", *_lines(plain)]
    for name, table in data.items():
        if isinstance(table, Mapping):
            lines += ["", f"[entry.{name}]", *_lines(table)]
    for reference in data["references"]:
        lines += ["", "[[entry.references]]", *_lines(reference)]
    return "\n".join(lines) + "\n"


def dump_failure(data: Mapping[str, Any]) -> str:
    """A [[failure]] table."""
    return "\n".join(["[[failure]]", *_lines(data)]) + "\n"


def toml_string(text: str) -> str:
    """A TOML basic string: JSON's escapes are TOML's, except that TOML also wants DEL escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(key)} = {_value(value, len(key) + 3)}" for key, value in table.items()]


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else toml_string(key)


def _value(value: Any, indent: int) -> str:
    if isinstance(value, list | tuple):
        items = [toml_string(item) for item in value]
        line = f"[{', '.join(items)}]"
        return line if indent + len(line) <= _WIDTH else "[\n" + "".join(f"  {item},\n" for item in items) + "]"
    return toml_string(value) if isinstance(value, str) else str(value)
