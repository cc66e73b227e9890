"""What the knowledge base holds: entries, their references, and failure reports, as frozen records."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Reference:
    """Something that can be cited: what it is, where it is, and what to look for there."""

    kind: str
    url: str
    locator: str
    commit: str | None = None


@dataclass(frozen=True)
class Entry:
    """How one model, or several sizes of it, was trained, and what says so.

    None and the empty tuple mean "not stated". `released_dtype` is what the published files are stored in: it is
    shown, and nothing is ever concluded from it.
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
    """Ids that a glob of this entry would match and that belong to others."""
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
    """Why this is an entry of its own beside another one of the family with the same precision."""
    official: str | None = None
    """The paper, report or official repository, where no reference is one."""
    conflict_with: str | None = None
    safe: Mapping[str, str] = field(default_factory=dict)
    risky: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""
    """The file it was read from."""
    overlay: bool = False
    """Whether that file is the user's own."""

    @property
    def compute(self) -> str:
        """The type of the training's products, without the regime: 'bf16' of 'bf16_mixed'."""
        return compute(self.train_precision)

    @property
    def regime(self) -> str | None:
        """How that type was used: full, mixed or pure; None where it is not known."""
        return regime(self.train_precision)

    @property
    def computes(self) -> tuple[str, ...]:
        """The types of all parts: one, unless the model is mixed by part."""
        return tuple(dict.fromkeys(compute(word) for word in self.parts.values())) or (self.compute,)

    @property
    def globs(self) -> tuple[str, ...]:
        """The ids with a *."""
        return tuple(name for name in self.model_ids if "*" in name)

    @property
    def excerpt_only(self) -> bool:
        """Whether only an excerpt of the references was read, so that they want another look."""
        return self.read_via == "excerpt"

    def globs_over(self, model_id: str) -> list[str]:
        """The globs that cover a model id; none if it is one of the exceptions."""
        if any(matches(name, model_id) for name in self.except_ids):
            return []
        return [name for name in self.globs if matches(name, model_id)]

    def conflicts(self, other: Entry) -> bool:
        """Whether one declares a conflict with the other."""
        return self.conflict_with == other.id or other.conflict_with == self.id

    def confirms(self, model_id: str) -> bool:
        """Whether a reference names this very hub id."""
        return model_id.casefold() in {name.casefold() for name in self.id_confirmed}


@dataclass(frozen=True)
class FailureReport:
    """What went wrong, or what was done against it, when a model was run in another type."""

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
    """The type of the training's products.

    >>> compute("fp8_mixed"), compute("fp32"), compute("amp_mixed_unspecified")
    ('fp8', 'fp32', 'amp')
    """
    return train_precision.split("_")[0]


def regime(train_precision: str) -> str | None:
    """full, mixed or pure.

    >>> regime("bf16_pure"), regime("fp32"), regime("mixed_by_part"), regime("unknown")
    ('pure', 'full', 'mixed', None)
    """
    if train_precision == "unknown":
        return None
    words = [word for word in train_precision.split("_") if word in ("mixed", "pure")]
    return words[0] if words else "full"


def matches(pattern: str, model_id: str) -> bool:
    """Whether an id, or a glob, covers a model id; upper and lower case are one, as on the hub.

    >>> matches("facebook/convnext-*", "facebook/ConvNeXt-tiny-224"), matches("t5", "t5-base")
    (True, False)
    """
    expression = "[^/]*".join(map(re.escape, pattern.casefold().split("*")))
    return re.fullmatch(expression, model_id.casefold()) is not None


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
