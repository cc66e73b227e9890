"""The records of the knowledge base, entries and failure reports, read from the package's and the user's data files."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from halfstep.errors import KnowledgeBaseError, unknown


@dataclass(frozen=True)
class Reference:
    """A citable source: what it is, its address, and what to look for in it."""

    kind: str
    url: str
    locator: str
    commit: str | None = None


@dataclass(frozen=True)
class Entry:
    """How one model, or several sizes of it, was trained, with references.

    None and the empty tuple mean "not stated". `released_dtype` is the dtype of the published files: it is shown, and
    nothing is ever concluded from it.
    """

    id: str
    family: str
    year: int
    stage: str
    train_precision: str
    tier: str
    evidence_kind: str
    paraphrase: str
    references: tuple[Reference, ...]
    model_ids: tuple[str, ...] = ()
    except_ids: tuple[str, ...] = ()
    """Ids that match a glob of this entry but belong to other entries."""
    id_confirmed: tuple[str, ...] = ()
    """The hub ids that a reference names; the others are from memory."""
    aliases: tuple[str, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)
    master_weight_dtype: str | None = None
    optimizer_state_dtype: str | None = None
    grad_accum_dtype: str | None = None
    higher_precision_parts: tuple[str, ...] = ()
    keep_in_fp32: tuple[str, ...] = ()
    hardware: str | None = None
    framework: str | None = None
    released_dtype: str | None = None
    read_via: str | None = None
    notes: str | None = None
    reason: str | None = None
    """Why it is separate from another entry of the family with the same precision."""
    official: str | None = None
    """The paper, report or official repository, if no reference is one."""
    conflict_with: str | None = None
    safe: Mapping[str, str] = field(default_factory=dict)
    risky: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""
    """The file it was read from."""
    overlay: bool = False
    """Whether that file is the user's own."""

    @property
    def compute(self) -> str:
        """The compute type of the training's matmuls, without the regime: 'bf16' of 'bf16_mixed'."""
        return compute(self.train_precision)

    @property
    def regime(self) -> str | None:
        """How that type was used: full, mixed or pure; None if unknown."""
        words = [word for word in self.train_precision.split("_") if word in ("mixed", "pure")]
        return None if self.train_precision == "unknown" else words[0] if words else "full"

    @property
    def computes(self) -> tuple[str, ...]:
        """The compute types of all parts: one, unless the model is mixed by part."""
        return tuple(dict.fromkeys(compute(word) for word in self.parts.values())) or (self.compute,)

    @property
    def globs(self) -> tuple[str, ...]:
        """The ids with a *."""
        return tuple(name for name in self.model_ids if "*" in name)

    @property
    def excerpt_only(self) -> bool:
        """Whether only an excerpt of the references was read, so that they should be read again."""
        return self.read_via == "excerpt"

    def globs_over(self, model_id: str) -> list[str]:
        """The globs that match a model id; none if it is one of the exceptions."""
        if any(matches(name, model_id) for name in self.except_ids):
            return []
        return [name for name in self.globs if matches(name, model_id)]

    def conflicts(self, other: Entry) -> bool:
        """Whether one of the two declares a conflict with the other."""
        return self.conflict_with == other.id or other.conflict_with == self.id

    def confirms(self, model_id: str) -> bool:
        """Whether a reference names exactly this hub id."""
        return model_id.casefold() in {name.casefold() for name in self.id_confirmed}


@dataclass(frozen=True)
class FailureReport:
    """A report of a failure, or of its fix, when a model was run in another type."""

    id: str
    kind: str
    url: str
    locator: str
    model: str
    trained_in: str
    tried: str
    uses: tuple[str, ...]
    symptom: str
    note: str | None = None
    entries: tuple[str, ...] = ()
    model_ids: tuple[str, ...] = ()
    origin: str = ""


def compute(train_precision: str) -> str:
    """The compute type of the training's matmuls.

    >>> compute("fp8_mixed"), compute("fp32"), compute("amp_mixed_unspecified")
    ('fp8', 'fp32', 'amp')
    """
    return train_precision.split("_")[0]


