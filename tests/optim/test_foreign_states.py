"""States of other optimizers: those with the same moments are taken over exactly, all others are refused."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import halfstep
from families import for_each
from halfstep.errors import OptimizerError
from halfstep.optim import AdamW8bit, AdamWFp8, CoatAdamW, GaLoreAdamW, Lion, LowBitAdamW
from halfstep.recipe import get_recipe
from tiny import assert_same


OURS = {kind.__name__: kind for kind in (AdamW8bit, AdamWFp8, CoatAdamW, GaLoreAdamW, LowBitAdamW)}
PREPARED = {
    "adamw": torch.optim.AdamW,
    "lion": Lion,
    "nadam": torch.optim.NAdam,
    "rmsprop": torch.optim.RMSprop,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}
SAVED_BY = {
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": torch.optim.Adagrad,
    "Adam": torch.optim.Adam,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RMSprop": torch.optim.RMSprop,
    "Rprop": torch.optim.Rprop,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def layer():
    torch.manual_seed(0)
    return nn.Linear(64, 96)


def stepped(build, steps=2):
    model = layer()
    optimizer = build(model.parameters())
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()
    return optimizer


def prepared(name):
    model = layer()
    return halfstep.prepare(model, PREPARED[name](model.parameters()), "bf16-mixed")[1]


def receivers():
    """(name, optimizer to load into, names of the stock classes whose states it accepts)."""
    adams = {"Adam"}
    own = {"adamw": adams, "lion": set(), "nadam": {"NAdam"}, "rmsprop": {"RMSprop"}, "sgd": {"SGD"}}
    yield from ((name, kind(layer().parameters()), adams) for name, kind in OURS.items())
    yield from ((name, prepared(name), own[name]) for name in PREPARED)


@for_each("name", SAVED_BY)
def test_states_of_other_torch_optimizers_are_refused_without_changes(name):
    saved = stepped(SAVED_BY[name]).state_dict()
    found = ", ".join(sorted(saved["state"][0]))
    for ours, optimizer, own in receivers():
        before = copy.deepcopy(optimizer.state_dict())
        if name in own:
            optimizer.load_state_dict(saved)
        else:
            with pytest.raises(OptimizerError, match=f"parameter 0 holds {found}; expected .* another optimizer"):
                optimizer.load_state_dict(saved)
            assert_same(optimizer.state_dict(), before), ours


def test_states_of_other_halfstep_optimizers_are_refused():
    """Lion's only moment is one of Adam's two."""
    parameters = list(layer().parameters())
    two = AdamW8bit(parameters)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape)
    two.step()
    one = prepared("lion")
    with pytest.raises(OptimizerError, match=r"holds exp_avg, exp_avg_scale, exp_avg_sq.*expected exp_avg, step"):
        one.load_state_dict(two.state_dict())
    state = copy.deepcopy(one.state_dict())
    state["state"][0]["step"] += 1
    with pytest.raises(OptimizerError, match="holds exp_avg, step; expected exp_avg, exp_avg_sq, step"):
        two.load_state_dict(state)


def test_missing_extra_and_misshapen_states_are_refused():
    saved = stepped(torch.optim.AdamW).state_dict()
    optimizer = AdamW8bit(layer().parameters())
    cases = [
        (lambda state: state[1].pop("exp_avg_sq"), "parameter 1 holds exp_avg, step; expected exp_avg, exp_avg_sq"),
        (lambda state: state[1].update(exp_avg_diff=torch.ones(96)), "holds exp_avg, exp_avg_diff, exp_avg_sq, step"),
        (lambda state: state[1].update(exp_avg=torch.ones(())), r"exp_avg of shape \(\), expected \(96,\)"),
        (lambda state: state.update({7: {}}), "1 entries of parameters that none of its groups names, such as 7"),
    ]
    for change, words in cases:
        changed = copy.deepcopy(saved)
        change(changed["state"])
        with pytest.raises(OptimizerError, match=words):
            optimizer.load_state_dict(changed)
    del saved["state"][1]  # as of a frozen parameter
    optimizer.load_state_dict(saved)
    assert [float(state["step"]) for state in optimizer.state.values()] == [2, 0]


def test_entries_that_a_wrapper_adds_to_states_are_kept():
    """As timm's Lookahead does."""
    optimizer = stepped(AdamW8bit)
    for parameter, state in optimizer.state.items():
        state["slow_buffer"] = parameter.detach().clone()
    again = AdamW8bit(layer().parameters())
    again.load_state_dict(optimizer.state_dict())
    assert all("slow_buffer" in state for state in again.state.values())


# ---- codes of other libraries ----------------------------------------------------------------------------------------


def of_bitsandbytes(**options):
    import bitsandbytes as bnb  # slow to import

    optimizer = stepped(lambda parameters: bnb.optim.AdamW8bit(parameters, **options), 3)
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    exact = {
        name: bnb.functional.dequantize_blockwise(
            state[f"state{digit}"], absmax=state[f"absmax{digit}"], code=state[f"qmap{digit}"], blocksize=256
        )
        for name, digit in (("exp_avg", "1"), ("exp_avg_sq", "2"))
    }
    return optimizer.state_dict(), exact


