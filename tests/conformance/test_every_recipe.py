"""Checks that every recipe must pass."""

import copy
import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfstep
from families import slow_unless
from halfstep import get_recipe
from halfstep.optim import convert
from halfstep.quant.masters import get_master
from halfstep.recipe import MASTER, get_storage, is_master
from tiny import (
    BREAKS,
    EVERY,
    FAST,
    FOUR,
    PROJECTED,
    SMOOTH,
    Gated,
    adamw,
    assert_same,
    batch,
    copied,
    grads,
    mlp,
    model_for,
    mostly_slow,
    prepared,
    train,
)  # fmt: skip


every_recipe = pytest.mark.parametrize("name", EVERY)
both_kinds_of_cpu = pytest.mark.parametrize(  # every recipe with native matmuls, one of each path with emulated ones
    ("name", "products"),
    [*itertools.product(EVERY, ["own"]), *mostly_slow(EVERY, "carried")],
    indirect=["products"],
)
SOME = FAST | {"coat", "nvfp4"}  # FAST lacks recipes with low-bit saved activations and rotations
some_recipes = pytest.mark.parametrize("name", slow_unless(SOME.__contains__, EVERY))
some_on_both_kinds_of_cpu = pytest.mark.parametrize(
    ("name", "products"),
    slow_unless(lambda case: case[0] in SOME, itertools.product(EVERY, ["own", "carried"])),
    indirect=["products"],
)
WIDE = [name for name in EVERY if get_recipe(name).weights == "fp32"]
FEW = [name for name in EVERY if any(rule.linear.rounds for rule in get_recipe(name).rules)]
SANE = [name for name in EVERY if name not in BREAKS]
TRACED = [("fp16-mixed", "own"), ("mxfp8", "carried")]
"""Fast cases; the others take a second each."""


def gradients(model, scaler, rows=slice(None)):
    x, y = (t[rows] for t in batch())
    scaler.scale(F.mse_loss(model(x), y)).backward()
    return grads(model)


@some_on_both_kinds_of_cpu
def test_outputs_are_float32_and_autocast_is_off_afterwards(name, products):
    model, _, _ = prepared(name)
    assert model(batch()[0]).dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


@both_kinds_of_cpu
def test_recipe_changes_the_outputs(name, products):
    """Weights or outputs differ from the stock model's; a recipe without effect would pass the other tests."""
    stock = model_for(name)(batch()[0])
    model, _, _ = prepared(name)
    assert torch.equal(model(batch()[0]), stock) == (name == "fp32")
    atol = 0.6 if name in FOUR else 0.2 if name in FEW else 0.05  # twice the largest error of 4 bits, 0.30
    torch.testing.assert_close(model(batch()[0]), stock, rtol=0.05, atol=atol)


@some_recipes
def test_parameter_storages_are_resizable(name):
    """FSDP2 resizes storages to free full weights; a storage taken from a numpy array cannot be resized."""
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler, steps=1)
    assert all(parameter.untyped_storage().resizable() for parameter in model.parameters())


@every_recipe
def test_parameters_and_moments_have_the_recipes_dtypes(name):
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler)
    recipe = get_recipe(name)
    for path, parameter in model.named_parameters():
        codes = recipe.codes if path in ("0.weight", "3.weight") else None
        memory = parameter.codes if codes else parameter
        assert memory.dtype == (codes.weights.scaled_dtype if codes else get_storage(recipe.weights).dtype)
        kind = recipe.moment("exp_avg_sq", parameter.numel())
        assert optimizer.state[parameter]["exp_avg_sq"].dtype == kind.layout("v", tuple(parameter.shape))["v"][0]
        kept = {state for state in optimizer.state[parameter] if is_master(state)}
        own = {MASTER, f"{MASTER}_scale"} if codes and codes.master else set()
        assert kept == own | get_master(recipe.master).keeps.keys()


@pytest.mark.quick("fp32", "fp16-mixed-unscaled", "fp16-static", "fp8-current", "fp8-rowwise", "bf16-nomaster")
@every_recipe
def test_prepare_keeps_names_identities_classes_and_signatures(name):
    model = model_for(name)
    keys, parameters, modules = list(model.state_dict()), list(model.parameters()), list(model.modules())
    names = [(type(m).__name__, type(m).__qualname__, type(m).__module__) for m in modules]
    signatures = [inspect.signature(m.forward) for m in modules]
    kinds = [type(m) for m in modules]
    returned, _, _ = prepared(name, model)
    assert returned is model
    assert list(model.state_dict()) == keys
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert all(m is n for m, n in zip(model.modules(), modules, strict=True))
    assert [(type(m).__name__, type(m).__qualname__, type(m).__module__) for m in modules] == names
    assert [inspect.signature(m.forward) for m in modules] == signatures
    assert all(isinstance(m, kind) for m, kind in zip(modules, kinds, strict=True))


