"""Find what Python files define: the members of a family, one a file in its folder; what a user names."""

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
    """Whatever carries the name it is found by."""

    @property
    def name(self) -> str:
        """The name."""


T = TypeVar("T", bound=Named)


def collect(package: str, kind: type[T]) -> dict[str, T]:
    """Import every module of `package` and return its public objects of type `kind`, by name.

    Adding a member of a family is therefore one new file and no list to edit. An object that two modules
    share (an import) counts once.

    Raises:
        HalfstepError: two different objects carry the same name.
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
    """`collect`, made when it is first asked for, and once."""
    return cache(lambda: collect(package, kind))


def load_module(path: str, error: type[HalfstepError]) -> ModuleType:
    """The module of that name, looked for in the working folder too, or the module in that file (`name.py`).

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
        error: as `load_module`; or it has no such function, the nearest are shown.
    """
    path, _, name = reference.rpartition(":")
    module = load_module(path, error)
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise error(f"{path}: {unknown('function', name, own)}")
    return function  # type: ignore[no-any-return]
