"""Four ranks in two pipeline stages of different depth: each stage reduces amaxes over its own process group.

NaN, infinities and skipped steps of one rank count on all ranks of its stage."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import halfstep
from halfstep.nn.scaling import Scalings
from halfstep.optim import LossScaler
from ranks import on_ranks
from tiny import assert_same


NAMES = ("fp8-delayed", "fp8-delayed-megatron", "fp8lm-o1")
DEPTHS = (1, 3)
STEPS = 6
pytestmark = pytest.mark.slow


def inputs(step, rank):
    """A rank's inputs. In step 1 one rank of each stage has a NaN, in step 3 the other one has an infinity."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    if step == 1 and rank in (0, 3):
        x[0, 0] = torch.nan
    if step == 3 and rank in (1, 2):
        x[0, 0] = torch.inf
    return x


def on_a_rank(name, rank, group):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(DEPTHS[rank // 2])))
    halfstep.apply(model, name)
    scaler = LossScaler(enabled=False, follower=Scalings(model, group))
    found = []
    for step in range(STEPS):
        model(inputs(step, rank)).square().mean().backward()
        if step == 2:  # one rank of each stage skips the batch
            halfstep.advance(model, skipped=rank in (0, 3), process_group=group)
        elif step % 2:
            scaler.update()
        else:
            halfstep.advance(model, process_group=group)
        found.append(Scalings(model).state_dict())
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(DEPTHS[rank // 2])))
    _, _, scaler = halfstep.prepare(model, torch.optim.AdamW(model.parameters()), name, amax_group=group)
    model(inputs(0, rank)).square().mean().backward()
    scaler.update()
    assert torch.equal(Scalings(model).state_dict()["0.input"], found[0]["0.input"])
    return found


def results(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    found = {name: on_a_rank(name, rank, groups[rank // 2]) for name in NAMES}
    return {**found, "warned": [warned(seed, rank) for seed in (0, rank // 2)]}


def warned(seed, rank):
    """The warnings of a first step without a group, where the ranks' models differ at most in their weights."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8))
    halfstep.apply(model, "fp8-delayed")
    model(inputs(0, rank)).sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        halfstep.advance(model)
    return [str(warning.message) for warning in caught]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_ranks(results, tmp_path_factory.mktemp("ranks"), world=4)


def test_equally_deep_stages_without_a_group_are_warned_of(ranks):
    for found in ranks:
        alike, parts = found["warned"]
        assert alike == []
        assert len(parts) == 1
        assert "hold different weights" in parts[0]
        assert "amax_group" in parts[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stage", [0, 1])
def test_ranks_of_a_stage_have_the_same_finite_states(ranks, name, stage):
    first, second = ranks[2 * stage][name], ranks[2 * stage + 1][name]
    assert len(first[0]) == (2 if name == "fp8lm-o1" else 3) * DEPTHS[stage]
    assert_same(first, second)
    assert all(state.isfinite().all() for states in first for state in states.values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stage", [0, 1])
def test_histories_hold_the_largest_amaxes_of_the_stage(ranks, name, stage):
    """Steps with a NaN, an infinity or a skip on any rank of the stage are left out."""
    expected = []
    for step, states in enumerate(ranks[2 * stage][name]):
        both = [inputs(step, rank) for rank in (2 * stage, 2 * stage + 1)]
        if step != 2 and all(x.isfinite().all() for x in both):
            expected.append(max(x.abs().max().item() for x in both))
        elif step != 2 and name == "fp8lm-o1":
            expected.clear()  # it starts over
        history = [amax for amax in states["0.input"][1:].tolist() if amax]
        assert history == ([] if name == "fp8-delayed-megatron" else expected)
        usual = 448 / torch.tensor(max(expected) if name == "fp8-delayed" else [1.0, *expected][-1]).double()
        assert states["0.input"][0] == (0.0 if name == "fp8lm-o1" else usual.float())