def matches(pattern: str, model_id: str) -> bool:
    """Whether an id, or a glob, matches a model id, ignoring case as the hub does.

    >>> matches("facebook/convnext-*", "facebook/ConvNeXt-tiny-224"), matches("t5", "t5-base")
    (True, False)
    """
    return re.fullmatch("[^/]*".join(map(re.escape, pattern.casefold().split("*"))), model_id.casefold()) is not None


def entry_from(data: Mapping[str, Any], family: str, origin: str, overlay: bool = False) -> Entry:
    """An entry from its TOML table, which the schema has accepted."""
    references = tuple(Reference(**reference) for reference in data["references"])
    rest = {key: _frozen(value) for key, value in data.items() if key != "references"}
    return Entry(**rest, references=references, family=family, origin=origin, overlay=overlay)


def failure_from(data: Mapping[str, Any], origin: str) -> FailureReport:
    """A failure report from its TOML table, which the schema has accepted."""
    return FailureReport(**{key: _frozen(value) for key, value in data.items()}, origin=origin)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# ---- the schema -----------------------------------------------------------------------------------------------------

# `schema.json` is an ordinary JSON schema, for editors and other tools. This file implements only the vocabulary
# that `schema.json` uses; the tests compare it with the jsonschema library.

_TYPES: Mapping[str, type] = {"string": str, "integer": int, "array": list, "object": dict}


@cache
def schema() -> dict[str, Any]:
    """The JSON schema of a data file."""
    return dict(json.loads(files("halfstep.kb").joinpath("schema.json").read_text(encoding="utf-8")))


def words(name: str, of: str = "entry") -> list[str]:
    """The values that a field may take, as the schema lists them; `of` is the table that has the field."""
    return list(_resolved(schema()["$defs"][of]["properties"][name])["enum"])


def uses() -> list[str]:
    """The types that a model can be asked to run in."""
    return list(schema()["$defs"]["use"]["enum"])


def problems(value: Any, kind: str, where: str | None = None) -> Iterator[str]:
    """The violations of a value of one kind (entry, failure, text ...), one message each; `where` names the value in
    them."""
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
    return schema()["$defs"][reference.removeprefix("#/$defs/")]  # type: ignore[no-any-return]


# ---- the files ------------------------------------------------------------------------------------------------------

DEFAULT_OVERLAY = Path("~/.config/halfstep/kb")
"""The default folder of a user's own entries; it need not exist."""


@dataclass(frozen=True)
class KnowledgeBase:
    """Entries, the user's own before the package's, and their failure reports."""

    entries: tuple[Entry, ...]
    failures: tuple[FailureReport, ...]

    def counts(self) -> dict[str, int]:
        """The number of definitive entries, and of inferred ones, which are never added up."""
        return {tier: sum(entry.tier == tier for entry in self.entries) for tier in ("definitive", "inferred")}


def load(overlay: Path | str | None = DEFAULT_OVERLAY) -> KnowledgeBase:
    """The package's knowledge base combined with the user's own entries, if `overlay` is a folder that exists.

    An entry of the overlay replaces the package's entry of the same id; `lookup` decides which of the two answers for a
    model id that both claim. The overlay is checked when it is read; the package is checked by its tests.

    Raises:
        KnowledgeBaseError: a file of the overlay is not TOML, or not of the form that docs/knowledge_base.md describes;
            or a folder other than the default one is given and does not exist.
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
    """Read a folder of data files: one family per file, and failure reports in the sub-folder failures.

    Raises:
        KnowledgeBaseError: a file is broken; the message lists all its violations.
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
    """The violations of the schema in the tables of one file."""
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
        for table in tables if isinstance(tables, list) else ():
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
    return sorted([file for place in places for file in place.iterdir() if file.name.endswith(".toml")], key=str)


def text_of(file: Traversable) -> str:
    """The text of a data file.

    Raises:
        KnowledgeBaseError: it cannot be read, or is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KnowledgeBaseError(f"{file}: cannot be read as UTF-8 text: {error}; save it as UTF-8") from error
