"""Families are collected from the files of their folder; duplicate names raise."""

import sys

import pytest

from halfstep import formats
from halfstep.errors import HalfstepError
from halfstep.registry import collect


@pytest.fixture
def family(tmp_path, monkeypatch):
    """A function that writes a package of modules and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, **modules):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        for module, source in modules.items():
            (tmp_path / name / f"{module}.py").write_text(source)
        return name

    yield write
    for module in [m for m in sys.modules if m.startswith("made_family")]:
        del sys.modules[module]


MADE = "from halfstep.formats import ieee\n{} = ieee({!r}, 4, 3, 'made up')\n"


def test_one_file_adds_a_member(family):
    package = family("made_family_a", one=MADE.format("a", "a"), two=MADE.format("b", "b"))
    assert sorted(collect(package, formats.Format)) == ["a", "b"]


def test_duplicate_names_raise(family):
    package = family("made_family_b", one=MADE.format("x", "same"), two=MADE.format("y", "same").replace("3", "2"))
    with pytest.raises(HalfstepError, match=r"two Format objects are called 'same'.*\.one.*\.two; rename one"):
        collect(package, formats.Format)


def test_imported_and_private_objects_are_not_collected(family):
    package = family(
        "made_family_c",
        one=MADE.format("a", "a") + MADE.format("_hidden", "hidden"),
        two="from made_family_c.one import a",
    )
    assert list(collect(package, formats.Format)) == ["a"]


def test_only_objects_of_the_given_class_are_collected(family):
    assert collect(family("made_family_d", one="name = 'a string'"), formats.Format) == {}
