"""What a CUDA graph would hold wrongly is an error while it is captured; signs are made where they are used."""

import pytest
import torch

import halfstep
from halfstep.errors import QuantizationError, RecipeError
from halfstep.quant.hadamard import Hadamard, _made_there
from halfstep.recipe import Stage, chain, get_recipe
from tiny import batch, mlp, prepared


@pytest.fixture
def capturing(monkeypatch):
    """torch says that a CUDA graph is being captured."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_noise_that_replays_would_repeat_is_refused(capturing):
    x = torch.ones(4)
    with pytest.raises(QuantizationError, match="every replay of the graph would round with the same noise"):
        halfstep.round_to(x, "e4m3fn", "stochastic")
    with pytest.raises(QuantizationError, match="signs of a Hadamard transform"):
        Hadamard(16, "anew").signs()
    halfstep.round_to(x, "e4m3fn", "stochastic", generator=5)
    halfstep.round_to(x, "e4m3fn")


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4-rht"])
def test_recipes_that_draw_in_the_passes_are_refused(monkeypatch, name):
    model, _, _ = prepared(name, mlp())
    loss = model(batch()[0]).sum()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(QuantizationError, match="Leave these layers out of the graph"):
        loss.backward()


def test_stages_that_nobody_would_count_are_refused(capturing):
    staged = chain(get_recipe("fp8-current"), Stage(get_recipe("bf16-mixed"), 2))
    model = mlp()
    _, _, scaler = halfstep.prepare(model, torch.optim.AdamW(model.parameters()), staged)
    with pytest.raises(RecipeError, match="counted by nobody"):
        scaler.update()


@pytest.mark.parametrize("hadamard", [Hadamard(), Hadamard(2, 3), Hadamard(32, 1), Hadamard(128, 7)], ids=str)
def test_signs_made_of_whole_numbers(hadamard):
    signs = hadamard.signs()
    assert torch.equal(_made_there((signs < 0).tolist(), "cpu"), signs)
