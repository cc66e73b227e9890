"""What needs no torch imports none: `import halfstep`, and the commands that only read data."""

import subprocess
import sys

import pytest


HEAVY = ("torch", "numpy", "numba", "matplotlib", "transformers")
COMMAND = "import sys; sys.argv = {!r}; from halfstep.cli.app import main\ntry: main()\nexcept SystemExit: pass\n"


def heavy_after(code):
    report = f"import sys; print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True)
    return result.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "code",
    [
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
    ],
)
def test_no_torch(code):
    assert heavy_after(code) == "[]"


def test_no_compiler_where_nothing_is_compiled_by_torch():
    rounds = "[halfstep.round_to(torch.zeros(64), format) for format in ('e4m3fn', 'mxfp8')]"
    code = f"import halfstep, sys, torch; {rounds}; print([*sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'halfstep.ops.casts'" in result.stdout
    assert "torch._dynamo" not in result.stdout


def test_what_is_imported_is_seen():
    assert "numpy" in heavy_after("import numpy")
