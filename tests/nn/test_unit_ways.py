"""Unit-scaled models with micro-batches, weights stored as codes, and activations saved as codes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from families import slow_unless
from halfstep import ops, unit
from halfstep.lab.models.gpt import GPT
from tiny import UNIT


TOKENS = torch.randint(0, 97, (8, 32), generator=torch.Generator().manual_seed(0))
CODES = "fp8lm-o1", "fp8lm-o2"
ROUNDED = {"fp32": 1e-6, "unit-nvfp4": 0.2, **dict.fromkeys(CODES, 0.01)}
"""Relative tolerance of a gradient's size between batches of different sizes; 0.001 for other recipes."""


def loss(output, tokens):
    return F.cross_entropy(output.flatten(0, 1).float(), tokens.flatten())


def gpt(scaled=True):
    torch.manual_seed(0)
    model = GPT(97, 32, 2, 64, 4)
    if scaled:
        halfstep.unit_scale(model, TOKENS, loss=lambda output: loss(output, TOKENS))
    return model


def prepared(recipe, scaled=True, lr=0.02):
    model = gpt(scaled)
    return halfstep.prepare(model, torch.optim.AdamW(model.parameters(), lr=lr), recipe, generator=0)


def gradients(made, tokens, micro=1):
    """The gradients of the loss of all tokens, computed in `micro` micro-batches."""
    model, _, scaler = made
    model.zero_grad()
    for part in tokens.chunk(micro):
        scaler.scale(loss(model(part), part) / micro).backward()
    return {name: p.grad.float() / scaler.get_scale() for name, p in model.named_parameters()}


@pytest.mark.quick("umup-fp8", "fp8lm-o2")
@pytest.mark.parametrize(
    "recipe",
    slow_unless({"unit-fp16", "unit-fp8", "umup-fp8", "fp8lm-o2"}.__contains__, ["fp32", *UNIT, *CODES]),
)
def test_gradients_of_micro_batches_are_a_multiple_of_the_batchs(recipe):
    """Matmuls and gains divide by the square root of their call's rows, so n micro-batches give sqrt(n) times the
    gradient; embedding tables have a constant of the traced batch (docs/unit_scaling.md)."""
    made = prepared(recipe)
    whole, added = gradients(made, TOKENS), gradients(made, TOKENS, 4)
    for name, grad in whole.items():
        expected = 1 if name in ("token.weight", "position.weight") else 2
        along = float((added[name] * grad).sum() / grad.square().sum())
        assert along == pytest.approx(expected, rel=ROUNDED.get(recipe, 1e-3)), name
        direction = F.cosine_similarity(added[name].flatten(), grad.flatten(), dim=0)
        assert direction > (0.9 if recipe == "unit-nvfp4" else 0.998), name


@pytest.mark.slow
@pytest.mark.parametrize("recipe", slow_unless("fp8lm-o2".__eq__, CODES))
def test_weights_stored_as_codes_are_near_the_float32_model(recipe):
    """Matmuls of codes have the factors too: outputs and gradients are near float32's, which those without factors are
    not, and the model trains."""
    made, plain = prepared(recipe), prepared("fp32")
    held = [name for name, p in made[0].named_parameters() if isinstance(p, ops.CodeTensor)]
    assert len(held) == 8  # in two blocks
    output, expected = (model(TOKENS).float() for model in (made[0], plain[0]))
    assert (output - expected).norm() < 0.1 * expected.norm()
    found, grads = gradients(made, TOKENS), gradients(plain, TOKENS)
    for name, grad in grads.items():
        assert (found[name] - grad).norm() < 0.25 * grad.norm(), name
    unscaled = gradients(prepared(recipe, scaled=False), TOKENS)
    assert all((unscaled[name] - grads[name]).norm() > 0.5 * grads[name].norm() for name in held)
    model, optimizer, scaler = made
    losses = []
    for _ in range(25):
        losses.append(float(loss(model(TOKENS), TOKENS).detach()))
        gradients(made, TOKENS)
        scaler.step(optimizer)
        scaler.update()
    assert losses[-1] < 0.5 * losses[0], losses


def layers():
    return nn.Sequential(unit.Linear(16, 32), unit.LayerNorm(32, elementwise_affine=True), unit.Linear(32, 8))


def adopted():
    made = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))
    halfstep.unit_scale(made, torch.randn(64, 16))
    return made


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does, as it traces
@pytest.mark.slow
@pytest.mark.parametrize("make", [layers, adopted])
def test_a_traced_graph_keeps_the_factors_of_norms_gains(make):
    """Under a recipe that saves norms' tensors as codes; traced norms do not compute their gradients from the codes."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, x = make(), torch.randn(64, 16)
        halfstep.apply(model, "coat")
        torch.compiler.reset()
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        run(x).square().mean().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    eager, traced = found
    assert eager["1.weight"].norm() > 0
    for name, grad in eager.items():
        assert (traced[name] - grad).norm() < 0.1 * grad.norm(), name
