"""`halfstep formats`: errors with exit code 2, plots, and that a new format is found everywhere."""

import subprocess
import sys
from pathlib import Path

import pytest

import halfstep
from families import slow_unless


ROOT = Path(__file__).parent.parent.parent
HOME = Path(halfstep.__file__).parents[1]


@pytest.mark.quick(
    "show e1m2-",
    "show bf16 --value -",
    "show bf16 --value 1/0-",
    "show bf16 --value 1e999999999-",
    "show bf16 --value 2^99999-",
    "show bf16 --value 1 --rounding nearest-",
    "show mxfp4 --value 1-",
    "show bf16 --plot x.jpeg2000-",
    "show bf16 --plot /nowhere/x.png-",
    "compare bf16 nvfp4-",
    "add posit16_1 1 2-",
    "add bf16 1 nan-",
    "add fp16 65520 1-",
)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--yaml"], "No such option"),
        (["show"], "Missing argument"),
        (["show", "bf61"], "unknown format 'bf61'; nearest: bf16"),
        (["show", "[bold]x"], "unknown format '[bold]x'"),
        (["show", "e1m2"], "1 exponent and 2 mantissa bits given"),
        (["show", "bf16", "--value", "three"], "'three' is not a number; write 3.25"),
        (["show", "bf16", "--value", ""], "'' is not a number"),
        (["show", "bf16", "--value", "1/0"], "'1/0' divides by zero"),
        (["show", "bf16", "--value", "1e999999999"], "'1e999999999' is beyond 2^±4000"),
        (["show", "bf16", "--value", "9" * 5000], "is not a number"),
        (["show", "bf16", "--value", "2^99999"], "is beyond 2^±4000"),
        (["show", "bf16", "--value", "1", "--rounding", "nearest"], "unknown rounding 'nearest'; nearest: nearest"),
        (["show", "bf16", "--value", "1", "--overflow", "wrap"], "unknown overflow 'wrap'"),
        (["show", "mxfp4", "--value", "1"], "mxfp4 is a block format"),
        (["show", "mxfp4", "--plot", "x.png"], "Take its element format, float4_e2m1fn"),
        (["show", "bf16", "--plot", "x.jpeg2000"], "the name ends in one of .png, .pdf, .svg"),
        (["show", "bf16", "--plot", "/nowhere/x.png"], "cannot write '/nowhere/x.png': No such file or directory"),
        (["compare", "bf16"], "Missing argument"),
        (["compare", "bf16", "nvfp4"], "nvfp4 is a block format"),
        (["add", "int8", "1", "2"], "int8 has no exponent and mantissa to align"),
        (["add", "posit16_1", "1", "2"], "addition by hand is shown for floats"),
        (["add", "bf16", "1", "nan"], "nan is not within bf16"),
        (["add", "fp16", "65520", "1"], "65520 is not within fp16, whose largest value is 65504"),
        (["add", "bf16", "1"], "Missing argument"),
        (["add", "bf16", "1", "2", "3"], "unexpected extra argument"),
        (["add", "bf16", "1", "--typo"], "'--typo' is not a number"),
    ],
    ids=lambda x: " ".join(x)[:40] if isinstance(x, list) else "",
)
def test_bad_arguments_exit_2_with_a_message(run, arguments, words):
    code, out, err = run("formats", *arguments)
    assert (code, out) == (2, "")
    assert words in " ".join(err.split())
    assert "Traceback" not in err


PLOTTED = "fp4", "e4m3fn", "posit16_1", "fp32", "nf4", "e8m0", "uint8", "dynamic8"


@pytest.mark.quick("nf4")
@pytest.mark.parametrize("name", slow_unless(("posit16_1", "fp32", "nf4", "e8m0", "uint8").__contains__, PLOTTED))
def test_plot_overwrites_an_existing_file(run, tmp_path, name):
    path = tmp_path / "line.png"
    path.write_text("an old one")
    code, out, err = run("formats", "show", name, "--plot", str(path), "--value", "0.8")
    assert (code, err) == (0, "")
    assert out.endswith(f"wrote {path}\n")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_names_the_extra(run, monkeypatch, tmp_path):
    monkeypatch.setattr("halfstep.cli.formats.plot.find_spec", lambda name: None)
    code, _, err = run("formats", "show", "fp4", "--plot", str(tmp_path / "x.png"))
    assert code == 2
    assert "pip install 'halfstep[lab]'" in err


def test_ascii_terminal_gets_an_ascii_plot():
    command = [sys.executable, "-m", "halfstep", "formats", "show", "e4m3fn"]
    done = subprocess.run(command, capture_output=True, env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(HOME)})
    assert done.returncode == 0
    assert b"####" in done.stdout


MADE_UP = '''"""A format nobody has."""

from halfstep.formats.floating import Float

made_up = Float("made_up5", 3, 1, 2, "fn", source="made up", aliases=("mu5",))
'''


def run_with_made_up_format(folder, code):
    """Run code in a process in which `halfstep.formats` also finds formats in `folder`."""
    (folder / "made_up.py").write_text(MADE_UP)
    start = f"import halfstep.formats as room; room.__path__.append({str(folder)!r}); import sys\n"
    command = [sys.executable, "-c", start + code]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)


@pytest.mark.slow  # conformance/test_one_file.py is the fast test
def test_new_format_needs_one_call_in_one_file(tmp_path):
    """The table, the page and the tensor functions find it without registration."""
    code = """
from halfstep.cli.app import main
for arguments in (["formats"], ["formats", "show", "mu5", "--value", "3.3"], ["formats", "add", "mu5", "12", "1"]):
    sys.argv = ["halfstep", *arguments]
    try:
        main()
    except SystemExit as stopped:
        assert not stopped.code
import torch, halfstep
x = torch.tensor([1.1, 40.0, -0.4])
print(halfstep.round_to(x, "made_up5").tolist(), halfstep.encode(x, "mu5").tolist())
"""
    done = run_with_made_up_format(tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert any(line.startswith("made_up5 ") for line in done.stdout.splitlines())
    assert "0 011 1" in done.stdout  # 3 = 2^(3 - 2) * 1.5
    assert "all of b, which vanished" in done.stdout.replace("\n", " ")
    assert done.stdout.splitlines()[-1] == "[1.0, 32.0, -0.5] [4, 14, 18]"


@pytest.mark.slow
def test_conformance_tests_include_the_new_format(tmp_path):
    """Runs them on the new format only; exit code 5 would mean that none was collected."""
    code = """
import pytest
sys.exit(pytest.main(["-p", "no:cacheprovider", "-k", "made_up5", "tests/conformance/test_every_format.py"]))
"""
    done = run_with_made_up_format(tmp_path, code)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
