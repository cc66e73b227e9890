"""Changes from one recipe to another: each loss is warned of, and changes must be allowed. The tables of
docs/changing.md."""

import pytest
from changes import TABLE, all_losses, lost, render


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
def test_a_change_loses_only_what_it_warns_of(name, other, expected):
    assert {*lost(name, other)} == expected


@pytest.mark.slow
def test_the_tables_of_changing_md_are_current():
    assert TABLE.read() == render(all_losses()), "run python tests/uses/changes.py --write"
