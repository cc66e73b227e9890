"""`for_each` tries every member from the same seed and names all failures; `in_turn` and `quick` choose fast cases."""

import re
from types import SimpleNamespace

import pytest
import torch

from families import for_each, in_turn, mark_slow


def test_error_names_every_failing_member():
    seen = []

    @for_each("n, word", [(1, "one"), (2, "two"), (3, "three"), (4, "four")], ids=lambda member: member[1])
    def odd(n, word):
        seen.append((n, word, torch.rand(()).item()))
        if n == 4:
            pytest.fail("too large")
        assert n % 2, "even"

    with pytest.raises(AssertionError) as caught:
        odd()
    assert re.match(r"2 fail:\ntwo: AssertionError: even.*\nfour: Failed: too large", str(caught.value), re.DOTALL)
    assert [n for n, _, _ in seen] == [1, 2, 3, 4]
    assert len({drawn for _, _, drawn in seen}) == 1
    assert str(caught.value.__cause__).startswith("even")


def test_loops_nest_and_take_fixtures(request):
    seen = []

    @for_each("a", [1, 2])
    @for_each("b", [3, 4])
    def test(request, a, b):
        seen.append((a, b))
        assert b != 4

    with pytest.raises(AssertionError, match=r"^2 fail:\n1, 4: AssertionError(.|\n)*\n2, 4: AssertionError"):
        test(request)
    assert seen == [(1, 3), (1, 4), (2, 3), (2, 4)]


def test_empty_loop_raises():
    with pytest.raises(AssertionError, match="no file to loop over"):
        for_each("file", [])
    with pytest.raises(AssertionError, match="takes no file"):
        for_each("file", [1])(lambda other: None)


def test_loop_of_fast_members_is_fast_and_of_all_is_slow():
    seen = []

    @for_each("n", [1, 2, 3], fast=[1, 3])
    def test(n):
        seen.append(n)

    (mark,) = test.pytestmark
    fast, every = mark.args[1]
    assert (mark.args[0], fast.id, fast.marks, every.id) == ("tried", "fast", (), "every")
    assert [each.name for each in every.marks] == ["slow"]
    for case, expected in ((fast, [1, 3]), (every, [1, 2, 3])):
        seen.clear()
        test(tried=case.values[0])
        assert seen == expected
    with pytest.raises(AssertionError, match="not among the n"):
        for_each("n", [1], fast=[2])
    with pytest.raises(AssertionError, match="no fast n"):
        for_each("n", [1], fast=[])


def test_in_turn_covers_every_member():
    assert in_turn("abc", [1, 2], [None]) == [("a", 1, None), ("b", 2, None), ("c", 1, None)]
    assert in_turn([1], "ab") == [(1, "a"), (1, "b")]


def test_cases_not_listed_as_quick_are_slow_and_unknown_ones_raise():
    def items(*ids):
        return [
            SimpleNamespace(
                path="test_it.py",
                originalname="test_it",
                callspec=SimpleNamespace(id=case),
                iter_markers=lambda name: [pytest.mark.quick(*ids).mark],
                add_marker=lambda mark, case=case: slow.append((case, mark.name)),
            )
            for case in ("a", "b", "c")
        ]

    slow = []
    mark_slow(items("c", "a"), whole=True)
    assert slow == [("b", "slow")]
    mark_slow(items("a", "d"), whole=False)
    with pytest.raises(pytest.UsageError, match=r"test_it.py: test_it has no case \['d'\]; it has \['a', 'b', 'c'\]"):
        mark_slow(items("a", "d"), whole=True)
