"""States of GaLore: saved, loaded, copied and resumed bit for bit, refused if they do not fit, and equal on all
ranks."""

import copy
import io
import pickle
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import OptimizerError
from halfstep.optim import GaLoreAdamW, GaLoreAdamW8bit
from halfstep.recipe import PROJECTOR, Projection, get_recipe
from ranks import on_ranks
from tiny import PROJECTED, assert_same, nameless


def net(width=12):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, width), nn.GELU(), nn.Linear(width, 7))


def started(name="galore", width=12, build=torch.optim.AdamW, **options):
    recipe = replace(get_recipe(name), name="made", projection=Projection(**{"gap": 3, **options}))
    model = net(width)
    return halfstep.prepare(model, build(model.parameters(), lr=0.01), recipe, generator=7)


def trained(model, optimizer, scaler, start, steps, rank=0):
    losses = []
    for step in range(start, start + steps):
        x = torch.randn(8, 9, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def through_a_file(data):
    file = io.BytesIO()
    torch.save(data, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.quick("0-galore", "5-galore")
@pytest.mark.parametrize("name", PROJECTED)
@pytest.mark.parametrize("stop", range(8))
def test_a_run_resumed_at_any_step_is_exact(name, stop, monkeypatch):
    """Before, at and after a change of the subspace; with no additional SVD."""
    whole = started(name, width=160)
    expected = trained(*whole, 0, 8)
    model, optimizer, scaler = started(name, width=160)
    found = trained(model, optimizer, scaler, 0, stop)
    saved = through_a_file([model.state_dict(), optimizer.state_dict(), scaler.state_dict()])
    again = started(name, width=160)
    for part, state in zip(again, saved, strict=True):
        if state:
            part.load_state_dict(state)
    made, stock = [], torch.linalg.svd
    monkeypatch.setattr(torch.linalg, "svd", lambda *a, **k: made.append(1) or stock(*a, **k))
    assert found + trained(*again, stop, 8 - stop) == expected
    assert len(made) == 2 * sum(step % 3 == 0 for step in range(stop, 8))
    assert_same(again[1].state_dict()["state"], whole[1].state_dict()["state"])


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_and_pickles_train_identically(way):
    first = started()
    trained(*first, 0, 4)
    second = copy.deepcopy(first) if way == "deepcopy" else pickle.loads(pickle.dumps(first))
    assert trained(*first, 4, 4) == trained(*second, 4, 4)


# ---- states that do not fit -----------------------------------------------------------------------------------------


def saved_by(optimizer_of):
    model, optimizer, scaler = optimizer_of()
    trained(model, optimizer, scaler, 0, 2)
    return optimizer.state_dict()


def whole():
    model = net()
    return halfstep.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), "bf16-mixed")


OTHERS = {
    "of the whole gradient": (started, whole, r"parameter 0 holds moments of the whole gradient.*found none"),
    "in a subspace": (whole, started, r"parameter 0 holds moments in a subspace.*is not projected. Resume as it was"),
    "of another rank": (started, lambda: started(rank=2), r"a projector of shape \(9, 2\), expected \(9, 4\)"),
    "of another side": (started, lambda: started(side="long"), r"a projector of shape \(12, 4\), expected \(9, 4\)"),
}


@pytest.mark.parametrize(("into", "source", "message"), OTHERS.values(), ids=OTHERS)
def test_states_that_do_not_fit_are_refused_without_changes(into, source, message):
    _, optimizer, _ = into()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(OptimizerError, match=message):
        optimizer.load_state_dict(nameless(saved_by(source)))
    assert_same(optimizer.state_dict(), before)


def test_states_of_torch_and_galore_torch_are_refused():
    _, optimizer, _ = started()
    stock = torch.optim.AdamW(net().parameters())
    for parameter in stock.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    stock.step()
    with pytest.raises(OptimizerError, match="holds moments of the whole gradient"):
        optimizer.load_state_dict(stock.state_dict())
    theirs = optimizer.state_dict()
    theirs["state"][0] = {**theirs["state"][0], PROJECTOR: object()}
    with pytest.raises(OptimizerError, match="found a object"):
        optimizer.load_state_dict(theirs)


def test_float32_state_dict_of_projected_states_is_refused():
    _, optimizer, _ = parts = started()
    trained(*parts, 0, 1)
    with pytest.raises(OptimizerError, match="holds moments in a subspace"):
        optimizer.float32_state_dict()


def test_8_bit_projected_moments_load_from_float32_ones():
    parts = started("galore", width=1200, rank=4)
    trained(*parts, 0, 2)
    model, optimizer, scaler = started("galore-8bit", width=1200, rank=4)
    model.load_state_dict(parts[0].state_dict())
    optimizer.load_state_dict(nameless(parts[1].state_dict()))
    state = optimizer.state[model[0].weight]
    assert state["exp_avg"].dtype == torch.uint8
    assert_same(state[PROJECTOR], parts[1].state[parts[0][0].weight][PROJECTOR])
    trained(model, optimizer, scaler, 2, 3)


