"""Seeds of stochastic rounding in layers depend on a saved seed, the step and the input's values, on no generator."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import halfstep
from families import for_each
from halfstep import formats, get_recipe, preparation
from halfstep.kernels.operator import seeds
from halfstep.nn.noise import ATTRIBUTE
from halfstep.quant import Hadamard, Quantizer, Scales
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import TENSOR
from halfstep.recipe import AttentionSpec, LinearSpec, Matmul, Recipe, Rule, linear_spec
from tiny import assert_same, batch, grads, mlp, prepared, train


NOISY = Quantizer(formats.get("e4m3fn"), rounding="stochastic", scales=Scales(TENSOR, get_scaling("current")))
EVERYWHERE = linear_spec(NOISY, NOISY, NOISY)
ANEW = LinearSpec(*[Matmul(NOISY, NOISY, hadamard=Hadamard(128, "random"))] * 3)
"""Stochastic rounding of all operands, and also Hadamard transforms of more than 64 random signs."""


def recipe(linear=EVERYWHERE, attention=None):
    return Recipe("noisy", "Noise in all operands.", "the tests", rules=(Rule("*", linear),), attention=attention)


def key(number=5, steps=0):
    return torch.tensor([number, steps])


# ---- seeds ----------------------------------------------------------------------------------------------------------


@for_each("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_seeds_depend_only_on_the_key_and_the_tensors_values(dtype):
    x = torch.randn(64, 48).to(dtype)
    found = seeds(x, key(), 6)
    assert found == seeds(x.t().contiguous().t(), key(), 6)
    assert found[:3] == seeds(x, key(), 3)
    others = [seeds(x, key(6), 6), seeds(x, key(5, 1), 6), seeds(x + 1, key(), 6), seeds(x[:63], key(), 6)]
    drawn = [seed for one in (found, *others) for seed in one]
    assert len(set(drawn)) == len(drawn)
    assert all(0 <= seed < 1 << 64 for seed in drawn)


def test_micro_batches_with_a_common_prompt_have_different_seeds():
    """Sequences that begin alike, in contiguous batches."""
    prompt = torch.randn(1, 16, 64).expand(32, 16, 64)
    batches = [torch.cat([prompt, torch.randn(32, 48, 64)], 1).view(-1, 64) for _ in range(4)]
    assert len({seeds(each, key(), 1)[0] for each in batches}) == 4


@for_each("shape", [(0, 8), (1, 1), (3,), (2, 3, 5, 7), (2, 2, 2, 2, 2)])
def test_tensors_of_any_shape_have_seeds(shape):
    assert len(seeds(torch.randn(shape), key(), 3)) == 3


def test_bits_of_seeds_are_balanced():
    """Over 500 micro-batches that differ in one value by one unit in the last place."""
    drawn = [seeds(torch.full((4, 4), 1.0).index_fill_(0, torch.tensor(0), i / 2**20), key(), 2) for i in range(500)]
    bits = torch.tensor([[seed >> i & 1 for seed in one for i in range(64)] for one in drawn]).double()
    assert (bits.mean(0) - 0.5).abs().max() < 0.12  # five standard deviations
    assert (bits[:, :64] != bits[:, 64:]).double().mean().sub(0.5).abs() < 0.01


# ---- layers ---------------------------------------------------------------------------------------------------------


def backward(model, x=None):
    model.zero_grad()
    model(batch()[0] if x is None else x).square().mean().backward()
    return grads(model)


@pytest.mark.quick("signs")
@pytest.mark.parametrize("linear", [EVERYWHERE, ANEW], ids=["noise", "signs"])
def test_gradients_repeat_within_a_step_and_differ_between_steps(linear):
    """Their mean over steps is near the gradient without stochastic rounding."""
    model, exact = mlp(), backward(mlp())
    halfstep.apply(model, recipe(linear))
    first = backward(model)
    assert_same(backward(model), first)
    total = {name: torch.zeros_like(value) for name, value in first.items()}
    for _ in range(100):
        halfstep.advance(model)
        found = backward(model)
        assert not torch.equal(found["0.weight"], first["0.weight"])
        total = {name: value + found[name] for name, value in total.items()}
    mean, one = total["3.bias"] / 100, exact["3.bias"]  # linear in the rounded operands
    assert (mean - one).norm() < 0.3 * (first["3.bias"] - one).norm()


class Twice(nn.Module):
    """A layer that is called twice; the calls in `again` are checkpointed."""

    def __init__(self, checkpointed, reentrant=False):
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.layer, self.checkpointed, self.reentrant = nn.Linear(8, 8), checkpointed, reentrant

    def forward(self, x):
        for number in range(2):
            x = (
                checkpoint(self.layer, x, use_reentrant=self.reentrant)
                if number in self.checkpointed
                else self.layer(x)
            )
        return x


@for_each("linear", [EVERYWHERE, ANEW], ids=lambda linear: "signs" if linear.rotates else "noise")
def test_checkpointing_a_layer_called_twice_repeats_the_noise_of_each_call(linear):
    found = []
    for checkpointed, reentrant in [((), False), ((0,), False), ((1,), True), ((0, 1), True), ((0, 1), False)]:
        model = Twice(checkpointed, reentrant)
        halfstep.apply(model, recipe(linear))
        inputs = [batch(seed)[0].requires_grad_() for seed in (1, 2)]
        (model(inputs[0]).square().mean() + model(inputs[1]).square().mean()).backward()
        found.append((grads(model), inputs[0].grad, inputs[1].grad))
    for parameters, *rest in found[1:]:
        assert_same(rest, list(found[0][1:]))
        torch.testing.assert_close(parameters, found[0][0], rtol=1e-5, atol=1e-7)  # added up in another order


@for_each("kind", [nn.Linear, nn.LSTM, nn.Conv1d, nn.MultiheadAttention], ids=lambda kind: kind.__name__)
def test_no_kind_of_layer_draws_from_the_generator(kind):
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            torch.default_generator.manual_seed(0)
            sizes = {nn.Conv1d: (8, 8, 3), nn.MultiheadAttention: (8, 2)}
            self.layer = kind(*sizes.get(kind, (8, 8)))

        def forward(self, x):
            y = self.layer(x, x, x) if kind is nn.MultiheadAttention else self.layer(x)
            return y[0] if isinstance(y, tuple) else y

    model = Alone()
    attends = AttentionSpec(EVERYWHERE, EVERYWHERE) if kind is nn.MultiheadAttention else None
    halfstep.apply(model, recipe(attention=attends))
    x, before = torch.randn(4, 8, 8), torch.get_rng_state()
    found = backward(model, x)
    assert torch.equal(torch.get_rng_state(), before)
    torch.default_generator.manual_seed(8)
    assert_same(backward(model, x), found)
    halfstep.advance(model)
    assert not torch.equal(next(iter(backward(model, x).values())), next(iter(found.values())))


def test_quantized_layers_with_adapters_draw_from_no_generator():
    model = mlp()
    once = Matmul(NOISY, replace(NOISY, rounding="nearest_even"))
    halfstep.quantize_model(model, recipe(LinearSpec(once, Matmul(NOISY, NOISY))), adapters=True)
    x, before = batch()[0].requires_grad_(), torch.get_rng_state()
    model(x).square().mean().backward()
    assert torch.equal(torch.get_rng_state(), before)


# ---- state dicts ----------------------------------------------------------------------------------------------------


def test_the_seed_and_the_steps_are_saved_with_the_scaler():
    setup = prepared("nvfp4", generator=7)
    train(*setup, 2)
    saved = setup[2].state_dict()
    assert saved["halfstep"]["noise"] == {"seed": 7, "steps": 2}
    fresh = prepared("nvfp4", generator=8)
    first = backward(fresh[0])
    fresh[2].load_state_dict(saved)
    fresh[0].load_state_dict(setup[0].state_dict())
    assert_same(backward(fresh[0]), backward(setup[0]))
    assert not torch.equal(first["0.weight"], backward(fresh[0])["0.weight"])


def test_a_state_without_a_seed_warns():
    _, _, scaler = prepared("nvfp4")
    saved = scaler.state_dict()
    del saved["halfstep"]["noise"]
    with pytest.warns(UserWarning, match="holds no seed of the noise that layers draw"):
        scaler.load_state_dict(saved)


def test_the_seed_defaults_to_torchs_initial_seed():
    """Nothing is drawn from torch's generator."""
    found = []
    for seed, given in ((1, None), (2, None), (1, 2)):
        model = mlp()
        torch.default_generator.manual_seed(seed)
        before = torch.get_rng_state()
        _, _, scaler = prepared("nvfp4", model, generator=given)
        assert torch.equal(torch.get_rng_state(), before)
        found.append(scaler.state_dict()["halfstep"]["noise"]["seed"])
    assert found == [1, 2, 2]


