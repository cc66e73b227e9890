"""`halfstep kb`: in which precision was this model pre-trained? `halfstep site`: a page of tools. Imports no torch."""

import re
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from halfstep.cli.terminal import Json, answer, fail, table_text, write_text
from halfstep.errors import KnowledgeBaseError, unknown
from halfstep.kb import (
    DEFAULT_OVERLAY,
    Entry,
    add as adding,
    export as exporting,
    load,
    search as find_text,
)
from halfstep.kb.add import add_entry, slug
from halfstep.kb.reader import data_files, package_folder, read, words
from halfstep.kb.resolve import find
from halfstep.kb.verdict import describe_answer, describe_verdict, judge
from halfstep.text import printable, some


kb = typer.Typer(no_args_is_help=True)

Model = Annotated[str, typer.Argument(help="A hub id, an alias, or the path of a local Hugging Face folder.")]
Overlay = Annotated[
    Path | None, typer.Option("--overlay", help="A folder with your own entries.", show_default="~/.config/halfstep/kb")
]


_QUESTIONS = {
    "--model-id": "Hub id (organisation/name)",
    "--family": "Model family",
    "--year": "Year of release",
    "--precision": "Trained in (such as bf16_mixed)",
    "--evidence": "Evidence (paper, config, author_statement ...)",
    "--says": "What the reference says, in your own words",
    "--reference": "Reference (KIND URL WHERE)",
}
"""The questions asked in a terminal for missing options that an entry needs."""


@kb.command()
def add(
    model_id: Annotated[list[str] | None, typer.Option("--model-id", help="A hub id; repeat for more.")] = None,
    alias: Annotated[list[str] | None, typer.Option("--alias", help="Another name; repeat for more.")] = None,
    family: Annotated[str | None, typer.Option("--family", help="The model family.")] = None,
    year: Annotated[int | None, typer.Option("--year", help="The year of release.")] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="The precision it was trained in, such as bf16_mixed.")
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
    stage: Annotated[str, typer.Option("--stage", help="The training run that the reference describes.")] = "pretrain",
    official: Annotated[str | None, typer.Option("--official", help="The model's paper or repository.")] = None,
    conflict_with: Annotated[
        str | None, typer.Option("--conflict-with", help="An entry that contradicts this one.")
    ] = None,
    reason: Annotated[str | None, typer.Option("--reason", help="Why it differs from a similar entry.")] = None,
    entry_id: Annotated[
        str | None, typer.Option("--id", help="The entry's id.", show_default="from the model id")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Where to write.", show_default="~/.config/halfstep/kb")
    ] = None,
) -> None:
    """Write your own entry; missing fields are asked for in a terminal. An entry needs a reference."""
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
    """The options, with missing ones asked for in the terminal."""
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
    """A reference parsed from "KIND URL WHERE"; the commit is taken from a GitHub address."""
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


Format = StrEnum("Format", ["json", "csv", "md"])
"""The formats of `kb export`."""


@kb.command()
def check(
    model: Model,
    use: Annotated[str, typer.Option("--use", help="fp32, tf32, bf16, fp16, int8, fp8, mxfp4 or nvfp4.")],
    overlay: Overlay = None,
    as_json: Json = False,
) -> None:
    """Is MODEL safe to run in a type? Exit code 0: safe, 1: risky, 3: unknown, 2: no answer."""
    verdict = judge(load(overlay or DEFAULT_OVERLAY), model, use)
    derived = {
        name: [asdict(item) if hasattr(item, "__dataclass_fields__") else item for item in getattr(verdict, name)]
        for name in ("keep_in_fp32", "failures", "next_steps")
    }
    answer(
        as_json,
        lambda: {**asdict(verdict), "tier": verdict.answer.tier, **derived},
        lambda: describe_verdict(verdict, () if verdict.safe else _measure(model)),
    )
    raise typer.Exit({"safe": 0, "risky": 1, "unknown": 3}[verdict.verdict])


@kb.command()
def show(model: Model, overlay: Overlay = None, as_json: Json = False) -> None:
    """Print everything known about MODEL: entries, references and failure reports. Exit code 1 if there is nothing."""
    found = find(load(overlay or DEFAULT_OVERLAY), model)
    steps = [] if found.known else [f"next: {step}" for step in _measure(model)]
    answer(
        as_json,
        lambda: {**asdict(found), "tier": found.tier, "conflict": found.conflict},
        lambda: "\n".join([describe_answer(found), *steps]),
    )
    raise typer.Exit(0 if found.known else 1)


@kb.command()
def search(
    text: Annotated[list[str], typer.Argument(help="Words that an entry must contain.")],
    overlay: Overlay = None,
    as_json: Json = False,
) -> None:
    """List the entries in which every word of TEXT occurs. Exit code 1 if there is none."""
    wanted = " ".join(text)
    _print_entries(find_text(load(overlay or DEFAULT_OVERLAY), wanted), as_json, f"every word of {wanted!r}")


