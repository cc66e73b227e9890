"""Parametrization over families: a loop whose failure names every failing member, or cases marked slow."""

import functools
import inspect

import pytest
import torch


_SHOWN = 400  # characters of a member's error


def seed(number):
    """`torch.manual_seed` for tests. torch's own also records a traceback for each kind of GPU, even an unused one,
    which takes longer than many a test."""
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
    return torch.default_generator.manual_seed(int(number))


def start():
    """Set the seed that every test starts from."""
    seed(0)


class MembersFail(AssertionError):
    """The error of a `for_each` test, with a line for each failing member."""

    def __init__(self, lines):
        super().__init__(f"{len(lines)} fail:\n" + "\n".join(lines))
        self.lines = lines


def slow_unless(fast, members):
    """The members for `pytest.mark.parametrize`, marked slow unless `fast(member)`; a tuple gives several arguments."""
    return [
        pytest.param(
            *(member if isinstance(member, tuple) else (member,)), marks=() if fast(member) else pytest.mark.slow
        )
        for member in members
    ]


def mark_slow(items, whole):
    """Mark the cases slow that a test's `@pytest.mark.quick("an id", "another")` does not list.

    Args:
        whole: all cases are among the items, so an id that matches none is an error.
    """
    cases = {}
    for item in items:
        for quick in item.iter_markers("quick"):
            case = item.callspec.id if hasattr(item, "callspec") else ""
            cases.setdefault((item.path, item.originalname, quick.args), []).append(case)
            if case not in quick.args:
                item.add_marker(pytest.mark.slow)
    for (path, name, ids), found in cases.items():
        if whole and not set(ids) <= set(found):
            raise pytest.UsageError(f"{path}: {name} has no case {sorted(set(ids) - set(found))}; it has {found}")


def in_turn(*families):
    """Pairs (or tuples) that cover each member of every family once, cycling through the shorter families.

    For `slow_unless`, if the code paths of one family do not depend on another: every member is then in a fast test.
    """
    turns = range(max(map(len, families)))
    return [tuple(family[turn % len(family)] for family in families) for turn in turns]


def for_each(names, members, ids=str, fast=None):
    """Like `pytest.mark.parametrize`, in a single test; much faster for members that take milliseconds.

    Every member is tried, starting from the tests' seed; the error lists those that fail, followed by the first one's
    traceback. Fixtures are made once for all members: parametrize tests that write to one instead.

    Args:
        names: the test's arguments that a member gives, separated by commas.
        ids: a function that names a member in the error.
        fast: the members for the fast test, if all take too long; all members are then tried in a slow test.
    """
    members, arguments = list(members), [name.strip() for name in names.split(",")]
    assert members, f"no {names} to loop over"
    if fast is not None:
        fast = list(fast)
        assert fast, f"no fast {names} to loop over"
        assert all(member in members for member in fast), f"not among the {names}"

    def decorate(test):
        signature = inspect.signature(test)
        assert set(arguments) <= set(signature.parameters), f"{test.__name__} takes no {names}"

        @functools.wraps(test)
        def loop(*args, tried=members, **kwargs):
            lines, first = [], None
            for member in tried:
                start()
                values = [member] if len(arguments) == 1 else member
                try:
                    test(*args, **kwargs, **dict(zip(arguments, values, strict=True)))
                except MembersFail as error:  # raised by a nested loop
                    lines += [f"{ids(member)}, {line}" for line in error.lines]
                    first = first or error.__cause__
                except (Exception, pytest.fail.Exception) as error:
                    lines.append(f"{ids(member)}: {type(error).__name__}: {str(error).strip()[:_SHOWN]}")
                    first = first or error
            if lines:
                raise MembersFail(lines) from first

        rest = [parameter for name, parameter in signature.parameters.items() if name not in arguments]
        if fast is not None:
            rest.append(inspect.Parameter("tried", inspect.Parameter.KEYWORD_ONLY))
        loop.__signature__ = signature.replace(parameters=rest)
        if fast is None:
            return loop
        every = pytest.param(members, id="every", marks=pytest.mark.slow)
        return pytest.mark.parametrize("tried", [pytest.param(fast, id="fast"), every])(loop)

    return decorate
