"""Recipes with stages: after each change the model equals one under that stage's recipe alone."""

import copy
import io
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfstep
from families import slow_unless
from halfstep.errors import LossScaleError, RecipeError
from halfstep.nn.stages import schedule_of
from halfstep.recipe import COAT, Stage, chain, get_recipe
from tiny import Gated, adamw, assert_same, batch, copied, gated, mlp, nameless, train


TWO = "fp8-delayed until step 3, then bf16-mixed"
MASTER = get_recipe("bf16-master")
ROUNDED = replace(MASTER, name="bf16-master-fp8", rules=get_recipe("fp8-current").rules)
KEPT = replace(get_recipe("fp8-current"), name="fp8-current-kept", saved=COAT)
O2 = get_recipe("fp8lm-o2")
OTHER_O2 = replace(O2, name="o2-rowwise", rules=get_recipe("fp8-rowwise").rules)
CHAINS = {
    "fewer bits, then more": ("fp8-delayed", "bf16-mixed"),
    "more, then fewer": ("bf16-mixed", "fp8-delayed"),
    "another dtype": ("fp32", "fp8-current"),
    "autocast ends": ("mxfp8", "fp32"),
    "three": ("mxfp8", "fp8-delayed", "fp8-delayed-megatron"),
    "16-bit weights": (ROUNDED, MASTER),
    "saved in few bits": ("bf16-mixed", KEPT, "fp8-current"),
    "weights are codes": (O2, OTHER_O2),
    "FP4": ("mxfp4", "fp4-zhou", "bf16-mixed"),
    "gated MLPs": ("fp8-smooth-swiglu", "bf16-mixed"),
    "a loss scale": (replace(get_recipe("fp16-mixed"), name="scaled", rules=get_recipe("mxfp8").rules), "fp16-mixed"),
}
EVERY = 2  # steps a stage


def staged(names, build=mlp, optimizer=adamw, **options):
    recipes = [get_recipe(name) for name in names]
    recipe = chain(recipes[0], *(Stage(r, EVERY * (i + 1)) for i, r in enumerate(recipes[1:])))
    model = build()
    return halfstep.prepare(model, optimizer(model), recipe, generator=3, **options)


def made_for(names):
    return gated if any(get_recipe(name).smooth_glu for name in names) else mlp


