"""The page: three tabs in one file that opens from a folder and asks no network for anything."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from typing import Any

import halfstep
from halfstep.errors import MissingLibraryError
from halfstep.kb import KnowledgeBase
from halfstep.printable import printable
from halfstep.site import formats, kb, memory


try:
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup
except ModuleNotFoundError as error:
    raise MissingLibraryError.of(error, "lab") from error

TABS = {"kb": "Knowledge base", "formats": "Formats", "memory": "Memory"}
_SCRIPTS = "frame", "exact", "share", "kb", "formats", "memory", "tabs"


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
    style, code = part("page.css"), script()
    data: dict[str, Any] = {"kb": kb.checker(base), "formats": formats.table(), "memory": memory.table()}
    said = json.dumps(data, separators=(",", ":"))
    return environment.get_template("page.html").render(
        **kb.facts(base),
        **formats.facts(),
        models=data["memory"]["models"],
        recipes=data["memory"]["recipes"],
        tabs=TABS,
        version=_version(data, said),
        style=Markup(style),
        script=Markup(code),
        data=Markup(_harmless(said)),
        policy=f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(code)}'",
    )


def space(title: str = "halfstep", file: str = "index.html") -> str:
    """README.md of a static Space of Hugging Face's that shows the page: front matter, and what it is."""
    return part("space.md").format(title=json.dumps(title), file=json.dumps(file), version=halfstep.__version__)


def script(names: tuple[str, ...] = _SCRIPTS) -> str:
    """The page's JavaScript, or some files of it, without indents and lines that are comments."""
    lines = "\n".join(part(f"{name}.js") for name in names).splitlines()
    return "\n".join(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("//"))


def part(name: str) -> str:
    """A file of this room."""
    return files("halfstep.site").joinpath(name).read_text(encoding="utf-8")


def _version(data: dict[str, Any], said: str) -> str:
    """Which data this page shows: two pages with the same words answer alike."""
    counts = f"{len(data['formats'])} formats, {len(data['memory']['models'])} architectures"
    digest = hashlib.sha256(said.encode()).hexdigest()[:12]
    return f"halfstep {halfstep.__version__}: {counts}, {len(data['memory']['recipes'])} recipes; data {digest}."


def _harmless(text: str) -> str:
    """JSON that may stand in a <script> element: no character in it can end the element."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
