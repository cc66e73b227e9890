"""16-bit gradients become float32 when unscaled or clipped, and have the parameters' dtype again afterwards."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F

from families import slow_unless
from halfstep.tracking import first_nonfinite
from tiny import SCALED, assert_same, batch, grads, mlp, prepared


HALF = ["fp16-master", "fp16-pure", "bf16-master", "bf16-stochastic"]
every_half = pytest.mark.parametrize("name", HALF)


def loss_of(model, seed=1):
    x, y = batch(seed)
    return F.mse_loss(model(x), y)


def clipped(name, **options):
    """model, optimizer and scaler under a recipe, with clipped gradients."""
    model, optimizer, scaler = prepared(name, **options)
    scaler.scale(loss_of(model)).backward()
    scaler.clip_grad_norm_(optimizer, 0.01)
    return model, optimizer, scaler


def dtypes(model):
    return {p.grad.dtype for p in model.parameters()}


WAYS = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, to zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model, to zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "by hand": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
}


@pytest.mark.quick(
    "False-model, to zeros-bf16-stochastic", "False-by hand-bf16-master", "False-by hand-bf16-stochastic"
)
@every_half
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scaled", [True, False])
def test_later_gradients_have_the_recipes_dtype_and_bits(name, way, scaled):
    """However the clipped ones are dropped, and whether or not the next loss is scaled."""
    model, optimizer, scaler = clipped(name)
    own = {p.dtype for p in model.parameters()}
    assert dtypes(model) == {torch.float32} != own
    scaler.step(optimizer)
    scaler.update()
    twin = copy.deepcopy(model)
    WAYS[way](model, optimizer)
    for _ in range(2):  # accumulated over two backwards
        for one in (model, twin):
            loss = loss_of(one, 2)
            (scaler.scale(loss) if scaled else loss).backward()
    assert dtypes(model) == own == {p.grad_dtype for p in model.parameters()}
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
    assert_same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


def test_a_clip_that_changes_nothing_keeps_the_gradient_tensors():
    for name in ("bf16-master", "fp16-pure"):  # with a constant scale of 1
        model, optimizer, scaler = prepared(name)
        scaler.scale(loss_of(model)).backward()
        before = [p.grad for p in model.parameters()]
        scaler.clip_grad_norm_(optimizer, 1e9)
        assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))


def test_gradients_of_a_cast_model_have_the_new_dtype():
    model, optimizer, _ = clipped("bf16-master")
    model.zero_grad()
    model.double()
    optimizer.zero_grad()
    assert {p.grad_dtype for p in model.parameters()} == {torch.float64}


@every_half
def test_copies_and_pickles_of_a_clipped_model_have_the_recipes_grad_dtype(name):
    model, _, _ = clipped(name)
    own = {p.dtype for p in model.parameters()}
    twin = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(list(model.parameters())))
    for parameters in (twin.parameters(), loaded):
        for p in parameters:
            p.sum().backward()
            assert {p.grad.dtype} == own


@pytest.mark.parametrize("name", slow_unless("bf16-master".__eq__, HALF))  # a full garbage collection for each
def test_widened_gradients_hold_no_reference_to_the_model(name):
    model, optimizer, scaler = clipped(name)
    references = weakref.ref(model), weakref.ref(model[0].weight), weakref.ref(optimizer)
    scaler._follower, scaler._names = None, {}  # these hold references by design
    del model, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_first_nonfinite_on_another_loss_leaves_clipped_gradients_unchanged():
    """The lab calls it: the gradients, their dtype and the scaler's state stay."""
    model, optimizer, scaler = clipped("fp16-master")
    twin, twins_optimizer, twins_scaler = clipped("fp16-master")
    before = [p.grad for p in model.parameters()]
    assert first_nonfinite(model, lambda: scaler.scale(loss_of(model, 2))) is None
    assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))
    for one, other in ((scaler, optimizer), (twins_scaler, twins_optimizer)):
        one.step(other)
        one.update()
        other.zero_grad()
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))
    scaler.scale(loss_of(model)).backward()
    assert dtypes(model) == {torch.float16}


@pytest.mark.parametrize("name", SCALED)
def test_first_nonfinite_leaves_coded_gradients_unchanged(name):
    model, optimizer, scaler = clipped(name)
    before = grads(model)
    assert first_nonfinite(model, lambda: loss_of(model, 2)) is None
    assert_same(grads(model), before)
    assert "the loss" in str(first_nonfinite(model, lambda: loss_of(model, 2) * torch.nan))
    scaler.step(optimizer)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@every_half
def test_a_compiled_model_trains_with_widened_gradients(name):
    ends = []
    for compiled in (True, False):
        model, optimizer, scaler = prepared(name, mlp())
        forward = torch.compile(model, backend="aot_eager") if compiled else model
        for i in range(4):
            x, y = batch(i)
            scaler.scale(F.mse_loss(forward(x), y)).backward()
            assert dtypes(model) == {p.dtype for p in model.parameters()}
            scaler.clip_grad_norm_(optimizer, 0.01)
            scaler.step(optimizer)
            scaler.update()
            (optimizer if i % 2 else model).zero_grad()
        ends.append([p.float() for p in model.parameters()])
    torch.testing.assert_close(*ends, rtol=1e-2, atol=1e-3)
