"""Verdicts on tensors drawn from described pipelines: none is certain and wrong, and as many are right as ever."""

import re
from collections import Counter

import pytest
from pipelines import SPACES, Pipeline, drawn, made, right, untrue
from torch import Tensor

from families import for_each
from halfstep.bits.memory import InMemory
from halfstep.bits.origin import origin
from halfstep.bits.scan import scan
from halfstep.bits.sentences import Evidence
from halfstep.bits.verdict import verdict


DRAWN = {"tuned on": (1, (256, 384), 6), "held out": (4711, (384, 512), 6)}
"""Seed, size, and pipelines of each family."""

BEFORE = {"held out": (0, 0)}
"""Right answers, and certain and right ones, of the inspector as it was before it was judged by these."""


def said_of(tensor: Tensor):
    """The key, and the verdict on a file of this tensor alone."""
    scanned = scan(InMemory(tensor))
    said = origin(scanned, str(tensor.dtype)[6:])
    return said, verdict([Evidence(said.stored, tensor.numel(), said, scanned.table.nonzero)])


def judged(one: Pipeline) -> Counter:
    said, found = said_of(made(one))
    wrong, certain = untrue(one, found.text) is not None, found.confidence == "certain"
    named = not wrong and re.fullmatch(right(one), said.key) is not None
    named &= one.family != "slivers" or not certain  # a hundredth of the values speaks
    if wrong and certain:
        print(one.name, "is told to be", said.key, untrue(one, found.text))
    return Counter(count=1, right=named, sure=named and certain, wrong=wrong, fatal=wrong and certain)


@pytest.mark.slow
@for_each("half", DRAWN)
def test_no_described_history_is_certain_and_wrong(half):
    found = {family: Counter() for family in SPACES}
    for one in drawn(*DRAWN[half]):
        found[one.family] += judged(one)
    for family, counts in found.items():
        print(f"{half}, {family}: {counts['right']} of {counts['count']} right, {counts['sure']} of them certain")
    total = sum(found.values(), Counter())
    print(f"{half}: {dict(total)}")
    assert total["count"] >= 75
    assert total["fatal"] == 0
    before = BEFORE.get(half, (0, 0))
    assert (total["right"], total["sure"]) >= before
    assert total["sure"] >= before[1]


@for_each("one", drawn(3, (128, 256), 1), ids=lambda one: one.name)
def test_one_history_of_each_family(one):
    assert not judged(one)["fatal"]
