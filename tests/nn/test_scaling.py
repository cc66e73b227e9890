"""Scaling states: only an optimizer step advances them, no matter what runs between two steps."""

import copy
import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfstep
from families import slow_unless
from halfstep import formats
from halfstep.errors import ModelError, QuantizationError, RecipeError
from halfstep.kernels import operator
from halfstep.nn import scaling as states_of_models
from halfstep.nn.adapters import linear
from halfstep.nn.scaling import Scalings, states_of
from halfstep.ops.casts import round_scaled
from halfstep.quant import Quantizer, Scales
from halfstep.quant.scaling import from_text, get_scaling, named
from halfstep.quant.scaling.delayed import Delayed, factor_of
from halfstep.quant.tile import TENSOR
from halfstep.recipe import LossScale, get_recipe
from oracles.numbers import same_bits
from tiny import assert_same, batch, mlp, prepared, train


pytestmark = pytest.mark.usefixtures("products")
STATEFUL = ("fp8-delayed", "fp8-delayed-megatron")
every_stateful = pytest.mark.parametrize("name", STATEFUL)
OPERANDS = ("input", "weight", "grad_output")
E4M3 = formats.get("e4m3fn")


def states(model):
    return Scalings(model).state_dict()


def backward(model, rows=slice(None), size=1.0):
    x, y = batch()
    F.mse_loss(model(size * x[rows]), y[rows]).backward()


def recorded(model):
    """The amaxes of the current step, by layer and operand."""
    return {name: state[1].item() for name, state in states(model).items()}


def follow(scaling, amaxes):
    """The scale after each step with that amax, and the state after the last."""
    state, factors = scaling.init(), []
    for amax in amaxes:
        scaling.record(state, torch.tensor(float(amax)))
        scaling.advance(state, E4M3)
        factors.append(state[0].item())
    return factors, state


# ---- delayed scaling ------------------------------------------------------------------------------------------------


def test_scales_of_a_history_of_4_equal_hand_computed_ones():
    factors, state = follow(Delayed("d", history=4), [1, 10, 1, 1, 1, 1, 1, 0, 2])
    expected = torch.tensor([448, 44.8, 44.8, 44.8, 44.8, 448, 448, 448, 224])
    assert_same(torch.tensor(factors), expected)
    assert state[1:].tolist() == [0, 1, 1, 2]


def test_scales_of_the_most_recent_amax_and_of_a_margin():
    assert follow(Delayed("d", history=4, algorithm="most_recent"), [1, 8, 2])[0] == [448, 56, 224]
    assert follow(Delayed("d", history=1, algorithm="most_recent"), [1, 8, 0])[0] == [448, 56, 56]
    assert follow(Delayed("d", history=1, margin=2), [1, 8])[0] == [112, 14]


class History:
    """A reference for the delayed scaling of one tensor, from its description: lists, and fractions for the scale."""

    def __init__(self, history, algorithm="max", margin=0, power_of_two=False, warmup=1, restart=False):
        self.history, self.algorithm, self.margin, self.exact = history, algorithm, margin, power_of_two
        self.warmup, self.restart, self.amaxes, self.fixed = warmup, restart, [], None if warmup else Fraction(1)

    def quotient(self, amax):
        factor = Fraction(448) / Fraction(amax) if amax else Fraction(1)
        factor /= 2**self.margin
        return Fraction(2.0 ** math.floor(math.log2(factor))) if self.exact else factor

    def factor(self, amax):
        return self.quotient(amax) if self.fixed is None else self.fixed

    def add(self, amax):
        if not math.isfinite(amax) and self.restart:
            self.amaxes, self.fixed = [], None
        if math.isfinite(amax) and amax > 0:
            self.amaxes.append(amax)
            window = self.amaxes[-self.history :]
        else:  # the current step takes an entry of the window even if its amax is not recorded
            window = self.amaxes[1 - self.history :] if self.history > 1 and self.algorithm == "max" else []
        if window and (self.fixed is not None or len(window) >= self.warmup):
            self.fixed = self.quotient(max(window) if self.algorithm == "max" else amax)


