"""Traced models: torch.export and torch.compile."""

import copy
import io
import warnings

import torch
import torch.nn.functional as F
from ways import prepare, start_of, steps, values, way

from tiny import assert_same, batch, grads


@way(core=("fp8-delayed",))
def test_export(name):
    """torch.export: of the prepared model in eval(), saved and loaded, [for any batch](#compiled) too; the program
    computes what the model does."""
    model, optimizer, scaler = prepare(name, start_of(name))
    steps(model, optimizer, scaler, 2)
    model.eval()
    x, file = batch()[0], io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        for harmless in ("No complete tensor found", "A model attribute .* requires gradient"):
            warnings.filterwarnings("ignore", message=harmless)
        program = torch.export.export(model, (x,))
        torch.export.save(program, file)
        file.seek(0)
        program = torch.export.load(file)
        with torch.no_grad():
            assert_same(program.module()(x), model(x))


@way(core=("bf16-stochastic",))
def test_compile(name):
    """torch.compile: of the prepared model; forward and backward in one graph, with `aot_eager` equal to the eager
    ones, with Inductor [near them](#compiled)."""
    torch._dynamo.reset()  # or the recipes before this one count against torch's limit of recompilations
    trained = prepare(name, start_of(name))
    twin = copy.deepcopy(trained)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, as it traces
        compiled = torch.compile(twin[0], backend="aot_eager", fullgraph=True)
        for seed in range(2):
            x, y = batch(seed)
            for (_, optimizer, scaler), model in ((trained, trained[0]), (twin, compiled)):
                torch.manual_seed(5)
                scaler.scale(F.mse_loss(model(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
            assert_same(grads(twin[0]), grads(trained[0]))
            for _, optimizer, _ in (trained, twin):
                optimizer.zero_grad()
    assert_same(values(twin[0]), values(trained[0]))