@kb.command("list")
def listing(
    precision: Annotated[
        str | None, typer.Option("--precision", help="bf16, or a whole word such as bf16_mixed.")
    ] = None,
    tier: Annotated[str | None, typer.Option("--tier", help="definitive or inferred.")] = None,
    since: Annotated[int | None, typer.Option("--since", help="The first year.")] = None,
    overlay: Overlay = None,
    as_json: Json = False,
) -> None:
    """List the entries. Exit code 1 if none matches."""
    entries = load(overlay or DEFAULT_OVERLAY).entries
    precisions = {*words("train_precision"), *(kind for entry in entries for kind in entry.computes)}
    for option, value, known in (("precision", precision, precisions), ("tier", tier, words("tier"))):
        if value is not None and value not in known:
            raise KnowledgeBaseError(unknown(option, value, known))
    chosen = [
        entry
        for entry in entries
        if (precision is None or precision in (entry.train_precision, *entry.parts.values(), *entry.computes))
        and (tier is None or entry.tier == tier)
        and (since is None or entry.year >= since)
    ]
    asked = [
        f"--{name} {value}" for name, value in (("precision", precision), ("tier", tier), ("since", since)) if value
    ]
    _print_entries(chosen, as_json, " ".join(asked))


@kb.command("model-card")
def model_card(model: Model, overlay: Overlay = None) -> None:
    """Print the field of a model card that says how MODEL was trained, as YAML."""
    typer.echo(exporting.model_card(find(load(overlay or DEFAULT_OVERLAY), model)))


@kb.command()
def validate(
    folder: Annotated[
        Path | None, typer.Argument(help="A folder with your own entries.", show_default="the package's")
    ] = None,
) -> None:
    """Check entries against the schema and the rules. Exit code 1 if one breaks them."""
    if folder is not None and not data_files(folder):
        raise KnowledgeBaseError(
            f"{str(folder)!r} holds no .toml file; expected a folder of entries, as `halfstep kb add` writes"
        )
    place = folder or package_folder()
    found = adding.validate(place, under=load(None) if folder else None)
    for problem in found:
        fail(printable(problem))
    if found:
        raise typer.Exit(1)
    base = read(place, check=False)
    typer.echo(f"{_counted(base.entries)}; {len(base.failures)} failure reports: no problem found")


@kb.command()
def export(
    form: Annotated[Format, typer.Option("--format", help="What to write.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file, instead of standard output.")] = None,
    overlay: Overlay = None,
) -> None:
    """Write the whole knowledge base; `halfstep site` writes the page for a browser."""
    base = load(overlay or DEFAULT_OVERLAY)
    text = {"json": exporting.to_json, "csv": exporting.to_csv, "md": exporting.to_markdown}[form](base)
    if output is None:
        sys.stdout.write(text)
    else:
        write_text(output, text, KnowledgeBaseError)
        typer.echo(f"wrote {output}: {_counted(base.entries)}")


def _print_entries(entries: Any, as_json: bool, asked: str) -> None:
    if entries or as_json:
        answer(as_json, lambda: [exporting.entry_data(entry) for entry in entries], lambda: _table(entries))
    if not entries:
        fail(f"no entry has {asked}; `halfstep kb list` shows all of them")
        raise typer.Exit(1)


def _table(entries: Any) -> str:
    rows = [[printable(cell) for cell in _row(entry)] for entry in entries]
    columns = ["entry", "trained in", "tier", "year", "evidence", "models"]
    return f"{table_text(columns, rows)}\n\n{_counted(entries)}"


def _row(entry: Entry) -> list[str]:
    names = (*entry.model_ids, *entry.aliases)
    precision = "; ".join(f"{part} {word}" for part, word in entry.parts.items()) or entry.train_precision
    return [entry.id, precision, entry.tier, str(entry.year), entry.evidence_kind.replace("_", " "), some(names, 1)]


def _counted(entries: Any) -> str:
    """The number of definitive entries, and separately that of inferred ones."""
    definitive = sum(entry.tier == "definitive" for entry in entries)
    return f"{definitive} definitive entries; apart from them, {len(entries) - definitive} inferred"


def _measure(model: str) -> list[str]:
    """Lines that say how to measure the model instead."""
    model = printable(model)
    return [
        f"halfstep inspect {model}: read from a downloaded folder which types its weights went through",
        f"halfstep probe {model}: measure the range of activations and gradients",
    ]


def site(
    output: Annotated[Path, typer.Argument(help="The file to write: index.html. An existing file is replaced.")],
    overlay: Annotated[
        Path | None,
        typer.Option("--overlay", help="A folder with your own entries of the knowledge base, added to the package's."),
    ] = None,
    space: Annotated[
        bool,
        typer.Option("--space", help="Write README.md beside it: with both a static Space of Hugging Face's is made."),
    ] = False,
) -> None:
    """Write one page that needs no network: the knowledge base, number formats, and the memory of training."""
    from halfstep.site.page import space as card, to_html

    readme = output.with_name("README.md")
    if space and readme.exists():
        raise KnowledgeBaseError(f"{str(readme)!r} is there already; --space writes that file: name another folder")
    texts = {output: to_html(load(overlay))}
    if space:
        texts[readme] = card(file=output.name)
    for path, text in texts.items():
        write_text(path, text, KnowledgeBaseError)
        typer.echo(f"wrote {path}: {len(text.encode()) / 1000:.0f} kB")
