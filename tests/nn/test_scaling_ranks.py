"""Scaling states and weights of two ranks, under DDP and FSDP2, equal those of one process that sees all data."""

import pytest
import torch

import halfstep
from halfstep.nn.scaling import Scalings
from ranks import on_ranks
from tiny import RECIPES, assert_same, mlp


STATEFUL = ("fp8-delayed", "fp8-delayed-megatron")
NAMES = [
    name for name in RECIPES if "fp8" in name
]  # Smooth-SwiGLU's gradients are rounded stochastically, with another seed on each rank
pytestmark = pytest.mark.slow


def micro_batches(step, rank):
    """Two micro-batches of a rank. The largest input of a step is on one rank only, by turns."""
    for i in range(2):
        generator = torch.Generator().manual_seed(100 * step + 10 * rank + i)
        size = 5.0 if (step + rank, i) == (2, 0) else 1.0
        x, y = torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)
        yield size * x, y


def backward(model, x, y):
    torch.nn.functional.mse_loss(model(x), y).backward()


def seen(model):
    whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
    return {n: p.detach().clone() for n, p in whole.items()}, Scalings(model).state_dict()


def update(model, lr=2.0**-4):
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(lr * p.grad.to(p.dtype))
            p.grad = None
    halfstep.advance(model)


def on_a_rank(name, how, rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    halfstep.apply(model, name)
    if how == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model[3], mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    amaxes = []
    for step in range(3):
        for i, (x, y) in enumerate(micro_batches(step, rank)):
            if how == "ddp":
                wrapped.require_backward_grad_sync = i == 1
            else:
                wrapped.set_requires_gradient_sync(i == 1)
            backward(wrapped, x, y)
        amaxes.append({key: state[1].item() for key, state in Scalings(model).state_dict().items()})
        update(model)
    found = {"seen": seen(model), "amaxes": amaxes, "error": ""}
    try:
        for _ in range(3):  # the second change is one too many
            backward(wrapped, x, y)
            with torch.no_grad():
                model[3].bias.mul_(2.0)
    except halfstep.HalfstepError as error:
        found["error"] = str(error)
    return found


def in_one_process(name):
    """The same steps with all micro-batches, their gradients summed in the ranks' order."""
    model = mlp()
    halfstep.apply(model, name)
    for step in range(3):
        sums = []
        for rank in range(2):
            for x, y in micro_batches(step, rank):
                backward(model, x, y)
            sums.append({name: p.grad.clone() for name, p in model.named_parameters()})
            model.zero_grad()
        for key, parameter in model.named_parameters():
            parameter.grad = sums[0][key] / 2 + sums[1][key] / 2
        update(model)
    return model


def results(rank):
    return {name: {how: on_a_rank(name, how, rank) for how in ("ddp", "fsdp")} for name in NAMES}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_ranks(results, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_equal_one_process(ranks, name):
    """Weights and states after three steps."""
    expected = seen(in_one_process(name))
    for rank in ranks:
        assert_same(rank[name]["ddp"]["seen"], expected)
        assert_same(rank[name]["fsdp"]["seen"], expected)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", STATEFUL)
def test_ranks_keep_their_own_amaxes_until_the_step_ends(ranks, name, how):
    """DDP broadcasts the first rank's buffers before a forward, but not these."""
    for rank, found in enumerate(ranks):
        for step, amaxes in enumerate(found[name][how]["amaxes"]):
            assert amaxes["0.input"] == max(x.abs().max().item() for x, _ in micro_batches(step, rank))
    first, second = (found[name][how]["amaxes"] for found in ranks)
    assert any(a["0.input"] > b["0.input"] for a, b in zip(first, second, strict=True))
    assert any(a["0.input"] < b["0.input"] for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", STATEFUL)
def test_an_optimizer_step_without_an_update_is_noticed(ranks, name, how):
    for found in ranks:
        assert "its scaling states have not moved on: call scaler.update()" in found[name][how]["error"]
