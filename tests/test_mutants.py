"""Every fault that `make mutants` puts into the source can still be put there."""

import dataclasses

import mutants


def test_every_mutant_can_be_tried():
    assert mutants.mistakes(mutants.load()) == []


def test_a_text_that_is_gone_is_told():
    gone = dataclasses.replace(mutants.load()[0], old="no such text", tests=("test_nowhere.py",))
    missing, old = mutants.mistakes([gone])
    assert "there is no tests/test_nowhere.py" in missing
    assert f"its text stands 0 times in {gone.file}, expected once" in old
