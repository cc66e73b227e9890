"""Runs the command line in the test's own process."""

import sys

import pytest

from halfstep.cli.app import main


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `halfstep ARGUMENTS` in a terminal of 200 columns (or as told): exit code, standard output and error."""

    def command(*arguments, columns=200):
        monkeypatch.setattr(sys, "argv", ["halfstep", *arguments])
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        return stopped.value.code or 0, captured.out, captured.err

    return command