AMAXES = [0, math.nan, 3, 0.3, math.inf, 5, math.nan, 0, 1e-3, 40, 2, 2, -math.inf, 2, 2, 7, math.inf, 1e-3, 1e-3, 0, 9]
OPTIONS = [
    {"history": 1024},
    {"history": 1, "algorithm": "most_recent"},
    {"history": 1, "power_of_two": True},
    {"history": 3, "margin": 2},
    {"history": 4, "warmup": 0},
    {"history": 4, "warmup": 3, "algorithm": "most_recent"},
    {"history": 4, "warmup": 4, "restart": True, "power_of_two": True},
    {"history": 5, "warmup": 2, "restart": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("default", [torch.float32, torch.float64, torch.bfloat16])
def test_every_history_equals_the_reference_and_records_no_nonfinite_amax(options, default):
    """For every default dtype of torch."""
    scaling, reference = Delayed("d", **options), History(**options)
    torch.set_default_dtype(default)
    try:
        state = scaling.init()
        for amax in AMAXES:
            own = torch.tensor(abs(amax), dtype=torch.float32)
            used = scaling.in_use(state, own, E4M3)
            assert used.dtype == state.dtype == torch.float32
            if reference.fixed is None and not math.isfinite(amax):
                assert used.isnan()  # so that it is seen
            else:
                assert used.item() == float(torch.tensor(float(reference.factor(own.item())), dtype=torch.float32))
            assert scaling.waits(state) == (reference.fixed is None)
            scaling.record(state, own)
            scaling.advance(state, E4M3)
            reference.add(own.item())
            assert state.isfinite().all()
            assert state[1] == 0 or len(state) == 2
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_states_advanced_together_equal_states_advanced_one_by_one(options):
    scaling = Delayed("d", **options)
    alone = [scaling.init() for _ in range(4)]
    for step in range(len(AMAXES)):
        for row, state in enumerate(alone):
            scaling.record(state, torch.tensor(float(AMAXES[(step + 5 * row) % len(AMAXES)])))
        together = torch.stack(alone)
        scaling.advance(together, E4M3)
        for state in alone:
            scaling.advance(state, E4M3)
        assert torch.equal(together, torch.stack(alone))


def test_the_scale_of_one_amax_equals_its_scale_in_a_batch():
    """A single amax on a CPU is not computed by torch."""
    amaxes = torch.tensor([0, 1e-45, 1e-38, 0.3, 448, 3e38, math.inf, math.nan])
    alone = torch.stack([factor_of(amax, E4M3) for amax in amaxes])
    same_bits(alone, factor_of(amaxes, E4M3))
    assert alone.isnan().tolist() == [False] * 6 + [True] * 2


@pytest.mark.parametrize("amax", [float("inf"), float("nan")])
def test_a_nonfinite_amax_is_not_recorded(amax):
    factors, _ = follow(Delayed("d", history=2), [2, amax, 4, 4, 4])
    assert factors == [224, 224, 112, 112, 112]
    factors, _ = follow(Delayed("d"), [amax, 2, amax, 1])
    assert factors == [0, 224, 224, 224]


def test_advancing_a_history_with_an_infinity_drops_it():
    scaling = Delayed("d", history=4)
    state = torch.tensor([224.0, 4.0, 1.0, math.inf, math.nan])
    scaling.advance(state, E4M3)
    assert state.tolist() == [112, 0, 0, 0, 4]


def test_options_of_a_scaling_are_in_its_text_and_are_checked():
    window = get_scaling("delayed", warmup=16, restart=True, history=16)
    assert window == Delayed("delayed", history=16, warmup=16, restart=True)
    assert str(window) == "delayed history=16 warmup=16 restart=True"
    assert str(get_scaling("delayed", power_of_two=False)) == "delayed"
    assert get_scaling(window, warmup=0).options == {**window.options, "warmup": 0}
    assert from_text(window.text) == window
    for options, words in [
        ({"warmup": True}, "option warmup = True of scale rule delayed found; expected an integer"),
        ({"restart": 1}, "option restart = 1 of scale rule delayed found; expected true or false"),
        ({"algorithm": 2}, "option algorithm = 2 of scale rule delayed found; expected a word"),
        ({"margins": 2}, "unknown option of scale rule delayed 'margins'; nearest: margin"),
        ({"warmup": -1}, "warmup -1 and history 1024: expected a number of steps, from 0"),
        ({"warmup": 5, "history": 4}, "warmup 5 and history 4: expected .* to the whole history"),
    ]:
        with pytest.raises(QuantizationError, match=words):
            get_scaling("delayed", **options)
    with pytest.raises(QuantizationError, match=r"unknown .* Options stand beside the name 'rceil': margin=2"):
        get_scaling("rceil margin=2")


def test_named_refuses_custom_scalings():
    assert named(get_scaling("rceil", margin=2)) == ("rceil", {"margin": 2})
    for rule in (Delayed("d"), Delayed("current"), replace(get_scaling("floor"), name="rceil")):
        with pytest.raises(QuantizationError, match="is one of your own: files and traced graphs take rules by name"):
            named(rule)


class ScalingMeta:
    """A reference for MS-AMP's bookkeeping of one tensor, from its description: a window of amaxes and a counter."""

    def __init__(self, window):
        self.window, self.amaxes = window, []

    def factor(self, amax):
        """What a tensor of that amax is multiplied by: by its own until the window is full."""
        largest = amax if len(self.amaxes) < self.window else max(self.amaxes[-self.window :])
        return 2.0 ** math.floor(math.log2(448 / largest))

    def add(self, amax):
        self.amaxes = [*self.amaxes, amax] if math.isfinite(amax) else []


def test_a_window_uses_the_tensors_own_amax_until_full_and_after_an_infinity():
    scaling = Delayed("d", history=4, power_of_two=True, warmup=4, restart=True)
    state, meta, used = scaling.init(), ScalingMeta(4), []
    amaxes = [1.0, 7.0, 100.0, 3.0, 448.0, 449.0, 2.0, 5.0, 0.3, 0.1, 0.2, math.inf, 6.0, 900.0, 2.0, 2.0, 1e-4, 1e-4]
    for amax in amaxes:
        if math.isfinite(amax):
            used.append(scaling.in_use(state, torch.tensor(amax), E4M3).item())
            assert used[-1] == meta.factor(amax)
        else:
            assert scaling.in_use(scaling.init(), torch.tensor(amax), E4M3).isnan()
        scaling.record(state, torch.tensor(amax))
        scaling.advance(state, E4M3)
        meta.add(amax)
    assert used[:5] == [256, 64, 4, 128, 4]
    follows = [Delayed("d", history=4).in_use(scaling.init(), torch.tensor(a), E4M3) for a in (0.0, 7.0)]
    assert follows == [1, 64]


def test_a_layer_with_a_window_is_scaled_by_its_own_amax_for_16_steps():
    """Compared with current scaling."""
    model, optimizer, scaler = prepared("fp8lm-o1", mlp())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    x, layer = batch()[0], model[0]
    own = Quantizer(E4M3, scales=Scales(TENSOR, get_scaling("rceil")))
    weight = own(model.state_dict()["0.weight"])
    found = []
    for steps in (0, 15, 1):
        train(model, optimizer, scaler, steps)
        with torch.no_grad():  # records no amax
            found.append((linear.forward(None, layer, 10 * x) - own(10 * x) @ weight.t() - layer.bias).abs().max())
    assert found[0] < 1e-5
    assert found[1] < 1e-5
    assert found[2] > 1e-3
    assert states(model)["0.input"][0] == 2.0 ** math.floor(math.log2(448 / x.abs().max().item()))


@pytest.mark.parametrize(("name", "clipped"), [("fp8-delayed", 0), ("fp8-delayed-megatron", 10)])
def test_an_alternating_amax_clips_half_of_the_steps_or_none(name, clipped):
    """A tensor whose amax is 1 and 8 by turns, with the scale of earlier steps."""
    scaling = get_recipe(name).rules[-1].linear.output.lhs.scales.rule
    state, found = scaling.init(), 0
    for step in range(22):
        x = torch.tensor([0.5, 1.0 if step % 2 == 0 else 8.0])
        factor = state[0].clone()
        back = round_scaled(x, factor, E4M3, "nearest_even", torch.float32) / factor
        found += step >= 2 and back[1].item() < x[1].item() * 0.9
        scaling.record(state, x.amax())
        scaling.advance(state, E4M3)
    assert found == clipped


# ---- a model's states -----------------------------------------------------------------------------------------------


@every_stateful
def test_every_operand_has_a_state_that_a_step_advances(name):
    model, optimizer, scaler = prepared(name)
    assert set(states(model)) == {f"{layer}.{operand}" for layer in ("0", "3") for operand in OPERANDS}
    assert not any(state.any() for state in states(model).values())
    x = batch()[0]
    train(model, optimizer, scaler, 1)
    for key, state in states(model).items():
        largest = formats.get("e5m2" if key.endswith("grad_output") else "e4m3fn").max
        assert state[-1] > 0 or len(state) == 2
        if len(state) > 2:
            assert state[0] == (largest / state[-1].double()).float()
    first = states(model)["0.input"]
    assert first[0] == (448 / x.abs().max().double()).float()


@every_stateful
def test_the_states_scale_changes_the_output(name):
    """A recipe whose factors were not used would pass the rest."""
    model, optimizer, scaler = prepared(name)
    before = model(batch()[0])
    train(model, optimizer, scaler, 1)
    scaled = states(model)
    after = model(batch()[0])
    Scalings(model).load_state_dict({key: torch.ones_like(state) for key, state in scaled.items()})
    assert not torch.equal(model(batch()[0]), after)
    assert not torch.equal(before, after)


@every_stateful
def test_states_are_buffers_outside_the_state_dict(name):
    model = mlp()
    keys, buffers = list(model.state_dict()), list(model.named_buffers())
    model, _, _ = prepared(name, model)
    assert list(model.state_dict()) == keys
    assert len(list(model.named_buffers())) == 6
    model.load_state_dict(mlp(1).state_dict())
    halfstep.revert(model)
    assert list(model.named_buffers()) == buffers
    assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")


def test_revert_keeps_the_users_list_of_buffers_that_ddp_ignores():
    model = mlp()
    model._ddp_params_and_buffers_to_ignore = ["0.bias"]
    halfstep.apply(model, "fp8-delayed")
    assert len(model._ddp_params_and_buffers_to_ignore) == 7
    halfstep.revert(model)
    assert model._ddp_params_and_buffers_to_ignore == ["0.bias"]


@every_stateful
def test_a_deepcopy_has_its_own_states(name):
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler, 2)
    backward(model)  # in the middle of a step
    twin = copy.deepcopy(model)
    assert_same(states(twin), states(model))
    kept = states(model)
    backward(twin, size=100)
    halfstep.advance(twin)
    assert_same(states(model), kept)
    assert not torch.equal(states(twin)["0.input"], kept["0.input"])


def test_states_are_looked_up_once_per_model(monkeypatch):
    found, find = [], states_of_models._find
    monkeypatch.setattr(states_of_models, "_find", lambda *given: found.append(1) or find(*given))
    model, _, scaler = prepared("fp8-delayed")
    for _ in range(3):
        halfstep.advance(model)
        scaler.update()
    assert found == [1]
    halfstep.advance(copy.deepcopy(model))  # a copy has its own states
    assert found == [1, 1]


@every_stateful
def test_evaluation_and_no_grad_record_nothing(name):
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler, 2)
    before = states(model)
    large = 1000 * batch()[0]
    with torch.no_grad():
        model(large)
    with torch.inference_mode():
        model(large)
    model.eval()
    model(large)
    model(large).sum().backward()
    assert_same(states(model), before)
    model.train()
    train(model, optimizer, scaler, 1)
    assert states(model)["0.input"][0] == before["0.input"][0]


