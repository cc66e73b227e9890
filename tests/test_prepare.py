"""`prepare`: the documented loop, updates that stall without masters, public names, and rejected models."""

import importlib
import pkgutil

import pytest
import torch
from torch import nn

import halfstep
from families import for_each
from halfstep.errors import ModelError
from halfstep.preparation import full_weights
from halfstep.recipe import DTYPES, Recipe, get_recipe
from tiny import RECIPES, adamw, assert_same, batch, descend, mlp, mostly_slow, prepared


def weight_after_steps(weights, master=None, rounding="nearest_even", times=4096):
    """A weight of 1.0 after `times` steps of -1/times through the real optimizer, and its master."""
    weight = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(weight.weight)
    recipe = Recipe("made", "", "", weights=weights, master=master, update_rounding=rounding)
    _, optimizer, _ = halfstep.prepare(weight, torch.optim.SGD(weight.parameters(), lr=1.0), recipe, generator=1)
    weight.weight.grad = torch.full((1, 1), 1 / times, dtype=DTYPES[weights])
    for _ in range(times):
        optimizer.step()
    return weight.weight.item(), optimizer.state[weight.weight].get("master")


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["fp16", "bf16"])
def test_16_bit_weights_stall_without_a_master(weights):
    assert weight_after_steps(weights) == (1.0, None)
    value, master = weight_after_steps(weights, "fp32")
    assert value == master.item() == 0.0


@pytest.mark.slow
def test_fp32_weights_do_not_stall():
    assert weight_after_steps("fp32")[0] == 0.0


def test_stochastic_rounding_does_not_stall_on_average():
    assert weight_after_steps("bf16", times=1024)[0] == 1.0
    assert weight_after_steps("bf16", rounding="stochastic", times=1024)[0] == pytest.approx(0.0, abs=0.15)


@pytest.mark.parametrize(
    ("weights", "step", "moves"),
    [("fp16", -12, False), ("fp16", -11, True), ("bf16", -9, False), ("bf16", -8, True)],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_updates_of_up_to_half_a_gap_are_lost(weights, step, moves, sign):
    """1 - 2^-12 and 1 + 2^-11 are lost in fp16, 1 - 2^-9 and 1 + 2^-8 in bf16: half a gap, and ties go to even 1."""
    size = 2.0 ** (step + (sign > 0))
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    recipe = Recipe("made", "", "", weights=weights)
    _, optimizer, _ = halfstep.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), recipe)
    model.weight.grad = torch.full((1, 1), -sign * size, dtype=DTYPES[weights])
    optimizer.step()
    assert (model.weight.item() != 1.0) == moves


@pytest.mark.quick("fp32", "bf16-mixed", "bf16-stochastic")
@pytest.mark.parametrize("name", mostly_slow(RECIPES))
def test_documented_loop_trains(name):
    model = mlp()
    optimizer = adamw(model)
    x, y = batch()
    model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe=name)
    losses = descend(lambda: torch.nn.functional.mse_loss(model(x), y), optimizer, scaler, steps=12)
    assert losses[-1] < losses[0]
    scale = get_recipe(name).loss_scale
    assert scaler.get_scale() <= (scale.init if scale else 1.0)
    assert scaler.is_enabled() == (scale is not None)


def test_masters_start_from_unrounded_weights():
    model = mlp()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model, optimizer, _ = prepared("bf16-master", model)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(optimizer.state[parameter]["master"], before[name], rtol=0, atol=0)
    assert not torch.equal(before["0.weight"], model[0].weight.detach().float())


def test_parameter_outside_the_model_is_trained_unchanged():
    """An optimizer may hold parameters outside the model, such as a temperature of the loss."""
    model, extra = mlp(), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.5)
    model, optimizer, _ = prepared("bf16-master", model, optimizer)
    extra.grad = torch.ones(2)
    optimizer.step()
    torch.testing.assert_close(extra.detach(), torch.full((2,), 0.5))


