"""Parameter groups: learning rates and decays by role and optimizer, and errors."""

import copy

import pytest
import torch
from torch import nn

from halfstep.errors import ModelError, OptimizerError
from halfstep.optim.classes import Lamb, Lion
from halfstep.unit.groups import parameter_groups
from halfstep.unit.parametrization import get_parametrization, list_parametrizations
from halfstep.unit.roles import decouple_decay, optimizer_kind, set_depth, set_roles


def mlp(width, layers=2):
    hidden = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
    model = nn.ModuleDict(
        {
            "table": nn.Embedding(11, width),
            "input": nn.Linear(5, width),
            "hidden": hidden,
            "norm": nn.LayerNorm(width),
            "head": nn.Linear(width, 3),
        }
    )
    set_roles(model, {"input.weight": "input", "hidden.*.weight": "hidden", "head.weight": "readout"})
    return model


def rates(model, *args, **options):
    """The learning rate and weight decay of each parameter's group, by parameter name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, *args, **options)
    return {names[p]: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}


ADAM_LIKE = [torch.optim.AdamW, torch.optim.Adam, torch.optim.Adafactor, Lion, Lamb, "adamw", "AdamW8bit"]


@pytest.mark.parametrize("optimizer", ADAM_LIKE)
@pytest.mark.parametrize("name", ["umup", "munit"])
def test_learning_rates_from_width_256_to_1024(optimizer, name):
    """Hidden weights' learning rate falls with the square root of the width; u-muP's embeddings' too."""
    small, large = (rates(mlp(w), optimizer, lr=1.0, parametrization=name) for w in (256, 1024))
    ratio = {key: large[key][0] / small[key][0] for key in small}
    assert ratio["hidden.0.weight"] == 0.5
    assert ratio["table.weight"] == (0.5 if name == "umup" else 1.0)
    others = {value for key, value in ratio.items() if key not in ("table.weight", *HIDDEN)}
    assert others == {1.0}


HIDDEN = ("hidden.0.weight", "hidden.1.weight")


def test_munit_learning_rates_from_a_base_width():
    rule = get_parametrization("munit", base_width=256, width=1024)
    found = rates(mlp(1024), "lion", lr=0.5, parametrization=rule, decay="coupled")
    assert found["hidden.0.weight"][0] == 0.25
    assert found["head.weight"][0] == 0.5
    with pytest.raises(ModelError, match="whose rule has no base"):
        get_parametrization("umup", base_width=256, width=512)
    with pytest.raises(ModelError, match="expected both, positive, or neither"):
        get_parametrization("munit", width=512)


def test_the_standard_parametrization_has_one_learning_rate():
    assert len(parameter_groups(mlp(64), torch.optim.SGD, lr=0.1, parametrization="standard")) == 1
    assert list_parametrizations() == ("munit", "standard", "umup")


def test_umup_divides_learning_rates_by_the_root_of_the_depth():
    model = mlp(64, layers=4)
    plain = rates(model, torch.optim.AdamW, lr=1.0)
    set_depth(model["hidden"], 4)
    deep = rates(model, torch.optim.AdamW, lr=1.0)
    assert all(deep[key][0] == plain[key][0] * (0.5 if key.startswith("hidden") else 1.0) for key in plain)


def test_sgd_learning_rates_depend_on_the_readouts_constraint():
    model = mlp(64)
    assert rates(model, torch.optim.SGD, lr=1.0, readout_constraint="none") == rates(model, "adamw", lr=1.0)
    tied = rates(model, torch.optim.SGD, lr=1.0, readout_constraint="to_output")
    expected = {
        "table.weight": 8.0,
        "input.weight": 5**0.5,
        "input.bias": 64.0,
        "hidden.0.weight": 8.0,
        "norm.weight": 64.0,
        "head.weight": 1.0,
        "head.bias": 3.0,
    }
    assert {key: tied[key][0] for key in expected} == expected
    with pytest.raises(OptimizerError, match=r"no unit\.LinearReadout was found"):
        parameter_groups(model, torch.optim.SGD, lr=1.0)
    with pytest.raises(OptimizerError, match="Adam-like optimizers alone"):
        parameter_groups(model, torch.optim.SGD, lr=1.0, parametrization="munit")


