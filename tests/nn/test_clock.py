"""Optimizer steps without scaler.update(), and training in eval(), are errors; other changes of weights are not."""

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from families import slow_unless
from halfstep.errors import RecipeError
from halfstep.nn.scaling import Scalings
from halfstep.recipe import LossScale, get_recipe
from tiny import adamw, assert_same, batch, mlp, model_for, prepared, train


STATEFUL = ("fp8-delayed", "fp8-delayed-megatron")
every_stateful = pytest.mark.parametrize("name", STATEFUL)
NOT_UPDATED = r"weights have changed and its scaling states have not moved on: call scaler.update\(\) after every"


def backward(model, rows=slice(None), size=1.0):
    x, y = batch()
    F.mse_loss(model(size * x[rows]), y[rows]).backward()


def applied(model=None, name="fp8-delayed", kind=adamw):
    """A model under `apply` and an optimizer of torch's, whose steps halfstep does not see."""
    model = mlp() if model is None else model
    halfstep.apply(model, name)
    return model, kind(model)


def states(model):
    return Scalings(model).state_dict()


# ---- steps without an update of the scaling states ------------------------------------------------------------------


class OnData(torch.optim.Optimizer):
    """An optimizer that writes through .data, which does not raise version counters."""

    def __init__(self, model):
        super().__init__(model.parameters(), {})

    def step(self):
        for p in itertools.chain(*(group["params"] for group in self.param_groups)):
            if p.grad is not None:
                p.data.sub_(0.1 * p.grad)