@every_stateful
def test_micro_batches_record_the_maximum_amax_without_advancing(name):
    model, _, _ = prepared(name)
    x = batch()[0]
    for rows, size in ((slice(0, 4), 1), (slice(4, 8), 3), (slice(8, 12), 1)):
        backward(model, rows, size)
    assert recorded(model)["0.input"] == max(x[:4].abs().max(), 3 * x[4:8].abs().max(), x[8:].abs().max())
    assert all(state[0] == 0 for state in states(model).values())


class Checkpointed(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.head, self.body = how, nn.Linear(8, 8), mlp()

    def forward(self, x):
        x = self.head(x)
        return self.body(x) if self.how is None else checkpoint(self.body, x, use_reentrant=self.how)


@every_stateful
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_states_and_gradients(name, reentrant):
    found = []
    for how in (None, reentrant):
        torch.manual_seed(4)
        model, optimizer, scaler = prepared(name, Checkpointed(how))
        train(model, optimizer, scaler, 3)
        backward(model)
        found.append((states(model), [p.grad for p in model.parameters()], dict(model.state_dict())))
    assert_same(*found)
    assert all(value > 0 for value in recorded(model).values())


@pytest.mark.slow
@pytest.mark.parametrize("products", slow_unless("carried".__eq__, ["own", "carried"]), indirect=True)
@pytest.mark.parametrize("name", slow_unless("fp8-delayed".__eq__, STATEFUL))
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does, as it traces
def test_a_traced_graph_gives_eager_states_with_as_many_amax_passes(monkeypatch, name):
    torch._dynamo.reset()
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler, 2)
    twin = copy.deepcopy(model)
    compiled, asked = torch.compile(twin, backend="aot_eager", fullgraph=True), []
    largest_of = operator.amax.run
    monkeypatch.setattr(operator.amax, "run", lambda x: (asked.append(x), largest_of(x))[1])
    for _ in range(2):
        for rows, size in ((slice(0, 6), 5.0), (slice(6, 12), 1.0)):
            backward(model, rows, size)
            before = len(asked)
            backward(compiled, rows, size)
            assert len(asked) == 2 * before
            asked.clear()
        assert_same(states(twin), states(model))
        assert all(value > 0 for value in recorded(twin).values())
        halfstep.advance(model)
        halfstep.advance(twin)
    assert_same(states(twin), states(model))
    assert_same([p.grad for p in twin.parameters()], [p.grad for p in model.parameters()])


