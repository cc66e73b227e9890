"""The page: three tabs in one file that opens from a folder and asks no network; two tabs' facts, memory's apart."""

import base64
import hashlib
import json
from collections import Counter
from importlib.resources import files
from math import isfinite
from typing import Any

from halfstep import __version__, formats
from halfstep.cli.formats.table import bits_per_value, kind, layout, tile_text
from halfstep.errors import MissingLibraryError
from halfstep.formats import Codebook, Float, Format, Integer, Posit
from halfstep.formats.exact import ROUNDINGS
from halfstep.kb import KnowledgeBase, Verdict
from halfstep.kb.reader import uses
from halfstep.kb.verdict import because, casts, judge, most_careful
from halfstep.site import memory
from halfstep.text import grouped, printable


with MissingLibraryError.of("lab"):
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

TABS = {"kb": "Knowledge base", "formats": "Formats", "memory": "Memory"}
_Said = tuple[str, tuple[int, ...], tuple[str, ...]]
"""A verdict, the numbers of the texts that say why, and what to keep in fp32."""


def to_html(base: KnowledgeBase) -> str:
    """The page: a cast checker over the knowledge base, numbers rounded onto formats, and bytes of training by role.

    Every text of an entry is escaped. The page may run its own script and style only, which its content security
    policy names by their hashes, and may load nothing. What it answers stands in its tables, which this package
    computed: the script looks up, rounds in exact fractions, and divides whole numbers.
    """
    # autoescape for all: the texts come from the entries' authors
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(part),
    )
    environment.filters["printable"] = printable
    style, code = _trimmed(part("page.css")), script()
    data: dict[str, Any] = {"kb": checker(base), "formats": table(), "memory": memory.table()}
    said = json.dumps(data, separators=(",", ":"))
    return environment.get_template("page.html").render(
        **entries(base),
        **facts(),
        models=data["memory"]["models"],
        recipes=data["memory"]["recipes"],
        tabs=TABS,
        version=_version(data, said),
        style=Markup(style),
        script=Markup(code),
        # in a <script> element: no character in it can end the element
        data=Markup(said.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")),
        policy=f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(code)}'",
    )


def space(title: str = "halfstep", file: str = "index.html") -> str:
    """README.md of a static Space of Hugging Face's that shows the page: front matter, and what it is."""
    return part("space.md").format(title=json.dumps(title), file=json.dumps(file), version=__version__)


def script(names: tuple[str, ...] = ("frame", "exact", "share", "kb", "formats", "memory", "tabs")) -> str:
    """The page's JavaScript, or some files of it, without indents and lines that are comments."""
    return _trimmed("\n".join(part(f"{name}.js") for name in names))


def _trimmed(text: str) -> str:
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))


def part(name: str) -> str:
    """A file of this room."""
    return files("halfstep.site").joinpath(name).read_text(encoding="utf-8")


def _version(data: dict[str, Any], said: str) -> str:
    """Which data this page shows: two pages with the same words answer alike."""
    counts = f"{len(data['formats'])} formats, {len(data['memory']['models'])} architectures"
    digest = hashlib.sha256(said.encode()).hexdigest()[:12]
    return f"halfstep {__version__}: {counts}, {len(data['memory']['recipes'])} recipes; data {digest}."


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def table() -> list[dict[str, Any]]:
    """Every scalar format for the page's script, widest first."""
    return [described(formats.get(name)) for name in formats.names()]


