"""Knowledge-base fixtures: the package's own data, and a folder for entries."""

import pytest
from toy_entry import ENTRY

from halfstep.kb import load


@pytest.fixture(scope="session")
def base():
    """The package's knowledge base, without the user's own entries."""
    return load(None)


@pytest.fixture
def overlay(tmp_path):
    """A function that writes a data file to a temporary folder and returns the folder."""

    def write(text=ENTRY, name="toy.toml", family="Toy"):
        folder = tmp_path / "own"
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text((f'family = "{family}"\n' if family else "") + text, encoding="utf-8")
        return folder

    return write
