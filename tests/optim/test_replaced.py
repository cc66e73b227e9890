"""Optimizers after parameters left the model, came late or changed, and the optimizer given to `prepare`: never
silent."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim.lr_scheduler import StepLR

import halfstep
from halfstep.errors import OptimizerError
from halfstep.memory import measure
from halfstep.recipe import get_recipe
from tiny import EVERY, adamw, assert_same, batch, copied, mlp, model_for, mostly_slow, nameless, prepared, train


every_recipe = pytest.mark.parametrize("name", mostly_slow(EVERY))
KINDS = [
    "fp32", "bf16-master", "fp16-master", "bf16-megatron", "bf16-split", "bf16-kahan", "bf16-collage-plus",
    "bf16-stochastic", "fp16-pure",
]  # fmt: skip


def one_step(model, optimizer):
    model(batch()[0]).square().mean().backward()
    optimizer.step()


# ---- parameters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("name", ["fp32", "bf16-master", "fp8-current"])
def test_parameters_replaced_after_prepare_are_refused(name, loaded):
    """As by resize_token_embeddings and structured pruning, after which the optimizer would step the old ones."""
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler, 1)
    if loaded:
        optimizer.load_state_dict(optimizer.state_dict())
    model[3].weight = nn.Parameter(model[3].weight.detach().clone())
    before = copied(optimizer.state_dict())
    with pytest.raises(OptimizerError, match=r"1 of this optimizer's 6 .* has 1 that .* \(3.weight\): build the optim"):
        train(model, optimizer, scaler, 1)
    assert_same(optimizer.state_dict(), before)
    optimizer.add_param_group({"params": [model[3].weight]})
    if name != "bf16-master":
        optimizer.step()


@pytest.mark.parametrize("name", ["fp32", "bf16-mixed", "bf16-stochastic", "fp8-current"])
def test_a_layer_added_after_prepare_trains_with_a_warning(name):
    model, optimizer, scaler = prepared(name)
    model.append(nn.Linear(4, 4))
    added = {"params": list(model[-1].parameters())}
    if name in ("fp32", "bf16-mixed"):  # no other storage and no rounded matmul: no warning
        optimizer.add_param_group(added)
    else:
        with pytest.warns(
            UserWarning, match=rf"^4\.weight, 4\.bias came to the model after recipe '{name}' was applied"
        ):
            optimizer.add_param_group(added)
    before = model[-1].weight.detach().clone()
    train(model, optimizer, scaler, 1)
    assert not torch.equal(model[-1].weight, before)


def test_a_layer_added_between_apply_and_optimize_is_warned_of():
    model = mlp()
    halfstep.apply(model, "bf16-stochastic")
    model.append(nn.Linear(4, 4))
    with pytest.warns(UserWarning, match=r"^4\.weight, 4\.bias came to the model after") as told:
        halfstep.optimize(model, adamw(model))
    assert told[0].filename == __file__


@pytest.mark.parametrize("inside", [False, True])
def test_a_submodule_replaced_between_steps_is_refused(inside):
    """Anywhere in the model, and also while the old module is referenced elsewhere."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model, optimizer, _ = halfstep.prepare(model, adamw(model), recipe="fp32")
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    whole, name = (model[1], "0") if inside else (model, "1")
    held = whole[int(name)]
    setattr(whole, name, copy.deepcopy(held))
    with pytest.raises(OptimizerError, match="2 of this optimizer's 4 parameters no longer belong to the model"):
        optimizer.step()
    setattr(whole, name, held)
    optimizer.step()


def test_added_untrained_and_deleted_layers_are_accepted():
    model, optimizer, scaler = prepared("fp32")
    model.add_module("4", nn.Linear(4, 4))  # untrained, as in torch; no parameter of the optimizer is missing
    train(model, optimizer, scaler, 1)
    del model[4]
    model[3] = nn.Identity()
    x = torch.randn(12, 16)
    train(model, optimizer, scaler, 1, data=(batch()[0], x))
    torch.optim.Optimizer.zero_grad(optimizer)
    with pytest.warns(UserWarning, match="this step moved none"):
        optimizer.step()  # no gradient: torch does nothing


def test_a_pruned_parameter_trains():
    model, optimizer, scaler = prepared("bf16-master")
    prune.random_unstructured(model[3], "weight", 0.5)
    before = copied(model[3].weight_orig)
    train(model, optimizer, scaler)
    assert not torch.equal(model[3].weight_orig, before)


def test_the_optimizer_does_not_keep_the_model_alive():
    model, optimizer, _ = prepared("fp32")
    weight = model[0].weight
    del model
    weight.grad = torch.ones_like(weight)
    optimizer.step()


