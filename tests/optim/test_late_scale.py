"""Optimizer steps on a GPU do not wait for the device, and overflow flags that are read later give the same results."""

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import halfstep
from fake_cuda import Reads, backward, fake_cuda
from halfstep.errors import LossScaleError
from halfstep.kernels.gpu import KINDS, kinds, optimizer as launches
from halfstep.optim import stepping
from tiny import EVERY, assert_same, batch, mlp, model_for, mostly_slow, prepared


@pytest.fixture
def unread(monkeypatch):
    """Make scalers treat tensors as if they were on a GPU."""
    monkeypatch.setattr(halfstep.LossScaler, "_waits", staticmethod(lambda device: True))


def scaler_state(scaler):
    return scaler.get_scale(), scaler.state_dict(), scaler.skipped_steps, scaler.overflowed


def twins(monkeypatch, recipe, **options):
    """Two equal prepared models, with scalers of the given options."""
    made = []
    for _ in range(2):
        model, optimizer, scaler = prepared(recipe, mlp())
        if options:
            names = {parameter: name for name, parameter in model.named_parameters()}
            scaler = halfstep.LossScaler(names=names, follower=scaler._follower, **options)
        made.append((model, optimizer, scaler))
    return made


def step(model, optimizer, scaler, seed, bad=(), max_norm=None):
    """One training step; gradients of the parameters numbered in `bad` are not finite."""
    x, y = batch(seed)
    scaler.scale(F.mse_loss(model(x), y)).backward()
    for place in bad:
        list(model.parameters())[place].grad.view(-1)[0] = torch.inf if place else torch.nan
    norm = None if max_norm is None else scaler.clip_grad_norm_(optimizer, max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return norm


OPTIONS = [
    {"init_scale": 2.0**10, "growth_interval": 2},
    {"init_scale": 2.0**10, "growth_interval": 2, "hysteresis": 2},
    {"init_scale": 2.0**10, "growth_interval": 3, "growth_factor": 1.7, "backoff_factor": 0.3},
    {"init_scale": 2.0**127, "growth_interval": 1},  # cannot grow
    {"init_scale": 8.0, "dynamic": False},
]
FLAGS = [(), (), (0,), (), (1, 2), (0,), (), (), (), (3,), (), ()]


@pytest.mark.quick(
    "{'init_scale': 1024.0, 'growth_interval': 2, 'hysteresis': 2}",
    "{'init_scale': 1.7014118346046923e+38, 'growth_interval': 1}",
)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_unread_flags_give_the_same_scales_and_weights(monkeypatch, options):
    ours, theirs = twins(monkeypatch, "fp16-mixed", **options)
    flags = [()] * 3 if options["init_scale"] > 2.0**100 else FLAGS
    for seed, bad in enumerate(flags):
        if options["init_scale"] > 2.0**100:
            bad = (0,) if seed == 1 else ()
        step(*theirs, seed, bad)
        with monkeypatch.context() as patch:
            patch.setattr(halfstep.LossScaler, "_waits", staticmethod(lambda device: True))
            step(*ours, seed, bad)
        assert scaler_state(ours[2]) == scaler_state(theirs[2])
        assert_same(list(ours[0].parameters()), list(theirs[0].parameters()))


@pytest.mark.quick("fp16-mixed", "fp32")
@pytest.mark.parametrize("recipe", ["fp16-mixed", "fp16-nomaster", "bf16-nomaster", "fp32"])
def test_unread_flags_give_the_same_clipping(monkeypatch, recipe):
    ours, theirs = twins(monkeypatch, recipe)
    for seed, max_norm in enumerate((0.05, 100.0, 0.01)):
        expected = step(*theirs, seed, max_norm=max_norm)
        with monkeypatch.context() as patch:
            patch.setattr(halfstep.LossScaler, "_waits", staticmethod(lambda device: True))
            found = step(*ours, seed, max_norm=max_norm)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        for mine, other in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=2**-7 if mine.itemsize == 2 else 1e-5, atol=1e-6)


def test_gradients_whose_squares_overflow_are_clipped(unread):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = halfstep.optim.convert(torch.optim.SGD([weight], lr=1.0), halfstep.get_recipe("fp32"), {})
    scaler = halfstep.LossScaler(init_scale=2.0**16)
    weight.grad = torch.tensor([3e34, 4e34])
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    assert norm.item() == pytest.approx(5e34 / 2**16)
    torch.testing.assert_close(weight.grad, torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize(
    ("options", "steps"), [({"init_scale": 2.0**-15}, 2), ({"init_scale": 8.0, "dynamic": False}, 32)], ids=str
)
def test_a_run_of_overflows_raises_one_update_later(unread, options, steps):
    model, optimizer, scaler = twins(None, "fp16-mixed", **options)[0]
    many = (
        pytest.warns(UserWarning, match=r"20 steps in a row.*\(0\.weight first\)")
        if steps > 20
        else contextlib.nullcontext()
    )
    with many:
        for seed in range(steps):
            step(model, optimizer, scaler, seed, bad=(0,))
    with pytest.raises(LossScaleError, match=r"in 0\.weight at the .*in a row"):
        step(model, optimizer, scaler, 0)


def test_torchs_optimizers_read_the_flag_and_skip(unread):
    model = mlp()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), halfstep.LossScaler(init_scale=4.0)
    before = copy.deepcopy(list(model.parameters()))
    step(model, optimizer, scaler, 0, bad=(0,))
    assert_same(list(model.parameters()), before)
    assert scaler.skipped_steps == 1
    step(model, optimizer, scaler, 1)
    assert not torch.equal(model[0].weight, before[0])


