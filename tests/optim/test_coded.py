"""Weights stored as codes with gradients and masters in any storage: they train, save, load and follow writes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import halfstep
from families import for_each
from halfstep.errors import OptimizerError
from halfstep.ops import CodeTensor
from halfstep.recipe import MASTER, Codes, from_data, get_recipe, get_storage, to_data
from tiny import assert_same, batch, copied, mlp, nameless, prepared, train


KINDS = {
    "blocks, a sum of two": Codes(get_storage("mxfp8_e4m3"), master=get_storage("bf16", residual=True)),
    "no scale, fp32": Codes(get_storage("e4m3fn"), get_storage("e5m2"), get_storage("fp32")),
    "fp4, blocks": Codes(get_storage("nvfp4"), get_storage("mxfp8_e5m2"), get_storage("mxfp8_e4m3", residual=True)),
    "nf4, plain fp16": Codes(get_storage("nf4"), master=get_storage("fp16")),
    "themselves": Codes(get_storage("mxfp8_e4m3")),
}
every_kind = for_each("codes", KINDS.values())


def recipe_of(codes, base="fp8lm-o1"):
    return replace(get_recipe(base), name="made", codes=codes)


def weights(model):
    return [p for p in model.parameters() if isinstance(p, CodeTensor)]


@pytest.mark.slow
@every_kind
def test_coded_weights_train_with_the_recipes_master(codes):
    recipe = recipe_of(codes)
    assert from_data(to_data(recipe), get_recipe) == recipe
    model, optimizer, scaler = prepared(recipe)
    losses = train(model, optimizer, scaler, 30)
    assert losses[-1] < losses[0] or codes.master is None  # few bits alone lose small updates
    assert len(weights(model)) == 2
    for weight in weights(model):
        assert weight.quantizer == codes.weights.quantizer
        state = optimizer.state[weight]
        expected = codes.master.layout(MASTER, tuple(weight.shape)) if codes.master else {}
        found = {name: (value.dtype, tuple(value.shape)) for name, value in state.items() if name in expected}
        assert found == expected


@every_kind
def test_a_step_updates_the_decoded_master_or_weight_and_rounds_it(codes):
    """Compared with SGD in float32."""
    model = mlp()
    model, optimizer, _ = prepared(recipe_of(codes), model, torch.optim.SGD(model.parameters(), lr=0.5))
    before = [optimizer.full(weight) for weight in weights(model)]
    torch.nn.functional.mse_loss(model(batch()[0]), batch()[1]).backward()
    gradients = [weight.grad.clone() for weight in weights(model)]
    assert all(isinstance(w.grad, CodeTensor) == (codes.grads is not None) for w in weights(model))
    optimizer.step()
    for weight, full, grad in zip(weights(model), before, gradients, strict=True):
        moved = full - 0.5 * grad
        if codes.master is not None:
            first = codes.master.quantizer(moved)
            moved = first + codes.master.quantizer(moved - first) if codes.master.residual else first
            assert_same(optimizer.full(weight), moved)
        assert_same(weight.values(), codes.weights.quantizer(moved))


@every_kind
def test_a_resumed_run_is_exact(codes):
    model, optimizer, scaler = prepared(recipe_of(codes))
    train(model, optimizer, scaler)
    kept = copied([model.state_dict(), optimizer.state_dict(), scaler.state_dict()])
    other, others, scale = prepared(recipe_of(codes))
    other.load_state_dict(kept[0]), others.load_state_dict(kept[1]), scale.load_state_dict(kept[2])
    assert train(other, others, scale) == train(model, optimizer, scaler)
    assert_same(other.state_dict(), model.state_dict())


@every_kind
def test_a_master_follows_a_write_to_the_weight(codes):
    model, optimizer, scaler = prepared(recipe_of(codes))
    train(model, optimizer, scaler)
    first, second = weights(model)
    before, other, was_zero = optimizer.full(first), optimizer.full(second), first.values() == 0
    with torch.no_grad():
        first.zero_()
    rest = before if codes.master else torch.zeros_like(before)  # unchanged for weights that were 0 before
    torch.testing.assert_close(optimizer.full(first), rest * was_zero, rtol=2.0**-7, atol=1e-6)
    assert_same(optimizer.full(second), other)


def test_loading_rounds_float_masters_and_refuses_coded_ones_elsewhere():
    """A float master is rounded; one of codes is refused where it is not kept so, and nothing has changed."""
    halves, blocks = (Codes(get_storage("nvfp4"), master=get_storage(kind)) for kind in ("fp16", "mxfp8_e4m3"))
    kinds = {"halves": recipe_of(halves), "blocks": recipe_of(blocks), "plain": "bf16-master"}
    runs = {name: prepared(recipe) for name, recipe in kinds.items()}
    for run in runs.values():
        train(*run)
    saved = {name: nameless(copied(optimizer.state_dict())) for name, (_, optimizer, _) in runs.items()}
    for name in ("halves", "plain"):
        _, optimizer, _ = runs[name]
        with pytest.raises(
            OptimizerError, match=r"holds master as codes \(float8_e4m3fn \(floor, 1x32.*this recipe keeps it as"
        ):
            optimizer.load_state_dict(copied(saved["blocks"]))
        assert_same(optimizer.state_dict()["state"], saved[name]["state"])
    model, optimizer, _ = runs["blocks"]
    optimizer.load_state_dict(copied(saved["halves"]))
    for number, parameter in enumerate(model.parameters()):
        if isinstance(parameter, CodeTensor):
            expected = saved["halves"]["state"][number][MASTER].float()
            assert_same(
                halfstep.ops.codes.read(get_storage("mxfp8_e4m3"), MASTER, optimizer.state[parameter], expected.shape),
                halfstep.get_quantizer("mxfp8_e4m3")(expected),
            )


def test_gradients_stored_in_blocks_are_clipped_by_value():
    """A factor is merged into the scale only if the scale is a float32 tensor."""
    codes = Codes(get_storage("mxfp8_e4m3"), grads=get_storage("mxfp8_e5m2"))
    model, _, _ = prepared(recipe_of(codes))
    (100 * model(batch()[0]).square().sum()).backward()
    before = [p.grad.clone() for p in model.parameters()]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norm = torch.stack([g.norm() for g in before]).norm()
    for parameter, grad in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad.clone(), grad / norm, rtol=2.0**-2, atol=float(norm) * 2.0**-24)