@pytest.mark.parametrize("name", ["bf16-master", "bf16-split", "bf16-kahan", "bf16-collage-plus", "fp8lm-o3"])
def test_unfreezing_a_weight_starts_its_master_with_a_warning(name):
    model = model_for(name)
    model[0].requires_grad_(False)
    model, optimizer, scaler = prepared(name, model)
    train(model, optimizer, scaler, 2)
    assert not optimizer.state.get(model[0].weight)
    model[0].requires_grad_(True)
    with pytest.warns(UserWarning, match=r"masters of parameter 0 \(0.weight\) of shape \(16, 8\).* rounded already"):
        train(model, optimizer, scaler, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, scaler, 1)
    if get_recipe(name).master:
        assert get_recipe(name).bytes_per_parameter().master == measure(model, optimizer).master


def test_unfreezing_a_weight_without_masters_does_not_warn():
    model = mlp()
    model[0].requires_grad_(False)
    model, optimizer, scaler = prepared("bf16-stochastic", model)
    model[0].requires_grad_(True)
    train(model, optimizer, scaler, 1)


@pytest.mark.parametrize(
    ("dtype", "why"),
    [(torch.complex64, "its imaginary part would be lost"), (torch.float64, "would round it at every step")],
)
def test_complex_and_float64_parameters_are_refused(dtype, why):
    model, extra = mlp(), nn.Parameter(torch.ones(2, dtype=dtype))
    before = copied(model.state_dict())
    stock = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    with pytest.raises(OptimizerError, match=f"parameter 6 is {dtype}: .*{why}"):
        halfstep.prepare(model, stock, "bf16-master")
    assert_same(model.state_dict(), before)
    assert not hasattr(model, "_halfstep")
    assert "rounding_seed" not in stock.param_groups[0]
    model, optimizer, scaler = prepared("bf16-master", model)
    with pytest.raises(OptimizerError, match=f"parameter 6 is {dtype}"):
        optimizer.add_param_group({"params": [extra]})
    assert len(optimizer.param_groups) == 1
    train(model, optimizer, scaler, 1)


# ---- gradients, options and states -------------------------------------------------------------------------------


