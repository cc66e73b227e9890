"""Read the data files: the package's own, and over them the user's."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from halfstep.errors import KnowledgeBaseError
from halfstep.kb.entry import Entry, FailureReport, entry_from, failure_from
from halfstep.kb.schema import problems, schema


DEFAULT_OVERLAY = Path("~/.config/halfstep/kb")
"""Where a user's own entries are looked for by default; the folder need not exist."""


@dataclass(frozen=True)
class KnowledgeBase:
    """Entries, the user's own before the package's, and the failure reports that go with them."""

    entries: tuple[Entry, ...]
    failures: tuple[FailureReport, ...]

    def counts(self) -> dict[str, int]:
        """How many entries are definitive, and how many inferred: two numbers that are never added up."""
        return {tier: sum(entry.tier == tier for entry in self.entries) for tier in ("definitive", "inferred")}


def load(overlay: Path | str | None = DEFAULT_OVERLAY) -> KnowledgeBase:
    """The package's knowledge base under the user's own entries, if `overlay` is a folder that exists.

    An entry of the overlay replaces the package's entry of the same id; which of the two answers for a model id that
    both claim is for `lookup` to say. The overlay is checked as it is read; the package is checked by its tests.

    Raises:
        KnowledgeBaseError: a file of the overlay is not TOML, or not of the form that docs/knowledge_base.md describes;
            or a folder other than the default one is given and is not there.
    """
    if overlay is None:
        return _package()
    folder = Path(overlay).expanduser()
    if not folder.is_dir():
        if folder == DEFAULT_OVERLAY.expanduser():
            return _package()
        raise KnowledgeBaseError(
            f"overlay {str(overlay)!r}: no such folder; expected a folder of .toml files with your own entries. "
            "`halfstep kb add` makes one"
        )
    own = read(folder, overlay=True)
    ids = {entry.id for entry in own.entries}
    package = _package()
    return KnowledgeBase(
        own.entries + tuple(entry for entry in package.entries if entry.id not in ids),
        own.failures + package.failures,
    )


@cache
def _package() -> KnowledgeBase:
    return read(package_folder(), check=False)


def package_folder() -> Traversable:
    """The folder of the package's own data files."""
    return files("halfstep.kb").joinpath("data")


def read(folder: Traversable, overlay: bool = False, check: bool = True) -> KnowledgeBase:
    """Read a folder of data files: one family a file, and failure reports in the sub-folder failures.

    Raises:
        KnowledgeBaseError: a file is broken; the message names all that is wrong with it.
    """
    entries: list[Entry] = []
    failures: list[FailureReport] = []
    for file in data_files(folder):
        name, data = file.name, parse(text_of(file), str(file))
        if check and (found := list(file_problems(name, data))):
            raise KnowledgeBaseError("\n".join(found))
        entries += [entry_from(table, data["family"], name, overlay) for table in data.get("entry", ())]
        failures += [failure_from(table, name) for table in data.get("failure", ())]
    return KnowledgeBase(tuple(entries), tuple(failures))


def file_problems(name: str, data: dict[str, Any]) -> Iterator[str]:
    """What the tables of one file violate of the schema."""
    for key in sorted(data.keys() - schema()["properties"].keys()):
        yield f"{name}: unknown key {key!r} at the top of the file; expected family and [[entry]], or [[failure]]"
    if "entry" in data and "family" not in data:
        yield f"{name}: 'family' is missing at the top of the file; expected the name of the model family"
    if not data.get("entry") and not data.get("failure"):
        yield f"{name}: found neither an [[entry]] nor a [[failure]]; expected at least one"
    if "family" in data:
        yield from (f"{name}: {message}" for message in problems(data["family"], "text", "family"))
    for kind in ("entry", "failure"):
        tables = data.get(kind, [])
        if not isinstance(tables, list):
            yield f"{name}: {kind}: found a single table; expected [[{kind}]], with two brackets"
            continue
        for table in tables:
            label = table.get("id", "without an id") if isinstance(table, dict) else table
            yield from (f"{name}: {kind} {label!r}: {message}" for message in problems(table, kind))


def parse(text: str, name: str) -> dict[str, Any]:
    """A TOML text as data.

    Raises:
        KnowledgeBaseError: it is not TOML; the message has the line and the column.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise KnowledgeBaseError(
            f"{name}: this is not TOML: {error}. Expected the form that docs/knowledge_base.md shows; "
            "strings stand in double quotes, lists in square brackets"
        ) from error


def data_files(folder: Traversable) -> list[Traversable]:
    """The .toml files of a folder and of its sub-folder failures, by name."""
    places = [place for place in (folder, folder.joinpath("failures")) if place.is_dir()]
    found = [file for place in places for file in place.iterdir() if file.name.endswith(".toml")]
    return sorted(found, key=str)


def text_of(file: Traversable) -> str:
    """The text of a data file.

    Raises:
        KnowledgeBaseError: it cannot be read, or is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KnowledgeBaseError(f"{file}: cannot be read as UTF-8 text: {error}; save it as UTF-8") from error
