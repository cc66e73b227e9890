"""Write a new entry into the user's own folder, in the form of a pull request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfstep.errors import KnowledgeBaseError
from halfstep.kb.entry import entry_from
from halfstep.kb.reader import DEFAULT_OVERLAY, file_problems, load, parse, text_of
from halfstep.kb.rules import pair_problems, validate
from halfstep.kb.toml import dump_entry, toml_string


def slug(text: str) -> str:
    """A name for a file or an entry.

    >>> slug("Llama 4 / Scout")
    'llama-4-scout'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.casefold()).strip("-")


def add_entry(family: str, data: Mapping[str, Any], folder: Path | str = DEFAULT_OVERLAY) -> Path:
    """Append an entry to the family's file in a folder, which is made if need be; the file is returned.

    Nothing is written unless the entry keeps every rule, beside the folder's own entries and the package's.

    Raises:
        KnowledgeBaseError: the entry breaks a rule (no reference, a model that has an entry already ...).
    """
    target = Path(folder).expanduser() / f"{slug(family) or 'entry'}.toml"
    block = dump_entry({**data, "references": data.get("references", [])})
    before = text_of(target) if target.exists() else f"family = {toml_string(family)}\n"
    text = f"{before.rstrip()}\n\n{block}"
    parsed = parse(text, target.name)
    if found := list(file_problems(target.name, parsed)):
        raise KnowledgeBaseError("\n".join(found))
    new = entry_from(data, family, target.name, overlay=True)
    if found := [problem for entry in load(None).entries for problem in pair_problems(entry, new)]:
        raise KnowledgeBaseError("\n".join(found))
    _write(target, text, before if target.exists() else None)
    return target


def _write(target: Path, text: str, before: str | None) -> None:
    """Write, check the folder as a whole, and put everything back if that fails."""
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
