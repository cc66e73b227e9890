"""The general cast table: what happens when a model trained in one type runs in another."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from halfstep.errors import FormatError, KnowledgeBaseError, unknown
from halfstep.formats import get
from halfstep.kb.schema import uses


_VERDICTS = {"none": "safe", "low": "safe", "medium": "risky", "high": "risky", "unknown": "unknown"}


@dataclass(frozen=True)
class Cast:
    """One cell of the table: its risk, the reason, and what to keep in fp32 when doing it all the same."""

    native: str
    use: str
    risk: str
    reason: str
    keep_in_fp32: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """safe, risky or unknown."""
        return _VERDICTS[self.risk]


@cache
def table() -> Mapping[tuple[str, str], Cast]:
    """All cells by (training type, type to run in)."""
    rows = tomllib.loads(files("halfstep.kb").joinpath("casts.toml").read_text(encoding="utf-8"))["cast"]
    natives = list(dict.fromkeys(native for row in rows for native in row["native"] if native != "any"))
    cells: dict[tuple[str, str], Cast] = {}
    # The lines for "any" come first, so that a type's own line overwrites them.
    for row in sorted(rows, key=lambda row: row["native"] != ["any"]):
        for native in natives if row["native"] == ["any"] else row["native"]:
            texts = {name: tuple(row.get(name, ())) for name in ("keep_in_fp32", "sources")}
            cells[native, row["use"]] = Cast(native, row["use"], row["risk"], row["reason"], **texts)
    return cells


def normal_use(use: object) -> str:
    """The table's word for a type to run in; torch's names and a `torch.dtype` are understood.

    >>> normal_use("float16"), normal_use("torch.bfloat16"), normal_use("float8_e4m3fn")
    ('fp16', 'bf16', 'fp8')

    Raises:
        KnowledgeBaseError: no type of that name; the known ones are shown.
    """
    word = str(use).removeprefix("torch.").lower()
    if word not in uses():
        with suppress(FormatError):
            word = get(word).name
    if word.startswith("float8"):
        return "fp8"
    if word not in uses():
        raise KnowledgeBaseError(unknown("type to run a model in", str(use), uses()))
    return word