def test_independent_decay_divides_by_the_learning_rate():
    for lr, decay in rates(mlp(64), torch.optim.AdamW, lr=0.25, weight_decay=2**-10).values():
        assert lr * decay == 2**-10
    coupled = rates(mlp(64), torch.optim.AdamW, lr=0.25, weight_decay=0.5, decay="coupled")
    assert {decay for _, decay in coupled.values()} == {0.5}


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_decoupled_decay_does_not_depend_on_the_peak_learning_rate(optimizer):
    model = mlp(16).double()
    groups = parameter_groups(model, optimizer, lr=0.5, weight_decay=0.25, decay="decoupled", readout_constraint="none")
    stepped = optimizer(groups)
    decouple_decay(stepped)
    schedule = torch.optim.lr_scheduler.LambdaLR(stepped, lambda step: (1.0, 0.1, 0.0, 0.3, 1.0)[step])
    for factor in (0.75, 0.75, 1.0, 0.75):  # a learning rate of zero stops decay too
        before = [p.detach().clone() for p in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        stepped.step()
        for old, new in zip(before, model.parameters(), strict=True):
            torch.testing.assert_close(new.detach(), old * factor, rtol=1e-14, atol=0)
        schedule.step()


def test_decoupled_decay_of_unfit_optimizers_raises():
    with pytest.raises(OptimizerError, match="no group of this optimizer has decay_per_step"):
        decouple_decay(torch.optim.SGD(mlp(4).parameters(), lr=1.0))
    groups = parameter_groups(
        mlp(4), torch.optim.SGD, lr=1.0, weight_decay=0.1, decay="decoupled", readout_constraint="none"
    )
    with pytest.raises(OptimizerError, match="momentum=0"):
        decouple_decay(torch.optim.SGD(groups, momentum=0.9))


def test_given_groups_keep_their_options():
    model = mlp(16)
    own = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.5, "betas": (0.5, 0.6)},
        {"params": (p for p in model.parameters() if p.dim() < 2), "lr": 2.0},
    ]
    groups = parameter_groups(model, torch.optim.AdamW, lr=1.0, groups=own, decay="coupled")
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    for group in groups:
        matrices = group["params"][0].dim() > 1
        assert ("betas" in group) == matrices
        assert group["weight_decay"] == (0.5 if matrices else 0.0)
        assert matrices or group["lr"] == 2.0


def test_a_scheduler_keeps_the_ratios_of_learning_rates():
    groups = parameter_groups(mlp(64), torch.optim.AdamW, lr=1.0)
    peaks = [group["lr"] for group in groups]
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.5 * peak for peak in peaks]


def test_groups_of_frozen_and_tied_parameters():
    model = mlp(16)
    model["extra"] = nn.Linear(4, 4)  # without a role, frozen: left out
    model["extra"].requires_grad_(False)
    model["norm"].requires_grad_(False)
    found = rates(model, torch.optim.AdamW, lr=1.0)
    assert "extra.weight" not in found
    assert "norm.weight" in found
    tied = nn.ModuleDict({"token": nn.Embedding(9, 64), "head": nn.Linear(64, 9, bias=False)})
    tied["head"].weight = tied["token"].weight
    set_roles(tied, {"head.weight": "readout"})
    assert rates(tied, "lion", lr=1.0, parametrization="munit") == {"token.weight": (1.0, 0.0)}
    with pytest.raises(ModelError, match=r"token.weight \(embedding\) 0.125, head.weight \(readout\) 1"):
        parameter_groups(tied, "lion", lr=1.0)
    set_roles(tied, {"head.weight": "embedding"})
    assert rates(tied, "lion", lr=1.0) == {"token.weight": (0.125, 0.0)}
    set_roles(tied, {"*.weight": "readout"})
    assert rates(tied, "lion", lr=1.0) == {"token.weight": (1.0, 0.0)}


def test_invalid_arguments_raise():
    model = mlp(8)
    with pytest.raises(OptimizerError, match=r"unknown optimizer 'Muon'.*give optimizer='adamw' if its step stays"):
        parameter_groups(model, type("Muon", (torch.optim.Optimizer,), {}), lr=1.0)
    with pytest.raises(OptimizerError, match="an instance of SGD found; expected its class"):
        parameter_groups(model, torch.optim.SGD(model.parameters(), lr=1.0), lr=1.0)
    with pytest.raises(OptimizerError, match="lr = 0 given"):
        parameter_groups(model, "adamw", lr=0)
    with pytest.raises(OptimizerError, match="Adam adds weight decay to the gradient"):
        parameter_groups(model, torch.optim.Adam, lr=1.0, weight_decay=0.1)
    with pytest.raises(OptimizerError, match="weight_decay = -1"):
        parameter_groups(model, "adamw", lr=1.0, weight_decay=-1)
    with pytest.raises(OptimizerError, match="unknown decay 'independant'; nearest: independent"):
        parameter_groups(model, "adamw", lr=1.0, decay="independant")
    with pytest.raises(ModelError, match="1 of the parameters in groups are not ModuleDict's"):
        parameter_groups(model, "adamw", lr=1.0, groups=[{"params": nn.Parameter(torch.zeros(2))}])
    with pytest.raises(ModelError, match="stands in two groups"):
        parameter_groups(model, "adamw", lr=1.0, groups=[{"params": model["norm"].weight}] * 2)
    with pytest.raises(OptimizerError, match="a group of type Parameter found"):
        parameter_groups(model, "adamw", lr=1.0, groups=model.parameters())
    with pytest.raises(ModelError, match="has no parameters to group"):
        parameter_groups(nn.ReLU(), "adamw", lr=1.0)
    with pytest.raises(ModelError, match=r"no role is known of 0\.weight"):
        parameter_groups(nn.Sequential(nn.Linear(2, 2)), "adamw", lr=1.0)
    with pytest.raises(ModelError, match="unknown parametrization 'mup'; nearest: umup"):
        parameter_groups(model, "adamw", lr=1.0, parametrization="mup")


def test_optimizer_subclasses_have_the_kind_of_their_base():
    assert optimizer_kind(type("MyAdamW", (torch.optim.AdamW,), {})).decoupled
    assert optimizer_kind(type("Mine", (torch.optim.SGD,), {})).rule == "sgd"


def test_a_copied_model_has_the_same_groups():
    model = mlp(32)
    assert rates(copy.deepcopy(model), "adamw", lr=1.0) == rates(model, "adamw", lr=1.0)
