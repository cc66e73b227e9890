"""Find the members of a family: each is an object defined in one file of the family's folder."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Protocol, TypeVar

from halfstep.errors import HalfstepError


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
