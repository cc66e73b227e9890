"""Every fault of `make mutants` can still be put into the source."""

import dataclasses

import mutants


def test_mutants_are_applicable():
    assert mutants.mistakes(mutants.load()) == []


def test_missing_text_or_test_is_reported():
    gone = dataclasses.replace(mutants.load()[0], old="no such text", tests=("test_nowhere.py",))
    missing, old = mutants.mistakes([gone])
    assert "there is no tests/test_nowhere.py" in missing
    assert f"its text stands 0 times in {gone.file}, expected once" in old