def described(format: Format) -> dict[str, Any]:
    """A format for the page's script: its limits, and what its codes are read by."""
    found: dict[str, Any] = {
        **{name: getattr(format, name) for name in ("name", "bits", "max", "min", "smallest", "eps", "ties")},
        "aliases": list(format.aliases),
        "source": format.source,
        "layout": f"{kind(format)}, {layout(format)}",
        "bytes": f"{format.bytes:g}",
        "infinity": format.has_infinity,
        "nan": format.has_nan,
        "negativeZero": format.has_negative_zero,
        "least_normal": None,
        "specials": None,
        "overflowFrom": format.overflow_from if isfinite(format.overflow_from) else None,
    }
    if isinstance(format, Float):
        own = {"exponent": format.exponent_bits, "mantissa": format.mantissa_bits, "bias": format.bias}
        return found | own | {"kind": "float", "specials": format.specials, "least_normal": format.min_normal}
    if isinstance(format, Posit):
        return found | {"kind": "posit", "es": format.es}
    if isinstance(format, Integer):
        return found | {"kind": "integer", "low": format.low, "fraction": format.fraction_bits}
    if isinstance(format, Codebook):
        return found | {"kind": "codebook", "table": list(format.table)}
    return found | {"kind": "exponent"}


def facts() -> dict[str, Any]:
    """What formats.html is written from."""
    rows = [
        {"name": b.name, "element": b.element.name, "tile": tile_text(b), "bits": bits_per_value(b)}
        for b in map(formats.get_block, formats.block_names())
    ]
    return {"formats": table(), "roundings": ROUNDINGS, "blocks": rows}


def entries(base: KnowledgeBase) -> dict[str, Any]:
    """What kb.html is written from."""
    return {
        "entries": sorted(base.entries, key=lambda entry: (-entry.year, entry.family.casefold(), entry.id)),
        "failures": base.failures,
        "reports": {
            entry.id: [report for report in base.failures if entry.id in report.entries] for entry in base.entries
        },
        "counts": base.counts(),
        "precisions": Counter(kind for entry in base.entries for kind in entry.computes),
        "evidence": Counter(entry.evidence_kind for entry in base.entries),
        "years": sorted({entry.year for entry in base.entries}, reverse=True),
        "uses": uses(),
        "natives": list(dict.fromkeys(native for native, _ in casts())),
        "cells": casts(),
    }


def checker(base: KnowledgeBase) -> dict[str, Any]:
    """What the page's cast checker answers from: every verdict is `judge`'s, none is made in the page."""
    texts: dict[str, int] = {}
    said: dict[_Said, int] = {}
    answers: dict[tuple[str, ...], dict[str, Any]] = {}
    names: dict[str, tuple[int, str]] = {}
    globs: list[tuple[str, list[str], int]] = []
    for entry in base.entries:
        for name in (*entry.model_ids, entry.id, *entry.aliases):
            verdicts = {use: judge(base, name, use) for use in uses()}
            found = verdicts["fp32"].answer
            key = tuple(sorted(each.id for each in found.entries))
            if key not in answers:
                numbers = [said.setdefault(_said(verdict, texts), len(said)) for verdict in verdicts.values()]
                answers[key] = {"entries": [each.id for each in found.entries], "tier": found.tier, "said": numbers}
            number = list(answers).index(key)
            if "*" in name:
                globs.append((name.lower(), [other.lower() for other in entry.except_ids], number))
            else:
                names.setdefault(name.lower(), (number, found.how))
    reports = [
        {
            "id": report.id,
            "kind": report.kind,
            "uses": report.uses,
            "entries": report.entries,
            "globs": [name.lower() for name in report.model_ids],
        }
        for report in base.failures
    ]
    listed = {
        "names": [[*way, called] for way, called in grouped((way, name) for name, way in names.items()).items()],
        "answers": list(answers.values()),
        "said": list(said),
        "texts": list(texts),
    }
    return {"uses": uses(), "globs": globs, **listed, "reports": reports}


def _said(verdict: Verdict, texts: dict[str, int]) -> _Said:
    """What the entries say; the page adds the reports of failures, which depend on the name."""
    own = [reason for reason in verdict.reasons if reason.entry is not None] or list(verdict.reasons)
    numbers = tuple(texts.setdefault(printable(line), len(texts)) for line in dict.fromkeys(map(because, own)))
    return most_careful(own), numbers, tuple(printable(part) for part in verdict.keep_in_fp32)