def of_torchao(kind):
    from torchao.optim import subclass_4bit, subclass_8bit, subclass_fp8  # slow to import

    build = {
        "4 bits": subclass_4bit.OptimState4bit.zeros,
        "8 bits": subclass_8bit.OptimState8bit.zeros,
        "fp8": lambda shape, signed: subclass_fp8.OptimStateFp8.zeros(shape),
    }[kind]
    saved, generator = stepped(torch.optim.AdamW).state_dict(), torch.Generator().manual_seed(1)
    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        values = torch.randn(96, 64, generator=generator)
        kept = build((96, 64), signed)
        saved["state"][0][name] = kept.copy_(values if signed else values.square())
    return saved, {name: saved["state"][0][name].dequantize() for name in ("exp_avg", "exp_avg_sq")}


def loaded(optimizer, saved):
    optimizer.load_state_dict(saved)
    wide = optimizer.float32_state_dict()["state"][0]
    assert all(type(value) is torch.Tensor for value in optimizer.state_dict()["state"][0].values())
    return {name: wide[name] for name in ("exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize("nested", [True, False])
def test_bitsandbytes_moments_are_taken_over_exactly(nested):
    saved, exact = of_bitsandbytes()
    if not nested:  # as in state dicts of bitsandbytes before 0.45
        for state in saved["state"].values():
            state |= state.pop("__bnb_optimizer_quant_state__")
    optimizer = AdamW8bit(layer().parameters())
    for receiver in (optimizer, LowBitAdamW(layer().parameters()), prepared("adamw")):
        assert_same(loaded(receiver, saved), exact)
        assert float(receiver.state[receiver.param_groups[0]["params"][0]]["step"]) == 3
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].dtype == torch.uint8
    small = saved["state"][1].get("__bnb_optimizer_quant_state__", saved["state"][1])
    assert_same(optimizer.state[optimizer.param_groups[0]["params"][1]]["exp_avg"], small["state1"])
    with pytest.warns(UserWarning, match=r"exp_avg.* was saved as dynamic8.*rounded again, to float8_e4m3fn"):
        loaded(AdamWFp8(layer().parameters()), saved)


@pytest.mark.parametrize("kind", ["8 bits", "fp8", "4 bits"])
def test_torchaos_moments_are_taken_over_exactly(kind):
    saved, exact = of_torchao(kind)
    for receiver in (LowBitAdamW(layer().parameters()), prepared("adamw")):
        assert_same(loaded(receiver, saved), exact)
    alike = {"8 bits": AdamW8bit, "fp8": AdamWFp8}.get(kind)
    if alike is not None:
        assert_same(loaded(alike(layer().parameters()), saved), exact)


def test_bitsandbytes_states_other_than_adams_are_refused():
    saved, _ = of_bitsandbytes()
    whole = saved["state"][0]["__bnb_optimizer_quant_state__"]
    with pytest.raises(OptimizerError, match=r"state1 of shape \(96, 64\), state2 .* this one keeps momentum_buffer"):
        prepared("sgd").load_state_dict(saved)
    for change, words in [
        ({"state1": torch.zeros(2, 96, 64)}, r"state1 of shape \(2, 96, 64\)"),  # AdEMAMix
        ({"state2": None}, r"does not say of which: state1 of shape \(96, 64\)\. Those"),  # Lion, SGD, RMSprop ...
        ({"absmax1": torch.ones(5)}, "expected uint8, a map qmap1 of 256 numbers"),
        ({"qmap1": torch.ones(16)}, "expected uint8, a map qmap1 of 256 numbers"),
    ]:
        changed = {**saved, "state": {**saved["state"], 0: {"step": 3, **whole, **change}}}
        with pytest.raises(OptimizerError, match=words):
            AdamW8bit(layer().parameters()).load_state_dict(changed)


def test_bitsandbytes_states_with_other_maps_and_blocks_are_decoded():
    saved, exact = of_bitsandbytes()
    state = saved["state"][0]["__bnb_optimizer_quant_state__"]
    state["qmap1"] = state["qmap1"] / 2
    assert_same(loaded(LowBitAdamW(layer().parameters()), saved)["exp_avg"], exact["exp_avg"] / 2)
    state["absmax2"] = torch.ones(3)
    expected = state["qmap2"][state["state2"].long()]
    assert_same(loaded(LowBitAdamW(layer().parameters()), saved)["exp_avg_sq"], expected)


def test_an_unknown_moment_name_is_refused_without_changes():
    model = layer()
    stock, recipe = torch.optim.AdamW(model.parameters()), get_recipe("adamw-8bit")
    for name in ("exp_avgsq", "square_avg"):  # RMSprop's moment has the storage of Adam's
        misspelt = replace(recipe, moments=((name, "bf16"),))
        with pytest.raises(
            OptimizerError, match=f"{name} = .* would keep nothing: unknown moment '{name}'.*exp_avg_sq"
        ):
            halfstep.prepare(model, stock, misspelt)
        assert type(model) is nn.Linear
        with pytest.raises(OptimizerError, match="would keep nothing"):
            LowBitAdamW(model.parameters(), moments=misspelt.moments)
    halfstep.prepare(model, stock, replace(recipe, moments=(("momentum_*", "bf16"), ("exp_avg", "bf16"))))
