"""Recipes with stages on two ranks, under DDP and FSDP2: both change together, and equal each stage's recipe alone."""

import pytest
import torch
import torch.nn.functional as F

import halfstep
from halfstep.nn.stages import schedule_of
from halfstep.recipe import Stage, chain, get_recipe
from ranks import on_ranks
from tiny import assert_same, mlp


pytestmark = pytest.mark.slow
CHAINS = {"three": ("fp8-delayed", "bf16-mixed", "fp8-delayed-megatron"), "wider": ("fp32", "fp8-current")}
EVERY = 2  # steps a stage


def spread(how, recipe, weights=None, **options):
    """A model under the recipe on two ranks, its wrapper, its optimizer and its scaler."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    if weights is not None:
        model.load_state_dict(weights)
    halfstep.apply(model, recipe)
    if how == "ddp":
        called = torch.nn.parallel.DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model[3], mesh=mesh)
        called = fully_shard(model, mesh=mesh)
    optimizer, scaler = halfstep.optimize(called, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    return model, called, optimizer, scaler


def steps(how, made, first, number, rank):
    """Run `number` steps of two micro-batches, starting with step `first`."""
    _, called, optimizer, scaler = made
    losses = []
    for step in range(first, first + number):
        for i in range(2):
            if how == "ddp":
                called.require_backward_grad_sync = i == 1
            else:
                called.set_requires_gradient_sync(i == 1)
            generator = torch.Generator().manual_seed(100 * step + 10 * rank + i)
            x, y = torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)
            loss = F.mse_loss(called(x), y)
            scaler.scale(loss).backward()
            losses.append(loss.item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses


def whole(model):
    return {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in model.named_parameters()
    }


def on_a_rank(names, how, rank):
    total = EVERY * len(names)
    first, *rest = map(get_recipe, names)
    recipe = chain(first, *(Stage(each, (i + 1) / len(names)) for i, each in enumerate(rest)))
    made = spread(how, recipe, total_steps=total)
    losses, stages, saved = [], [], []
    for step in range(total):
        losses += steps(how, made, step, 1, rank)
        stages.append(schedule_of(made[0]).stage)
        saved.append((whole(made[0]), made[3].state_dict()))
    expected, weights = [], None
    for i, name in enumerate(names):  # each stage in its own model
        other = spread(how, name, weights)
        expected += steps(how, other, EVERY * i, EVERY, rank)
        weights = whole(other[0])
    resumed = {}
    for after in (1, 3):
        again = spread(how, recipe, saved[after - 1][0], total_steps=total)
        again[3].load_state_dict(saved[after - 1][1])
        found = steps(how, again, after, total - after, rank)
        resumed[after] = (found == losses[2 * after :], whole(again[0]))
    plain = spread(how, names[0])
    alone = steps(how, plain, 0, total, rank)
    return {"losses": losses, "expected": expected, "stages": stages, "weights": whole(made[0]), "hand": weights,
            "resumed": resumed, "alone": alone}  # fmt: skip


def results(rank):
    return {(key, how): on_a_rank(names, how, rank) for key, names in CHAINS.items() for how in ("ddp", "fsdp")}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_ranks(results, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("key", CHAINS)
def test_ranks_change_stages_together_and_equal_each_recipe(ranks, key, how):
    for rank in ranks:
        found = rank[key, how]
        last = len(CHAINS[key]) - 1
        assert found["stages"] == [min((step + 1) // EVERY, last) for step in range(EVERY * (last + 1))]
        assert found["losses"] == found["expected"]
        assert found["losses"] != found["alone"]
        assert_same(found["weights"], found["hand"])
    assert_same(ranks[0][key, how]["weights"], ranks[1][key, how]["weights"])


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("key", CHAINS)
@pytest.mark.parametrize("after", [1, 3])
def test_a_run_resumes_in_either_stage(ranks, key, how, after):
    for rank in ranks:
        same, weights = rank[key, how]["resumed"][after]
        assert same
        assert_same(weights, rank[key, how]["weights"])
