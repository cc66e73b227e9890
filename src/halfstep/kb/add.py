"""Write a new entry into the user's own folder, formatted for a pull request; the rules that all entries must keep."""

import json
import re
from collections.abc import Iterator, Mapping
from importlib.resources.abc import Traversable
from itertools import combinations
from pathlib import Path
from typing import Any

from halfstep.errors import KnowledgeBaseError, unknown
from halfstep.kb.reader import (
    DEFAULT_OVERLAY,
    Entry,
    KnowledgeBase,
    data_files,
    entry_from,
    file_problems,
    load,
    matches,
    parse,
    read,
    text_of,
)


def slug(text: str) -> str:
    """A slug for a file or an entry.

    >>> slug("Llama 4 / Scout")
    'llama-4-scout'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.casefold()).strip("-")


def add_entry(family: str, data: Mapping[str, Any], folder: Path | str = DEFAULT_OVERLAY) -> Path:
    """Append an entry to the family's file in a folder, which is created if necessary; return the file.

    Nothing is written unless the entry keeps every rule, together with the folder's own entries and the package's.

    Raises:
        KnowledgeBaseError: the entry breaks a rule (no reference, a model that has an entry already ...).
    """
    target = Path(folder).expanduser() / f"{slug(family) or 'entry'}.toml"
    block = dump_entry({**data, "references": data.get("references", [])})
    before = text_of(target) if target.exists() else f"family = {toml_string(family)}\n"
    text = f"{before.rstrip()}\n\n{block}"
    if found := list(file_problems(target.name, parse(text, target.name))):
        raise KnowledgeBaseError("\n".join(found))
    new = entry_from(data, family, target.name, overlay=True)
    if found := [problem for entry in load(None).entries for problem in pair_problems(entry, new)]:
        raise KnowledgeBaseError("\n".join(found))
    _write(target, text, before if target.exists() else None)
    return target


def _write(target: Path, text: str, before: str | None) -> None:
    """Write, check the folder as a whole, and restore the old text if the check fails."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise KnowledgeBaseError(
            f"cannot write {str(target)!r}: {error.strerror}; name a folder that you may write to with --folder"
        ) from None
    if found := validate(target.parent, under=load(None)):
        if before is None:
            target.unlink()
        else:
            target.write_text(before, encoding="utf-8")
        raise KnowledgeBaseError("\n".join(found))


_OFFICIAL = {"paper", "report", "config", "code", "readme", "card", "doc", "logbook"}
_WEAK = {"secondary", "inferred_hardware", "wiki_unreferenced"}


def validate(folder: Traversable, under: KnowledgeBase | None = None) -> list[str]:
    """All violations in a folder of data files, one message each; an empty list if there are none.

    `under` is the package's knowledge base when the folder is an overlay: its entries may then be named in conflicts
    and in failure reports.
    """
    found: list[str] = []
    for file in data_files(folder):
        try:
            found += file_problems(file.name, parse(text_of(file), file.name))
        except KnowledgeBaseError as error:
            found.append(str(error))
    if found:
        return found
    return [*rule_problems(read(folder, overlay=under is not None, check=False), under.entries if under else ())]


def rule_problems(base: KnowledgeBase, others: tuple[Entry, ...] = ()) -> Iterator[str]:
    """The rules that entries of a knowledge base violate; `others` are entries that they may refer to."""
    known = {entry.id: entry for entry in (*others, *base.entries)}
    for entry in base.entries:
        for message in (*_alone(entry), *_conflict(entry, known, others)):
            yield f"{entry.origin}: entry {entry.id!r}: {message}"
    for one, other in combinations(base.entries, 2):
        yield from pair_problems(one, other)
    for number, report in enumerate(base.failures):
        place = f"{report.origin}: failure {report.id!r}"
        if any(report.id == earlier.id for earlier in base.failures[:number]):
            yield f"{place}: another report has this id; give each its own"
        for name in report.entries:
            if name not in known:
                yield f"{place}: {unknown('entry', name, known)}"


def _alone(entry: Entry) -> list[str]:
    covered = {name.casefold() for name in entry.model_ids}
    rules = [
        (not entry.model_ids and not entry.aliases, "names no model; expected model_ids or aliases"),
        (
            not entry.official and not any(reference.kind in _OFFICIAL for reference in entry.references),
            "nothing shows that this is an official model: expected a reference of kind "
            f"{', '.join(sorted(_OFFICIAL))}, or `official`, the address of its paper, report or official repository",
        ),
        (
            entry.tier == "definitive" and entry.evidence_kind in _WEAK,
            f'evidence of kind {entry.evidence_kind!r} cannot be definitive; expected tier = "inferred", or a '
            "first-hand source that states the precision",
        ),
        (
            (entry.train_precision == "mixed_by_part") != bool(entry.parts),
            'train_precision = "mixed_by_part" and [entry.parts] go together; give both or neither',
        ),
        *(
            (True, f"{use} stands in both [entry.safe] and [entry.risky]; keep the one that the references bear out")
            for use in entry.safe.keys() & entry.risky.keys()
        ),
        *(
            (
                reference.commit and "github.com" in reference.url and reference.commit not in reference.url,
                f"reference {reference.url!r} does not contain its commit {reference.commit!r}; link to that commit",
            )
            for reference in entry.references
        ),
        *(
            (
                name.casefold() not in covered or "*" in name,
                f"id_confirmed has {name!r}, which is not one of model_ids; confirm only ids that stand there in full",
            )
            for name in entry.id_confirmed
        ),
        *(
            (
                not any(matches(glob, name) for glob in entry.globs),
                f"except_ids has {name!r}, which no glob of model_ids would match; take it out",
            )
            for name in entry.except_ids
        ),
    ]
    return [message for broken, message in rules if broken]


def _conflict(entry: Entry, known: dict[str, Entry], others: tuple[Entry, ...]) -> Iterator[str]:
    if entry.conflict_with is None:
        return
    other = known.get(entry.conflict_with)
    if other is None:
        yield f"conflict_with: {unknown('entry', entry.conflict_with, known)}"
    elif other.conflict_with != entry.id and other not in others:
        yield (
            f"conflict_with names {other.id!r}, which does not name this entry back; "
            f'add conflict_with = "{entry.id}" to {other.origin}'
        )


def pair_problems(one: Entry, other: Entry) -> Iterator[str]:
    """The rules that two entries violate together."""
    place = f"{other.origin}: entry {other.id!r}"
    if one.id == other.id:
        yield f"{place}: an entry of this id stands in {one.origin} already; give each its own id"
        return
    if one.conflicts(other):
        return
    shared = _claims(one) & _claims(other)
    if shared:
        yield (
            f"{place}: {', '.join(sorted(shared))} stands in entry {one.id!r} ({one.origin}) already. One entry per "
            "model: give its ids to one of the two, or declare the conflict with conflict_with"
        )
    same = one.family == other.family and one.train_precision == other.train_precision
    if same and not (one.reason or other.reason):
        yield (
            f"{place}: family {one.family!r} has entry {one.id!r} with the same precision, {one.train_precision}. "
            "Join them, or say in `reason` why they stand apart"
        )
    for wide, narrow in ((one, other), (other, one)):
        yield from (
            f"{wide.origin}: entry {wide.id!r}: the glob {glob!r} swallows {name!r} of entry "
            f"{narrow.id!r} ({narrow.origin}); narrow the glob, or list the id in except_ids"
            for name in narrow.model_ids
            for glob in wide.globs_over(name)
        )


def _claims(entry: Entry) -> set[str]:
    return {name.casefold() for name in (entry.id, *entry.model_ids, *entry.aliases)}


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
