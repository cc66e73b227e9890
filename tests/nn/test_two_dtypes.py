"""16-bit weights with float32 inputs, in layers and in modules' own code, whose kernels take one dtype only."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import halfstep
from families import for_each, slow_unless
from halfstep import recipe
from halfstep.errors import RecipeError
from halfstep.recipe import Recipe, Rule
from tiny import BREAKS, FAST, FOUR, PROJECTED, RECIPES, Estimated, adamw, mostly_slow, prepared


class Own(nn.Module):
    """A layer norm as people write it, or another function that refuses mixed dtypes."""

    def __init__(self, function=None):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(8) + 0.5), nn.Parameter(torch.rand(8))
        self.function = function or (lambda x, w, b: F.layer_norm(x, (8,), w, b))

    def forward(self, x):
        return self.function(x, self.weight, self.bias)


class Beside(nn.Module):
    """Adds a float32 buffer to a 16-bit input."""

    def __init__(self):
        super().__init__()
        self.inner, self.weight = nn.Linear(8, 8), nn.Parameter(torch.rand(8) + 0.5)
        self.register_buffer("positions", torch.randn(8))

    def forward(self, x):
        return F.layer_norm(self.inner(x) + self.positions, (8,), weight=self.weight, bias=None)


class Twice(nn.Module):
    """A module that takes its input twice, or with per-sample weights."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        if isinstance(self.layer, nn.Bilinear):
            return self.layer(x, x * 0.5)
        bags = torch.arange(24).view(12, 2) % 9
        return self.layer(bags, per_sample_weights=x[:, :2].sigmoid())


OWN = {
    "layer_norm": None,
    "group_norm": lambda x, w, b: F.group_norm(x, 2, w, b),
    "batch_norm": lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    "rms_norm": lambda x, w, b: F.rms_norm(x, (8,), w) + b,
    "torch.layer_norm": lambda x, w, b: torch.layer_norm(x, (8,), w, b),
    "mv": lambda x, w, b: x * torch.mv(x, w)[:, None] + b,
    "lerp": lambda x, w, b: torch.lerp(x, w.expand_as(x), 0.25) + b,
    "dot": lambda x, w, b: x + torch.stack([row.dot(w) for row in x])[:, None] * b,
}
LAYERS = {
    "instance": lambda: nn.InstanceNorm1d(8, affine=True),
    "batch": lambda: nn.BatchNorm1d(8, track_running_stats=False),
    "bilinear": lambda: Twice(nn.Bilinear(8, 8, 8)),
    "bag": lambda: Twice(nn.EmbeddingBag(9, 8, mode="sum")),
    "bag with padding": lambda: Twice(nn.EmbeddingBag(9, 8, mode="sum", padding_idx=3)),
    "beside": Beside,
    **{name: (lambda f: lambda: Own(f))(function) for name, function in OWN.items()},
}


def model(name):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    if name == "instance":
        return nn.Sequential(
            nn.Unflatten(1, (8, 1)), nn.Upsample(scale_factor=2), layer, nn.Flatten(), nn.Linear(16, 4)
        )
    return nn.Sequential(layer, nn.Linear(8, 4))


def data():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(12, 8, generator=generator), torch.randn(12, 4, generator=generator)


def rates(name):
    """Relative tolerances of outputs and of gradients. For 4 bits: a third more than is seen, 0.35 and 0.48 with wide
    inputs."""
    made = recipe.get_recipe(name)
    rounds = any(rule.linear.rounds for rule in made.rules)
    rate = 0.2 if rounds else {"fp32": 1e-5, "bf16": 0.03, "fp16": 0.004}[made.compute]
    return (0.47, 0.64) if name in FOUR else (rate, 2 * rate)


def compare(name, stock, changed, x):
    """Compare outputs and gradients with the stock model's, within the recipe's own rounding."""
    near, near_gradients = rates(name)
    model, optimizer, scaler = prepared(name, changed)
    with Estimated(name):
        expected = stock(x)
    found = model(x)
    assert found.dtype == torch.float32
    assert (found - expected).norm() <= near * expected.norm()
    (expected.square().mean() / 64).backward()
    scaler.scale(found.square().mean() / 64).backward()  # within fp16's range, at the first scale too
    trained = {n: p for n, p in model.named_parameters() if p.grad is not None}
    assert len(trained) == sum(p.grad is not None for p in stock.parameters())
    total = torch.cat([p.grad.flatten() for p in stock.parameters() if p.grad is not None])
    ours = torch.cat([halfstep.ops.values_of(p.grad).float().flatten() for p in trained.values()])
    assert (ours / scaler.get_scale() - total).norm() <= near_gradients * total.norm()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.quick("fp8-current", "bf16-master")
@pytest.mark.filterwarnings("ignore:.*does not round")
@pytest.mark.parametrize("name", mostly_slow(RECIPES))
@for_each("layer", LAYERS)
def test_layers_take_a_float32_input_under_every_recipe(name, layer):
    compare(name, model(layer), model(layer), data()[0])