class Looped(nn.Sequential):
    """A loop with graph breaks: torch.compile skips this frame, and compiles the layers that it calls."""

    def forward(self, x):
        for layer in self:
            torch._dynamo.graph_break()
            x = layer(x)
        return x


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does, as it traces
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # and that too
def test_a_missing_update_is_noticed_in_a_compiled_model_with_graph_breaks():
    torch._dynamo.reset()
    model, optimizer = applied(Looped(nn.Linear(4, 4)))
    called = torch.compile(model, backend="eager")
    for _ in range(2):
        called(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    with pytest.raises(RecipeError, match=NOT_UPDATED):
        called(torch.ones(2, 4))


@every_stateful
@pytest.mark.parametrize("kind", [adamw, OnData])
@pytest.mark.parametrize("mode", [True, False])
def test_a_second_step_of_torchs_optimizer_without_an_update_is_noticed(name, kind, mode):
    model, optimizer = applied(name=name, kind=kind)
    model.train(mode)
    for _ in range(2):
        backward(model)
        optimizer.step()
    with torch.no_grad():
        model(batch()[0])
    with pytest.raises(
        RecipeError, match=NOT_UPDATED + r" optimizer step, or halfstep.advance\(model\) where there is"
    ):
        model(batch()[0])
    if mode:
        halfstep.advance(model)
        backward(model)


def test_a_missing_update_is_noticed_despite_a_frozen_first_layer():
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = adamw(model[3])
    halfstep.apply(model, "fp8-delayed")
    for _ in range(2):
        backward(model)
        optimizer.step()
    with pytest.raises(RecipeError, match=NOT_UPDATED):
        model(batch()[0])


@pytest.mark.quick("fp8-delayed-False", "fp8-delayed-megatron-False")
@pytest.mark.parametrize(
    ("name", "compiled"),
    slow_unless(
        lambda case: not case[1] or case[0] == "fp8-delayed", [(n, c) for n in STATEFUL for c in (False, True)]
    ),
)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does, as it traces
def test_a_second_step_of_our_optimizer_without_an_update_is_refused(name, compiled):
    """Before a weight is written; and in a traced graph, whose forwards are not counted."""
    torch._dynamo.reset()
    model, optimizer, scaler = prepared(name)
    called = torch.compile(model, backend="aot_eager") if compiled else model
    backward(called)
    optimizer.step()
    backward(called)
    before = copy.deepcopy(model.state_dict())
    for step in (optimizer.step, lambda: scaler.step(optimizer)):
        with pytest.raises(RecipeError, match=NOT_UPDATED):
            step()
    assert_same(dict(model.state_dict()), dict(before))
    scaler.update()
    optimizer.step()


def test_steps_without_a_forward_need_no_update():
    """With gradients set by the user no scale gets stale."""
    model, optimizer, _ = prepared("fp8-delayed")
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()


def test_steps_that_torchs_grad_scaler_skips_need_no_update():
    model, optimizer, _ = prepared("fp8-delayed")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for size in (math.inf, math.inf, 1.0):
        scaler.scale(F.mse_loss(model(batch()[0]), batch()[1]) * size).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    halfstep.advance(model)


def test_the_optimizer_of_a_reverted_model_needs_no_update():
    model, optimizer, _ = prepared("fp8-delayed")
    backward(model)
    optimizer.step()
    halfstep.revert(model)
    backward(model)
    optimizer.step()


# ---- changes of weights that are no steps ---------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(20, 8, max_norm=0.1), nn.Linear(8, 4)

    def forward(self, tokens):
        return self.out(self.table(tokens))


@every_stateful
@pytest.mark.parametrize("how", ["apply", "prepare"])
def test_an_embedding_with_max_norm_is_no_step(name, how):
    torch.manual_seed(0)
    if how == "apply":
        model, optimizer = applied(Words(), name)
    else:
        model, optimizer, _ = prepared(name, Words())
    for step in range(3):
        for micro in range(5):
            tokens = torch.randint(0, 20, (6,), generator=torch.Generator().manual_seed(10 * step + micro))
            model(tokens).square().mean().backward()
        optimizer.step()
        halfstep.advance(model)
        optimizer.zero_grad()


def sam(model, optimizer, perturb):
    """Sharpness-aware minimisation: a move up the gradient, a second gradient there, the move undone, and a step."""
    backward(model)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            perturb(p, 0.05 * p.grad)
    model.zero_grad()
    backward(model)
    with torch.no_grad():
        for p, old in zip(model.parameters(), before, strict=True):
            p.copy_(old)
    optimizer.step()
    model.zero_grad()


def on_data(p, change):
    p.data.add_(change)


def in_place(p, change):
    p.add_(change)


@every_stateful
@pytest.mark.parametrize("perturb", [in_place, on_data])
@pytest.mark.parametrize("how", ["apply", "prepare"])
def test_sharpness_aware_minimisation_is_one_step(name, perturb, how):
    model, optimizer = applied(name=name) if how == "apply" else prepared(name)[:2]
    for _ in range(3):
        sam(model, optimizer, perturb)
        halfstep.advance(model)


@every_stateful
def test_loads_and_clamps_of_weights_between_micro_batches_are_no_steps(name):
    model, optimizer, scaler = prepared(name)
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(2):
        for _ in range(3):
            backward(model)
            kept = copy.deepcopy(model.state_dict())
            model.load_state_dict(average.module.state_dict())
            with torch.no_grad():
                model(batch()[0])
            model.load_state_dict(kept)
            with torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-1.0, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        average.update_parameters(model)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.G, self.D = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))

    def forward(self, x, real):
        return self.D(x if real else self.G(x))


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("mode", [True, False])
def test_two_optimizers_on_parts_of_one_model_may_share_an_update(updates, mode):
    """As GANs are trained: advance() once for both steps or after each, and one call too many."""
    model = Pair()
    halfstep.apply(model, "fp8-delayed")
    optimizers = {part: torch.optim.SGD(getattr(model, part).parameters(), lr=0.01) for part in "DG"}
    x = batch()[0]
    for _ in range(3):
        for number, (part, optimizer) in enumerate(optimizers.items()):
            model.zero_grad()
            (model(x, real=True) - model(x, real=False)).mean().backward()
            optimizer.step()
            if part == "D":
                with torch.no_grad():
                    for p in model.D.parameters():
                        p.clamp_(-0.1, 0.1)
            if number >= 2 - updates:
                halfstep.advance(model)
        model.train(mode)
        halfstep.advance(model)
        model.train()
    assert states(model)["G.input"][0] == (448 / x.abs().max().double()).float()


def test_two_followed_optimizers_may_share_an_update():
    model = Pair()
    halfstep.apply(model, "fp8-delayed")
    parts = {part: torch.optim.SGD(getattr(model, part).parameters(), lr=0.01) for part in "DG"}
    for optimizer in parts.values():
        Scalings(model).follow(optimizer)
    for _ in range(3):
        for optimizer in parts.values():
            model(batch()[0], real=False).mean().backward()
            optimizer.step()
        halfstep.advance(model)
    for part in "DG":
        model(batch()[0], real=False).mean().backward()
        parts[part].step()
    model(batch()[0], real=False).mean().backward()
    with pytest.raises(RecipeError, match=NOT_UPDATED):
        parts["D"].step()


