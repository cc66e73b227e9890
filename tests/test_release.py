"""`make release`'s checks find what is wrong with a wheel or a source distribution."""

import ast
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import halfstep
import release


PROJECT = release.project()
SOURCES = ["halfstep/__init__.py", "halfstep/py.typed", "halfstep/kb/data/a.toml"]
INFO = "halfstep-0.1.0.dist-info"
NAMES = [*SOURCES, f"{INFO}/METADATA", f"{INFO}/licenses/LICENSE"]
METADATA = "".join(
    [
        "Metadata-Version: 2.4\nName: halfstep\n",
        f"Version: {PROJECT['version']}\nLicense-Expression: Apache-2.0\nRequires-Python: >=3.11\n",
        *(f"Provides-Extra: {extra}\n" for extra in PROJECT["optional-dependencies"]),
        "\n" + "README " * 100,
    ]
)


def test_correct_wheel_has_no_mistakes():
    assert release.wheel_mistakes(NAMES, METADATA, SOURCES, PROJECT) == []


@pytest.mark.parametrize(
    ("names", "metadata", "says"),
    [
        (NAMES[1:], METADATA, "lacks halfstep/__init__.py"),
        ([n for n in NAMES if n != "halfstep/py.typed"], METADATA, "lacks halfstep/py.typed"),
        ([*NAMES, "tests/test_release.py"], METADATA, "has tests/test_release.py"),
        (NAMES[:-1], METADATA, "lacks LICENSE"),
        (NAMES, METADATA.replace("Apache-2.0", "MIT"), "License-Expression is MIT"),
        (NAMES, METADATA.replace("Provides-Extra: hf\n", ""), "the extra hf"),
        (NAMES, METADATA.replace("README ", ""), "no README"),
    ],
)
def test_mistakes_of_a_wheel_are_named(names, metadata, says):
    (mistake,) = release.wheel_mistakes(names, metadata, SOURCES, PROJECT)
    assert says in mistake


def test_mistakes_of_a_source_distribution_are_named():
    whole = [*(f"src/{name}" for name in SOURCES), "README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "PKG-INFO"]
    assert release.sdist_mistakes(whole, SOURCES) == []
    assert release.sdist_mistakes(whole[1:], SOURCES) == ["the source distribution lacks src/halfstep/__init__.py"]
    assert release.sdist_mistakes([*whole, "tests/a.py"], SOURCES) == ["the source distribution has tests/a.py"]


def test_paths_of_the_machine_are_found(tmp_path):
    texts = [("a.toml", b"clean"), ("b.py", b"x = '" + str(tmp_path).encode() + b"/file'")]
    assert release.named(texts, [tmp_path]) == [f"b.py names {tmp_path}, a path of this machine"]


def test_versions_of_project_package_and_citation_are_equal():
    assert PROJECT["version"] == halfstep.__version__
    assert f"\nversion: {halfstep.__version__}\n" in (release.ROOT / "CITATION.cff").read_text()


def test_lowest_versions_pin_everything():
    pinned = release.lowest(PROJECT, ["hf"])
    assert len(pinned) == len(PROJECT["dependencies"]) + len(PROJECT["optional-dependencies"]["hf"])


def test_constraints_satisfy_the_dependencies():
    lines = (release.ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    for line in PROJECT["dependencies"]:
        wanted = Requirement(line)
        assert wanted.specifier.contains(pins[wanted.name]), line


def test_deprecated_name_works_and_names_the_new_one(monkeypatch):
    monkeypatch.setitem(halfstep._DEPRECATED, "list_formats", ("formats", "0.3"))
    with pytest.warns(DeprecationWarning, match=r"halfstep.list_formats is now halfstep.formats, and halfstep 0.3"):
        assert halfstep.list_formats is halfstep.formats
    assert "list_formats" not in vars(halfstep)


def test_type_checkers_know_every_public_name():
    tree = ast.parse(Path(halfstep.__file__).read_text())
    (block,) = (n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    typed = [name.name for statement in block.body for name in statement.names]
    assert sorted(typed) == sorted(halfstep.__all__)
    assert {*halfstep._HOME} == {*halfstep.__all__} - {*halfstep._ROOMS}


def test_deprecated_names_have_a_replacement_and_have_not_expired():
    for old, (new, version) in halfstep._DEPRECATED.items():
        assert old not in halfstep.__all__
        assert new in halfstep.__all__
        assert Version(version) > Version(halfstep.__version__), f"{old}: its time is over; take it out"
