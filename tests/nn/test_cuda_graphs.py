"""Stochastic rounding in CUDA graphs: replays draw the seeds of eager steps, and unsupported captures are errors."""

import sys
import weakref
from functools import partial

import pytest
import torch

import halfstep
from fake_cuda import Reads, backward, fake_cuda
from halfstep import quant
from halfstep.errors import QuantizationError, RecipeError
from halfstep.ops.casts import seed_of
from halfstep.quant import rounding
from halfstep.quant.hadamard import Hadamard, _drawn_words, _made_there, _words
from halfstep.quant.rounding import Draws
from halfstep.recipe import Stage, chain, get_recipe
from tiny import mlp, model_for, prepared


GPU = torch.device("cuda")


@pytest.fixture
def capturing(monkeypatch):
    """Make torch report that a CUDA graph is being captured."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


@pytest.fixture
def draws(capturing):
    """The draws of an open halfstep.CUDAGraph."""
    made = Draws()
    rounding.opened(made)
    yield made
    rounding.opened(None)


class OnHost:
    """Draws of a graph whose cells lie on the CPU, whatever device is asked for."""

    def __init__(self):
        self._draws, self.taken = Draws(), 0

    def cells(self, draw, count, device):
        self.taken += 1
        return self._draws.cells(draw, count, torch.device("cpu"))

    def fill(self):
        self._draws.fill()


def test_stochastic_rounding_in_torchs_own_graph_is_refused(capturing):
    x = torch.ones(4)
    with pytest.raises(QuantizationError, match="every replay of the graph would round with the same noise"):
        halfstep.round_to(x, "e4m3fn", "stochastic")
    with pytest.raises(QuantizationError, match=r"signs of a Hadamard transform.*not on the GPU"):
        Hadamard(16, "random").signs()
    with pytest.raises(QuantizationError, match=r"Capture into halfstep\.CUDAGraph\(\)"):
        seed_of("stochastic", None, GPU)
    halfstep.round_to(x, "e4m3fn", "stochastic", generator=5)
    halfstep.round_to(x, "e4m3fn")


def test_stochastic_rounding_of_a_cpu_tensor_during_capture_is_refused(draws):
    with pytest.raises(QuantizationError, match="not on the GPU"):
        halfstep.round_to(torch.ones(4), "e4m3fn", "stochastic")


def test_scaler_update_of_a_staged_recipe_during_capture_is_refused(capturing):
    staged = chain(get_recipe("fp8-current"), Stage(get_recipe("bf16-mixed"), 2))
    model = mlp()
    _, _, scaler = halfstep.prepare(model, torch.optim.AdamW(model.parameters()), staged)
    with pytest.raises(RecipeError, match="would not be counted"):
        scaler.update()


def test_a_graph_is_referenced_only_while_open():
    """torch 2.10 releases thread-local objects once more often than it took them."""
    graph = Draws()
    counted, gone = sys.getrefcount(graph), weakref.ref(graph)
    for _ in range(100):
        rounding.opened(graph)
        assert rounding.check_drawing("noise", GPU) is graph
        assert sys.getrefcount(graph) == counted + 1
        rounding.opened(None)
        assert sys.getrefcount(graph) == counted
    rounding.opened(graph)
    del graph
    assert gone() is rounding.check_drawing("noise", GPU)
    rounding.opened(None)
    assert gone() is None


# ---- draws ----------------------------------------------------------------------------------------------------------


def draw_step(generator=None):
    """What a step draws: seeds of two generators and random signs of several sizes, in order."""
    first = seed_of("stochastic", None, GPU)
    words = rounding.drawn("signs", partial(_drawn_words, 64), 2, GPU)
    return [first, seed_of("stochastic", generator, GPU), *words, rounding.draw_seed(None, GPU)]


def as_unsigned(drawn):
    return [int(number) & (1 << 64) - 1 for number in drawn]


def test_replays_draw_the_seeds_of_eager_steps(monkeypatch):
    """Other draws, eager steps and restored generator states come in between; a capture draws nothing."""
    own = torch.Generator().manual_seed(5)
    torch.default_generator.manual_seed(3)
    eager = []
    for _ in range(4):
        eager.append(as_unsigned(draw_step(own)))
        torch.randperm(7)

    own.manual_seed(5)
    torch.default_generator.manual_seed(3)
    graph = OnHost()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        rounding.opened(graph)
        cells = draw_step(own)
        rounding.opened(None)
    assert graph.taken == 4
    found = []
    for replayed in (True, False, True):
        if replayed:
            graph.fill()
            found.append(as_unsigned(cells))
        else:
            found.append(as_unsigned(draw_step(own)))
        torch.randperm(7)
    saved = torch.get_rng_state(), own.get_state()
    graph.fill()
    found.append(as_unsigned(cells))
    assert found == eager
    torch.set_rng_state(saved[0])
    own.set_state(saved[1])
    graph.fill()
    assert as_unsigned(cells) == eager[-1]


def test_draws_are_open_during_capture_and_filled_before_each_replay(monkeypatch, capturing):
    calls = []
    for name in ("capture_begin", "capture_end", "replay"):
        monkeypatch.setattr(torch.cuda.CUDAGraph, name, lambda self, *given, name=name, **named: calls.append(name))
    if torch.backends.cuda.is_built() and not torch.cuda.is_available():
        pytest.skip("a torch for CUDA makes no graph without a driver")
    graph = halfstep.CUDAGraph() if torch.backends.cuda.is_built() else object.__new__(halfstep.CUDAGraph)
    graph.replay()
    for _ in range(2):  # a second capture forgets the first one's draws
        graph.capture_begin(capture_error_mode="global")
        numbers = iter((5, 6))
        cells = rounding.check_drawing("noise", GPU).cells(lambda drawn=numbers: [next(drawn)], 1, torch.device("cpu"))
        graph.capture_end()
        with pytest.raises(QuantizationError):
            rounding.check_drawing("noise", GPU)
        for number in (5, 6):
            graph.replay()
            assert cells.tolist() == [number]
    assert calls == ["replay", *["capture_begin", "capture_end", "replay", "replay"] * 2]


def test_a_torch_without_cuda_has_no_graphs(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(QuantizationError, match=r"built without CUDA.*run the step itself"):
        halfstep.CUDAGraph()


def test_draws_over_several_buffers_keep_their_order(draws):
    """A full buffer is followed by another, no draw is split between two, and the values sent are signed."""
    numbers = iter(range(1 << 64))
    device = torch.device("cpu")
    cells = [draws.cells(lambda: [next(numbers) + (1 << 63) for _ in range(3)], 3, device) for _ in range(700)]
    draws.fill()
    assert len(draws._parts) == 3
    assert torch.equal(torch.cat(cells), torch.arange(2100) - 2**63)


@pytest.mark.parametrize("seed", [0, 7, 0x9E3779B97F4A7C15, (1 << 64) - 1, 1 << 63, 0xFFFFFFFF])
def test_a_seed_in_a_tensor_draws_the_noise_of_the_integer(seed):
    cell = torch.tensor(seed - (seed >> 63 << 64))
    assert torch.equal(quant.noise_bits(cell, 16000, 900), quant.noise_bits(seed, 16000, 900))
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    for name in ("mxfp4", "nvfp4"):
        quantizer = quant.get_quantizer(name, rounding="stochastic")
        assert torch.equal(quantizer.quantize(x, cell).dequantize(), quantizer.quantize(x, seed).dequantize())


@pytest.mark.quick("nvfp4")
@pytest.mark.parametrize("name", ["mxfp4-rht", "nvfp4", "bf16-stochastic", "fp8-current", "fp8-smooth-swiglu"])
def test_a_captured_step_draws_from_no_generator_and_reads_no_value(monkeypatch, name):
    """With tensors without values, for torch's own CUDAGraph: seeds are computed on the tensors' device."""
    with fake_cuda(), Reads() as reads, monkeypatch.context() as patch:
        with torch.device("cuda"):
            model = model_for(name)
        model, _, _ = prepared(name, model)
        x = torch.empty(12, 8, device="cuda")
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patch.setattr(torch, "randint", None)
        reads.found.clear()
        backward(model(x).sum())
        halfstep.advance(model)
        assert not set(reads.found)


@pytest.mark.parametrize("hadamard", [Hadamard(), Hadamard(2, 3), Hadamard(32, 1), Hadamard(128, 7)], ids=str)
def test_hadamard_signs_made_from_integer_words_equal_signs(hadamard):
    signs = hadamard.signs()
    words = _words((signs < 0).tolist())
    assert torch.equal(_made_there(words, hadamard.size, None), signs)
    assert torch.equal(_made_there(torch.tensor(words), hadamard.size, None), signs)