def test_several_forwards_before_a_backward_and_a_deepcopy_are_no_steps():
    for model, optimizer in (applied(), prepared("fp8-delayed")[:2]):
        for _ in range(2):
            x = batch()[0]
            (model(x[:6]) @ model(x[6:]).t()).logsumexp(1).mean().backward()
            twin = copy.deepcopy(model)
            backward(twin)
            optimizer.step()
            halfstep.advance(model)


# ---- eval() ---------------------------------------------------------------------------------------------------------


@every_stateful
@pytest.mark.parametrize("how", ["apply", "prepare"])
@pytest.mark.parametrize("trained", [0, 2])
def test_training_in_eval_is_refused_at_the_first_step(name, how, trained):
    model, optimizer = applied(name=name) if how == "apply" else prepared(name)[:2]

    def step():
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        halfstep.advance(model)

    for _ in range(trained):
        step()
    model.eval()
    before = states(model)
    words = (
        r"Sequential is in eval\(\), where its scaling states record nothing, and its weights have changed: call "
        r"model.train\(\) before .* take part.eval\(\) after it"
    )
    with pytest.raises(RecipeError, match=words):
        step()
    assert_same(states(model), before)
    halfstep.advance(model, skipped=True)
    model.train()
    step()
    assert not torch.equal(states(model)["3.weight"], before["3.weight"])


@pytest.mark.slow  # the fast test of a traced graph is that of a second step
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does, as it traces
@pytest.mark.parametrize("how", ["prepare", "apply"])
def test_training_a_compiled_model_in_eval_is_refused(how):
    torch._dynamo.reset()
    model, optimizer = applied() if how == "apply" else prepared("fp8-delayed")[:2]
    compiled = torch.compile(model.eval(), backend="aot_eager")
    backward(compiled)
    optimizer.step()
    with pytest.raises(RecipeError, match=r"is in eval\(\)"):
        halfstep.advance(model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does, as it traces
def test_eval_of_a_compiled_model_between_step_and_update_is_no_error():
    torch._dynamo.reset()
    model, optimizer, scaler = prepared("fp8-delayed")
    backward(torch.compile(model, backend="aot_eager"))
    scaler.step(optimizer)
    model.eval()
    scaler.update()
    assert states(model)["0.input"][0] == (448 / batch()[0].abs().max().double()).float()


@every_stateful
def test_backward_in_eval_and_an_extra_update_leave_scales_unchanged(name):
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler, 2)
    before = states(model)
    model.eval()
    x = (100 * batch()[0]).requires_grad_()
    for _ in range(3):
        model(x).sum().backward()
    optimizer.zero_grad()
    halfstep.advance(model)  # no optimizer has stepped
    for key, state in states(model).items():
        assert state[0] == before[key][0]
    model.train()
    backward(model)
    scaler.step(optimizer)
    model.eval()
    model(x).sum().backward()
    scaler.update()
    assert states(model)["0.input"][0] == before["0.input"][0]


# ---- skipped batches ------------------------------------------------------------------------------------------------


@every_stateful
def test_a_skipped_batch_leaves_scaling_states_unchanged(name):
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler, 2)
    before = states(model)
    backward(model, size=1000)
    optimizer.zero_grad()
    halfstep.advance(model, skipped=True)
    assert_same(states(model), before)
    scaled = replace(get_recipe(name), name="made", loss_scale=LossScale(init=2.0))
    model, optimizer, scaler = prepared(scaled)
    scaler.scale(F.mse_loss(model(1000 * batch()[0]), batch()[1]) * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not any(state.any() for state in states(model).values())


@pytest.mark.parametrize("name", ["fp8-delayed", "fp8-delayed-megatron", "fp8-smooth-swiglu"])
@pytest.mark.parametrize("trained", [0, 2])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_nonfinite_batch_changes_no_scale_and_costs_one_step_of_history(name, trained, bad):
    """Without a loss scale the step is not skipped."""
    model, optimizer, scaler = prepared(name, model_for(name))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, scaler, trained)
    before = states(model)
    x, y = batch()
    x = torch.cat([torch.full((1, 8), bad), x[1:]])
    F.mse_loss(model(x), y).backward()
    optimizer.zero_grad()  # the user sees the loss and skips the step
    scaler.update()
    after = states(model)
    assert all(state.isfinite().all() for state in after.values())
    assert after["0.input"][0] == before["0.input"][0]
    train(model, optimizer, scaler, 2)
    largest = {"fp8-smooth-swiglu": lambda a: 2.0 ** math.floor(math.log2(240 / a))}.get(name, lambda a: 448 / a)
    amax = batch()[0].abs().max().double().item()
    assert states(model)["0.input"][0] == torch.tensor(largest(amax), dtype=torch.float32)


