"""The loss scale's trajectory equals torch.amp.GradScaler's step by step; options that torch lacks work as
documented."""

import pytest
import torch
from hypothesis import given, strategies as st

from halfstep import LossScaler
from halfstep.errors import LossScaleError


FIVE = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
# init 2^16, growth_interval 4
FLAGS = [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 1]
SCALES = [65536, 65536, 65536, 131072, 65536, 65536, 65536, 65536, 131072, 131072, 65536, 32768]
TRACKERS = [1, 2, 3, 0, 0, 1, 2, 3, 0, 1, 0, 0]


def torchs(**options):
    return torch.amp.GradScaler("cpu", **options)


class Driver:
    """Feeds a scaler steps whose gradients are finite or not."""

    def __init__(self, scaler):
        self.scaler = scaler
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.0)
        scaler.scale(torch.ones(()))  # torch creates its scale on first use

    def step(self, overflow):
        self.weight.grad = torch.tensor([1.0, float("inf") if overflow else 2.0, 3.0])
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale(), self.scaler.state_dict()["_growth_tracker"]


def test_the_scale_follows_a_hand_computed_trace():
    ours, theirs = Driver(LossScaler(growth_interval=4)), Driver(torchs(growth_interval=4))
    for flag, scale, tracker in zip(FLAGS, SCALES, TRACKERS, strict=True):
        assert ours.step(flag) == theirs.step(flag) == (scale, tracker)
    assert ours.scaler.skipped_steps == sum(FLAGS)


@pytest.mark.filterwarnings("ignore:20 steps in a row were skipped")
@given(
    flags=st.lists(st.booleans(), max_size=40),
    growth=st.sampled_from([2.0, 1.5, 1.001, 3.7]),
    backoff=st.sampled_from([0.5, 0.3, 0.999]),
    interval=st.integers(1, 4),
    init=st.sampled_from([2.0**16, 1000.1, 2.0**127, 3e38]),
)
def test_any_sequence_matches_torch(flags, growth, backoff, interval, init):
    options = {
        "init_scale": init, "growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval
    }  # fmt: skip
    ours, theirs = Driver(LossScaler(min_scale=1e-30, **options)), Driver(torchs(**options))
    for flag in flags:
        assert ours.step(flag) == theirs.step(flag)


def test_growth_stops_below_infinity():
    ours = Driver(LossScaler(init_scale=2.0**127, growth_interval=1))
    assert ours.step(False) == (2.0**127, 0)


def test_scaled_losses_match_torch():
    for loss in (torch.tensor(3.0), torch.tensor(3.0).bfloat16(), torch.ones(2).half(), torch.ones(2)):
        ours, theirs = LossScaler(init_scale=8.0).scale(loss), torchs(init_scale=8.0).scale(loss)
        torch.testing.assert_close(ours, theirs)
    nested = LossScaler(init_scale=8.0).scale([torch.ones(()), (torch.ones(()), torch.ones(2))])
    torch.testing.assert_close(nested, [torch.tensor(8.0), (torch.tensor(8.0), torch.full((2,), 8.0))])
    assert [float(v) for v in LossScaler(init_scale=8.0).scale(iter([torch.ones(())]))] == [8.0]
    with pytest.raises(LossScaleError, match="got float; expected a tensor or a sequence"):
        LossScaler().scale(1.0)


def test_states_have_torchs_keys_and_load_both_ways():
    ours, theirs = Driver(LossScaler(growth_interval=3)), Driver(torchs(growth_interval=3))
    for flag in (0, 1, 0, 0, 0, 0):
        ours.step(flag)
    assert set(ours.scaler.state_dict()) == set(theirs.scaler.state_dict()) == FIVE
    theirs.scaler.load_state_dict(ours.scaler.state_dict())
    assert theirs.step(0) == ours.step(0)
    fresh = Driver(LossScaler())
    fresh.scaler.load_state_dict(theirs.scaler.state_dict())
    for flag in FLAGS:
        assert fresh.step(flag) == theirs.step(flag)


def test_a_state_without_torchs_keys_is_refused():
    with pytest.raises(LossScaleError, match=r"lacks scale, growth_factor.*five keys.*disabled scaler"):
        LossScaler().load_state_dict(LossScaler(enabled=False).state_dict())
    LossScaler(enabled=False).load_state_dict({})


def test_getters_and_setters_work_like_torchs():
    ours = LossScaler()
    ours.set_growth_factor(3.0)
    ours.set_backoff_factor(0.25)
    ours.set_growth_interval(7)
    found = (ours.get_scale(), ours.get_growth_factor(), ours.get_backoff_factor(), ours.get_growth_interval())
    assert found == (2.0**16, 3.0, 0.25, 7)
    assert ours.is_enabled()
    assert not LossScaler(enabled=False).is_enabled()
    assert LossScaler(enabled=False).get_scale() == 1.0