def test_all_ranks_use_the_seed_of_the_first(monkeypatch):
    monkeypatch.setattr(preparation, "are_several", lambda group: True)
    monkeypatch.setattr(preparation, "first_ranks", lambda seed, group: seed + 1)
    assert prepared("nvfp4", generator=7)[2].state_dict()["halfstep"]["noise"]["seed"] == 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does, as it traces
def test_a_graph_is_traced_once_for_all_steps():
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    model, *others = prepared("nvfp4")
    assert train(torch.compile(model, backend=graphs), *others, 4) == train(*prepared("nvfp4"), 4)
    assert graphs.frame_count == 1


def test_seed_buffers_survive_copies_casts_and_to_empty():
    """`revert` removes them, DDP ignores them, and on the meta device they start in to_empty."""
    model = mlp()
    torch.default_generator.manual_seed(3)
    halfstep.apply(model, "nvfp4")
    halfstep.advance(model)
    own = model[0]._buffers[ATTRIBUTE].clone()
    assert own[1] == 1
    assert own[0] != model[3]._buffers[ATTRIBUTE][0]
    assert "0." + ATTRIBUTE in model._ddp_params_and_buffers_to_ignore
    assert torch.equal(copy.deepcopy(model)[0]._buffers[ATTRIBUTE], own)
    assert torch.equal(model.double().float().to_empty(device="cpu")[0]._buffers[ATTRIBUTE], own)
    with torch.device("meta"):
        blank = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    halfstep.apply(blank, "nvfp4")
    assert blank[0]._buffers[ATTRIBUTE].is_meta
    begun = blank.to_empty(device="cpu")[0]._buffers[ATTRIBUTE]
    assert begun.tolist() == [own[0].item(), 0]
    halfstep.revert(model)
    assert not list(model.named_buffers())
    assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")


def test_two_stages_share_the_steps():
    staged = halfstep.recipe.chain(get_recipe("nvfp4"), halfstep.recipe.Stage(get_recipe("mxfp4-rht"), 2))
    setup = prepared(staged)
    train(*setup, 3)
    saved = [each.state_dict() for each in setup]
    fresh = prepared(staged, generator=9)
    for each, state in zip(fresh, copy.deepcopy(saved), strict=True):
        each.load_state_dict(state)
    assert setup[2].state_dict()["halfstep"]["noise"]["steps"] == 3
    assert train(*fresh, 2) == train(*setup, 2)
    assert F.mse_loss(fresh[0](batch()[0]), setup[0](batch()[0])) == 0