def test_scaling_states_drop_the_amaxes_of_an_unread_skipped_step(monkeypatch):
    ours, theirs = (prepared("fp8-delayed", mlp()) for _ in range(2))
    made = []
    for model, lowbit, scaler in (ours, theirs):
        follower = scaler._follower
        made.append((model, lowbit, halfstep.LossScaler(init_scale=4.0, follower=follower)))
    for seed, bad in enumerate([(), (0,), (), (1,), ()]):
        step(*made[1], seed, bad)
        with monkeypatch.context() as patch:
            patch.setattr(halfstep.LossScaler, "_waits", staticmethod(lambda device: True))
            step(*made[0], seed, bad)
        assert_same(scaler_state(made[0][2])[1], scaler_state(made[1][2])[1])


def test_scaler_states_with_unread_flags_save_load_and_copy(unread):
    model, optimizer, scaler = twins(None, "fp16-mixed", init_scale=64.0, growth_interval=3)[0]
    step(model, optimizer, scaler, 0, bad=(0,))
    saved, twin = scaler.state_dict(), copy.deepcopy(scaler)
    assert scaler_state(twin) == scaler_state(scaler)
    step(model, optimizer, scaler, 1, bad=(0,))
    assert scaler.get_scale() == 16.0
    scaler.load_state_dict(saved)
    scaler.skipped_steps = 7
    step(model, optimizer, scaler, 2)
    assert (scaler.get_scale(), scaler.skipped_steps, scaler.state_dict()["_growth_tracker"]) == (32.0, 7, 1)
    scaler.update(new_scale=8.0)
    assert scaler.scale(torch.ones(())).item() == 8.0


# ---- FakeTensors ----------------------------------------------------------------------------------------------------

PROJECTED = ("galore", "galore-8bit", "galore-bf16")
WAIT = ("lowbit.py step",)
"""Reads of values in GaLore's steps: whether to skip, and the gradients' scale."""
SOMETIMES = {"states.py look": "GaLore: whether gradients are finite where they choose a subspace, every 200 steps"}


@pytest.fixture
def kernels(monkeypatch):
    """Step FakeTensors together as on a GPU, and record the launches instead of running them."""
    launched = []
    functions = SimpleNamespace(prepare="prepare", update="update", made=lambda source, *program: id(program))
    monkeypatch.setattr(launches, "functions", lambda name: functions)
    monkeypatch.setattr(launches, "prepared", lambda kernel, *_, **__: lambda *rest: launched.append(kernel))
    for module in (stepping, kinds):
        name = "plain" if module is stepping else "is_dense"
        monkeypatch.setattr(module, name, lambda t, *dtypes: t.dtype in (dtypes or KINDS) and t.is_contiguous())
    own = torch.Tensor.data_ptr
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda t: 16 * id(t) if hasattr(t, "fake_mode") else own(t))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("halfstep.kernels.gpu.cast.capability", lambda device: (9, 0))
    return launched


@pytest.mark.quick("fp8-delayed", "fp8lm-o3")
@pytest.mark.parametrize("name", mostly_slow(EVERY))
def test_a_training_step_on_a_gpu_reads_no_value(name, kernels):
    """Forward, backward, clip, step and update, twice."""
    with fake_cuda(), Reads() as reads:
        with torch.device("cuda"):
            model = model_for(name)
        model, optimizer, scaler = prepared(name, model)
        x, y = torch.empty(12, 8, device="cuda"), torch.empty(12, 4, device="cuda")
        reads.found.clear()
        for _ in range(2):
            backward(scaler.scale(F.mse_loss(model(x), y)))
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    waits = (*WAIT, *SOMETIMES) if name in PROJECTED else ()
    assert {found for found in reads.found if not found.startswith(waits or "nothing")} == set()
    assert optimizer._together.all == (name not in PROJECTED)
    assert kernels.count("prepare") == 2


def test_the_detector_notices_reads():
    with fake_cuda(), Reads() as reads:
        x = torch.empty(3, device="cuda")
        for read in (lambda: x.sum().item(), lambda: bool(x.any()), x.cpu, x.nonzero, lambda: x[0].fill_(2).tolist()):
            reads.found.clear()
            with contextlib.suppress(Exception):  # data-dependent sizes raise
                read()
            assert reads.found
        reads.found.clear()
        assert (x.to("cpu", non_blocking=True) + 1).shape == (3,)
        assert reads.found == set()