def test_tiny_gradients_reach_every_layer_in_the_first_step():
    """Gradients of 1e-6 lie below E5M2's smallest subnormal: with a first scale of 1 they would reach one more layer
    per step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(12)))
    model, _, _ = prepared("fp8-delayed", model)
    x = batch()[0]
    (1e-6 * model(x).square().mean()).backward()
    assert all(p.grad.any() for p in model.parameters())
    twin = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(12)))
    twin.load_state_dict(model.state_dict())
    halfstep.apply(twin, "fp8-current")
    (1e-6 * twin(x).square().mean()).backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


# ---- the root's training mode decides, not a submodule's ------------------------------------------------------------


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.backbone, self.last = nn.Linear(8, 8), mlp(), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.backbone(self.first(x)))


@pytest.mark.parametrize("name", ["fp8-delayed", "fp8-delayed-megatron", "fp8lm-o1"])
@pytest.mark.filterwarnings("ignore:.* is called outside .*:UserWarning", "ignore:.* and not as codes:UserWarning")
@pytest.mark.parametrize("called", ["root", "parts"])
def test_a_frozen_submodule_in_eval_updates_its_scaling_states(name, called):
    """Small activations and gradients pass through it, and its scales follow them."""
    model = Layered()
    model.backbone.requires_grad_(False).eval()
    with torch.no_grad():
        model.first.weight.mul_(1e-3)
        model.first.bias.zero_()
    halfstep.apply(model, name)
    optimizer, x = torch.optim.SGD([*model.first.parameters(), *model.last.parameters()], lr=0.0), batch()[0]
    seen = {}
    model.backbone[0].register_forward_pre_hook(lambda _, args: seen.update(x=args[0].abs().max()))
    model.backbone[0].register_full_backward_hook(lambda *args: seen.update(grad=args[2][0].abs().max()))
    for _ in range(2):
        y = model(x) if called == "root" else model.last(model.backbone(model.first(x)).float())
        (1e-4 * y.square().mean()).backward()
        optimizer.step()
        halfstep.advance(model)
        assert model.first.weight.grad.count_nonzero() == 64
    found = states(model)
    if name != "fp8lm-o1":
        assert found["backbone.0.input"][0] == (448 / seen["x"].double()).float()
        assert found["backbone.0.grad_output"][0] == (57344 / seen["grad"].double()).float()
    assert {len(state[1:].nonzero()) for state in found.values()} == {0 if name == "fp8-delayed-megatron" else 2}


# ---- target networks -------------------------------------------------------------------------------------------------


def update_target(target, model, how):
    with torch.no_grad():
        if how == "load":
            target.load_state_dict(model.state_dict())
        for mine, its in zip(target.parameters(), model.parameters(), strict=True):
            if how == "data":
                mine.data.copy_(0.9 * mine.data + 0.1 * its.data)
            elif how == "lerp":
                mine.lerp_(its, 0.1)


@every_stateful
@pytest.mark.parametrize("how", ["lerp", "data", "load"])
@pytest.mark.parametrize("made", ["copied before", "copied", "in eval", "prepared"])
def test_a_target_network_needs_no_update(name, how, made):
    """As in DQN, called with and without gradients, which are never computed."""
    model, before = mlp(), mlp()
    model, optimizer, scaler = prepared(name, model)
    target = before if "before" in made or made == "prepared" else copy.deepcopy(model)
    if made == "prepared":
        target, _, _ = prepared(name, target)
    elif made == "copied before":
        halfstep.apply(target, name)
    target.train(made != "in eval")
    x, _ = batch()
    for step in range(5):
        with torch.set_grad_enabled(step != 3):
            goal = target(x)
        scaler.scale(F.mse_loss(model(x), goal.detach() + 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        update_target(target, model, how)
    assert all(p.grad is None for p in target.parameters())


def test_a_missing_update_is_noticed_in_a_former_target_network():
    model, optimizer = applied()
    for _ in range(4):
        model(batch()[0])
        update_target(model, mlp(seed=3), "lerp")
    for _ in range(2):
        backward(model)
        optimizer.step()
    with pytest.raises(RecipeError, match=NOT_UPDATED):
        model(batch()[0])
