"""The package's structure: imports go to the same room or a lower floor, at the top of files; other house rules."""

import ast
import functools
import graphlib
from pathlib import Path

import halfstep
from families import for_each


ROOT = Path(halfstep.__file__).parent
FLOORS = {
    "constant": 0, "drawing": 0, "errors": 0, "registry": 0, "text": 0, "formats": 0,
    "quant": 1,
    "recipe": 2, "kernels": 2,
    "ops": 3, "bits": 3, "memory": 3, "kb": 3, "law": 3,
    "unit": 4, "layouts": 4,
    "nn": 5, "optim": 5, "inspection": 5,
    "preparation": 6, "tracking": 6, "auditing": 6, "distributed": 6, "serving": 6,
    "lab": 7, "probe": 7, "claims": 7, "accounting": 7,
    "cli": 8, "__main__": 8, "ui": 8, "site": 8, "integrations": 8, "__init__": 8,
}  # fmt: skip
# Floor 0 is one room: plain data and its errors.
SHARED = {"constant", "drawing", "errors", "registry", "text", "formats"}
LAZY = {"__init__"}  # its __getattr__ imports, like the commands in cli
FILES = sorted(ROOT.rglob("*.py"))
every_file = for_each("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))


def room_of(file):
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


@functools.cache
def tree(file):
    return ast.parse(file.read_text())


@functools.cache
def walked(file):
    return list(ast.walk(tree(file)))


def nodes(file, *kinds):
    return [node for node in walked(file) if isinstance(node, kinds)]


def imported(node):
    """The full names that an import statement can bind or load."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.level == 0, "a relative import"
    if node.module == "halfstep":
        return [f"halfstep.{alias.name}" for alias in node.names]
    return [node.module]


def rooms_imported(file):
    names = [name for node in nodes(file, ast.Import, ast.ImportFrom) for name in imported(node)]
    rooms = {name.split(".")[1] for name in names if name.startswith("halfstep.")}
    return {room for room in rooms if (ROOT / room).exists() or (ROOT / f"{room}.py").exists()}


def allowed(source, target):
    if source == target or FLOORS.get(source) == 8:
        return True
    if source in SHARED and target in SHARED:
        return target != "formats"
    return FLOORS[target] < FLOORS[source]


@every_file
def test_every_file_has_a_floor(file):
    assert room_of(file) in FLOORS


@every_file
def test_imports_go_to_lower_floors(file):
    source = room_of(file)
    wrong = sorted(target for target in rooms_imported(file) if not allowed(source, target))
    assert not wrong, f"{file.relative_to(ROOT)} imports {wrong}"


@every_file
def test_imports_are_at_the_top(file):
    functions = nodes(file, ast.FunctionDef, ast.AsyncFunctionDef)
    hidden = [n for f in functions for n in ast.walk(f) if isinstance(n, (ast.Import, ast.ImportFrom))]
    assert not hidden or room_of(file) == "cli" or room_of(file) in LAZY


@every_file
def test_no_globals_and_no_environment(file):
    assert not nodes(file, ast.Global)
    reads = [n.attr for n in nodes(file, ast.Attribute) if n.attr in ("environ", "getenv", "putenv")]
    assert not reads


@for_each("file", [file for file in FILES if room_of(file) in SHARED], ids=lambda file: str(file.relative_to(ROOT)))
def test_floor_0_needs_only_the_standard_library(file):
    names = {name.split(".")[0] for node in nodes(file, ast.Import, ast.ImportFrom) for name in imported(node)}
    assert not names & {"torch", "numpy", "numba", "scipy", "pydantic", "rich", "typer"}


MADE = {
    "arange", "bernoulli", "blackman_window", "empty", "empty_strided", "eye", "full", "hann_window", "linspace",
    "logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices",
    "triu_indices", "zeros",
}  # fmt: skip


@every_file
def test_tensors_are_made_with_dtype_and_device(file):
    """Users set `torch.set_default_dtype` and `torch.set_default_device`, as Hugging Face does to load models."""
    calls = [node for node in nodes(file, ast.Call) if isinstance(node.func, ast.Attribute) and node.func.attr in MADE]
    made = [call for call in calls if isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"]
    wrong = [call.lineno for call in made if not {"dtype", "device"} <= {keyword.arg for keyword in call.keywords}]
    assert not wrong, f"lines {wrong}"


@every_file
def test_files_start_with_a_docstring_sentence(file):
    docstring = ast.get_docstring(tree(file))
    assert docstring
    assert docstring.splitlines()[0].endswith((".", ":"))


def test_allowed_rejects_upward_imports():
    """`allowed` rejects what it should."""
    assert not allowed("quant", "ops")
    assert not allowed("nn", "optim")
    assert not allowed("unit", "nn")
    assert allowed("nn", "unit")
    assert not allowed("recipe", "kernels")
    assert not allowed("memory", "ops")
    assert not allowed("bits", "inspection")
    assert not allowed("bits", "ops")
    assert not allowed("formats", "quant")
    assert allowed("optim", "kernels")
    assert allowed("memory", "quant")
    assert allowed("inspection", "bits")


def modules_imported(file):
    """The package's files that `file` imports from, including under TYPE_CHECKING."""
    found = set()
    for node in nodes(file, ast.Import, ast.ImportFrom):
        names = imported(node)
        if isinstance(node, ast.ImportFrom):
            names = [*names, *(f"{node.module}.{alias.name}" for alias in node.names)]
        found |= {ROOT.parent / (name.replace(".", "/") + ".py") for name in names}
    return found & set(FILES) - {file}


def test_imports_have_no_cycles():
    graphlib.TopologicalSorter({file: modules_imported(file) for file in FILES}).prepare()  # raises CycleError


def test_names_of_test_files_are_distinct():
    """pytest imports test files by name, so a second file of the same name fails the collection."""
    names = [file.name for file in Path(__file__).parent.rglob("test_*.py")]
    assert [name for name in names if names.count(name) > 1] == []
