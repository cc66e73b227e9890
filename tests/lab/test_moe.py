"""The lab's mixture of experts: routing, capacity and balance loss as published; recipes train it or raise."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import halfstep
from families import slow_unless
from halfstep.lab.experiment import read_metrics
from halfstep.lab.models import build_model
from halfstep.lab.models.moe import BALANCE, Experts, MoE, Router, Routing, balance, counted, within
from halfstep.lab.tasks import experiment_for, get_task
from halfstep.lab.train import Trainer
from halfstep.recipe import get_recipe, list_recipes
from ranks import on_ranks


SMOOTH = {"fp8-smooth-swiglu", "fp8-fishman"}
PURE = {"fp16-pure"}  # as documented: squares of small gradients underflow
LATE = {"fp8-adam"}  # slow for a dense model, too: 4.15 to 3.67 in 24 steps
UNIT = {name for name in list_recipes() if get_recipe(name).unit_scaled}


def build(**options):
    torch.manual_seed(0)
    return MoE(64, 16, 2, 32, 2, **{"experts": 4, **options})


@functools.cache
def tokens():
    return torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(0))


def routed(probabilities, slots=1):
    return Routing(probabilities, probabilities.topk(slots, -1).indices)


def losses_under(recipe, steps=8, **options):
    model = build(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe)
    losses = []
    for _ in range(steps):
        output = model(tokens()[:, :-1])
        loss = F.cross_entropy(output.logits.flatten(0, 1), tokens()[:, 1:].flatten()) + output.balance_loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.quick("fp8-smooth-swiglu", "unit-fp8")
@pytest.mark.parametrize(
    "name", slow_unless({"bf16-mixed", "fp8-delayed", "fp8-smooth-swiglu", "unit-fp8"}.__contains__, list_recipes())
)
def test_recipes_train_it_or_raise(name):
    if name in SMOOTH | UNIT:
        reason = "smooths gated MLPs.* and MoE has none" if name in SMOOTH else "MoE is not unit-scaled"
        with pytest.raises(halfstep.HalfstepError, match=reason):
            losses_under(name, steps=1)
        return
    losses, model = losses_under(name, steps=24 if name in LATE else 8)
    assert name in PURE or losses[-1] < 0.9 * losses[0]
    plan = halfstep.plan_of(model)
    rounds = any(rule.linear.rounds for rule in get_recipe(name).rules)
    assert ("blocks.1.mlp.experts" in {*plan.layers} | {*plan.kept}) == rounds or "last blocks" in plan.kept.values()


def test_router_precision_follows_the_recipe():
    """Rules keep the router's operands unrounded; its scores are in the compute dtype."""
    selective = replace(get_recipe("bf16-mixed"), name="selective", float32_modules=("*.router",))
    nowhere = replace(get_recipe("bf16-nomaster"), name="stored", float32_modules=("*.router",))
    for recipe, dtype, stored in [
        ("bf16-mixed", torch.bfloat16, torch.float32),
        ("fp8-delayed", torch.bfloat16, torch.float32),
        (selective, torch.float32, torch.float32),
        (nowhere, torch.float32, torch.float32),
        ("bf16-nomaster", torch.bfloat16, torch.bfloat16),
    ]:
        seen, (_, model) = [], losses_under(recipe, steps=1)
        router = model.blocks[1].mlp.router
        router.register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(output[0].dtype))
        model(tokens()[:, :-1])
        assert seen == [dtype], recipe
        assert router.scores.weight.dtype == stored
    _, model = losses_under("fp8-delayed", steps=1)
    assert halfstep.plan_of(model).kept["blocks.1.mlp.router.scores"] == "router"


@pytest.mark.parametrize("slots", [1, 2])
def test_balance_loss_equals_transformers(slots):
    scores = torch.randn(60, 8)
    routing = routed(scores.softmax(-1), slots)
    theirs = load_balancing_loss_func((scores,), 8, slots) / slots  # transformers does not divide by the slots
    torch.testing.assert_close(balance(routing, counted(routing)), theirs)


