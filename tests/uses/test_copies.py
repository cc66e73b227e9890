"""Copies of models and training states: deepcopy, pickle, files, and resuming from states."""

import copy
import io
import pickle

import torch
from ways import assert_near_fp32, assert_outputs_near, both, prepare, start_of, steps, values, way

from tiny import adamw, assert_same, batch, copied


def run(name):
    """A run of three steps under Adam, whose moments copies must include."""
    model = start_of(name)
    trained = prepare(name, model, adamw(model))
    steps(*trained, 3)
    return trained


def assert_continue_identically(copies, originals):
    """Copies and originals continue with the same bits, and independently."""
    before = values(originals[0])
    losses = steps(*copies, 3, first=3)
    assert_same(values(originals[0]), before)
    assert steps(*originals, 3, first=3) == losses
    assert_same(values(copies[0]), values(originals[0]))
    assert_same(copied(copies[1].state_dict()["state"]), copied(originals[1].state_dict()["state"]))


@way()
def test_deepcopy(name):
    """deepcopy: of the model, or of model, optimizer and scaler together, which then train on bit for bit."""
    trained = run(name)
    alone = copy.deepcopy(trained[0])
    assert_same(alone.eval()(batch()[0]), trained[0].eval()(batch()[0]))
    trained[0].train()
    assert_continue_identically(copy.deepcopy(trained), run(name))
    assert_continue_identically(trained, run(name))


@way()
def test_pickle(name):
    """pickle: of model, optimizer and scaler together (`pickle.dumps((model, optimizer, scaler))`); they train on."""
    assert_continue_identically(pickle.loads(pickle.dumps(run(name))), run(name))


@way()
def test_save_of_a_model(name):
    """torch.save(model): read it with `torch.load(file, weights_only=False)`; it follows the recipe."""
    for what in (lambda trained: trained, lambda trained: trained[0]):
        trained, file = run(name), io.BytesIO()
        torch.save(what(trained), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        if isinstance(loaded, tuple):
            assert_continue_identically(loaded, trained)
        else:
            assert_same(loaded.eval()(batch()[0]), trained[0].eval()(batch()[0]))
            assert type(loaded).__name__ == type(start_of(name)).__name__


@way()
def test_resume(name):
    """Save and resume: the state dicts of model, optimizer and scaler, loaded after `prepare`, resume bit for bit."""
    trained, file = run(name), io.BytesIO()
    torch.save([part.state_dict() for part in trained], file)
    file.seek(0)
    model = start_of(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    resumed = prepare(name, model, adamw(model))
    for part, state in zip(resumed, torch.load(file), strict=True):
        part.load_state_dict(state) if state else None  # a scaler that scales nothing saves nothing
    assert_continue_identically(resumed, trained)


@way()
def test_stock_model_loads(name):
    """State dict into a stock model: the keys are the stock ones, and a stock model loads it."""
    start, found, _ = both(name, steps)
    stock = start_of(name)
    stock.load_state_dict(found)
    model, _, _ = prepare(name, start_of(name))
    model.load_state_dict(found)
    x = batch()[0]
    assert_outputs_near(name, model(x), stock(x))
    assert not torch.equal(start[next(iter(start))], found[next(iter(found))])


@way()
def test_loaded_weights(name):
    """Weights loaded after `prepare`: `model.load_state_dict(stock_state)`; the masters start from its values."""

    def loop(model, optimizer, scaler):
        torch.manual_seed(9)
        model.load_state_dict(start_of(name, lambda: other(name)).state_dict())
        steps(model, optimizer, scaler)

    _, found, expected = both(name, loop)
    assert_near_fp32(name, values(other(name)), found, expected)


def other(name):
    model = start_of(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model
