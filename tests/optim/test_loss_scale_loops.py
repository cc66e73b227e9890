"""The loss scaler in other training loops: missing, wrapped, with closures, copied and saved."""

import copy
import gc
import math
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F

import halfstep
from halfstep import LossScaler
from halfstep.errors import LossScaleError
from halfstep.recipe import get_recipe
from tiny import EVERY, adamw, assert_same, batch, copied, mlp, model_for, mostly_slow, prepared, train


def backward(model, scaler, factor=1.0, seed=1):
    x, y = batch(seed)
    scaler.scale(F.mse_loss(model(x), y) * factor).backward()


def scales(name):
    scale = get_recipe(name).loss_scale
    return scale is not None and (scale.dynamic or scale.init != 1)


# ---- loops without the recipe's scaler ------------------------------------------------------------------------------


@pytest.mark.quick("bf16-mixed", "fp16-mixed", "fp8-delayed")
@pytest.mark.parametrize("name", mostly_slow(EVERY))
def test_a_loop_without_the_recipes_scaler_warns_once(name):
    model = model_for(name)
    model, optimizer, _ = prepared(name, model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            F.mse_loss(model(batch()[0]), batch()[1]).backward()
            optimizer.step()
            halfstep.advance(model)
    told = [w for w in caught if "saw no loss scale" in str(w.message)]
    assert len(told) == scales(name)
    for one in told:
        assert "scaler.step(optimizer)" in str(one.message)
        assert "accelerator.scaler" in str(one.message)
        assert one.filename == __file__


def ours(model, optimizer, scaler):
    backward(model, scaler)
    scaler.step(optimizer)


def ours_unscaled(model, optimizer, scaler):
    backward(model, scaler)
    scaler.unscale_(optimizer)
    optimizer.step()


def ours_clipped(model, optimizer, scaler):
    backward(model, scaler)
    scaler.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()


def torchs(model, optimizer, scaler):
    scaler = torch.amp.GradScaler("cpu")
    backward(model, scaler)
    scaler.step(optimizer)


def torchs_unscaled(model, optimizer, scaler):
    scaler = torch.amp.GradScaler("cpu")
    backward(model, scaler)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


@pytest.mark.parametrize("loop", [ours, ours_unscaled, ours_clipped, torchs, torchs_unscaled])
@pytest.mark.parametrize("name", ["fp16-mixed", "fp16-static"])
def test_loops_with_a_scaler_do_not_warn(name, loop):
    model, optimizer, scaler = prepared(name)  # warnings are errors here
    loop(model, optimizer, scaler)
    optimizer.step()


def test_a_disabled_scaler_counts_as_missing():
    model, optimizer, _ = prepared("fp16-mixed")
    with pytest.warns(UserWarning, match="saw no loss scale"):
        train(model, optimizer, LossScaler(enabled=False), 1)


# ---- closures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp32", "fp16-mixed", "fp16-master", "fp16-pure"])
def test_a_closure_of_none_is_no_closure(name):
    """accelerate always passes None on; torch's scaler accepts it as a positional argument."""
    ends = []
    for arguments in [((), {}), ((None,), {}), ((), {"closure": None})]:
        model, optimizer, scaler = prepared(name)
        for _ in range(3):
            backward(model, scaler)
            scaler.step(optimizer, *arguments[0], **arguments[1])
            scaler.update()
            optimizer.zero_grad()
        ends.append(copied(dict(model.state_dict())))
    assert_same(ends[1], ends[0])
    assert_same(ends[2], ends[0])


@pytest.mark.quick("False-fp32", "False-bf16-mixed")
@pytest.mark.parametrize("name", ["fp32", "bf16-mixed", "bf16-master", "fp8-current", "fp8-delayed"])
@pytest.mark.parametrize("named", [True, False])
def test_closures_without_a_loss_scale_equal_a_plain_loop(name, named):
    """Backward and clip run inside the closure."""
    ends = []
    for inside in (True, False):
        model, optimizer, scaler = prepared(name)
        losses = []
        for _ in range(3):

            def closure(model=model, optimizer=optimizer, scaler=scaler):
                optimizer.zero_grad()
                loss = F.mse_loss(model(batch()[0]), batch()[1])
                scaler.scale(loss).backward()
                scaler.clip_grad_norm_(optimizer, 0.1)
                return loss

            if inside:
                losses.append(scaler.step(optimizer, closure=closure) if named else scaler.step(optimizer, closure))
            else:
                losses.append(closure())
                scaler.step(optimizer)
            scaler.update()
        ends.append((torch.stack(losses).detach(), copied(dict(model.state_dict()))))
    assert_same(*ends)


# ---- wrappers -------------------------------------------------------------------------------------------------------


class Wrapper(torch.optim.Optimizer):
    """An optimizer wrapper like accelerate's, Lightning's and Fabric's: the same groups and the other one's step."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self, closure=None):
        return self.optimizer.step(closure)


@pytest.mark.quick("0.1-bf16-master", "None-bf16-master")
@pytest.mark.parametrize("name", ["fp16-mixed", "fp16-master", "bf16-master"])
@pytest.mark.parametrize("clip", [0.1, None])
def test_a_wrapped_optimizer_counts_as_the_optimizer(name, clip):
    """Clipping one and stepping the other divides once."""
    ends = []
    for clipped, stepped in [(False, False), (True, False), (False, True), (True, True)]:
        model, optimizer, scaler = prepared(name)
        wrapper = Wrapper(optimizer)
        for _ in range(3):
            backward(model, scaler)
            if clip:
                scaler.clip_grad_norm_(wrapper if clipped else optimizer, clip)
            scaler.step(wrapper if stepped else optimizer)
            scaler.update()
            optimizer.zero_grad()
        ends.append(copied(dict(model.state_dict())))
    for end in ends[1:]:
        assert_same(end, ends[0])


@pytest.mark.parametrize("name", ["fp32", "fp16-mixed"])
def test_the_optimizer_given_to_prepare_counts_as_the_returned_one(name):
    """They share param groups, so clipping by one and stepping the other divides once."""
    ends = []
    for old in (False, True):
        model = mlp()
        given = adamw(model)
        model, optimizer, _ = prepared(name, model, given)
        scaler = LossScaler()
        for _ in range(3):
            backward(model, scaler)
            scaler.clip_grad_norm_(given if old else optimizer, 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        ends.append(copied(dict(model.state_dict())))
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


# ---- calls to the model's scaling states ----------------------------------------------------------------------------


def watched(name="fp16-mixed"):
    """Two optimizers over two parts of one model, a scaler, and the arguments of its follower's calls."""
    model = mlp()
    parts = [[*model[0].parameters()], [*model[2].parameters(), *model[3].parameters()]]
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
    _, _, scaler = prepared(name)
    told = []
    scaler._follower.advance = told.append
    return model, optimizers, scaler, told


def test_states_advance_if_one_of_two_optimizers_stepped():
    model, optimizers, scaler, told = watched()
    for bad in ((), (0,), (0, 1)):
        backward(model, scaler)
        for i in bad:
            optimizers[i].param_groups[0]["params"][0].grad.fill_(math.inf)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
    assert told == [False, False, True]
    assert scaler.skipped_steps == 2


@pytest.mark.parametrize("name", ["fp16-mixed", "fp8-delayed"])
def test_a_dropped_batch_counts_as_skipped(name):
    """With and without a loss scale. A step that bypasses the scaler counts."""
    model, (optimizer, _), scaler, told = watched(name)
    for then in (scaler.step, lambda o: o.zero_grad(), lambda o: o.step()):
        backward(model, scaler)
        scaler.clip_grad_norm_(optimizer, 1.0)
        then(optimizer)
        scaler.update()
        model.zero_grad()
    assert told == [False, True, False]


def test_a_deleted_optimizer_is_not_mistaken_for_another_at_its_address():
    """Not taken for another one, which is given the same address."""
    scaler = LossScaler()
    for _ in range(20):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward(model, scaler)
        scaler.unscale_(optimizer)
        del optimizer, model
        gc.collect(1)  # generation 1 only: addresses are reused at once
    gc.collect()
    assert len(scaler._pending) == 0


# ---- copies, pickles, states ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp16-mixed", "fp16-static", "bf16-mixed"])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_and_pickles_of_a_scaler_continue_identically(name, how):
    model = mlp()
    scaler = LossScaler(growth_interval=3, enabled=get_recipe(name).loss_scale is not None, hysteresis=2)
    optimizer = adamw(model)
    train(model, optimizer, scaler, 2)
    twin = how(scaler)
    ends = []
    for one in (scaler, twin):
        net = copy.deepcopy(model)
        stepper = adamw(net)
        train(net, stepper, one, 2)
        backward(net, one, math.inf)
        one.step(stepper)
        one.update()
        ends.append((one.get_scale(), one.state_dict(), one.skipped_steps))
    assert ends[0] == ends[1]


def test_model_optimizer_and_scaler_can_be_deepcopied_together():
    model, optimizer, scaler = prepared("fp8-delayed")
    train(model, optimizer, scaler, 2)
    twins = copy.deepcopy((model, optimizer, scaler))
    assert twins[2]._follower._model is twins[0]
    assert_same(train(*twins, 3), train(model, optimizer, scaler, 3))
    assert_same(dict(twins[0].state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("call", ["unscale_", "clip_grad_norm_", "step"])
def test_copying_a_scaler_between_unscaling_and_update_is_refused(call):
    """As torch's scaler asserts."""
    model, optimizer, scaler = prepared("fp16-mixed")
    backward(model, scaler)
    getattr(scaler, call)(optimizer, *([1.0] if call == "clip_grad_norm_" else []))
    for how in (copy.deepcopy, pickle.dumps):
        with pytest.raises(LossScaleError, match=r"cannot be copied or pickled between.*after scaler.update\(\)"):
            how(scaler)
    scaler.update()
    pickle.dumps(LossScaler())


def test_a_copy_keeps_the_process_group():
    class Group:
        def __reduce__(self):
            raise TypeError

    group = Group()
    assert copy.deepcopy(LossScaler(process_group=group))._process_group is group


@pytest.mark.parametrize("name", ["fp16-mixed", "fp8-delayed"])
def test_state_dict_between_step_and_update_warns(name):
    model, optimizer, scaler = prepared(name)
    backward(model, scaler)
    scaler.step(optimizer)
    with pytest.warns(UserWarning, match=r"between step\(\) and update\(\).*Save after scaler.update\(\)"):
        scaler.state_dict()
    scaler.update()
    scaler.state_dict()