def steps(model, optimizer, scaler, number, forward=None):
    """The documented loop with two micro-batches a step; returns the losses."""
    losses = []
    for _ in range(number):
        for seed in (1, 2):
            x, y = batch(seed)
            loss = F.mse_loss((forward or model)(x), y) / 2
            scaler.scale(loss).backward()
            losses.append(loss.item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses


def separately(names, build=mlp):
    """The losses and the last setup if each stage has its own model and optimizer that start from the previous ones."""
    losses, last = [], None
    for name in names:
        model = build()
        made = halfstep.prepare(model, adamw(model), name, generator=3)
        if last is not None:
            made[0].load_state_dict(last[0].state_dict())
            made[1].load_state_dict(nameless(last[1].state_dict()))
            if made[2].is_enabled():
                made[2].load_state_dict(last[2].state_dict() | {"halfstep": {}})
        losses += steps(*made, EVERY)
        last = made
    return losses, last


def values(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.quick("another dtype", "saved in few bits")
@pytest.mark.parametrize("names", CHAINS.values(), ids=CHAINS)
@pytest.mark.filterwarnings("ignore:the scaler state holds no scaling states")
def test_stages_equal_separate_runs_of_their_recipes(names):
    build = made_for(names)
    model, optimizer, scaler = staged(names, build)
    parameters, keys = list(model.parameters()), [*model.state_dict()]
    losses, (expected, other, _) = separately(names, build)
    assert steps(model, optimizer, scaler, EVERY * len(names)) == losses
    assert_same(copied(dict(model.state_dict())), copied(dict(expected.state_dict())))
    assert_same(copied(optimizer.state_dict()["state"]), copied(other.state_dict()["state"]))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert [*model.state_dict()] == keys == [*build().state_dict()]
    alone = halfstep.prepare(m := build(), adamw(m), names[0], generator=3)
    assert steps(*alone, EVERY * len(names)) != losses  # the stages differ


@pytest.mark.quick("first-three", "first-weights are codes", "first-a loss scale")
@pytest.mark.parametrize("names", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize("made", [0, EVERY], ids=["first", "second"])
def test_revert_restores_the_stock_model_in_either_stage(names, made):
    build = made_for(names)
    model, optimizer, scaler = staged(names, build)
    steps(model, optimizer, scaler, made)
    assert schedule_of(model).stage == bool(made)
    halfstep.revert(model)
    stock = build()
    for module, other in zip(model.modules(), stock.modules(), strict=True):
        assert type(module) is type(other)
        assert {*vars(module)} == {*vars(other)}
        assert {*module._buffers} == {*other._buffers}
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in stock.parameters()]


@pytest.mark.quick("copy-2", "copy-3")
@pytest.mark.parametrize("made", [2, 3, 4])
@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copies_and_pickles_continue_in_their_stage(made, copy_of):
    prepared = halfstep.prepare(m := mlp(), adamw(m), TWO)
    train(*prepared, steps=made)
    twin = copy_of(prepared)
    assert train(*twin, steps=3) == train(*prepared, steps=3)
    assert_same(values(twin[0]), values(prepared[0]))
    assert schedule_of(twin[0]).steps == schedule_of(prepared[0]).steps == made + 3


def load(saved, recipe, **options):
    model = mlp(seed=5)
    made = halfstep.prepare(model, adamw(model), recipe, generator=9, **options)
    for part, state in zip(made, saved, strict=True):
        part.load_state_dict(state)
    return made


def through_a_file(made):
    """The state dicts after torch.save and torch.load."""
    file = io.BytesIO()
    torch.save([part.state_dict() for part in made], file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.quick("fp8-delayed until step 3, then bf16-mixed-3", "fp8-delayed until step 3, then bf16-mixed-5")
@pytest.mark.parametrize("made", [1, 3, 5])
@pytest.mark.parametrize("recipe", [TWO, "bf16-mixed until 40%, then fp8-delayed until 80% then fp8-current"])
def test_a_resumed_run_equals_the_uninterrupted_one(made, recipe):
    prepared = halfstep.prepare(m := mlp(), adamw(m), recipe, generator=9, total_steps=8)
    train(*prepared, steps=made)
    resumed = load(through_a_file(prepared), recipe, total_steps=8)
    assert schedule_of(resumed[0]).stage == schedule_of(prepared[0]).stage
    assert train(*resumed, steps=8 - made) == train(*prepared, steps=8 - made)
    assert_same(values(resumed[0]), values(prepared[0]))


def test_loading_an_earlier_state_returns_to_its_stage():
    prepared = halfstep.prepare(m := mlp(), adamw(m), TWO, generator=9)
    train(*prepared, steps=1)
    before = through_a_file(prepared)
    losses = train(*prepared, steps=5)
    for part, state in zip(prepared, before, strict=True):
        part.load_state_dict(state)
    assert train(*prepared, steps=5) == losses


def test_the_scalers_state_has_the_stage_beside_torchs_keys():
    scaled = replace(get_recipe("fp16-mixed"), name="a", rules=get_recipe("mxfp8").rules)
    model = mlp()
    _, optimizer, scaler = halfstep.prepare(model, adamw(model), chain(scaled, Stage(get_recipe("fp16-mixed"), 2)))
    train(model, optimizer, scaler, steps=3)
    state = scaler.state_dict()
    assert [*state] == [*torch.amp.GradScaler("cpu").state_dict(), "halfstep"]
    stages = {"steps": 3, "stage": 1, "starts": [2], "total_steps": None}
    assert {**state["halfstep"], "recipe": "a"} == {"recipe": "a", "steps": 3, "stages": stages}


def test_a_state_without_a_stage_warns_and_starts_in_the_first():
    prepared = halfstep.prepare(m := mlp(), adamw(m), "bf16-mixed until step 2, then fp32")
    train(*prepared, steps=3)
    with pytest.warns(UserWarning, match="does not say how many steps were made, so recipe .* begins with its first"):
        prepared[2].load_state_dict({})
    assert (schedule_of(prepared[0]).steps, schedule_of(prepared[0]).stage) == (0, 0)
    assert prepared[0](batch()[0]).dtype == torch.float32
    train(*prepared, steps=3)
    assert schedule_of(prepared[0]).stage == 1


def test_resuming_with_another_length_warns_of_the_changed_stage():
    recipe = "fp8-current until 50%, then bf16-mixed"
    prepared = halfstep.prepare(m := mlp(), adamw(m), recipe, total_steps=4)
    train(*prepared, steps=3)
    with pytest.warns(UserWarning, match=r"of a run of 4 steps whose stages began after \[2\]; in this one, of 10, .*"
                      r"\[5\]. It goes on after step 3 in stage 1, and was in stage 2"):  # fmt: skip
        longer = load(through_a_file(prepared), recipe, total_steps=10)
    assert schedule_of(longer[0]).stage == 0


def test_a_state_with_a_stage_in_a_model_without_stages_warns():
    prepared = halfstep.prepare(m := mlp(), adamw(m), "fp8-current until step 2, then bf16-mixed")
    train(*prepared, steps=3)
    with pytest.warns(UserWarning, match="saved after 3 steps of a recipe with stages, and recipe 'bf16-mixed' has"):
        load([nameless(state) for state in through_a_file(prepared)], "bf16-mixed")


# ---- counting steps --------------------------------------------------------------------------------------------------


LENGTH = "changes after 90% of the run, whose length is not known: give total_steps"


def test_stages_by_fraction_need_total_steps():
    model = mlp()
    with pytest.raises(RecipeError, match=LENGTH):
        halfstep.prepare(model, adamw(model), "fp8-current until 90%, then bf16-mixed")
    assert type(model) is nn.Sequential
    halfstep.apply(model, "fp8-current until 90%, then bf16-mixed")
    with pytest.raises(RecipeError, match=LENGTH):
        halfstep.optimize(model, adamw(model))
    optimizer, scaler = halfstep.optimize(model, adamw(model), total_steps=10)
    train(model, optimizer, scaler, steps=9)
    assert schedule_of(model).stage == 1


@pytest.mark.parametrize("total", [0, -1, 10.0, True, "10"])
def test_an_invalid_total_steps_is_refused_under_every_recipe(total):
    model = mlp()
    with pytest.raises(RecipeError, match=r"total_steps = .* given; expected the number of calls"):
        halfstep.prepare(model, adamw(model), "fp32", total_steps=total)


@pytest.mark.parametrize("total", [1, 2, 3])
def test_a_stage_without_steps_is_refused(total):
    model = mlp()
    with pytest.raises(RecipeError, match=rf"begin after 3 steps of a run of total_steps = {total}: one of them would"):
        halfstep.prepare(model, adamw(model), TWO, total_steps=total)
    with pytest.raises(RecipeError, match="begin after 0 steps"):
        halfstep.prepare(model, adamw(model), "fp32 until 10% then bf16-mixed", total_steps=total)


def test_recipes_without_stages_ignore_total_steps():
    ours, alike = (halfstep.prepare(m := mlp(), adamw(m), "fp8-delayed", total_steps=t) for t in (5, None))
    assert train(*ours) == train(*alike)
    assert "stages" not in ours[2].state_dict()["halfstep"]


def test_two_optimizers_of_a_model_must_agree_on_total_steps():
    model = mlp()
    halfstep.apply(model, "fp8-current until 50%, then bf16-mixed")
    first, scaler = halfstep.optimize(model, torch.optim.AdamW(model[0].parameters()), total_steps=4)
    with pytest.raises(RecipeError, match="total_steps = 6 given, and 4 before"):
        halfstep.optimize(model, torch.optim.SGD(model[3].parameters(), lr=0.1), total_steps=6)
    second, _ = halfstep.optimize(model, torch.optim.SGD(model[3].parameters(), lr=0.1))
    for step in range(4):
        x, y = batch()
        F.mse_loss(model(x), y).backward()
        scaler.step(first)
        scaler.step(second)
        scaler.update()  # once for both
        first.zero_grad()
        second.zero_grad()
        assert schedule_of(model).stage == (step >= 1)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does, as it traces
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_loop_without_updates_is_refused(compiled):
    model, optimizer, _ = halfstep.prepare(m := mlp(), adamw(m), "fp8-current until step 1, then bf16-mixed")
    called, (x, y) = torch.compile(model, backend="eager") if compiled else model, batch()
    F.mse_loss(called(x), y).backward()
    optimizer.step()
    F.mse_loss(called(x), y).backward()
    before = values(model)
    with pytest.raises(RecipeError, match=r"the stage of its recipe|recipe's stage has not moved on.*scaler.update"):
        optimizer.step()
    assert_same(values(model), before)


def test_a_loop_with_torchs_scaler_needs_advance():
    scaled = replace(get_recipe("fp16-mixed"), name="a", rules=get_recipe("mxfp8").rules)
    recipe = chain(scaled, Stage(get_recipe("fp16-mixed"), 2))

    def loop(advances):
        model, optimizer, _ = halfstep.prepare(m := mlp(), adamw(m), recipe)
        scaler, (x, y) = torch.amp.GradScaler("cpu", init_scale=64.0), batch()
        for _ in range(3):
            scaler.scale(F.mse_loss(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            if advances:
                halfstep.advance(model)
            optimizer.zero_grad()
        return model

    assert schedule_of(loop(True)).stage == 1
    with pytest.raises(RecipeError, match=r"stage has not moved on: call scaler.update\(\) after every optimizer step, "
                       "or halfstep.advance"):  # fmt: skip
        loop(False)


def test_a_missing_advance_is_noticed_with_torchs_optimizer():
    model, (x, y) = mlp(), batch()
    halfstep.apply(model, "fp8-current until step 2, then bf16-mixed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward_and_step():
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    for stage in (0, 1, 1):
        backward_and_step()
        halfstep.advance(model)
        assert schedule_of(model).stage == stage
    backward_and_step()
    backward_and_step()
    with pytest.raises(RecipeError, match="recipe's stage has not moved on"):
        backward_and_step()


def test_advance_without_total_steps_is_refused_for_stages_by_fraction():
    model = mlp()
    halfstep.apply(model, "fp8-current until 90%, then bf16-mixed")
    with pytest.raises(RecipeError, match=LENGTH):
        halfstep.advance(model)


def test_skipped_steps_count_towards_stages():
    scaled = replace(get_recipe("fp16-mixed"), name="a", rules=get_recipe("mxfp8").rules)
    model, optimizer, scaler = halfstep.prepare(
        m := mlp(), adamw(m), chain(scaled, Stage(get_recipe("fp16-mixed"), 3)))  # fmt: skip
    for step, size in enumerate((1.0, torch.inf, 1.0)):
        assert schedule_of(model).stage == 0, step
        scaler.scale(model(batch()[0]).square().mean() * size).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.skipped_steps == 1
    assert schedule_of(model).stage == 1


# ---- checkpointing, compilation, other features ----------------------------------------------------------------------


class Blocks(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.first = mlp()
        self.second = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x):
        hidden = self.first(x)
        if self.how is None:
            return self.second(hidden)
        return checkpoint(self.second, hidden, use_reentrant=self.how)


@pytest.mark.quick("names1-False", "names1-True")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("names", [("fp8-delayed", "bf16-mixed"), ("fp32", "fp8-delayed")])
def test_checkpointing_changes_no_bit(names, reentrant):
    plain, other = (staged(names, lambda how=how: Blocks(how)) for how in (None, reentrant))
    assert steps(*plain, 4) == steps(*other, 4)
    assert_same(values(plain[0]), values(other[0]))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("names", [("fp8-delayed", "bf16-mixed"), ("fp8-current", "mxfp8"), ("fp32", "fp8-current")])
def test_recomputing_a_checkpoint_in_another_stage_is_refused(names, reentrant):
    """The stage changes between a checkpointed forward and its backward."""
    model = staged(names, lambda: Blocks(reentrant))[0]
    for _ in range(EVERY - 1):
        model(batch()[0]).sum().backward()
        halfstep.advance(model)
    loss = model(batch()[0]).sum()
    model(batch()[0]).sum().backward()
    halfstep.advance(model)
    assert schedule_of(model).stage == 1
    model(batch()[0]).sum().backward()
    with pytest.raises(RecipeError, match=r"a forward of stage 1 again in stage 2.*loss.backward\(\) before scaler"):
        loss.backward()
    model(batch()[0]).sum().backward()  # later passes work


@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad"
)  # a nested checkpoint in a forward without gradients
@pytest.mark.parametrize("inner", [None, True])
def test_recomputing_a_checkpointed_model_in_another_stage_is_refused(inner):
    plain, model = (staged(("fp8-current", "mxfp8"), lambda how=how: Blocks(how))[0] for how in (None, inner))

    def forward():
        return checkpoint(model, batch()[0].requires_grad_(), use_reentrant=True).sum()

    loss = forward()
    for _ in range(EVERY):  # before and after the change, it equals the model without checkpointing
        for each in (forward(), plain(batch()[0]).sum()):
            each.backward()
        halfstep.advance(model)
        halfstep.advance(plain)
    assert schedule_of(model).stage == 1
    with pytest.raises(RecipeError, match=r"a forward of an earlier stage again in stage 2.*before scaler"):
        loss.backward()
    for each in (forward(), plain(batch()[0]).sum()):
        each.backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_a_backward_after_a_change_gives_its_forwards_stages_gradients():
    """Without checkpointing nothing is recomputed."""
    grads = []
    for late in (False, True):
        model = staged(("fp8-current", "bf16-mixed"), lambda: Blocks(None))[0]
        loss = model(batch()[0]).sum()
        if late:
            for _ in range(EVERY):
                halfstep.advance(model)
            assert schedule_of(model).stage == 1
        loss.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert_same(*grads)


@pytest.mark.slow  # uses/test_graphs.py and conformance/test_every_recipe.py have traced graphs
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does, as it traces
@pytest.mark.parametrize(
    "kind", slow_unless("fewer bits, then more".__eq__, ["fewer bits, then more", "three", "another dtype"])
)
def test_each_stage_compiles_once(kind):
    from torch._dynamo.testing import CompileCounterWithBackend

    names = CHAINS[kind]
    torch._dynamo.reset()  # other tests' models have the same code
    plain, traced = staged(names), staged(names)
    counter = CompileCounterWithBackend("aot_eager")
    called = torch.compile(traced[0], backend=counter, fullgraph=True)
    for stage in range(len(names)):
        losses = steps(*plain, EVERY)
        assert steps(*traced, EVERY, forward=called) == losses
        assert counter.frame_count == stage + 1
    assert_same(values(plain[0]), values(traced[0]))


def test_a_patched_forward_survives_a_change_of_stage():
    model, optimizer, scaler = halfstep.prepare(m := mlp(), adamw(m), TWO)
    calls, own = [], model.forward
    model.forward = lambda x: calls.append(schedule_of(model).stage) or own(x)
    train(model, optimizer, scaler, steps=5)
    assert calls == [0, 0, 0, 1, 1]


def test_hooks_and_calls_of_submodules_survive_a_change_of_stage():
    model, optimizer, scaler = halfstep.prepare(m := gated(), adamw(m), "fp32 until step 1, then bf16-mixed")
    seen = []
    model[1].gate_proj.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    train(model, optimizer, scaler, steps=2)
    assert seen == [torch.float32, torch.bfloat16]
    with pytest.warns(UserWarning, match="is called outside"):
        assert model[1](torch.randn(2, 16)).dtype == torch.float32
    assert seen[-1] == torch.bfloat16


def test_a_change_of_stage_replaces_the_scaling_states():
    model, optimizer, scaler = halfstep.prepare(
        m := mlp(), adamw(m), "fp8-delayed until step 2 then fp8-delayed-megatron"
    )
    train(model, optimizer, scaler, steps=1)
    assert {len(b) for b in model.buffers()} == {1025}
    train(model, optimizer, scaler, steps=1)
    assert {len(b) for b in model.buffers()} == {2}
    assert not any(bool(b.any()) for b in model.buffers())
    train(model, optimizer, scaler, steps=1)
    assert all(bool(b[0] != 0) for b in model.buffers())


def test_the_audit_and_the_report_name_the_stage():
    model = mlp()
    report = str(halfstep.apply(model, TWO))
    assert "from step 3: bf16-mixed" in report
    optimizer, scaler = halfstep.optimize(model, adamw(model), total_steps=7)
    before = halfstep.audit(model, optimizer, scaler)
    assert "; stage 1 of 2, its first, until step 3" in str(before)
    train(model, optimizer, scaler, steps=3)
    after = halfstep.audit(model, optimizer, scaler)
    assert "; stage 2 of 2, bf16-mixed, to the end" in str(after)
    assert any(line.startswith("recipe: stage 1 of 2") for line in after.differences(before))
    assert halfstep.audit(mlp()).stage is None


def test_operand_errors_are_those_of_the_current_stage():
    from halfstep.tracking import operand_errors

    model, optimizer, scaler = halfstep.prepare(m := mlp(), adamw(m), TWO)
    with operand_errors(model) as rows:
        train(model, optimizer, scaler, steps=1)
    assert {row.format for row in rows} == {"float8_e4m3fn", "float8_e5m2"}
    train(model, optimizer, scaler, steps=2)
    with operand_errors(model) as rows:
        train(model, optimizer, scaler, steps=1)
    assert rows == []


def test_stages_that_store_different_weights_as_codes_are_refused():
    rules = (replace(O2.rules[-1], path="0"), replace(O2.rules[-1], path="3"))
    one, two = (replace(O2, name=name, rules=(rule,)) for name, rule in zip("ab", rules, strict=True))
    model = mlp()
    with pytest.raises(RecipeError, match="keeps the weights that rules round as codes, and its stages round others"):
        halfstep.apply(model, chain(one, Stage(two, 5)))
    assert type(model) is nn.Sequential


def test_a_later_stages_rule_without_matches_is_refused_at_once():
    late = replace(
        get_recipe("fp8-current"), name="late", rules=(replace(get_recipe("fp8-current").rules[-1], path="x"),)
    )
    model = mlp()
    with pytest.raises(RecipeError, match="recipe 'late': rule 'x' matched no layer"):
        halfstep.prepare(model, adamw(model), chain(get_recipe("fp32"), Stage(late, 5)))
    assert type(model[0]) is nn.Linear


def test_quantize_model_refuses_stages():
    model = mlp()
    with pytest.raises(RecipeError, match=r"has stages, and inference has none.*such as 'bf16-mixed'"):
        halfstep.quantize_model(model, TWO)


def test_the_models_of_a_gan_count_their_own_steps():
    makes, judges = Gated(), Gated()
    one = halfstep.prepare(makes, adamw(makes), "fp8-current until 50%, then bf16-mixed", total_steps=2)
    two = halfstep.prepare(judges, adamw(judges), "fp8-current until 50%, then bf16-mixed", total_steps=4)

    def end(optimizer, scaler):
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for _ in range(2):
        noise = torch.randn(4, 16)
        for _ in range(2):  # two steps of the critic for one of the generator
            judges(makes(noise).detach()).square().mean().backward()
            end(*two[1:])
        judges(makes(noise)).mean().backward()
        end(*one[1:])
    assert (schedule_of(makes).steps, schedule_of(judges).steps) == (2, 4)
    assert schedule_of(makes).stage == schedule_of(judges).stage == 1


def test_the_documented_loop_gives_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(*halfstep.prepare(m := mlp(), adamw(m), TWO), steps=5)


def test_a_step_that_fails_does_not_count():
    model, _, scaler = halfstep.prepare(m := mlp(), adamw(m), chain(
        replace(get_recipe("fp16-mixed"), name="a"), Stage(get_recipe("fp16-mixed"), 1)))  # fmt: skip
    with pytest.raises(LossScaleError):
        scaler.update()
    assert schedule_of(model).stage == 0
