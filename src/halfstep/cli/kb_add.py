"""`halfstep kb add`: write an entry of one's own, in the form of a pull request."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from halfstep.errors import KnowledgeBaseError
from halfstep.kb.add import add_entry, slug
from halfstep.kb.reader import DEFAULT_OVERLAY


_QUESTIONS = {
    "--model-id": "Hub id (organisation/name)",
    "--family": "Model family",
    "--year": "Year of release",
    "--precision": "Trained in (such as bf16_mixed)",
    "--evidence": "Evidence (paper, config, author_statement ...)",
    "--says": "What the reference says, in your own words",
    "--reference": "Reference (KIND URL WHERE)",
}
"""What is asked for at the terminal where an option that an entry needs is missing."""


def add(
    model_id: Annotated[list[str] | None, typer.Option("--model-id", help="A hub id; repeat for more.")] = None,
    alias: Annotated[list[str] | None, typer.Option("--alias", help="Another name; repeat for more.")] = None,
    family: Annotated[str | None, typer.Option("--family", help="The model family.")] = None,
    year: Annotated[int | None, typer.Option("--year", help="The year of release.")] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="What it was trained in, such as bf16_mixed.")
    ] = None,
    part: Annotated[
        list[str] | None, typer.Option("--part", help="NAME=PRECISION for a part; repeat for more.")
    ] = None,
    says: Annotated[str | None, typer.Option("--says", help="What the reference says, in your own words.")] = None,
    reference: Annotated[
        list[str] | None, typer.Option("--reference", help='"KIND URL WHERE": what it is, its address, where to look.')
    ] = None,
    evidence: Annotated[str | None, typer.Option("--evidence", help="paper, config, author_statement ...")] = None,
    tier: Annotated[str, typer.Option("--tier", help="definitive (stated first-hand) or inferred.")] = "inferred",
    stage: Annotated[str, typer.Option("--stage", help="Which training the reference speaks of.")] = "pretrain",
    official: Annotated[str | None, typer.Option("--official", help="The model's paper or repository.")] = None,
    conflict_with: Annotated[str | None, typer.Option("--conflict-with", help="An entry that says otherwise.")] = None,
    reason: Annotated[str | None, typer.Option("--reason", help="Why it stands apart from a like entry.")] = None,
    entry_id: Annotated[
        str | None, typer.Option("--id", help="The entry's id.", show_default="from the model id")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Where to write.", show_default="~/.config/halfstep/kb")
    ] = None,
) -> None:
    """Write an entry of your own; what is missing is asked for in a terminal. Without a reference there is no entry."""
    stated = precision or ("mixed_by_part" if part else None)
    answers = model_id or alias, family, year, stated, evidence, says, reference
    given = _completed(dict(zip(_QUESTIONS, answers, strict=True)))
    names = given["--model-id"]
    data = {
        "id": entry_id or slug(names[0].rsplit("/", 1)[-1]),
        "year": given["--year"],
        "stage": stage,
        "train_precision": given["--precision"],
        "parts": dict(_part(text) for text in part or ()),
        "tier": tier,
        "evidence_kind": given["--evidence"],
        "model_ids": names if model_id or not alias else [],
        "aliases": alias,
        "paraphrase": given["--says"],
        "reason": reason,
        "conflict_with": conflict_with,
        "official": official,
        "references": [_reference(text) for text in given["--reference"]],
    }
    file = add_entry(
        given["--family"], {name: value for name, value in data.items() if value}, folder or DEFAULT_OVERLAY
    )
    typer.echo(f"wrote {file}")
    typer.echo("`halfstep kb` reads it from now on." if folder is None else f"Use it with --overlay {folder}.")
    typer.echo("To propose it to everybody, open a pull request that puts it under src/halfstep/kb/data.")


def _completed(given: dict[str, Any]) -> dict[str, Any]:
    """The options, with answers asked for at the terminal for those that are missing."""
    missing = [flag for flag, value in given.items() if not value]
    if not missing:
        return given
    if not sys.stdin.isatty():
        raise KnowledgeBaseError(
            f"an entry needs {', '.join(missing)}. Every entry cites what it rests on, as "
            '--reference "paper https://arxiv.org/abs/1910.10683 section 2.1"'
        )
    for flag in missing:
        answer = typer.prompt(_QUESTIONS[flag], type=int if flag == "--year" else str)
        given[flag] = [answer] if flag in ("--model-id", "--reference") else answer
    return given


def _reference(text: str) -> dict[str, str]:
    """A reference from "KIND URL WHERE"; the commit is read off a GitHub address."""
    kind, url, where = (*text.split(maxsplit=2), "", "", "")[:3]
    if not where:
        raise KnowledgeBaseError(
            f"reference {text!r}: expected three things, KIND URL WHERE, such as "
            '"config https://github.com/owner/repo/blob/0123abc/train.yaml precision: bf16"'
        )
    found = re.match(r"https://github\.com/[^/]+/[^/]+/(?:blob|tree|commit)/([0-9a-f]{7,40})(?:/|$)", url)
    return {"kind": kind, "url": url, "locator": where, **({"commit": found[1]} if found else {})}


def _part(text: str) -> tuple[str, str]:
    name, mark, precision = text.partition("=")
    if not (name and mark and precision):
        raise KnowledgeBaseError(f"part {text!r}: expected NAME=PRECISION, such as language_model=bf16_mixed")
    return name.strip(), precision.strip()
