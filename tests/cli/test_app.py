"""The list of commands: what it says of one is what the command's own file says, and none is imported for it."""

import subprocess
import sys

from halfstep.cli.app import COMMANDS, load


def test_a_line_of_help_is_the_first_of_the_commands_docstring():
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