@pytest.mark.quick("bf16-mixed", "bf16-nomaster", "coat")
@pytest.mark.parametrize("name", [name for name in EVERY if name not in SMOOTH + PROJECTED])
def test_tied_weights_stay_tied(name):
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    model, optimizer, scaler = prepared(name, model)
    x, y = torch.arange(8), torch.arange(8)
    train(model, optimizer, scaler, data=(x, y), loss_of=F.cross_entropy)
    assert model[1].weight is model[0].weight
    assert len(optimizer.state) == 1
    restored = copy.deepcopy(model)
    assert restored[1].weight is restored[0].weight
    halfstep.revert(model)
    assert model[1].weight is model[0].weight


@pytest.mark.quick("bf16-megatron", "fp8-rowwise-gw-hp", "fp16-master", "bf16-fp32grad", "bf16-nomaster", "nf4")
@every_recipe
def test_revert_restores_the_stock_model(name):
    stock, model = model_for(name), model_for(name)
    kinds = [type(m) for m in model.modules()]
    attributes = [set(vars(m)) for m in model.modules()]
    halfstep.apply(model, name)
    halfstep.revert(model)
    assert [type(m) for m in model.modules()] == kinds
    assert [set(vars(m)) for m in model.modules()] == attributes
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    if name in WIDE:
        assert_same(dict(model.state_dict()), dict(stock.state_dict()))
        assert_same(model(batch()[0]), stock(batch()[0]))
    else:
        stored = {"bf16": torch.bfloat16, "fp16": torch.float16}[get_recipe(name).weights]
        expected = {key: value.to(stored).float() for key, value in stock.state_dict().items()}
        assert_same(dict(model.state_dict()), expected)
    halfstep.apply(model, name)


@pytest.mark.quick("mxfp8-carried")
@pytest.mark.parametrize(
    ("name", "products"),
    slow_unless(
        TRACED.__contains__,
        [
            *((name, "own") for name in ("bf16-mixed", "fp16-mixed", "fp8-current", "mxfp8")),
            *((n, "carried") for n in EVERY),
        ],
    ),
    indirect=["products"],
)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by torch's tracer
def test_compiled_forward_and_backward_equal_eager(name, products):
    torch._dynamo.reset()  # earlier recipes would count against torch's recompile limit
    model, _, scaler = prepared(name)
    twin = copy.deepcopy(model)
    x = batch()[0]
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    assert_same(compiled(x), model(x))
    for each in (compiled, model):
        scaler.scale(each(x).square().mean()).backward()
    assert_same(grads(twin), grads(model))


class Checkpointed(nn.Module):
    def __init__(self, on, name):
        super().__init__()
        self.on, self.body, self.head = on, model_for(name), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False) if self.on else self.body(x))


@pytest.mark.quick("fp32-carried", "bf16-stochastic-own", "coat-carried")
@some_on_both_kinds_of_cpu
def test_activation_checkpointing_changes_no_bit(name, products):
    found = []
    for on in (True, False):
        torch.manual_seed(4)
        model, _, scaler = prepared(name, Checkpointed(on, name))
        found.append(gradients(model, scaler))
    assert_same(*found)


@pytest.mark.quick("fp16-mixed-own", "bf16-collage-plus-own", "bf16-stochastic-own")
@some_on_both_kinds_of_cpu
def test_two_micro_batches_equal_one_batch(name, products):
    model, _, scaler = prepared(name)
    scaler.update(64.0)
    whole = gradients(model, scaler)
    model.zero_grad()
    gradients(model, scaler, slice(0, 6))
    halves = gradients(model, scaler, slice(6, 12))
    tolerance = 1e-5 if name == "fp32" else 0.3 if name in FEW else 0.1  # gradients have two mantissa bits
    for key, expected in whole.items():
        difference = (halves[key].float() / 2 - expected.float()).norm() / expected.float().norm()
        assert difference < tolerance, key