def test_a_sparse_gradient_is_refused_without_changes():
    model = nn.ModuleDict({"first": nn.Linear(3, 3), "table": nn.Embedding(4, 3, sparse=True)})
    model, optimizer, _ = prepared("bf16-master", model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for parameter in model["first"].parameters():
        parameter.grad = torch.ones_like(parameter)
    model["table"](torch.tensor([1])).sum().backward()
    before = copied([model.state_dict(), optimizer.state_dict()])
    with pytest.raises(
        OptimizerError, match=r"parameter 2 \(table.weight\) has a torch.sparse_coo .* No parameter was"
    ):
        optimizer.step()
    assert_same([model.state_dict(), optimizer.state_dict()], before)


def test_states_and_options_of_amsgrad_are_refused():
    model = mlp()
    ams = adamw(model, amsgrad=True)
    one_step(model, ams)
    state = copied(ams.state_dict())
    ams.param_groups[0]["amsgrad"] = False
    with pytest.raises(OptimizerError, match="the state holds max_exp_avg_sq: it is AMSGrad's running maximum"):
        halfstep.prepare(model, ams, "bf16-master")
    model, optimizer, _ = prepared("bf16-master")
    before = copied(optimizer.state_dict())
    with pytest.raises(OptimizerError, match="AdamW with amsgrad=True cannot be expressed"):
        optimizer.load_state_dict(state)
    state["param_groups"][0]["amsgrad"] = False
    with pytest.raises(OptimizerError, match="max_exp_avg_sq"):
        optimizer.load_state_dict(state)
    assert_same(optimizer.state_dict(), before)
    one_step(model, optimizer)
    optimizer.param_groups[0]["amsgrad"] = True
    before = copied(model.state_dict())
    with pytest.raises(OptimizerError, match="AdamW with amsgrad=True"):
        optimizer.step()
    assert_same(model.state_dict(), before)


def test_a_master_of_another_recipe_is_refused():
    model, optimizer, scaler = prepared("bf16-split")
    train(model, optimizer, scaler, 1)
    _, other, _ = prepared("bf16-master")
    with pytest.raises(OptimizerError, match="the state holds 'low', which this recipe keeps nothing in"):
        other.load_state_dict(nameless(optimizer.state_dict()))


# ---- the old optimizer -------------------------------------------------------------------------------------------


@every_recipe
def test_the_optimizer_given_to_prepare_refuses_but_its_schedulers_work(name):
    model = model_for(name)
    old = adamw(model)
    scheduler = StepLR(old, 1, 0.5)
    model, new, scaler = prepared(name, model, old)
    before = copied(model.state_dict())
    for use in (old.step, old.state_dict, lambda: old.load_state_dict({})):
        with pytest.raises(OptimizerError, match=r"this AdamW was handed to halfstep.* step, save and load that one"):
            use()
    assert_same(model.state_dict(), before)
    train(model, new, scaler, 1)
    scheduler.step()
    assert new.param_groups[0]["lr"] == 0.005


def test_a_step_of_lions_description_is_refused_with_its_own_message():
    model = mlp()
    lion = halfstep.optim.Lion(model.parameters())
    prepared("fp32", model, lion)
    with pytest.raises(OptimizerError, match="Lion describes an optimizer"):
        lion.step()


@pytest.mark.quick("old-bf16-mixed", "old-bf16-collage-plus", "new-bf16-mixed")
@every_recipe
@pytest.mark.parametrize("through", ["old", "new"])
def test_a_group_added_to_the_old_or_new_optimizer_trains(name, through):
    model = model_for(name)
    old = adamw(model[0])
    model, new, scaler = prepared(name, model, old)
    {"old": old, "new": new}[through].add_param_group({"params": list(model[3].parameters()), "lr": 0.5})
    before = copied(model.state_dict())["3.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        train(model, new, scaler, 4)
    assert new.param_groups[1]["lr"] == 0.5
    assert not torch.equal(model.state_dict()["3.weight"], before)


# ---- pickles -------------------------------------------------------------------------------------------------------


def by_torch(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.quick("fp16-master-deepcopy-sgd", "fp16-pure-deepcopy-sgd", "fp16-pure-deepcopy-lion")
@pytest.mark.parametrize("kind", ["adamw", "sgd", "lion", "lamb"])
@pytest.mark.parametrize("copied_by", [by_torch, copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
@pytest.mark.parametrize("name", KINDS)
def test_copied_and_pickled_optimizers_step_identically(name, kind, copied_by):
    """With their parameters, without a model."""
    build = {
        "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "lion": halfstep.optim.Lion, "lamb": halfstep.optim.Lamb,
    }[kind]  # fmt: skip
    model = model_for(name)
    _, optimizer, _ = prepared(name, model, build(model.parameters(), lr=0.01))
    optimizer.awaits_scaler = False  # gradients are set by hand
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def steps(optimizer, seed):
        generator = torch.Generator().manual_seed(seed)
        for p in (q for group in optimizer.param_groups for q in group["params"]):
            grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.grad = grad.to(p.grad_dtype or p.dtype)
        optimizer.step()

    steps(optimizer, 1)
    twin, twins = copied_by((optimizer, parameters))
    assert twin.rule is optimizer.rule
    for seed in (2, 3):
        steps(optimizer, seed)
        steps(twin, seed)
    assert_same([p.detach() for p in twins], [p.detach() for p in parameters])
    assert_same(twin.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("name", ["mxfp8", "bf16-stochastic"])
def test_a_step_after_a_cast_of_the_model_is_refused(name):
    """Float32 weights cast to bf16 would be rounded at every step without a master; bf16 ones cast to float32 would not
    be rounded."""
    model = mlp()
    model, optimizer, _ = halfstep.prepare(model, torch.optim.AdamW(model.parameters()), name)
    was = model[0].weight.dtype
    model.to(torch.bfloat16 if was == torch.float32 else torch.float32)
    model(torch.ones(2, 8)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(OptimizerError, match=r"0.weight was .* when halfstep.prepare took it, and is .* now"):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    model.to(was).zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["fp32", "bf16-master", "coat", "fp8lm-o3"])
def test_a_parameter_resized_in_place_is_refused(name):
    """As transformers resizes tied embeddings: the same parameter with states of another shape."""
    model, optimizer, scaler = prepared(name, nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 8)))
    for rows in (64, 80):
        if rows == 80:
            model[0].weight.data = torch.cat([model[0].weight.data, torch.zeros(16, 32, dtype=model[0].weight.dtype)])
        model(torch.arange(rows)).sum().backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        if rows == 64:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    with pytest.raises(OptimizerError, match=r"0\.weight had shape \(64, 32\) .* and has \(80, 32\) now"):
        optimizer.step()
    assert_same([parameter.detach() for parameter in model.parameters()], before)


def test_a_step_without_any_gradient_warns_and_changes_nothing():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, optimizer, scaler = halfstep.prepare(model, torch.optim.AdamW(model.parameters()), "bf16-mixed")
    model.requires_grad_(False)
    adapter = model[0].adapter = nn.Linear(4, 4)  # as an adapter library does it after prepare
    before = [parameter.clone() for parameter in model.parameters()]
    scaler.scale(adapter(model(torch.randn(2, 4))).square().sum()).backward()
    with pytest.warns(UserWarning, match=r"this step moved none.*added after halfstep.prepare.*add_param_group"):
        scaler.step(optimizer)
    assert all(map(torch.equal, before, model.parameters()))


def test_a_step_with_some_gradients_does_not_warn():
    model, optimizer, scaler = prepared("bf16-mixed")
    model[0].requires_grad_(False)
    train(model, optimizer, scaler, 1)  # a warning would be an error
