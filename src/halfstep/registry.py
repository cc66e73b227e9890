"""Find objects in Python files: the members of a family, one a file in its package; modules and functions by name."""

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, Protocol, TypeVar

from halfstep.errors import HalfstepError, unknown


class Named(Protocol):
    """An object with a name, by which it is found."""

    @property
    def name(self) -> str:
        """The object's name."""


T = TypeVar("T", bound=Named)


def collect(package: str, kind: type[T]) -> dict[str, T]:
    """The public objects of type `kind` in all modules of `package`, which are imported, by name.

    So a new member of a family needs one new file and no list to edit. An object that is in two modules (by an import)
    counts once.

    Raises:
        HalfstepError: two different objects have the same name.
    """
    found: dict[str, T] = {}
    origin: dict[str, str] = {}
    for info in iter_modules(import_module(package).__path__):
        module = import_module(f"{package}.{info.name}")
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or not isinstance(value, kind):
                continue
            if found.get(value.name, value) is not value:
                raise HalfstepError(
                    f"two {kind.__name__} objects are called {value.name!r}: one in {origin[value.name]}, "
                    f"one in {module.__name__}; rename one"
                )
            found[value.name] = value
            origin.setdefault(value.name, module.__name__)
    return found


def family(package: str, kind: type[T]) -> Callable[[], dict[str, T]]:
    """A function that returns `collect(package, kind)`, computed at its first call."""
    return cache(lambda: collect(package, kind))


def load_module(path: str, error: type[HalfstepError]) -> ModuleType:
    """The module with that name, searched for in the working directory too, or the module in that file (`name.py`).

    Raises:
        error: it cannot be imported.
    """
    here = str(Path.cwd())
    try:
        if not path.endswith(".py"):
            if here not in sys.path:
                sys.path.insert(0, here)
            return import_module(path)
        spec = spec_from_file_location(Path(path).stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except Exception as cause:
        raise error(f"{path}: cannot be imported ({type(cause).__name__}: {cause})") from cause


def load_function(reference: str, error: type[HalfstepError]) -> Callable[..., Any]:
    """The function of a module or a file: `module:function`, `file.py:function`.

    Raises:
        error: as `load_module`; or it has no such function (the message has the nearest names).
    """
    path, _, name = reference.rpartition(":")
    module = load_module(path, error)
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise error(f"{path}: {unknown('function', name, own)}")
    return function  # type: ignore[no-any-return]