def test_balance_loss_is_1_if_balanced_and_expert_count_if_collapsed():
    equal = Routing(torch.full((12, 4), 0.25), torch.arange(12)[:, None] % 4)
    collapsed = routed(F.one_hot(torch.zeros(12, dtype=torch.int64), 4).float())
    assert balance(equal, counted(equal)) == 1.0
    assert balance(collapsed, counted(collapsed)) == 4.0


def test_balance_over_micro_batches_differs_from_balance_within_each():
    """Hard routing: 2 for separate micro-batches, 1 together. Four domains on pairs of 8 experts: a buffer is in
    between."""
    hard = routed(F.one_hot(torch.arange(2).repeat_interleave(6), 2).float())
    counts = counted(hard, 2)
    assert balance(hard, counts) == 2.0
    assert balance(hard, counts.sum(0).expand_as(counts)) == 1.0

    domain = torch.arange(4).repeat_interleave(500)
    scores = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0)) * 0.5
    scores += 3 * F.one_hot(torch.stack([2 * domain, 2 * domain + 1]), 8).sum(0)
    routing = routed(scores.softmax(-1), 2)
    counts = counted(routing, 4)
    micro, together = (float(balance(routing, c)) for c in (counts, counts.sum(0).expand_as(counts)))
    assert micro > 2.8
    assert together == pytest.approx(1, abs=0.01)
    whole = counts.sum(0) / counts.sum()
    mean = routing.probabilities.mean(0)
    assert together == pytest.approx(float(8 * (whole * mean).sum()), rel=1e-6)  # equation 4 equals equation 6
    parts = [
        float(balance(Routing(routing.probabilities.view(4, 500, 8)[i], routing.chosen), counts[: i + 1].sum(0)[None]))
        for i in range(4)
    ]
    assert parts == sorted(parts, reverse=True)
    assert float(balance(routing, counts.cumsum(0))) == pytest.approx(sum(parts) / 4, rel=1e-6)


def test_balance_loss_gradient_flows_only_through_probabilities():
    scores = torch.randn(30, 4, requires_grad=True)
    routing = routed(scores.softmax(-1))
    counts = counted(routing)
    balance(routing, counts).backward()
    expected = torch.func.grad(lambda s: 4 * (counts[0] / 30 * s.softmax(-1).mean(0)).sum())(scores.detach())
    torch.testing.assert_close(scores.grad, expected)


def test_experts_keep_their_first_tokens_within_capacity():
    assert int((within(torch.zeros(32, 1, dtype=torch.int64), 4, 8) == 0).sum()) == 8  # capacity 1: T / N
    chosen = torch.tensor([[0, 1], [0, 1], [1, 0], [0, 1]])
    assert within(chosen, 2, 2).tolist() == [[0, 1], [0, 2], [1, 2], [2, 2]]  # first choices come before second ones
    many = torch.zeros(1000, 1, dtype=torch.int64)
    assert int((within(many, 2, 700) == 0).sum()) == 700  # beyond 256, up to which bfloat16 counts exactly


def test_dropped_tokens_are_unchanged_and_evaluation_drops_none():
    model = build(capacity=0.25)
    mixture, x = model.blocks[1].mlp, torch.randn(2, 16, 32)
    changed, routing = mixture(x)
    assert torch.equal(changed.flatten(0, 1).any(-1), (within(routing.chosen, 4, 2) < 4)[:, 0])
    assert mixture.eval()(x)[0].flatten(0, 1).any(-1).all()


def test_experts_equal_separate_mlps():
    torch.manual_seed(0)
    experts, x = Experts(8, 12, 3, 0.0), torch.randn(5, 8)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    index, gates = torch.tensor([[0, 2], [1, 3], [2, 1], [3, 3], [0, 1]]), torch.rand(5, 2)
    expected = torch.zeros_like(x)
    for token in range(5):
        for slot in range(2):
            if (e := int(index[token, slot])) < 3:
                one = experts.down_proj[e] @ (experts.up_proj[e] @ x[token]).relu()
                expected[token] += gates[token, slot] * one
    torch.testing.assert_close(experts(x, index, gates), expected)