# ---- skipped steps, and changes of weights that are no steps --------------------------------------------------------


def scaled_recipe(name):
    return replace(get_recipe(name), name="made", loss_scale=LossScale(init=4.0))


@every_stateful
def test_a_skipped_step_leaves_states_and_weights_unchanged(name):
    model, optimizer, scaler = prepared(scaled_recipe(name))
    train(model, optimizer, scaler, 2)
    before, weights = states(model), {key: value.clone() for key, value in model.state_dict().items()}
    backward(model, slice(0, 6), size=100)
    scaler.scale(F.mse_loss(model(batch()[0]), batch()[1]) * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    assert scaler.skipped_steps == 1
    assert_same(states(model), before)
    assert_same(dict(model.state_dict()), weights)
    train(model, optimizer, scaler, 1)
    assert states(model)["0.input"][0] == before["0.input"][0]


@every_stateful
def test_deepcopy_and_loading_a_checkpoint_need_no_update(name):
    """A copy in the middle of a step, a checkpoint that is loaded: neither is an optimizer step that nobody ended."""
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler, 1)
    saved = copy.deepcopy((model.state_dict(), scaler.state_dict()))
    backward(model)
    backward(copy.deepcopy(model))
    model.load_state_dict(saved[0])
    scaler.load_state_dict(saved[1])
    backward(model)


@every_stateful
def test_stateless_recipes_keep_no_states(name):
    model, _, scaler = prepared("fp8-current")
    assert states(model) == {}
    assert [*scaler.state_dict()["halfstep"]] == ["recipe", "steps"]
    assert not any(states_of(module) for module in model.modules())
    assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")


def test_apply_after_fully_shard_is_refused(tmp_path):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = fully_shard(mlp(), mesh=dist.init_device_mesh("cpu", (1,)))
        kinds = [type(m) for m in model.modules()]
        with pytest.raises(ModelError, match=r"0.weight is sharded; apply the recipe before fully_shard"):
            halfstep.apply(model, "fp8-delayed")
        assert [type(m) for m in model.modules()] == kinds
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.bfloat16])
def test_states_cast_to_16_bits_are_refused(cast):
    model = mlp()
    halfstep.apply(model, "fp8-delayed")
    with pytest.raises(
        RecipeError, match=r"the state of delayed scaling .* expected torch.float32: the model was cast"
    ):
        cast(model)(batch()[0])
