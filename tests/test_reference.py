"""The reference has every public name, with a docstring as CONTRIBUTING requires."""

import ast
import inspect
import re
import textwrap
import tomllib
from pathlib import Path

import pytest

import halfstep
from halfstep.errors import HalfstepError


DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def reference():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        import reference

        yield reference


@pytest.fixture(scope="module")
def pages(reference):
    return reference.pages()


@pytest.fixture(scope="module")
def build(reference):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        import build

        yield build


def functions(found):
    """The functions of a public name: itself, or the public methods and properties of a class."""
    if inspect.isfunction(found):
        yield found.__name__, inspect.unwrap(found)
    elif inspect.isclass(found):
        for each in (base for base in found.__mro__ if base.__module__.startswith("halfstep")):
            for name, value in vars(each).items():
                function = getattr(value, "fget", None) or getattr(value, "func", None) or value
                function = inspect.unwrap(getattr(function, "__func__", function))
                if inspect.isfunction(function) and not name.startswith("_"):
                    yield f"{found.__name__}.{name}", function


def docstring_of(reference, found, name, function):
    """A function's docstring, or that of the method or field it overrides."""
    if not inspect.isclass(found):
        return inspect.getdoc(function)
    name = name.rpartition(".")[2]
    own = [vars(base).get(name) for base in found.__mro__]
    methods = [
        each for each in own if inspect.isroutine(each) or inspect.isdatadescriptor(each) or hasattr(each, "func")
    ]
    docstrings = [each.__doc__ for each in methods]
    for base in (base for base in found.__mro__ if base.__module__.startswith("halfstep")):
        docstrings.append(reference.documented(base.__module__).get(base.__name__, {}).get(name))
    return next((text for text in docstrings if text), None)


def raised(function):
    """The errors that a function raises itself."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node.exc.func for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    return {call.id for call in calls if isinstance(call, ast.Name) and call.id.endswith("Error")}


def lacks(reference, found):
    """What the docstrings of a public name lack."""
    for name, function in functions(found):
        text = docstring_of(reference, found, name, function) or ""
        first = text.partition("\n\n")[0].rstrip()
        if not first.endswith((".", ":", ",", ")")):
            yield f"{name}: no sentence"
        yield from (f"{name}: says nothing of {error}" for error in sorted(raised(function)) if error not in text)


def test_reference_has_every_public_name(reference, pages):
    for room, module in reference.rooms().items():
        headings = re.findall(r"^## (\S+)$", pages[f"{room}.md"], re.MULTILINE)
        assert headings == list(module.__all__)
    assert set(pages) == {"README.md", *(f"{room}.md" for room in reference.rooms())}
    assert len(pages) > 15
    assert halfstep.__all__ == list(reference.public(halfstep))


@pytest.mark.parametrize("libraries", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_docstrings_are_sentences_and_name_raised_errors(reference, libraries):
    missing = {}
    for room, module in reference.rooms(libraries).items():
        for name, found in reference.public(module).items():
            docstring = (
                found.__doc__ if callable(found) or inspect.ismodule(found) else reference.constant(name, module)
            )
            wrong = [*([] if docstring else ["no docstring"]), *lacks(reference, found)]
            missing |= {f"{room}.{name}": wrong} if wrong else {}
    assert not missing


def test_incomplete_docstrings_are_found(reference):
    def silent(x):
        if x:
            raise HalfstepError("no")

    def told(x):
        """It is x.

        Raises:
            HalfstepError: x is true.
        """
        silent(x)
        if x:
            raise HalfstepError("no")

    assert list(lacks(reference, silent)) == ["silent: no sentence", "silent: says nothing of HalfstepError"]
    assert not list(lacks(reference, told))


def test_docstring_is_converted_to_markdown(reference):
    text = "Is 1.\n\nArgs:\n    x: a number\n        of any kind.\n\nRaises:\n    E: never."
    text += "\n\n>>> f(1)\n1\n\nSource: none."
    assert reference.as_markdown(text).splitlines() == [
        *("Is 1.", "", "**Args**", "", "- `x`: a number", "  of any kind.", "", "**Raises**", "", "- `E`: never.", ""),
        *("```python", ">>> f(1)", "1", "```", "", "Source: none."),
    ]


def test_entries_show_fields_methods_and_signatures(pages):
    page = pages["halfstep.optim.md"]
    assert "LossScaler(device: str | None = None, init_scale: float = 65536.0" in page
    assert "### LossScaler.clip_grad_norm_" in page
    assert (
        "- `state_scales`: Scales and zero points of master weights and optimizer states stored as codes."
        in pages["halfstep.memory.md"]
    )
    assert "In full: [halfstep.optim.LossScaler](halfstep.optim.md#lossscaler)" in pages["halfstep.md"]


def test_site_lists_every_page_and_has_their_images(build, tmp_path):
    build.lay_out(tmp_path)
    listed = re.findall(r'"([^"]+\.md)"', build.configuration())
    tomllib.loads(build.configuration())
    laid = [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.md")]
    assert sorted(listed) == sorted(laid)
    assert (tmp_path / "docs" / "images" / "loss.png").exists()


@pytest.mark.slow
def test_site_builds_and_fails_on_a_broken_link(build, tmp_path, monkeypatch):
    pytest.importorskip("zensical")
    assert build.main() == 0
    monkeypatch.setattr(build.reference, "pages", lambda libraries: {"README.md": "[nowhere](nowhere.md)\n"})
    monkeypatch.setattr(build.reference, "rooms", lambda libraries: {})
    assert build.main() != 0
    monkeypatch.undo()
    assert build.main() == 0
