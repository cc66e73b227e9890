"""Families of cases: in a loop, whose failure names every member that fails, or some of them in the slow tests."""

import functools
import inspect

import pytest
import torch


_SHOWN = 400  # characters of what went wrong with a member


def seed(number):
    """`torch.manual_seed` in tests: torch's also notes a traceback for each kind of GPU, used or not, which takes
    longer than many a test."""
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
    return torch.default_generator.manual_seed(int(number))


def start():
    """The seed that every test starts from."""
    seed(0)


class MembersFail(AssertionError):
    """Some members of a family fail: a line for each."""

    def __init__(self, lines):
        super().__init__(f"{len(lines)} fail:\n" + "\n".join(lines))
        self.lines = lines


def slow_unless(fast, members):
    """The members for `pytest.mark.parametrize`, marked slow unless `fast(member)`; a tuple is several arguments."""
    return [
        pytest.param(
            *(member if isinstance(member, tuple) else (member,)), marks=() if fast(member) else pytest.mark.slow
        )
        for member in members
    ]


def mark_slow(items, whole):
    """Mark slow what `@pytest.mark.quick("an id", "another")` leaves out of a test's cases.

    Args:
        whole: every case is among the items, so that an id of none is a mistake.
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
    """Cases of the families' product: each member of the longest once, with the others' in turn.

    For `slow_unless`, where the paths of one family do not depend on another's: every member of each is in a fast test.
    """
    turns = range(max(map(len, families)))
    return [tuple(family[turn % len(family)] for family in families) for turn in turns]


def for_each(names, members, ids=str, fast=None):
    """As `pytest.mark.parametrize`, in a single test: quicker by far where a member takes milliseconds.

    Every member is tried, from the seed that tests start from, and the error lists those that fail; the first one's
    traceback follows. Fixtures are made once for all of them: a test that writes to one is parametrised instead.

    Args:
        names: of the test's arguments that a member stands for, separated by commas.
        ids: what a member is called in the error.
        fast: the members of the fast test, where all of them take longer: those are tried in a slow one.
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
                except MembersFail as error:  # of a loop inside this one
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
