"""Bytes per parameter measured from live tensors equal each recipe's prediction."""

import itertools

import pytest
import torch
from torch import nn

import halfstep
from families import in_turn, slow_unless
from halfstep.memory import measure
from halfstep.recipe import get_recipe
from tiny import FAST, PROJECTED, RECIPES, SCALED


MATRIX = (64, 64)
LARGE = [name for name in RECIPES if get_recipe(name).moment("exp_avg").flat]


def model_for(recipe: str):
    """Parameters of all kinds; only large ones, ones of whole tiles, or ones that rules round, where the recipe stores
    these differently."""
    if recipe in PROJECTED:  # projected parameters only
        return nn.Linear(*MATRIX, bias=False), torch.eye(64)
    if recipe in LARGE:
        return nn.Sequential(nn.Linear(128, 64, bias=False), nn.GELU(), nn.Linear(64, 64, bias=False)), torch.eye(128)
    if recipe in SCALED:
        first, last = (nn.Linear(32, 16, bias=False), nn.GELU()), nn.RNNCell(8, 4, bias=False)
        convolution = nn.Unflatten(1, (4, 4)), nn.Conv1d(4, 4, 3, bias=False), nn.Flatten()
        return nn.Sequential(*first, *convolution, last), torch.eye(32)
    layers = nn.Embedding(32, 16), nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)
    convolution = nn.Unflatten(1, (2, 2)), nn.ConvTranspose1d(2, 4, 2), nn.Flatten(), nn.GRUCell(12, 4)
    return nn.Sequential(*layers, *convolution), torch.arange(32)


def trained(recipe: str, optimizer_class=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model, x = model_for(recipe)
    model, optimizer, scaler = halfstep.prepare(model, optimizer_class(model.parameters(), **options), recipe)
    for _ in range(2):  # moments exist from the first step on
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        size = measure(model, optimizer)
        scaler.step(optimizer)
        scaler.update()
    return size


OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {}, ("exp_avg", "exp_avg_sq")),
    "adam": (torch.optim.Adam, {}, ("exp_avg", "exp_avg_sq")),
    "sgd": (torch.optim.SGD, {"lr": 0.1}, ()),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, ("momentum_buffer",)),
}


@pytest.mark.quick(
    "galore-bf16-adam",
    "fp4-wang-momentum",
    "bf16-accumulate-sgd",
    "bf16-truncate-adamw",
    "fp8-rowwise-gw-hp-sgd",
    "galore-momentum",
)
@pytest.mark.parametrize(
    ("recipe", "optimizer"),
    slow_unless(
        lambda case: case in in_turn(RECIPES, [*OPTIMIZERS]) or (case[1] == "adamw" and case[0] in FAST),
        itertools.product(RECIPES, OPTIMIZERS),
    ),
)
def test_measured_bytes_equal_the_predicted_ones(recipe, optimizer):
    optimizer_class, options, moments = OPTIMIZERS[optimizer]
    measured = trained(recipe, optimizer_class, **options)
    predicted = halfstep.get_recipe(recipe).bytes_per_parameter(moments, MATRIX if recipe in PROJECTED else None)
    assert (measured.weights, measured.grads, measured.master, measured.states) == (
        predicted.weights, predicted.grads, predicted.master, predicted.states,
    )  # fmt: skip
    assert measured.total == predicted.total


TABLE = {
    "fp32": 16, "bf16-mixed": 16, "fp16-mixed": 16, "fp16-mixed-unscaled": 16, "bf16-master": 16, "fp16-master": 16,
    "fp16-nomaster": 12, "bf16-nomaster": 12,
    "bf16-stochastic": 12, "bf16-6byte": 6.03125, "bf16-7byte": 7.03125,
    "nf4": 12, "nf4-double": 12, "int8-weight-only": 12,
    "bf16-pure": 8, "fp16-pure": 8, "bf16-fp32grad": 14,
    "bf16-megatron": 18, "bf16-split": 14, "bf16-kahan": 14, "bf16-collage-light": 10, "bf16-collage-plus": 12,
    "bf16-truncate": 16, "fp16-accumulate": 16, "bf16-accumulate": 16,
    "galore": 16, "galore-8bit": 10.03125, "galore-bf16": 10,
    "adamw-8bit": 10.03125, "fp8-adam": 10.03125, "coat": 10.1875, "fp16-static": 16, "fp16-lists": 16,
    "fp8-delayed": 16, "fp8-delayed-megatron": 16,
    "fp8-current": 16, "fp8-rowwise": 16, "fp8-rowwise-gw-hp": 16, "fp8-block": 16,
    "umup-fp8": 16, "munit-fp8": 16, "mxfp8": 16, "mxfp8-floor": 16,
    "mxfp4": 16, "mxfp4-rht": 16, "nvfp4": 16,
    "fp4-zhou-dgrad-fp8": 16, "fp4-zhou-dgrad-bf16": 16,
    "fp8-amax": 12, "fp8-cscale": 12, "fp8-smooth-swiglu": 16, "fp8lm-o1": 11, "fp8lm-o2": 6,
    "fp4-wang": 6, "fp4-wang-msamp": 16, "fp8lm-o3": 7, "fp8-fishman": 10,
    "unit-fp16": 16, "unit-fp8": 16, "unit-fp8-e4m3": 16, "unit-mxfp8": 16, "unit-nvfp4": 16,
}  # fmt: skip


@pytest.mark.parametrize(("recipe", "total"), TABLE.items())
def test_total_bytes_equal_the_published_ones(recipe, total):
    assert halfstep.get_recipe(recipe).bytes_per_parameter().total == total


def test_every_named_recipe_is_in_the_table():
    assert set(TABLE) == set(halfstep.list_recipes())


def test_tied_weights_count_once():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    assert measure(model, optimizer).weights == 4


def test_measuring_a_model_without_trainable_parameters_raises():
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="trains no parameter"):
        measure(model, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0))
