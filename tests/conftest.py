"""What every test starts from: a fixed seed, and no deadlines (no clock in a test)."""

import sys

import pytest
import torch
from hypothesis import settings

from halfstep.cli.app import main


settings.register_profile("halfstep", deadline=None, max_examples=60, derandomize=True, database=None)
settings.load_profile("halfstep")


# Tensors in tests are small: a second thread costs more than it brings, and much more beside another process. Tests of
# threading set their own number.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


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
