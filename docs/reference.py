"""The reference as Markdown, from the docstrings: a page for each room, with every name that it makes public."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import halfstep


SECTION = re.compile(r"^(Args|Raises|Returns|Yields):$")


@functools.cache
def rooms() -> dict[str, ModuleType]:
    """The package and its rooms that say what is public in them, by name."""
    names = sorted(f"halfstep.{found.name}" for found in iter_modules(halfstep.__path__) if found.ispkg)
    modules = {name: import_module(name) for name in names if name != "halfstep.cli"}
    return {"halfstep": halfstep, **{name: module for name, module in modules.items() if hasattr(module, "__all__")}}


def public(room: ModuleType) -> dict[str, Any]:
    """What a room makes public, by name."""
    return {name: getattr(room, name) for name in room.__all__}


def pages() -> dict[str, str]:
    """The reference: a page for each room, and README.md, which lists them; by the file's name."""
    made = {f"{name}.md": page(name, room) for name, room in rooms().items()}
    lines = [f"- [{name}]({name}.md): {first_line(room)}" for name, room in rooms().items()]
    return {
        "README.md": "\n".join(["# Reference", "", "Every public name, from its docstring.", "", *lines, ""]),
        **made,
    }


def page(name: str, room: ModuleType) -> str:
    """A room's page: its sentence, then its names in the order in which it lists them."""
    parts = [f"# {name}", as_markdown(inspect.getdoc(room) or "")]
    for each, found in public(room).items():
        parts += entry(each, found, room)
    return "\n\n".join(part for part in parts if part) + "\n"


def entry(name: str, found: Any, room: ModuleType) -> Iterator[str]:
    """What the page says of one name."""
    yield f"## {name}"
    if inspect.ismodule(found):
        yield f"A room with a page of its own: [{found.__name__}]({found.__name__}.md)."
    elif room is halfstep and (home := home_of(name, found)):
        yield f"{first_line(found)} In full: [{home}.{name}]({home}.md#{name.lower()})."
    elif inspect.isclass(found):
        yield from [signature(name, found), as_markdown(inspect.getdoc(found) or ""), *members(found)]
    elif callable(found):
        yield from (signature(name, found), as_markdown(inspect.getdoc(found) or ""))
    else:
        yield as_markdown(constant(name, room))


def home_of(name: str, found: Any) -> str:
    """The room whose page shows a name of the package in full; "" where only the package's does."""
    room = ".".join(found.__module__.split(".")[:2])
    return room if getattr(rooms().get(room), name, None) is found and name in rooms()[room].__all__ else ""


def members(found: type) -> Iterator[str]:
    """The fields with their docstrings, then the public methods and properties, of a class and of its own bases."""
    own = [each for each in found.__mro__ if each.__module__.startswith("halfstep")]
    said = {
        name: text
        for each in reversed(own)
        for name, text in documented(each.__module__).get(each.__name__, {}).items()
    }
    yield "\n".join(f"- `{name}`: {' '.join(text.split())}" for name, text in said.items())
    for name in dict.fromkeys(name for each in own for name in vars(each) if not name.startswith("_")):
        value = inspect.getattr_static(found, name)
        function = getattr(value, "fget", None) or getattr(value, "func", None) or getattr(value, "__func__", value)
        text = inspect.getdoc(function)
        if inspect.isfunction(function) and text:
            called = inspect.isfunction(value) or isinstance(value, (classmethod, staticmethod))
            yield f"### {found.__name__}.{name}"
            yield signature(name, function) if called else ""
            yield as_markdown(text)


@functools.cache
def documented(module: str) -> dict[str, dict[str, str]]:
    """The strings that stand below the names of a module, and below the fields of its classes: "" is the module."""

    def strings(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
        for one, after in itertools.pairwise(body):
            target = (
                one.target
                if isinstance(one, ast.AnnAssign)
                else one.targets[0]
                if isinstance(one, ast.Assign)
                else None
            )
            if isinstance(target, ast.Name) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                yield target.id, str(after.value.value)

    tree = ast.parse(inspect.getsource(sys.modules[module]))
    classes = {node.name: dict(strings(node.body)) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return {"": dict(strings(tree.body)), **classes}


def constant(name: str, room: ModuleType) -> str:
    """The string below a constant, in whichever file of the room it stands."""
    inside = [
        module
        for module in sorted(sys.modules)
        if module.partition(".")[0] == "halfstep" and module.startswith(room.__name__)
    ]
    return next((text for module in inside if (text := documented(module)[""].get(name))), "")


def signature(name: str, found: Any) -> str:
    """How it is called, as a block of Python."""
    try:
        text = str(inspect.signature(found))
    except ValueError:  # a class of torch's or of typing's making
        return ""
    text = re.sub(r"<(?:function|class) '?([^ >']*)[^>]*>", r"\1", text).replace("'", "")
    return f"```python\n{textwrap.fill(name + text, 100, subsequent_indent='    ', break_long_words=False)}\n```"


def as_markdown(text: str) -> str:
    """A docstring as Markdown: examples as blocks, and what stands below `Args:` and `Raises:` as lists."""
    lines: list[str] = []
    section = example = False
    for line in text.splitlines():
        if example and not line.strip():
            lines.append("```")
            example = False
        if found := SECTION.match(line):
            lines += [f"**{found[1]}**", ""]
            section = True
            continue
        section = section and (not line or line.startswith(" "))
        if not example and line.lstrip().startswith(">>> "):
            lines.append("```python")
            example = True
        if section and (item := re.match(r"^    (\S[^:]*): (.*)$", line)):
            line = f"- `{item[1]}`: {item[2]}"
        elif section:
            line = re.sub(r"^    +", "  ", line)
        lines.append(line.strip() if example else line)
    return "\n".join([*lines, *["```"] * example])


def first_line(found: object) -> str:
    """The first sentence of a docstring."""
    return (inspect.getdoc(found) or "").partition("\n")[0]


def write(folder: Path) -> None:
    """Write the pages into a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
