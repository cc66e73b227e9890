"""Ctrl-C while the command line is still being imported exits with 130 and no traceback."""

import subprocess
import sys

import pytest


STOPPED = """
import sys

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == {!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Stop())
sys.argv = ["halfstep", "formats"]
"""
STARTS = {
    "python -m halfstep": "import runpy; runpy.run_module('halfstep', run_name='__main__', alter_sys=True)",
    "halfstep": "from halfstep.__main__ import main; sys.exit(main())",
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
@pytest.mark.parametrize("module", ["halfstep.cli.app", "typer", "halfstep.cli.terminal"])
def test_interrupted_import_exits_130_silently(start, module):
    done = subprocess.run([sys.executable, "-c", STOPPED.format(module) + start], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_interrupt_before_a_command_exits_130_silently():
    stop = "import halfstep.cli.app as app\ndef stopped(): raise KeyboardInterrupt\napp.app = stopped\napp.main()"
    done = subprocess.run([sys.executable, "-c", stop], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


def test_installed_command_starts_in_main(pytestconfig):
    assert 'halfstep = "halfstep.__main__:main"' in (pytestconfig.rootpath / "pyproject.toml").read_text()
