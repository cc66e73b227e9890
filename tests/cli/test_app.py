"""The list of commands: its help lines equal the commands' docstrings, and it imports no command."""

import subprocess
import sys

from halfstep.cli.app import COMMANDS, load


def test_help_lines_equal_the_first_lines_of_docstrings():
    own = {name: load(name) for name in COMMANDS}
    said = {
        name: command.help.partition("\n\n")[0] for name, command in own.items() if not hasattr(command, "commands")
    }
    assert len(said) == 12
    assert said.items() <= COMMANDS.items()


def test_the_help_imports_no_command():
    run = "from halfstep.cli.app import app\ntry: app(['--help'])\nexcept SystemExit: pass"
    code = f"import sys\n{run}\nprint(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert [name for name in out.splitlines()[-1].split() if name.startswith("halfstep.cli.")] == [
        "halfstep.cli.terminal",
        "halfstep.cli.app",
    ]
