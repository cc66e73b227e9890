"""`PerLayer`: optimizer steps within the backward pass give the same weights with one gradient in memory at a time."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import LossScaleError, OptimizerError
from halfstep.optim import GaLoreAdamW, PerLayer
from halfstep.optim.states import singular_vectors
from halfstep.recipe import PROJECTOR, Projection, Subspace, get_recipe
from tiny import assert_same, copied


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 7))


def started(name="galore", **options):
    recipe = replace(get_recipe(name), name="made", compute="fp32" if name == "galore" else get_recipe(name).compute)
    if name.startswith("galore"):
        recipe = replace(recipe, projection=Projection(**{"gap": 3, **options}))
    model = net()
    return halfstep.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1), recipe, generator=7
    )


def prepared(name, build=torch.optim.AdamW, **options):
    model = net()
    return halfstep.prepare(model, build(model.parameters(), **options), name)


def x_of(step, micro=0):
    return torch.randn(8, 9, generator=torch.Generator().manual_seed(100 * step + micro))


def run(model, optimizer, scaler, steps, micro_batches=1, same=False, start=0):
    for step in range(start, start + steps):
        for micro in range(micro_batches):
            loss = model(x_of(step, 0 if same else micro)).square().mean() / micro_batches
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.quick("galore-8bit", "bf16-mixed")
@pytest.mark.parametrize("name", ["galore", "galore-8bit", "galore-bf16", "bf16-mixed", "bf16-master", "bf16-kahan"])
def test_per_layer_steps_equal_plain_steps(name):
    plain, layered = started(name), started(name)
    PerLayer(layered[1])
    assert_same(run(*layered, 8), run(*plain, 8))
    assert_same(layered[1].state_dict()["state"], plain[1].state_dict()["state"])


def test_only_one_gradient_exists_at_a_time():
    model, optimizer, scaler = started()
    seen = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: seen.append(sum(p.grad is not None for p in model.parameters()))
        )
    PerLayer(optimizer)
    run(model, optimizer, scaler, 2)
    assert seen == [1] * 12
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", ["galore", "bf16-mixed"])
def test_gradients_of_micro_batches_accumulate(name):
    """With equal micro-batches the first one's subspace is the sum's, so the weights are those of whole gradients."""
    plain, layered = started(name), started(name)
    PerLayer(layered[1], micro_batches=3)
    found, expected = run(*layered, 8, 3, same=True), run(*plain, 8, 3, same=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    if name == "bf16-mixed":  # accumulated in .grad
        assert_same(found, expected)


def test_gradients_accumulate_across_changes_of_the_subspace():
    """Compared in float64 with algorithm 2 with the first micro-batch's singular vectors, and the gradients of all."""
    model, optimizer, scaler = started(rank=4)
    PerLayer(optimizer, micro_batches=4)
    weight = model[0].weight
    m = v = 0.0
    for step in range(7):
        before, grads = weight.detach().double(), []
        for micro in range(4):
            other = net()
            other.load_state_dict(model.state_dict())
            (other(x_of(step, micro)).square().mean() / 4).backward()
            grads.append(other[0].weight.grad)
        if step % 3 == 0:
            q = singular_vectors(grads[0], Subspace(4, left=False)).double()
        run(model, optimizer, scaler, 1, 4, start=step)
        assert_same(optimizer.state[weight][PROJECTOR].double(), q)
        r = sum(grads).double() @ q
        m, v = 0.9 * m + 0.1 * r, 0.999 * v + 0.001 * r * r
        u = (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
        expected = before * (1 - 0.001) - 0.01 * 0.25 * u @ q.T
        torch.testing.assert_close(weight.detach().double(), expected, rtol=0, atol=1e-6)
        assert optimizer.state[weight]["step"] == step + 1


def test_a_full_rank_projection_accumulates_whole_gradients():
    """A 7 x 12 matrix with all 7 vectors."""
    plain, layered = (started(rank=7, share=None, paths=("3",)) for _ in range(2))
    PerLayer(layered[1], micro_batches=2)
    assert_same(run(*layered, 5, 2), run(*plain, 5, 2))
    assert tuple(layered[1].state[layered[0][3].weight][PROJECTOR].shape) == (7, 7)


def test_a_parameter_unused_in_one_micro_batch_steps_with_the_others():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    recipe = replace(get_recipe("fp32"), name="made", projection=Projection())
    model, optimizer, _ = halfstep.prepare(model, torch.optim.AdamW(model.parameters()), recipe)
    PerLayer(optimizer, micro_batches=2)
    before = copied(dict(model.state_dict()))
    model["a"](torch.ones(2, 4)).sum().backward()
    (model["a"](torch.ones(2, 4)) + model["b"](torch.ones(2, 4))).sum().backward()
    assert torch.equal(model["b"].weight, before["b.weight"])
    optimizer.step()
    assert not torch.equal(model["b"].weight, before["b.weight"])
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}


