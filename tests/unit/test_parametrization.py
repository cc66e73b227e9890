"""u-muP and munit scaling: abc-symmetry, equal shares of variance, and activation sizes that do not change with
width."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from families import for_each, slow_unless
from halfstep import unit
from halfstep.errors import ModelError
from halfstep.unit.roles import optimizer_kind


WIDTHS = (64, 256, 512)
ALL_WIDTHS = (64, 128, 256, 512, 1024, 2048)


# ---- abc-symmetry ---------------------------------------------------------------------------------------------------


def test_losses_are_equal_under_mup_and_umup():
    """The hidden layers of a 3-layer MLP under muP (A = 1, B = m^-1/2, C = 1 / m) and under u-muP (A = m^-1/2, B = 1, C
    = m^-1/2), 20 steps of Adam with eps = 0: abc-symmetry with t = m^-1/2."""
    torch.manual_seed(0)
    width, data, target = 64, torch.randn(32, 8, dtype=torch.float64), torch.randn(32, 1, dtype=torch.float64)
    shapes, kinds = [(width, 8), (width, width), (1, width)], ("input", "hidden", "readout")
    umup = unit.get_parametrization("umup")
    weights = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    roles = [unit.Role(kind, shape[1], shape[0]) for kind, shape in zip(kinds, shapes, strict=True)]
    mine = [umup.multiplier(role) for role in roles]
    theirs = [mine[0], 1.0, mine[2]]
    adam = optimizer_kind("adam")
    rates = [umup.lr(role, adam, None) for role in roles]
    assert rates[1] == width**-0.5

    def losses(factors, start, rates):
        parameters = [nn.Parameter(w * s) for w, s in zip(weights, start, strict=True)]
        groups = [{"params": [p], "lr": 0.1 * rate} for p, rate in zip(parameters, rates, strict=True)]
        optimizer, found = torch.optim.Adam(groups, eps=0.0), []
        for _ in range(20):
            x = data
            for factor, p in zip(factors, parameters, strict=True):
                x = F.linear(x if p is parameters[0] else torch.tanh(x), p) * factor
            loss = F.mse_loss(x, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return torch.tensor(found, dtype=torch.float64)

    one = losses(mine, [1.0, 1.0, 1.0], rates)
    other = losses(theirs, [1.0, width**-0.5, 1.0], [rates[0], 1 / width, rates[2]])
    torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
    assert one[-1] < one[0] / 2
    wrong = losses(theirs, [1.0, width**-0.5, 1.0], [rates[0], width**-0.5, rates[2]])
    assert float((one - wrong).abs().max()) > 1e-3


# ---- residual ratios ------------------------------------------------------------------------------------------------


def shares(scheme, layers):
    """The shares of the output's variance: of the embedding, and of each residual layer."""
    parts = [1.0]
    for index in range(layers):
        square = scheme(index, layers) ** 2
        parts = [part / (1 + square) for part in parts] + [square / (1 + square)]
    return parts


def test_residual_ratios_of_eight_branches():
    found = [unit.equal_shares()(index, 8) for index in range(8)]
    assert [round(ratio, 4) for ratio in found] == [0.5, 0.4472, 0.4082, 0.3780, 0.3536, 0.3333, 0.3162, 0.3015]


@pytest.mark.parametrize("layers", [2, 8, 64])
def test_equal_shares_of_the_variance(layers):
    parts = shares(unit.equal_shares(), layers)
    assert (parts[0], sum(parts[1::2]), sum(parts[2::2])) == pytest.approx((1 / 3,) * 3, rel=1e-12)
    assert max(parts[1:]) == pytest.approx(min(parts[1:]), rel=1e-12)


@for_each("mult,ratio", [(0.5, 1.0), (2.0, 1.0), (1.0, 0.25), (1.5, 3.0)])
def test_equal_shares_multipliers_set_the_variance_ratios(mult, ratio):
    parts = shares(unit.equal_shares(mult, ratio), 12)
    attention, mlp = sum(parts[1::2]), sum(parts[2::2])
    assert attention / mlp == pytest.approx(ratio**2, rel=1e-12)
    assert (attention + mlp) / 2 / parts[0] == pytest.approx(mult**2, rel=1e-12)


