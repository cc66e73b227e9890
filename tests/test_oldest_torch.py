"""Every name of torch that the package uses exists in the oldest torch that pyproject.toml allows.

The tests run with a newer one, so the oldest torch's names are kept in a file. With the oldest torch installed,

    python tests/test_oldest_torch.py

looks up the used names again, writes those that exist, and prints the others."""

import ast
import importlib
import re
import sys
from pathlib import Path


ROOT = Path(__file__).parents[1]
KEPT = ROOT / "tests" / "oldest_torch.txt"


def used():
    """The names of torch used in the package: imported ones and attributes of `torch`, except our own operators."""
    found = set()
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                found |= {f"{node.module}:{name.name}" for name in node.names}
            elif isinstance(node, ast.Import):
                found |= {name.name for name in node.names if name.name.split(".")[0] == "torch"}
            elif isinstance(node, ast.Attribute):
                found |= {text for text in [ast.unparse(node)] if re.fullmatch(r"torch(\.\w+)+", text)}
    return {name for name in found if not name.startswith("torch.ops.halfstep")}


def has(name):
    """Whether the installed torch has the name: `module:name`, or a path of attributes or submodules of `torch`."""
    module, _, attribute = name.partition(":")
    try:
        if attribute:
            return hasattr(importlib.import_module(module), attribute)
        at = importlib.import_module("torch")
        for place, part in enumerate(module.split(".")[1:], 2):
            if not hasattr(at, part):
                importlib.import_module(".".join(module.split(".")[:place]))
            at = getattr(at, part)
    except (ImportError, AttributeError):
        return False
    return True


def oldest():
    """torch's lower bound."""
    return re.search(r'"torch>=([\d.]+)', (ROOT / "pyproject.toml").read_text())[1]


def test_oldest_torch_has_every_used_name():
    version, *names = KEPT.read_text().split()
    assert version == oldest(), f"install torch {oldest()} and run tests/test_oldest_torch.py with it"
    new = sorted(used() - {*names})
    assert new == [], f"run tests/test_oldest_torch.py with torch {version} installed, which says whether it has them"


if __name__ == "__main__":
    import torch

    if not torch.__version__.startswith(f"{oldest()}."):
        sys.exit(f"this is torch {torch.__version__}; expected {oldest()}, the lower bound in pyproject.toml")
    found = {name: has(name) for name in sorted(used())}
    KEPT.write_text("\n".join([oldest(), *(name for name in found if found[name]), ""]))
    print(*(f"not in torch {torch.__version__}: {name}" for name in found if not found[name]), sep="\n")