def test_gates_of_one_slot_are_probabilities_and_of_two_sum_to_1():
    for slots in (1, 2):
        probabilities, gates, chosen = Router(8, 4, slots)(torch.randn(6, 8))
        top = probabilities.gather(1, chosen)
        torch.testing.assert_close(gates, top if slots == 1 else top / top.sum(1, keepdim=True))


@torch.no_grad()
def test_bfloat16_router_has_ties_and_other_choices():
    """768 to 32, 8,192 tokens: about 1% choose another expert; 2% have a tie, none in float32."""
    torch.manual_seed(0)
    router, x = Router(768, 32, 1), torch.randn(8192, 768).bfloat16()
    std = (0.1 / 768) ** 0.5
    torch.nn.init.trunc_normal_(router.scores.weight, std=std, a=-2 * std, b=2 * std)
    wide, _, choice = router(x.float())
    narrow, _, other = router.bfloat16()(x)
    ties = [int(((p == p.amax(1, keepdim=True)).sum(1) > 1).sum()) for p in (wide, narrow)]
    assert ties[0] == 0
    assert 0.01 < ties[1] / 8192 < 0.03
    assert 0.006 < (choice != other).double().mean() < 0.016
    assert (wide.double().sum(1) - 1).abs().max() < 1e-6
    assert (narrow.double().sum(1) - 1).abs().max() > 5e-4


def test_initial_weights_are_truncated_at_two_scaled_deviations():
    for scale in (0.1, 1.0):
        for name, p in build(scale=scale).named_parameters():
            if p.dim() > 1 and not name.startswith(("token", "position")):
                std = (scale / p.shape[-1]) ** 0.5
                assert p.abs().max() <= 2 * std
                assert p.detach().std().item() == pytest.approx(0.88 * std, rel=0.15)


def counts_on_rank(rank):
    routing = routed(torch.randn(8, 4, generator=torch.Generator().manual_seed(rank)).softmax(-1))
    counts = counted(routing)[0]
    torch.distributed.all_reduce(counts)
    return balance(routing, counts[None])


@pytest.mark.slow  # two processes
def test_balance_loss_with_shared_counts_averages_to_the_global_loss(tmp_path):
    found = on_ranks(counts_on_rank, tmp_path)
    each = [torch.randn(8, 4, generator=torch.Generator().manual_seed(rank)).softmax(-1) for rank in range(2)]
    whole = routed(torch.cat(each))
    torch.testing.assert_close(torch.stack(found).mean(), balance(whole, counted(whole)))


@pytest.mark.slow
def test_balance_loss_is_added_only_in_training(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    options = {"batch": 2, "context": 16, "warmup": 1, "validations": 1, "statistics": 1, "checkpoints": 1, "seeds": 1}
    data = str(tmp_path / "text.txt")
    experiment = experiment_for("lm", recipes=("bf16-mixed",), model="moe-tiny", data=data, steps=3, **options)
    task = get_task("lm").open(experiment)
    model = build_model("moe-tiny", task.models(), 0)
    batch = task.batch(0, 1)
    output = model(batch["tokens"])
    assert output.balance_loss.item() >= 0.9 * BALANCE
    task_loss = F.cross_entropy(output.logits.flatten(0, 1), batch["targets"].flatten())
    torch.testing.assert_close(task.loss(model, batch), task_loss + output.balance_loss)
    torch.testing.assert_close(task.loss(model.eval(), batch), task_loss)
    build = functools.partial(build_model, "moe-tiny", task.models())
    Trainer(experiment, get_recipe("bf16-mixed"), 0, task, build, tmp_path / "run").run()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    losses = [row["loss"] for row in rows if row["kind"] == "step"]
    assert losses[-1] < losses[0]
    assert rows[-1]["status"] == "finished"