def test_running_mean_and_fixed_ratios_and_invalid_schemes():
    parts = shares(unit.running_mean(), 10)
    assert parts == pytest.approx([1 / 11] * 11, rel=1e-12)
    assert shares(unit.fixed(0.25), 1) == pytest.approx([0.75, 0.25], rel=1e-12)
    for scheme in (lambda: unit.fixed(1.0), lambda: unit.equal_shares(0.0), lambda: unit.equal_shares(1.0, -1.0)):
        with pytest.raises(ModelError, match="expected"):
            scheme()


@pytest.mark.parametrize("tau", [0.1, 0.4])
def test_forty_layers_keep_the_variance(tau):
    torch.manual_seed(0)
    x, ratio = torch.randn(200_000), unit.fixed(tau)(0, 40)
    for _ in range(40):
        branch, skip = unit.residual_split(x, ratio=ratio)
        x = unit.residual_add(torch.randn_like(branch), skip, ratio=ratio)
    assert float(x.var()) == pytest.approx(1.0, abs=0.01)


# ---- activation sizes over widths -----------------------------------------------------------------------------------


def mlp(width, parametrization):
    sizes = [(64, width), (width, width), (width, width), (width, 10)]
    kinds = ("input", "hidden", "hidden", "readout")
    if parametrization == "standard":
        layers = [nn.Linear(*size, bias=False) for size in sizes]
        for layer in layers:
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
    else:
        same = parametrization == "munit"
        constraints = [unit.SAME] * 4 if same else ["to_output"] * 3 + ["none"]
        layers = [
            unit.Linear(*size, role=kind, constraint=constraint)
            for size, kind, constraint in zip(sizes, kinds, constraints, strict=True)
        ]
    model = nn.Sequential()
    for layer in layers:
        model.extend([layer, nn.ReLU() if parametrization == "standard" else unit.ReLU()])
    model = model[:-1]
    unit.set_roles(model, {f"{2 * n}.weight": kind for n, kind in enumerate(kinds)})
    return model


def sizes_after(width, parametrization, lr, steps, seed=0):
    """The root mean squares of the last hidden layer and of the logits."""
    torch.manual_seed(seed)
    model = mlp(width, parametrization)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 64, generator=generator)
    classes = torch.randint(0, 10, (64,), generator=generator)
    groups = unit.parameter_groups(model, torch.optim.Adam, lr=lr, parametrization=parametrization)
    optimizer = torch.optim.Adam(groups)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), classes).backward()
        optimizer.step()
    with torch.no_grad():
        hidden = model[:-1](x)
        return [float(t.pow(2).mean().sqrt()) for t in (hidden, model[-1](hidden))]


@pytest.mark.quick("umup-widths0")
@pytest.mark.parametrize("widths", slow_unless(lambda widths: widths == (WIDTHS,), [(WIDTHS,), (ALL_WIDTHS,)]))
@pytest.mark.parametrize("parametrization", ["umup", "munit"])
def test_activation_sizes_after_ten_steps_do_not_depend_on_width(parametrization, widths):
    """Within 10 % of the middle, means of three seeds."""
    runs = [[sizes_after(width, parametrization, 0.1, 10, seed) for seed in range(3)] for width in widths]
    found = torch.tensor(runs).mean(1)
    spread = found.amax(0) / found.amin(0)
    assert float(spread.max()) < 1.1 / 0.9, found
    assert float(found[0, 1]) > 0.3  # it has learned something


@pytest.mark.slow
def test_logits_after_ten_steps_grow_under_the_standard_parametrization():
    small, large = (sizes_after(width, "standard", 0.01, 10)[1] for width in (64, 2048))
    assert large > 3 * small


@pytest.mark.slow
def test_initial_logits_fall_with_the_root_of_the_width():
    """By design; other tests therefore compare sizes after some steps."""
    small, large = (
        torch.tensor([sizes_after(width, "umup", 0.1, 0, seed)[1] for seed in range(24)]).pow(2).mean().sqrt()
        for width in (64, 1024)
    )
    assert math.log2(small / large) == pytest.approx(2.0, abs=0.25)


def test_umup_and_munit_agree_without_residual_branches():
    """Their gradients differ by a constant per layer, which Adam does not see."""
    found = torch.tensor([[sizes_after(64, name, 0.05, 5)] for name in ("umup", "munit")])
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=0)