def test_update_accepts_a_new_scale():
    ours, theirs = LossScaler(), torchs()
    theirs.scale(torch.ones(()))
    for new in (8.0, torch.tensor(0.1)):
        ours.update(new)
        theirs.update(new)
        assert ours.get_scale() == theirs.get_scale()


def test_overflow_at_min_scale_is_an_error_that_names_the_parameter():
    ours = Driver(LossScaler(init_scale=4.0, min_scale=1.0))
    ours.scaler._names = {ours.weight: "layer.weight"}
    assert ours.step(True)[0] == 2.0
    assert ours.step(True)[0] == 1.0
    with pytest.raises(LossScaleError, match=r"layer.weight at the loss scale's floor, 1, 3 steps.*'bf16-mixed'"):
        ours.step(True)


@pytest.mark.filterwarnings("ignore:20 steps in a row were skipped")
def test_a_static_scale_skips_without_changing_and_finally_raises():
    ours = Driver(LossScaler(init_scale=128.0, dynamic=False, growth_interval=1))
    for flag in (0, 0, 1, 0, 1):
        assert ours.step(flag)[0] == 128.0
    assert ours.scaler.skipped_steps == 2
    for _ in range(30):
        ours.step(True)
    with pytest.raises(LossScaleError, match=r"parameter 0 of group 0 at the constant loss scale 128, 32 steps"):
        ours.step(True)


def deepspeed(flags, hysteresis, window, scale=2.0**16):
    """DeepSpeed's DynamicLossScaler.update_scale (consecutive_hysteresis=False), from its source."""
    patience, last_overflow, trace = hysteresis, -1, []
    for iteration, overflow in enumerate(flags):
        if overflow:
            if hysteresis == 1 or patience == 1:
                scale /= 2
            else:
                patience -= 1
            last_overflow = iteration
        elif (iteration - last_overflow) % window == 0:
            patience = hysteresis
            scale *= 2
        trace.append(scale)
    return trace


@given(flags=st.lists(st.booleans(), max_size=25), hysteresis=st.integers(1, 3), window=st.integers(1, 4))
def test_hysteresis_matches_deepspeed(flags, hysteresis, window):
    ours = Driver(LossScaler(hysteresis=hysteresis, growth_interval=window, min_scale=1e-30))
    assert [ours.step(flag)[0] for flag in flags] == deepspeed(flags, hysteresis, window)


def test_hysteresis_in_progress_is_saved_under_one_extra_key():
    first = Driver(LossScaler(hysteresis=2))
    first.step(True)
    state = first.scaler.state_dict()
    assert set(state) == FIVE | {"halfstep"}
    second = Driver(LossScaler(hysteresis=2))
    second.scaler.load_state_dict(state)
    assert second.step(True)[0] == first.step(True)[0] == 2.0**15
    second.scaler.load_state_dict(torchs().state_dict() | {"scale": 4.0})
    assert second.step(True)[0] == 4.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"growth_factor": 1.0}, "growth_factor 1.0.*expected growth_factor > 1"),
        ({"backoff_factor": 1.0}, "backoff_factor 1.0.*0 < backoff_factor < 1"),
        ({"backoff_factor": 0.0}, "backoff_factor 0.0"),
        ({"init_scale": 0.0}, "init_scale 0.0.*positive scales"),
        ({"min_scale": -1.0}, "min_scale -1.0"),
        ({"hysteresis": 0}, "hysteresis 0.*at least 1"),
        ({"growth_interval": 0}, "growth_interval 0"),
    ],
)
def test_impossible_options_are_refused(options, words):
    with pytest.raises(LossScaleError, match=words):
        LossScaler(**options)


@pytest.mark.parametrize("options", [{}, {"dynamic": False}, {"hysteresis": 8}])
def test_twenty_skips_in_a_row_warn_once(options):
    weight = torch.nn.Parameter(torch.ones(3))
    driver = Driver(LossScaler(init_scale=2.0**40, **options))
    driver.weight, driver.optimizer = weight, torch.optim.SGD([weight], lr=0.0)
    driver.scaler._names = {weight: "head.weight"}
    for _ in range(19):
        driver.step(True)
    with pytest.warns(
        UserWarning, match=r"20 steps in a row.*\(head\.weight first\), and the loss scale is \d.*first_non"
    ):
        driver.step(True)
    for _ in range(10):
        driver.step(True)
    driver.step(False)
    for _ in range(19):
        driver.step(True)


INVALID = (float("nan"), float("inf"), 1e300, 0.0, -1.0)


def test_invalid_scales_are_refused():
    state = LossScaler().state_dict()
    for wrong in INVALID:
        for options in ({"init_scale": wrong}, {"min_scale": wrong}):
            with pytest.raises(LossScaleError, match="expected positive scales that float32 holds"):
                LossScaler(**options)
        with pytest.raises(LossScaleError, match=r"has a scale of .* expected a positive number"):
            LossScaler().load_state_dict({**state, "scale": wrong})
    with pytest.raises(LossScaleError, match="growth_factor nan"):
        LossScaler(growth_factor=float("nan"))