def test_an_embedding_bag_sums_16_bit_rows_in_float32():
    bag, x = nn.EmbeddingBag(9, 8, mode="sum", padding_idx=3), data()[0]
    indices, offsets = torch.arange(24) % 9, torch.arange(0, 24, 4)
    weights = x.flatten()[:24].clone().requires_grad_()
    halfstep.apply(changed := nn.ModuleDict({"bag": copy.deepcopy(bag)}), "bf16-master")
    bag.weight.data = changed.bag.weight.detach().float()
    stock, found = bag(indices, offsets, weights), changed.bag(indices, offsets, weights)
    torch.testing.assert_close(found, stock)
    stock.sum().backward()
    found.sum().backward()
    torch.testing.assert_close(changed.bag.weight.grad.float(), bag.weight.grad, rtol=0.01, atol=0.01)
    with torch.no_grad():
        torch.testing.assert_close(
            changed.bag(indices.view(12, 2)).float(), bag(indices.view(12, 2)), rtol=0.01, atol=0.01
        )


def test_a_modules_own_code_on_16_bit_inputs_changes_no_bit():
    """Nothing is wider than the weights."""
    layer = Own().bfloat16()
    x = torch.randn(12, 8).bfloat16()
    expected = layer(x)
    halfstep.apply(changed := nn.Sequential(Own()), "bf16-master")
    changed[0].load_state_dict(layer.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        found = changed[0](x)
    assert torch.equal(found, expected)
    halfstep.revert(changed)
    assert type(changed[0]) is Own


def test_checkpointing_a_modules_own_code_changes_no_bit():
    name = "bf16-master"
    plain, kept = model("layer_norm"), model("layer_norm")
    inner = kept[0]
    kept[0] = Checkpointed(inner)
    for each in (plain, kept):
        halfstep.apply(each, name)
        each(data()[0]).square().sum().backward()
    assert torch.equal(plain[0].weight.grad, inner.weight.grad)


class Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


SPECTRAL = {
    "spectral": nn.utils.spectral_norm,
    "spectral parametrization": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "weight_norm": nn.utils.weight_norm,
    "weight_norm parametrization": parametrizations.weight_norm,
}


def normed(kind):
    torch.manual_seed(0)
    return nn.Sequential(SPECTRAL[kind](nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8))


pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")


@pytest.mark.quick("spectral-bf16-master", "spectral parametrization-bf16-master", "weight_norm-bf16-master")
@pytest.mark.parametrize(
    ("kind", "name"),
    slow_unless(
        lambda case: case[1] in FAST and (case[0] == "spectral" or case[1] in ("fp16-mixed", "bf16-master")),
        itertools.product(SPECTRAL, RECIPES),
    ),
)
def test_parametrized_weights_follow_the_recipe(name, kind):
    compare(name, normed(kind), normed(kind), data()[0])
    changed, stock = normed(kind), normed(kind)
    trained, optimizer, scaler = prepared(name, changed)
    plain = adamw(stock)
    x, y = data()[0], data()[0].flip(0)
    losses = []
    for _ in range(8):
        for each, own in ((trained, optimizer), (stock, plain)):
            loss = F.mse_loss(each(x), y)
            losses.append(loss.item())
            scaler.scale(loss).backward() if own is optimizer else loss.backward()
            scaler.step(own) if own is optimizer else own.step()
            own.zero_grad()
        scaler.update()
    if name in PROJECTED:  # steps in a subspace of the gradient differ from AdamW's
        assert losses[-2] < losses[0]
    elif name not in BREAKS:
        assert losses[-2] == pytest.approx(losses[-1], rel=0.1)


@pytest.mark.parametrize("name", mostly_slow(RECIPES))
def test_a_prepared_layer_can_be_parametrized(name):
    """torch gives the layer another class that derives from ours. Removing the parametrization restores ours."""
    torch.manual_seed(0)
    changed, stock = nn.Linear(8, 8), nn.Linear(8, 8)
    stock.load_state_dict(changed.state_dict())
    root, twin = nn.Sequential(changed, nn.Tanh(), nn.Linear(8, 4)), nn.Sequential(stock, nn.Tanh(), nn.Linear(8, 4))
    twin.load_state_dict(root.state_dict())
    halfstep.apply(root, name)
    adopted = type(root[0])
    for each in (root, twin):
        torch.manual_seed(1)
        parametrizations.spectral_norm(each[0])
    x = data()[0]
    expected, found = twin(x), root(x)
    assert (found - expected).norm() <= rates(name)[name not in FOUR] * expected.norm()
    found.sum().backward()
    assert root[0].parametrizations.weight.original.grad is not None
    if adopted is not nn.Linear:
        with pytest.raises(RecipeError, match=r"0 was given another class .*remove_parametrizations., then revert"):
            halfstep.revert(root)
    parametrize.remove_parametrizations(root[0], "weight")
    assert type(root[0]) is adopted
    halfstep.revert(root)
    assert type(root[0]) is nn.Linear


def test_rules_match_a_parametrized_layer_but_not_its_parametrization():
    changed = normed("spectral parametrization")
    report = halfstep.apply(
        changed, Recipe("made", "", "", rules=(Rule("*", recipe.get_recipe("fp8-current").rules[-1].linear),))
    )
    assert report.quantized == ("0", "2")
    assert report.kept == {}
