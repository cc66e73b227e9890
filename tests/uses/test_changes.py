"""From one recipe to another: what is lost is told, and nothing is taken unasked. The tables of docs/changing.md."""

import pytest
from changes import TABLE, every, lost, render


@pytest.mark.quick(
    "bf16-master-bf16-stochastic-expected1",
    "bf16-mixed-fp8lm-o2-expected2",
    "fp16-mixed-fp32-expected3",
    "galore-bf16-mixed-expected4",
    "bf16-master-bf16-megatron-expected5",
)
@pytest.mark.parametrize(
    ("name", "other", "expected"),
    [
        ("bf16-mixed", "fp8-delayed", {"Scaling states"}),
        ("bf16-master", "bf16-stochastic", {"Weights and masters"}),
        ("bf16-mixed", "fp8lm-o2", {"Weights and masters", "Moments", "Scaling states"}),
        ("fp16-mixed", "fp32", {"Loss scale"}),
        ("galore", "bf16-mixed", {"Moments"}),
        ("bf16-master", "bf16-megatron", set()),
        ("bf16-mixed", "fp8-current", set()),
    ],
)
def test_a_change_loses_what_it_tells(name, other, expected):
    assert {*lost(name, other)} == expected


@pytest.mark.slow
def test_every_pair_is_as_the_page_says():
    assert TABLE.read() == render(every()), "run python tests/uses/changes.py --write"
