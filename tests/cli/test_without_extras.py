"""Without its extras every command works or names the extra it needs; named extras exist in pyproject.toml."""

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
from every_command import COMMANDS, failure_of
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
    """The distributions that an extra requires, directly or through other extras."""
    found = set()
    for line in PROJECT["optional-dependencies"][extra]:
        wanted = Requirement(line)
        found |= {canonicalize_name(wanted.name)} - {"halfstep"}
        found |= {name for other in wanted.extras for name in distributions(other)}
    return found


def needed(names):
    """The installed distributions of these names, with all that they require."""
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
    """The top-level modules of each distribution."""
    found = {}
    for module, names in importlib.metadata.packages_distributions().items():
        for name in names:
            found.setdefault(canonicalize_name(name), set()).add(module)
    return found


PLAIN = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}


def plain_modules():
    """The modules of halfstep's own dependencies."""
    return {module for name in PLAIN for module in modules()[name]}


def extra_modules():
    """The modules that only extras bring."""
    return sorted(
        {m for extra in FOR_USERS for name in distributions(extra) for m in modules().get(name, ())} - plain_modules()
    )


def skip_unless_installed(extras):
    """Called at the end of a test: skips it, naming the extras that are not installed and so were not examined."""
    if missing := sorted({extra for extra in extras if not distributions(extra) <= {*modules()}}):
        pytest.skip(f"not installed, so not looked at: {', '.join(missing)}")


def run_every_command(folder, *options, hidden=(), **environment):
    command = [sys.executable, *options, TESTS / "cli" / "every_command.py", folder, *hidden]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow  # commands that need an extra have tests of their own
def test_commands_work_or_name_their_extra(tmp_path):
    found = run_every_command(tmp_path, hidden=["--quick", *extra_modules()])
    assert [line for line in map(failure_of, found["results"]) if line] == []
    silent = [row["words"] for row in found["results"] if row["extra"] and row["code"] != 2]
    assert silent == [], "which an extra is said to bring, and which works without"
    without = [words for words in found["commands"] if not any(row[: len(words)] == words for row, _, _ in COMMANDS)]
    assert without == [], "commands that every_command.py does not try"


@pytest.mark.slow
def test_commands_with_only_the_dependencies_installed(tmp_path):
    """An environment with only the dependencies. torch brings jinja2, so commands that need no more than that work."""
    (tmp_path / "site").mkdir()
    (tmp_path / "work").mkdir()
    for found in needed(PLAIN).values():
        for top in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
            place = tmp_path / "site" / top
            if not place.is_symlink():
                place.symlink_to(found.locate_file(top))
    path = os.pathsep.join(map(str, (SOURCE.parent, tmp_path / "site")))
    found = run_every_command(tmp_path / "work", "-S", PYTHONPATH=path)
    assert [line for line in map(failure_of, found["results"]) if line] == []


def test_failure_of_a_command_is_found():
    row = {"words": ["kb"], "extra": "lab", "expected": 0, "err": "error: pip install 'halfstep[lab]'"}
    assert failure_of({**row, "code": 0}) is None
    assert failure_of({**row, "code": 2}) is None
    assert "exit code 2" in failure_of({**row, "code": 2, "err": "error: no"})
    assert "exit code 1" in failure_of({**row, "code": 1})
    assert "exit code 2" in failure_of({**row, "code": 2, "extra": None})


# ---- names of extras ------------------------------------------------------------------------------------------------


@cache
def parsed():
    """All AST nodes of every source file."""
    return {file: [*ast.walk(ast.parse(file.read_text()))] for file in SOURCE.rglob("*.py")}


@cache
def modules_of(extra):
    """The modules that an extra brings, with its dependencies."""
    return {module for name in needed(distributions(extra)) for module in modules().get(name, ())}


def extras(block):
    """The extras named by a block `with MissingLibraryError.of(EXTRA)`."""
    calls = [item.context_expr for item in block.items] if isinstance(block, ast.With) else []
    named = "MissingLibraryError.of"
    asked = [call for call in calls if isinstance(call, ast.Call) and ast.unparse(call.func) == named]
    return {call.args[0].value for call in asked}


def imports(nodes):
    """(module, whether its absence is caught) for each import of a module outside halfstep."""
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


def test_imports_are_dependencies_or_name_their_extra():
    known = {*sys.stdlib_module_names, *plain_modules(), "halfstep", "llvmlite"}  # llvmlite is part of numba
    for file, nodes in parsed().items():
        asked = {"triton"} if file.parent.match("kernels/gpu/jit") else set()  # `kernels.gpu.missing` says why not
        for module, caught in imports(nodes):
            assert caught or module in known | asked or module in _EXTRAS, f"{file}: {module}"


def test_extras_of_commands_bring_their_modules():
    for module, extra in _EXTRAS.items():
        if distributions(extra) <= {*modules()}:
            assert any(module in modules()[name] for name in distributions(extra)), module
    skip_unless_installed(_EXTRAS.values())


def test_integrations_name_the_extra_of_their_library():
    """Imports inside `with MissingLibraryError.of(EXTRA)` are of that extra's libraries."""
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


def test_extras_named_in_messages_exist():
    found = {name for file in SOURCE.rglob("*.py") for name in re.findall(r"halfstep\[([\w,]+)\]", file.read_text())}
    assert {"lab", "hf", "words"} <= found
    assert found <= {*PROJECT["optional-dependencies"]}
