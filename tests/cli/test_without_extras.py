"""Without its extras every command works, or says which extra it wants; and the names of extras are pyproject's."""

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from every_command import COMMANDS, broken
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import halfstep
from halfstep.cli.app import _EXTRAS


SOURCE = Path(halfstep.__file__).parent
TESTS = Path(__file__).parents[1]
PROJECT = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]
FOR_USERS = [name for name in PROJECT["optional-dependencies"] if name not in ("dev", "bench", "site")]


@cache
def distributions(extra):
    """What an extra asks for, itself and by other extras."""
    found = set()
    for line in PROJECT["optional-dependencies"][extra]:
        wanted = Requirement(line)
        found |= {canonicalize_name(wanted.name)} - {"halfstep"}
        found |= {name for other in wanted.extras for name in distributions(other)}
    return found


def needed(names):
    """Distributions that are installed, with all that they need."""
    found, left = {}, [canonicalize_name(name) for name in names]
    while left:
        name = left.pop()
        if name not in found:
            found[name] = importlib.metadata.distribution(name)
            wanted = map(Requirement, found[name].requires or [])
            left += [canonicalize_name(w.name) for w in wanted if not w.marker or w.marker.evaluate({"extra": ""})]
    return found


@cache
def modules():
    """The modules at the top of each distribution."""
    found = {}
    for module, names in importlib.metadata.packages_distributions().items():
        for name in names:
            found.setdefault(canonicalize_name(name), set()).add(module)
    return found


PLAIN = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}


def own():
    """The modules of what every install brings."""
    return {module for name in PLAIN for module in modules()[name]}


def brought():
    """The modules that extras alone bring."""
    return sorted({m for extra in FOR_USERS for name in distributions(extra) for m in modules().get(name, ())} - own())


def skip_unless_installed(extras):
    """Once what is installed has been looked at: skipped, with the extras of which it is not known what they bring."""
    if missing := sorted({extra for extra in extras if not distributions(extra) <= {*modules()}}):
        pytest.skip(f"not installed, so not looked at: {', '.join(missing)}")


def tried(folder, *options, hidden=(), **environment):
    command = [sys.executable, *options, TESTS / "cli" / "every_command.py", folder, *hidden]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow  # the commands that want an extra have tests that say so
def test_every_command_works_or_names_its_extra(tmp_path):
    found = tried(tmp_path, hidden=["--quick", *brought()])
    assert [line for line in map(broken, found["results"]) if line] == []
    silent = [row["words"] for row in found["results"] if row["extra"] and row["code"] != 2]
    assert silent == [], "which an extra is said to bring, and which works without"
    without = [words for words in found["commands"] if not any(row[: len(words)] == words for row, _, _ in COMMANDS)]
    assert without == [], "commands that every_command.py does not try"


@pytest.mark.slow
def test_where_nothing_but_the_dependencies_is_installed(tmp_path):
    """An environment of their folders alone. torch itself brings jinja2, so that what needs no more works."""
    (tmp_path / "site").mkdir()
    (tmp_path / "work").mkdir()
    for found in needed(PLAIN).values():
        for top in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
            place = tmp_path / "site" / top
            if not place.is_symlink():
                place.symlink_to(found.locate_file(top))
    path = os.pathsep.join(map(str, (SOURCE.parent, tmp_path / "site")))
    found = tried(tmp_path / "work", "-S", PYTHONPATH=path)
    assert [line for line in map(broken, found["results"]) if line] == []


def test_a_command_that_breaks_is_found():
    row = {"words": ["kb"], "extra": "lab", "expected": 0, "err": "error: pip install 'halfstep[lab]'"}
    assert broken({**row, "code": 0}) is None
    assert broken({**row, "code": 2}) is None
    assert "exit code 2" in broken({**row, "code": 2, "err": "error: no"})
    assert "exit code 1" in broken({**row, "code": 1})
    assert "exit code 2" in broken({**row, "code": 2, "extra": None})


# ---- names of extras ------------------------------------------------------------------------------------------------


@cache
def parsed():
    """The nodes of every file."""
    return {file: [*ast.walk(ast.parse(file.read_text()))] for file in SOURCE.rglob("*.py")}


@cache
def modules_of(extra):
    """The modules that an extra brings, and what it needs."""
    return {module for name in needed(distributions(extra)) for module in modules().get(name, ())}


def extras(block):
    """The extras that bring what is imported within a block: `with MissingLibraryError.of(EXTRA)`."""
    calls = [item.context_expr for item in block.items] if isinstance(block, ast.With) else []
    named = "MissingLibraryError.of"
    asked = [call for call in calls if isinstance(call, ast.Call) and ast.unparse(call.func) == named]
    return {call.args[0].value for call in asked}


def imports(nodes):
    """Modules that a file imports from outside, where nothing catches their absence."""
    caught = {
        id(node)
        for block in nodes
        if extras(block)
        or (
            isinstance(block, ast.Try)
            and any(isinstance(h.type, ast.Name) and h.type.id == "ModuleNotFoundError" for h in block.handlers)
        )
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in nodes:
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "import_module"
        names += [node.args[0].value] if called and isinstance(node.args[0], ast.Constant) else []
        yield from ((name.partition(".")[0], id(node) in caught) for name in names)


def test_what_is_imported_is_a_dependency_or_named_with_its_extra():
    known = {*sys.stdlib_module_names, *own(), "halfstep", "llvmlite"}  # which is a part of numba, and has its version
    for file, nodes in parsed().items():
        asked = {"triton"} if file.parent.match("kernels/gpu/jit") else set()  # `kernels.gpu.missing` says why not
        for module, caught in imports(nodes):
            assert caught or module in known | asked or module in _EXTRAS, f"{file}: {module}"


def test_the_commands_extras_bring_what_they_are_named_for():
    for module, extra in _EXTRAS.items():
        if distributions(extra) <= {*modules()}:
            assert any(module in modules()[name] for name in distributions(extra)), module
    skip_unless_installed(_EXTRAS.values())


def test_integrations_name_the_extra_of_the_library_that_they_import():
    """`with MissingLibraryError.of(EXTRA)` stands around the import of a library of that extra."""
    named = set()
    for file, nodes in parsed().items():
        for block in nodes:
            named |= extras(block)
            for extra in (e for e in extras(block) if distributions(e) <= {*modules()}):
                brought = modules_of(extra)
                wanted = {name for statement in block.body for name, _ in imports([*ast.walk(statement)])}
                assert wanted, f"{file}: nothing is imported"
                assert wanted <= brought, f"{file}: the extra {extra} brings no {', '.join(wanted - brought)}"
    assert named
    skip_unless_installed(named)


def test_every_extra_that_a_message_names_is_there():
    found = {name for file in SOURCE.rglob("*.py") for name in re.findall(r"halfstep\[([\w,]+)\]", file.read_text())}
    assert {"lab", "hf", "words"} <= found
    assert found <= {*PROJECT["optional-dependencies"]}
