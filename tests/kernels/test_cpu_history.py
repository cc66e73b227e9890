"""The CPU kernel that advances delayed scaling states equals `Delayed.advance`, bit for bit."""

from dataclasses import replace

import pytest
import torch

from halfstep import formats
from halfstep.kernels.operators import history_kernel
from halfstep.quant.scaling.delayed import delayed


E4M3, E5M2 = formats.get("e4m3fn"), formats.get("e5m2")
RULES = [
    delayed,
    replace(delayed, history=1),
    replace(delayed, history=2, algorithm="most_recent"),
    replace(delayed, history=7, warmup=3),
    replace(delayed, history=16, warmup=0, restart=True),
]


def sample_states(rule, count=40):
    """States in all situations: during warm-up, with zeros, and with nonfinite amaxes."""
    generator = torch.Generator().manual_seed(0)
    states = torch.rand(count, 1 + rule.history, generator=generator) * 10.0 ** torch.randint(-42, 38, (count, 1))
    states[torch.rand(states.shape, generator=generator) < 0.3] = 0.0
    for row, value in enumerate((torch.inf, torch.nan)):
        states[row, 1] = states[row + 2, -1] = value
    states[4:8, 1:], states[8, 1] = 0.0, 3e38
    states[9, 1:] = 0.0
    states[9, 1] = 1e-45
    return states


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("element", [E4M3, E5M2], ids=str)
def test_advanced_states_equal_the_rules(rule, element):
    given = sample_states(rule)
    wanted = given.clone()
    rule.advance(wanted, element)
    own = [row.clone() for row in given]
    kernel = history_kernel([(own, rule, element)])
    kernel.advance(False)
    assert torch.equal(torch.stack(own).view(torch.int32), wanted.view(torch.int32))
    before = torch.stack(own)
    kernel.advance(torch.tensor(1.0))
    before[:, 1] = 0.0
    assert torch.equal(torch.stack(own), before), "a skipped step clears only its amaxes"


def test_replaced_state_tensors_are_noticed():
    own = [torch.zeros(1 + delayed.history) for _ in range(3)]
    kernel = history_kernel([(own, delayed, E4M3)])
    own[1].set_(torch.zeros(1 + delayed.history))
    for state in own:
        state[1] = 2.0
    kernel.advance(False)
    assert [state[0].item() for state in own] == [224.0] * 3


def test_unsupported_rules_dtypes_and_devices_have_no_kernel():
    state = delayed.init()
    assert history_kernel([]) is None
    assert history_kernel([([state], replace(delayed, margin=1), E4M3)]) is None
    assert history_kernel([([state.double()], delayed, E4M3)]) is None
    assert history_kernel([([delayed.init("meta")], delayed, E4M3)]) is None