@pytest.mark.parametrize("name", ["bf16-master", "bf16-split", "fp8lm-o3"])
def test_two_optimizers_of_one_model_equal_a_single_one(name):
    """Masters start from the weights before `apply` rounded them, in one optimizer or two that share a model."""
    found = []
    for steps in (1, 2):
        model = mlp()
        parts = [[*model[0].parameters(), *model[2].parameters()], [*model[3].parameters()]]
        if steps == 1:
            both = halfstep.prepare(model, torch.optim.AdamW([*parts[0], *parts[1]], lr=1e-2), name, generator=3)[1:]
            optimizers = [both[0]]
        else:
            masters = full_weights(model, get_recipe(name))
            halfstep.apply(model, name)
            optimizers = [
                halfstep.optimize(model, torch.optim.AdamW(part, lr=1e-2), generator=3, masters=masters)[0]
                for part in parts
            ]
        for _ in range(3):
            x, y = batch()
            torch.nn.functional.mse_loss(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            halfstep.advance(model)
        found.append(dict(model.state_dict()))
    assert_same(*found)


@for_each("name", halfstep.__all__)
def test_public_names_are_unaffected_by_imports_of_modules(name):
    """A function and a module of the same name would collide once the module is imported."""
    for info in pkgutil.walk_packages(halfstep.__path__, "halfstep."):
        if not any(part in info.name for part in ("__main__", ".report", ".gpu.jit.", ".executors.")):
            importlib.import_module(info.name)
    value = getattr(halfstep, name)
    assert callable(value) or name in halfstep._ROOMS
    assert callable(halfstep.formats.ieee)
    assert callable(halfstep.ops.linear)
    assert callable(halfstep.nn.apply)


def test_unknown_public_name_raises():
    with pytest.raises(AttributeError, match="module 'halfstep' has no attribute 'prepair'"):
        _ = halfstep.prepair
    assert dir(halfstep) == sorted(halfstep.__all__)


def test_swapped_model_and_optimizer_raise():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(ModelError, match=r"model is a SGD, expected a module: halfstep\.prepare\(model, optimizer"):
        halfstep.prepare(optimizer, nn.Linear(2, 2), "bf16-mixed")


@pytest.mark.parametrize("recipe", ["bf16-stochastic", "bf16-mixed"])
def test_weights_assigned_in_another_dtype_raise(recipe):
    """`load_state_dict(assign=True)` changes dtypes; models leave the meta device by it."""
    stored, other = DTYPES[get_recipe(recipe).weights], {"bf16-stochastic": "float32", "bf16-mixed": "bfloat16"}[recipe]
    with torch.device("meta"):
        halfstep.apply(model := mlp(), recipe)
    state = {key: value.to(getattr(torch, other)) for key, value in mlp().state_dict().items()}
    model.load_state_dict(state, assign=True)
    with pytest.raises(ModelError, match=rf"0\.weight is torch\.{other}, and was stored in {stored} .*assign=True"):
        halfstep.optimize(model, adamw(model))
    model.load_state_dict({key: value.to(stored) for key, value in state.items()}, assign=True)
    halfstep.optimize(model, adamw(model))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_scripted_submodules():
    """Scripted parts compute as their code says: right for float32 weights, and without weights under any recipe."""
    weightless = "bf16-mixed", "fp8-delayed", "bf16-stochastic"
    for part, recipes in ((lambda: nn.Linear(16, 16), ("bf16-mixed", "fp32")), (nn.ReLU, weightless)):
        for recipe in recipes:
            found = []
            for scripted in (False, True):
                torch.manual_seed(0)
                model = nn.Sequential(nn.Linear(8, 16), part(), nn.Linear(16, 4))
                model[1] = torch.jit.script(model[1]) if scripted else model[1]
                model, optimizer, scaler = halfstep.prepare(model, adamw(model), recipe, generator=1)
                losses = descend(lambda model=model: model(batch()[0]).square().mean(), optimizer, scaler, 3)
                found.append([torch.tensor(losses), *(parameter.detach() for parameter in model.parameters())])
            assert_same(*found)
            halfstep.revert(model)
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 4)))
    with pytest.raises(ModelError, match=r"Sequential: 1 is scripted .* bf16 under 'bf16-stochastic'"):
        halfstep.prepare(model, adamw(model), "bf16-stochastic")


def test_inference_mode_raises():
    model = mlp()
    with torch.inference_mode():
        made, expected = mlp(), r"0\.weight would be, or is, a tensor of torch\.inference_mode"
        with pytest.raises(ModelError, match=expected):
            halfstep.prepare(model, adamw(model), "fp32")
    with pytest.raises(ModelError, match=expected):
        halfstep.prepare(made, adamw(made), "fp32")
    halfstep.prepare(model, adamw(model), "fp32")


def test_shared_memory_weights_raise_for_recipes_of_codes():
    """Processes that train one model together (hogwild) would each write to codes of their own."""
    model = mlp().share_memory()
    with pytest.raises(ModelError, match=r"0.weight lies in memory that processes share .* such as 'bf16-mixed'"):
        halfstep.prepare(model, adamw(model), "fp8lm-o2")
    assert type(model) is nn.Sequential
    halfstep.prepare(model, adamw(model), "bf16-mixed")
