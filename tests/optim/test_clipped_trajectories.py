"""Clipping under a loss scale: training goes where plain torch goes that unscales and clips in float32."""

import copy

import pytest
import torch
import torch.nn.functional as F

import halfstep
from halfstep.recipe import get_recipe


STEPS, SMALL = 12, 2.0**-18
"""The loss is so small that most gradients, unscaled, are below fp16's smallest number."""
MAX_NORM = 0.5 * SMALL
every_fp16_recipe = pytest.mark.parametrize("name", ["fp16-mixed", "fp16-static", "fp16-lists", "fp16-master"])
every_optimizer = pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1 / SMALL, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-8 * SMALL),
    ],
    ids=["sgd", "adamw"],
)


def model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 4))


def batches():
    generator = torch.Generator().manual_seed(4)
    return [(torch.randn(16, 12, generator=generator), torch.randn(16, 4, generator=generator)) for _ in range(STEPS)]


def ours(name, optimizer):
    """Float32 weights at the end, through `prepare`."""
    net = model()
    net, stepper, scaler = halfstep.prepare(net, optimizer(net.parameters()), name)
    for x, y in batches():
        scaler.scale(SMALL * F.mse_loss(net(x), y)).backward()
        scaler.clip_grad_norm_(stepper, MAX_NORM)
        scaler.step(stepper)
        scaler.update()
        stepper.zero_grad()
    assert scaler.skipped_steps == 0
    return torch.cat([stepper.full(p).flatten() for p in net.parameters()])


def plain(name, optimizer, clip=True, half_unscaled=False):
    """The same in plain torch: float32 weights, an fp16 pass over a copy, gradients widened before all else."""
    recipe = get_recipe(name)
    scale, in_half = recipe.loss_scale.init, recipe.weights == "fp16"
    net = model()
    stepper = optimizer(net.parameters())
    for x, y in batches():
        worker = copy.deepcopy(net).half() if in_half else net
        with torch.autocast("cpu", torch.float16):
            out = worker(x.half() if in_half else x)
        (scale * SMALL * F.mse_loss(out.float(), y)).backward()
        for full, p in zip(net.parameters(), worker.parameters(), strict=True):
            full.grad = (p.grad.half() / scale).float() if half_unscaled else p.grad.float() / scale
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
        stepper.step()
        stepper.zero_grad()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def distance(one, other):
    """How far apart two ends are, over how far one went."""
    start = torch.cat([p.detach().flatten() for p in model().parameters()])
    return float((one - other).norm() / (other - start).norm())


@every_fp16_recipe
@every_optimizer
def test_it_ends_where_the_float32_reference_does(name, optimizer):
    assert distance(ours(name, optimizer), plain(name, optimizer)) < 1e-5


@every_fp16_recipe
def test_the_bound_tells_clipping_and_unscaling_apart(name):
    """Far outside it: no clipping, and gradients divided in fp16."""

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1 / SMALL, momentum=0.9)

    right = plain(name, sgd)
    assert distance(plain(name, sgd, clip=False), right) > 0.1
    assert distance(plain(name, sgd, half_unscaled=True), right) > 0.03