def test_zero_grad_drops_an_incomplete_step():
    """And its subspace."""
    dropped, other = started(), started()
    for _, optimizer, _ in (dropped, other):
        PerLayer(optimizer, micro_batches=2)
    dropped[0](x_of(50)).square().mean().backward()
    dropped[1].zero_grad()
    assert_same(run(*dropped, 2, 2), run(*other, 2, 2))


def test_max_norm_clips_each_parameter_separately():
    model, optimizer, _ = prepared("fp32", torch.optim.SGD, lr=1.0)
    PerLayer(optimizer, max_norm=0.01)
    before = [p.detach().clone() for p in model.parameters()]
    (model(x_of(0)).square().mean() * 100).backward()
    for p, old in zip(model.parameters(), before, strict=True):
        assert 0.0099 < float((p.detach() - old).norm()) < 0.0101


def test_clip_grad_norm_with_per_layer_steps_is_refused():
    model, optimizer, scaler = started()
    PerLayer(optimizer)
    model(x_of(0)).sum().backward()
    with pytest.raises(
        LossScaleError, match=r"clip_grad_norm_\(\).*PerLayer\).*Clip layer by layer: PerLayer\(optimizer, max"
    ):
        scaler.clip_grad_norm_(optimizer, 1.0)


def test_a_wrong_number_of_micro_batches_is_refused():
    model, optimizer, _ = started()
    PerLayer(optimizer, micro_batches=2)
    model(x_of(0)).sum().backward()
    with pytest.raises(OptimizerError, match=r"step\(\) after 1 of 2 micro-batches"):
        optimizer.step()
    model(x_of(0)).sum().backward()
    with pytest.raises(
        OptimizerError, match=r"has stepped in this step already: end each step of 2 .* optimizer.step\(\)"
    ):
        model(x_of(0)).sum().backward()


def test_per_layer_can_be_removed_and_is_refused_twice():
    layered, plain = started(), started()
    with_hooks = PerLayer(layered[1])
    with pytest.raises(OptimizerError, match=r"steps in the backward pass already; call remove\(\)"):
        PerLayer(layered[1])
    run(*layered, 2)
    with_hooks.remove()
    run(*plain, 2)
    assert_same(run(*layered, 2, start=2), run(*plain, 2, start=2))
    layered[2].clip_grad_norm_(layered[1], 1.0)


def test_per_layer_works_with_galore_adamw():
    model, other = net(), net()
    weights = [[{"params": [m[0].weight, m[3].weight], "rank": 3}, {"params": m[0].bias}] for m in (model, other)]
    layered, plain = (GaLoreAdamW(groups, lr=0.01) for groups in weights)
    PerLayer(layered)
    for step in range(3):
        for m, optimizer in ((model, layered), (other, plain)):
            m(x_of(step)).square().mean().backward()
            optimizer.step()
            m.zero_grad()
    assert_same([p.detach() for p in model.parameters()], [p.detach() for p in other.parameters()])


def test_unsupported_optimizers_and_models_are_refused(monkeypatch):
    model = net()
    with pytest.raises(OptimizerError, match=r"PerLayer takes an optimizer of halfstep.prepare.*found AdamW"):
        PerLayer(torch.optim.AdamW(model.parameters()))
    with pytest.raises(OptimizerError, match="recipe 'fp16-mixed' scales its loss"):
        PerLayer(prepared("fp16-mixed")[1])
    with pytest.raises(OptimizerError, match="micro_batches = 0"):
        PerLayer(started()[1], micro_batches=0)
    _, optimizer, _ = started()
    monkeypatch.setattr("halfstep.optim.lowbit.are_several", lambda group: True)
    with pytest.raises(OptimizerError, match="PerLayer with several ranks"):
        PerLayer(optimizer)
    monkeypatch.setattr("halfstep.optim.lowbit.are_several", lambda group: False)
    optimizer.param_groups[0]["params"][0].device_mesh = "two ranks"
    with pytest.raises(OptimizerError, match="PerLayer under fully_shard"):
        PerLayer(optimizer)
    assert optimizer.per_layer is None
