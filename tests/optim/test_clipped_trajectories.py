"""Clipping under a loss scale equals plain torch that unscales and clips in float32, over whole trajectories.

Plain torch gets the gradients of our backward. A forward and backward of its own would sum in another order on some
CPUs, and one near-tie in fp16 is a thousand times the tolerance here."""

import pytest
import torch
import torch.nn.functional as F

import halfstep
from halfstep.recipe import get_recipe


pytestmark = pytest.mark.cpu
SEEDS, STEPS, SMALL = 20, 12, 2.0**-18
"""The loss is so small that most unscaled gradients are below fp16's smallest subnormal."""
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
both_kinds_of_cpu = pytest.mark.usefixtures("products")


def model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 4))


def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(16, 12, generator=generator), torch.randn(16, 4, generator=generator)) for _ in range(STEPS)]


def ours(name, optimizer, seed):
    """The final float32 weights through `prepare`, and every step's gradients from backward."""
    net, seen = model(), []
    net, stepper, scaler = halfstep.prepare(net, optimizer(net.parameters()), name)
    for x, y in batches(seed):
        scaler.scale(SMALL * F.mse_loss(net(x), y)).backward()
        seen.append([p.grad.clone() for p in net.parameters()])
        scaler.clip_grad_norm_(stepper, MAX_NORM)
        scaler.step(stepper)
        scaler.update()
        stepper.zero_grad()
    assert scaler.skipped_steps == 0
    return torch.cat([stepper.full(p).flatten() for p in net.parameters()]), seen


def plain(name, optimizer, gradients, clip=True, half_unscaled=False):
    """The same steps in plain torch: float32 weights, with gradients cast to float32 first."""
    scale, net = get_recipe(name).loss_scale.init, model()
    stepper = optimizer(net.parameters())
    for step in gradients:
        for p, grad in zip(net.parameters(), step, strict=True):
            p.grad = (grad.half() / scale).float() if half_unscaled else grad.float() / scale
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
        stepper.step()
        stepper.zero_grad()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def distance(one, other):
    """The distance of two final weight vectors, relative to the distance from the start."""
    start = torch.cat([p.detach().flatten() for p in model().parameters()])
    return float((one - other).norm() / (other - start).norm())


@pytest.mark.quick(
    "own-range(0, 1)-sgd-fp16-static", "own-range(0, 1)-adamw-fp16-static", "carried-range(0, 1)-sgd-fp16-static"
)
@every_fp16_recipe
@every_optimizer
@both_kinds_of_cpu
@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, SEEDS), marks=pytest.mark.slow)], ids=str)
def test_clipped_training_ends_at_the_float32_references_weights(name, optimizer, seeds):
    """On an EPYC at most 1.4e-7 apart with SGD and 2.6e-7 with AdamW, over all seeds."""
    for seed in seeds:
        weights, gradients = ours(name, optimizer, seed)
        assert distance(weights, plain(name, optimizer, gradients)) < 2e-6, seed


@pytest.mark.quick("sgd-fp16-static", "sgd-fp16-lists")
@every_fp16_recipe
@every_optimizer
def test_the_tolerance_excludes_missing_clipping_and_fp16_unscaling(name, optimizer):
    """Far outside it: no clipping, and gradients divided in fp16."""
    gradients = ours(name, optimizer, 4)[1]
    right = plain(name, optimizer, gradients)
    assert distance(plain(name, optimizer, gradients, clip=False), right) > 0.03
    assert distance(plain(name, optimizer, gradients, half_unscaled=True), right) > 0.03
