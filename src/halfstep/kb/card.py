"""The field for a model card that says how a model was trained, as YAML."""

from __future__ import annotations

import json

from halfstep.errors import KnowledgeBaseError
from halfstep.kb.entry import Entry
from halfstep.kb.resolve import Answer


def model_card(answer: Answer) -> str:
    """Lines for the YAML header of a model card: the precision, how sure it is, and what says so.

    The name `trained_precision` is the one proposed for config.json in huggingface/transformers#11209. Strings are
    JSON strings, which YAML reads as they are.

    Raises:
        KnowledgeBaseError: there is no entry, or entries conflict; a card says one thing.
    """
    if not answer.known:
        near = f" Nearest names: {', '.join(answer.near)}." if answer.near else ""
        raise KnowledgeBaseError(
            f"no entry for {answer.model_id!r}, and a card must not guess.{near} If you trained it, add your own "
            "entry: halfstep kb add"
        )
    if answer.conflict:
        ids = " and ".join(entry.id for entry in answer.entries)
        raise KnowledgeBaseError(
            f"entries {ids} conflict over {answer.model_id!r}, and a card says one thing. Read both with "
            f"`halfstep kb show {answer.model_id}`; a reference that settles it is welcome"
        )
    return "\n".join(_lines(answer.entries[0], answer.tier or "inferred"))


def _lines(entry: Entry, tier: str) -> list[str]:
    if entry.parts:
        lines = ["trained_precision:", *(f"  {json.dumps(part)}: {word}" for part, word in entry.parts.items())]
    else:
        lines = [f"trained_precision: {entry.train_precision}"]
    lines.append(f"trained_precision_tier: {tier}")
    kept = entry.higher_precision_parts
    if kept:
        lines += ["trained_precision_kept_higher:", *(f"  - {json.dumps(part)}" for part in kept)]
    if entry.master_weight_dtype:
        lines.append(f"trained_precision_master_weights: {json.dumps(entry.master_weight_dtype)}")
    urls = dict.fromkeys(reference.url for reference in entry.references)
    return [*lines, "trained_precision_references:", *(f"  - {json.dumps(url)}" for url in urls)]
