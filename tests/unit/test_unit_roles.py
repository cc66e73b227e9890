"""Roles: set by modules, kept in copies, and errors where none is known."""

import copy
import pickle

import pytest
import torch
from torch import nn

from halfstep.errors import ModelError
from halfstep.unit.roles import Role, Tag, known_roles, roles, set_depth, set_roles, set_tag, tag_of


def small():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    set_roles(model, {"1.weight": "hidden", "3.weight": "readout"})
    return model


def test_roles_from_classes_and_from_set_roles():
    assert roles(small()) == {
        "0.weight": Role("embedding", 10, 4),
        "1.weight": Role("hidden", 4, 6),
        "1.bias": Role("bias", 6, 6),
        "2.weight": Role("norm", 6, 6),
        "2.bias": Role("bias", 6, 6),
        "3.weight": Role("readout", 6, 3),
        "3.bias": Role("bias", 3, 3),
    }


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_their_roles(again):
    model = small()
    set_tag(model[1], "weight", Tag("hidden", ends_branch=True))
    assert roles(again(model)) == roles(model)


def test_a_copy_does_not_share_its_roles():
    model = small()
    other = copy.deepcopy(model)
    set_roles(other, {"1.weight": "input"})
    assert roles(model)["1.weight"].kind == "hidden"


def test_fan_in_and_fan_out_of_convolutions():
    model = nn.ModuleDict(
        {
            "a": nn.Conv2d(6, 8, (3, 5), groups=2),
            "b": nn.ConvTranspose1d(6, 8, 5, groups=2),
        }
    )
    set_roles(model, {"*.weight": "hidden"})
    found = roles(model)
    assert found["a.weight"] == Role("hidden", 3 * 15, 8)
    assert found["b.weight"] == Role("hidden", 3 * 5, 8)


def test_a_parameter_without_a_role_raises_with_its_name():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with pytest.raises(ModelError, match=r"no role is known of 0\.weight\. Say it: halfstep\.unit\.set_roles"):
        roles(model)
    assert known_roles(model)[1] == ["0.weight"]


def test_unknown_roles_and_parameters_raise_and_set_nothing():
    model = nn.Sequential(nn.Linear(3, 4))
    with pytest.raises(ModelError, match="unknown role of a parameter 'hiden'; nearest: hidden"):
        set_roles(model, {"0.weight": "hiden"})
    with pytest.raises(ModelError, match=r"unknown parameter 'wieght'"):
        set_roles(model, {"*": "hidden", "wieght": "hidden"})
    assert tag_of(model[0]) is None


def test_the_first_matching_glob_decides_and_ends_branch_is_kept():
    model = small()
    set_tag(model[1], "weight", Tag("hidden", ends_branch=True))
    set_roles(model, {"1.*": "hidden", "*.weight": "norm"})
    assert tag_of(model[1]) == Tag("hidden", ends_branch=True)
    assert tag_of(model[1], "bias").kind == "hidden"
    assert tag_of(model[3]).kind == "norm"


def test_parameters_have_the_depth_of_their_stack():
    stack = nn.ModuleList([nn.LayerNorm(4) for _ in range(3)])
    set_depth(stack, 3)
    model = nn.ModuleDict({"stack": stack, "norm": nn.LayerNorm(4)})
    found = roles(model)
    assert found["stack.1.weight"].depth == 3
    assert found["norm.weight"].depth is None
    with pytest.raises(ModelError, match="depth = 0 given"):
        set_depth(stack, 0)


def test_nested_stacks_raise():
    inner = nn.Sequential(nn.LayerNorm(4))
    set_depth(inner, 1)
    model = nn.Sequential(inner)
    set_depth(model, 1)
    with pytest.raises(ModelError, match="0 is a residual stack within the model"):
        roles(model)


def test_tied_parameters_have_a_role_for_each_name():
    model = nn.ModuleDict({"token": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
    model["head"].weight = model["token"].weight
    set_roles(model, {"head.weight": "readout"})
    assert [role.kind for role in roles(model).values()] == ["embedding", "readout"]
    assert torch.equal(model["head"].weight, model["token"].weight)