# ---- GaLoreAdamW, with galore-torch's options -----------------------------------------------------------------------


def groups_of(model, **options):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "rank": 4, **options}, {"params": others}]


def train_plainly(model, optimizer, steps, start=0):
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    for step in range(start, start + steps):
        x = torch.randn(8, 9, generator=torch.Generator().manual_seed(10 * step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("build", [GaLoreAdamW, GaLoreAdamW8bit])
def test_galore_adamw_equals_the_recipe_and_resumes(build):
    """Of the same rank, in the same loop; and it goes on where its state was saved."""
    options = {"update_proj_gap": 3, "scale": 0.5, "proj_type": "std"}
    model = net()
    alone = build(groups_of(model, **options), lr=0.02, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    found = train_plainly(model, alone, 5)
    other = net()
    made = replace(get_recipe("fp32"), name="made", projection=Projection(4, 3, 0.5, paths=("0", "2"), share=None))
    stock = torch.optim.AdamW([{"params": g["params"]} for g in groups_of(other)], 0.02, (0.9, 0.99), 1e-8, 0.1)
    other, prepared, _ = halfstep.prepare(other, stock, made)
    assert_same(found, train_plainly(other, prepared, 5))
    third = net()
    third.load_state_dict(model.state_dict())
    resumed = build(groups_of(third, **{**options, "rank": 4}), lr=1.0)
    resumed.load_state_dict(through_a_file(alone.state_dict()))
    assert_same(train_plainly(third, resumed, 4, 5), train_plainly(model, alone, 4, 5))


def test_galore_adamw_without_a_rank_equals_adamw():
    model, other = net(), net()
    found = train_plainly(model, GaLoreAdamW(model.parameters(), lr=0.02), 3)
    assert_same(
        found,
        train_plainly(other, halfstep.optim.LowBitAdamW(other.parameters(), 0.02, eps=1e-6, weight_decay=0.0), 3),
    )


@pytest.mark.slow
def test_galore_adamw8bit_stores_large_moments_in_8_bits():
    model = nn.Linear(128, 256, bias=False)
    optimizer = GaLoreAdamW8bit([{"params": model.parameters(), "rank": 32}], lr=1e-3)
    model(torch.randn(4, 128)).square().mean().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    assert (state["exp_avg"].dtype, tuple(state["exp_avg"].shape)) == (torch.uint8, (1, 256 * 32))
    assert (state[PROJECTOR].dtype, tuple(state[PROJECTOR].shape)) == (torch.float32, (128, 32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 10}, r"parameter 0: rank = 10 of a matrix of shape \(12, 9\), which has 9"),
        ({"rank": 0}, "projection rank = 0"),
        ({"rank": None}, "projection rank = None; expected an integer"),
        ({"rank": 2.5}, "projection rank = 2.5; expected an integer"),
        ({"scale": "1"}, "projection scale = '1'; expected a number"),
        ({"update_proj_gap": 0}, "projection gap = 0"),
        ({"proj_type": "full"}, "unknown proj_type 'full'.*from both sides is not offered"),
        ({"proj_type": "sdt"}, "unknown proj_type 'sdt'.*std"),
    ],
)
def test_invalid_groups_are_refused(options, message):
    with pytest.raises(OptimizerError, match=re.compile(message, re.S)):
        GaLoreAdamW(groups_of(net(), **options))


def test_a_rank_of_a_parameter_that_is_no_matrix_is_refused():
    optimizer = GaLoreAdamW(groups_of(net()))
    for shape in ((5,), (2, 3, 4)):
        with pytest.raises(
            OptimizerError, match=r"parameter 4 of shape .* is in a group with a rank; expected matrices"
        ):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(shape))], "rank": 2})
        assert len(optimizer.param_groups) == 2
    with pytest.raises(OptimizerError, match="correct_bias=False"):
        GaLoreAdamW(groups_of(net()), correct_bias=False)


# ---- ranks ----------------------------------------------------------------------------------------------------------


def on_a_rank(rank):
    found = {}
    for name in PROJECTED:
        model, optimizer, scaler = started(name)
        wrapped = nn.parallel.DistributedDataParallel(model)
        trained(wrapped, optimizer, scaler, 0, 7, rank)
        found[name] = [p.detach() for p in model.parameters()], optimizer.state_dict()["state"]
    try:
        halfstep.optim.PerLayer(optimizer)
    except OptimizerError as error:
        found["per layer"] = str(error)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_ranks(on_a_rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
def test_ranks_have_equal_weights_and_per_layer_steps_are_refused(ranks):
    for name in PROJECTED:
        assert_same(ranks[0][name], ranks[1][name])
    assert ranks[0]["per layer"].startswith("PerLayer with several ranks: a layer would step before DDP has summed")
