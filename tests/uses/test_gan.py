"""GANs: two networks with an optimizer each, a gradient penalty, and weights clamped after each step."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from ways import ROUNDING, Stock, assert_near_fp32, prepare, sgd, values, way

from tiny import batch, model_for


def networks(name):
    torch.manual_seed(2)
    generator = nn.Sequential(nn.Linear(3, 8), nn.GELU(), model_for(name), nn.GELU(), nn.Linear(4, 8))
    critic = nn.Sequential(model_for(name), nn.GELU(), nn.Linear(4, 1))
    return generator, critic


def none(critic, scaler, real, fake):
    return 0.0


def penalty(critic, scaler, real, fake):
    """The gradient penalty of Gulrajani et al., as in torch's notes on mixed precision."""
    x = real.lerp(fake, 0.3).requires_grad_()
    (grad,) = torch.autograd.grad(scaler.scale(critic(x).sum()), x, create_graph=True)
    grad = grad / scaler.get_scale()
    return (grad.norm(dim=1) - 1).square().mean()


def train_gan(generator, critic, regularizer=none, after=lambda critic: None, rounds=4):
    """Train both; each is (model, optimizer, scaler)."""
    (g, g_optimizer, g_scaler), (d, d_optimizer, d_scaler) = generator, critic
    for seed in range(rounds):
        real = batch(seed)[0]
        noise = torch.randn(12, 3, generator=torch.Generator().manual_seed(seed))
        fake = g(noise).detach()
        loss = F.softplus(-d(real)).mean() + F.softplus(d(fake)).mean() + regularizer(d, d_scaler, real, fake)
        d_scaler.scale(loss).backward()
        d_scaler.step(d_optimizer)
        d_scaler.update()
        d_optimizer.zero_grad()
        after(d)
        g_scaler.scale(F.softplus(-d(g(noise))).mean()).backward()
        g_scaler.step(g_optimizer)
        g_scaler.update()
        g_optimizer.zero_grad()
        d_optimizer.zero_grad()


class Plain(Stock):
    def get_scale(self):
        return 1.0


def descent(model, lr=0.5):
    return sgd(model, lr, momentum=0.5)  # large updates, since the rounding of stored weights hides small ones


def compare_gan(name, slack=1.0, networks_compared=2, lr=0.5, **options):
    """Compare both networks, or only the critic, with fp32's; return the critic under the recipe."""
    ours, stock = networks(name), networks(name)
    start = [values(model) for model in ours]
    prepared = [prepare(name, model, descent(model, lr)) for model in ours]
    torch.manual_seed(1)
    train_gan(*prepared, **options)
    train_gan(*[(model, descent(model, lr), Plain()) for model in stock], **options)
    for before, model, expected in [*zip(start, ours, stock, strict=True)][-networks_compared:]:
        assert_near_fp32(name, before, values(model), values(expected), slack)
    return ours[1]


@way()
def test_gan(name):
    """GAN: prepare each network with its own optimizer, and use each one's scaler."""
    compare_gan(name, slack=3)


@way(may_refuse=ROUNDING)
def test_gradient_penalty(name):
    """Gradient penalty: `torch.autograd.grad(scaler.scale(critic(x).sum()), x, create_graph=True)`, then divide by
    `scaler.get_scale()`. A rounded matmul has no second derivative."""
    compare_gan(name, slack=2, regularizer=penalty)


def through_data(critic):
    for parameter in critic.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def through_no_grad(critic):
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.clamp_(-0.2, 0.2)


@way()
def test_clamp(name):
    """Weights clamped after each step: through `.data` or under no_grad; masters follow."""
    for clamp in (through_data, through_no_grad):
        critic = compare_gan(name, slack=2, networks_compared=1, lr=0.1, after=clamp)
        assert max(value.abs().max() for value in values(critic).values()) <= 0.21


@way()
def test_mask(name):
    """Masks after each step: multiply the weights under no_grad; the others keep their masters."""
    torch.manual_seed(3)
    stock = model_for(name)
    model, start = copy.deepcopy(stock), values(stock)
    mask = torch.rand_like(stock[0].weight) < 0.5
    for trained, optimizer, scaler in (prepare(name, model), (stock, sgd(stock), Stock())):
        for seed in range(4):
            x, y = batch(seed)
            scaler.scale(F.mse_loss(trained(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            with torch.no_grad():
                trained[0].weight.mul_(mask)
    assert (values(model)["0.weight"][~mask] == 0).all()
    assert (values(model)["0.weight"][mask] != 0).all()
    assert_near_fp32(name, start, values(model), values(stock))
