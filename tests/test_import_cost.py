"""`import halfstep` and commands that only read data import no torch and no other heavy library."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


HEAVY = ("torch", "numpy", "numba", "matplotlib", "transformers")
COMMAND = "import sys; sys.argv = {!r}; from halfstep.cli.app import main\ntry: main()\nexcept SystemExit: pass\n"


def heavy_after(*codes):
    """The heavy modules imported after each code; the codes run one after another in one process."""
    report = f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    code = "\n".join(["import sys", *(f"{code}\n{report}" for code in codes)])
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return dict(zip(codes, result.stderr.strip().splitlines()[-len(codes) :], strict=True))


CODES = [
    "import halfstep",
    "import halfstep; halfstep.formats.get('bf16'); dir(halfstep); halfstep.__version__",
    COMMAND.format(["halfstep", "formats"]),
    COMMAND.format(["halfstep", "formats", "--json"]),
    COMMAND.format(["halfstep", "formats", "show", "posit32_2", "--value", "0.1"]),
    COMMAND.format(["halfstep", "formats", "compare", "bf16", "e4m3fn"]),
    COMMAND.format(["halfstep", "formats", "add", "bf16", "1", "-0.001"]),
    COMMAND.format(["halfstep", "claims"]),
    COMMAND.format(["halfstep", "claims", "--json"]),
    COMMAND.format(["halfstep", "claims", "show", "forum-bytes"]),
    COMMAND.format(["halfstep", "--help"]),
]


def test_light_code_imports_no_heavy_library():
    assert heavy_after(*CODES) == dict.fromkeys(CODES, "[]")


@pytest.mark.slow
def test_rounding_imports_no_torch_compiler():
    rounds = "[halfstep.round_to(torch.zeros(64), format) for format in ('e4m3fn', 'mxfp8')]"
    code = f"import halfstep, sys, torch; {rounds}; print([*sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'halfstep.ops.casts'" in result.stdout
    assert "torch._dynamo" not in result.stdout


@pytest.mark.slow
def test_names_used_in_pages_are_attributes_of_the_package():
    pages = Path(__file__).parent.parent.glob("**/*.md")
    text = "\n".join(page.read_text() for page in [*pages] if not {".venv", "_build"} & {*page.parts})
    named = re.findall(r"(?<!import )(?<!from )(?<!-m )\bhalfstep\.([a-z]+)\.(\w+)", text)
    found = {name for name in named if name[0] not in ("claims", "integrations", "kernels", "lab")}  # imported by name
    assert len(found) > 10
    code = "import halfstep\n" + "\n".join(f"halfstep.{room}.{name}" for room, name in sorted(found))
    subprocess.run([sys.executable, "-c", code], check=True)


def test_heavy_after_finds_an_import():
    assert heavy_after("import sys", "import numpy") == {"import sys": "[]", "import numpy": "['numpy']"}