@some_recipes
@pytest.mark.parametrize("rows", [(6,), (2, 3)])
def test_in_place_ops_on_layer_outputs(name, rows):
    """`y += x` and `ReLU(inplace=True)` equal `y = y + x` and `ReLU()`."""

    class Both(nn.Module):
        def __init__(self, inplace):
            super().__init__()
            self.inplace, self.inner, self.gated = inplace, nn.Linear(8, 8), Gated(8, 8)
            self.relu = nn.ReLU(inplace=inplace)

        def forward(self, x):
            y = self.relu(self.inner(x))
            z = self.gated(y)
            if self.inplace:
                z += y
                return z.mul_(2)
            return (z + y) * 2

    found = []
    for inplace in (True, False):
        torch.manual_seed(0)
        model, _, scaler = prepared(name, Both(inplace))
        output = model(torch.randn(*rows, 8))
        scaler.scale(output.square().mean()).backward()
        found.append([output.detach(), grads(model)])
    assert_same(*found)


@some_recipes
def test_module_and_parameter_hooks_still_run(name):
    model, seen = model_for(name), []
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[3].register_full_backward_hook(lambda *_: seen.append("backward"))
    model.register_forward_pre_hook(lambda *_: seen.append("root"))
    model[0].weight.register_post_accumulate_grad_hook(lambda _: seen.append("gradient"))
    model, _, scaler = prepared(name, model)
    gradients(model, scaler)
    assert set(seen) == {"root", "forward", "backward", "gradient"}


@pytest.mark.quick(
    "fp32-own", "fp32-carried", "bf16-mixed-own", "fp16-mixed-own", "fp16-mixed-carried", "bf16-stochastic-own"
)
@some_on_both_kinds_of_cpu
def test_deepcopied_model_follows_the_recipe(name, products):
    model, _, _ = prepared(name)
    twin = copy.deepcopy(model)
    assert_same(twin(batch()[0]), model(batch()[0]))
    with pytest.raises(halfstep.HalfstepError, match="already follows"):
        halfstep.apply(twin, name)
    halfstep.revert(twin)
    halfstep.apply(twin, "fp32")


@pytest.mark.quick(
    "own-fp32", "own-fp8-delayed", "own-bf16-stochastic", "carried-fp16-mixed", "carried-mxfp8", "carried-fp4-wang"
)
@pytest.mark.parametrize("name", mostly_slow(SANE))
@pytest.mark.usefixtures("products")
def test_loss_falls(name):
    model, optimizer, scaler = prepared(name)
    losses = train(model, optimizer, scaler, 25)
    assert min(losses[-3:]) < 0.8 * losses[0]


def test_fp32_recipe_equals_the_stock_loop_bit_for_bit():
    """Also with dropout: prepare draws nothing from torch's generator."""
    runs = []
    for identity in (True, False):
        model = nn.Sequential(mlp(), nn.Dropout(0.3))
        torch.manual_seed(7)
        optimizer = adamw(model, weight_decay=0.1)
        if identity:
            model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe="fp32")
        else:
            optimizer, scaler = convert(optimizer, get_recipe("fp32"), {}), torch.amp.GradScaler("cpu", enabled=False)
        runs.append((train(model, optimizer, scaler, 5), copied(model.state_dict())))
    assert_same(runs[0], runs[1])


@pytest.mark.parametrize("name", ["bf16-mixed", "fp16-mixed"])
@pytest.mark.cpu
def test_mixed_recipes_equal_torch_amp_bit_for_bit(name, carry):
    carry()  # native matmuls on any machine
    dtype = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}[name]
    model, optimizer, scaler = prepared(name)
    losses = train(model, optimizer, scaler, 5)
    stock = mlp()
    stock_optimizer = convert(adamw(stock), get_recipe("fp32"), {})
    stock_scaler = torch.amp.GradScaler("cpu", enabled=name == "fp16-mixed")
    x, y = batch()
    expected = []
    for _ in range(5):
        with torch.autocast("cpu", dtype):
            output = stock(x)
        loss = F.mse_loss(output.float(), y)
        stock_scaler.scale(loss).backward()
        stock_scaler.step(stock_optimizer)
        stock_scaler.update()
        stock.zero_grad()
        expected.append(loss.item())
    assert losses == expected
    assert_same(dict(model.state_dict()), dict(stock.state_dict()))
