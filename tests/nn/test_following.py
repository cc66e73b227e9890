"""Calls of a model and of its parts follow its recipe: compared with its own forward, and with torch."""

import copy
import functools
import io
import itertools
import pickle
import threading
import types
import warnings
from abc import ABC, abstractmethod
from contextlib import nullcontext
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfstep
from families import for_each, in_turn, slow_unless
from halfstep import get_recipe
from halfstep.errors import OptimizerError, RecipeError
from halfstep.nn.scaling import Scalings
from tiny import EVERY, FAST, SMOOTH, adamw, assert_same, batch, mlp, model_for, mostly_slow, prepared, train


PLAIN = [name for name in EVERY if name not in SMOOTH]
every_plain = pytest.mark.parametrize("name", mostly_slow(PLAIN))
WARNS = r"Coder.encoder is called outside Coder's forward. It follows recipe"


class Coder(nn.Module):
    """Its forward can be computed from its parts: only a ReLU is between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder, self.loss = nn.Linear(8, 16), mlp_of(16), nn.BCEWithLogitsLoss()

    def encode(self, x):
        return F.relu(self.encoder(x))

    def forward(self, x):
        return self.decoder(self.encode(x))


def mlp_of(width):
    return nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 4))


class Pair(nn.Module):
    """A container without a forward."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = mlp(), mlp()


def quiet(function, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return function(*args)


@every_plain
def test_submodules_called_from_outside_equal_the_forward(name):
    model = Coder()
    halfstep.apply(model, name)
    x = batch()[0]
    apart = quiet(lambda: model.decoder(model.encode(x)))
    assert apart.dtype == torch.float32
    assert_same(apart, model(x))
    with halfstep.following(model):
        inside = model.decoder(model.encode(x))
    assert_same(inside.float(), model(x))
    autocast = get_recipe(name).compute
    assert inside.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[autocast]
    assert not torch.is_autocast_enabled("cpu")


def test_a_submodule_called_from_outside_warns_once():
    model, x = Coder(), batch()[0]
    halfstep.apply(model, "bf16-mixed")
    with torch.no_grad():
        model.encode(x)  # as transformers' generate calls an encoder: no warning, which is an error here
    with pytest.warns(UserWarning, match=WARNS) as said:
        model.encode(x)
    assert said[0].filename == __file__
    model.encode(x)  # no second warning, which is an error here
    halfstep.revert(model)
    model.encode(x)


def test_submodules_of_a_container_follow_without_a_warning():
    model = Pair()
    halfstep.apply(model, "bf16-mixed")
    stock = copy.deepcopy(model.critic)
    halfstep.revert(copy.deepcopy(model))
    x = batch()[0]
    with torch.autocast("cpu", torch.bfloat16):
        expected = stock(x)
    found = model.critic(x)
    assert found.dtype == torch.float32
    assert_same(found, expected.float())


def test_functional_matmuls_follow_only_within_the_context():
    model, x = Coder(), torch.randn(4, 8)
    halfstep.apply(model, "bf16-mixed")
    with halfstep.following(model):
        assert (x @ x.t()).dtype == torch.bfloat16
        assert model(x).dtype == torch.float32  # outputs of the model are float32 within the context too
        assert (x @ x.t()).dtype == torch.bfloat16
    assert (x @ x.t()).dtype == torch.float32
    with pytest.raises(ZeroDivisionError), halfstep.following(model):
        _ = 1 / 0
    assert (x @ x.t()).dtype == torch.float32
    with halfstep.following(torch.compile(model, backend="eager")):
        assert (x @ x.t()).dtype == torch.bfloat16
    with pytest.raises(RecipeError, match="follows no recipe"):
        halfstep.following(mlp())


def test_losses_without_parameters_compute_in_float32():
    """Under autocast binary_cross_entropy is an error of torch's; modules without parameters do not follow."""
    model, x = Coder(), batch()[0]
    halfstep.apply(model, "fp16-mixed")
    loss = model.loss(model(x), torch.ones(12, 4))
    assert_same(loss, F.binary_cross_entropy_with_logits(model(x), torch.ones(12, 4)))


# ---- patched forwards -----------------------------------------------------------------------------------------------


def as_function(model):
    stock = model.forward
    return lambda x: 2 * stock(x)


def as_method(model):
    return types.MethodType(lambda self, x: 2 * self.decoder(self.encode(x)), model)


QUICK = [name for name in PLAIN if name in FAST]
PATCHES = list(itertools.product([as_function, as_method], ["before", "after"]))


@pytest.mark.parametrize(
    ("name", "patched"), slow_unless(in_turn(QUICK, PATCHES).__contains__, itertools.product(PLAIN, PATCHES))
)
def test_a_patched_forward_follows_the_recipe(name, patched):
    model, x, (patch, when) = Coder(), batch()[0], patched
    if when == "before":
        model.forward = patch(model)
    halfstep.apply(model, name)
    if when == "after":
        model.forward = patch(model)
    found = model(x)
    assert found.dtype == torch.float32
    assert_same(model.forward(x), found)
    del model.forward
    assert_same(found, 2 * model(x))
    with pytest.raises(AttributeError):
        del model.forward


def test_nested_patches_work_and_survive_revert():
    model, x = Coder(), batch()[0]
    halfstep.apply(model, "bf16-mixed")
    once = model(x)
    for _ in range(2):
        model.forward = as_function(model)
    assert_same(model(x), 4 * once)
    halfstep.revert(model)
    assert_same(model(x), 4 * Coder()(x))
    assert not any(key.startswith("_halfstep") for m in model.modules() for key in vars(m))


def test_class_and_instance_have_the_stock_forwards_signature():
    model = Coder()
    halfstep.apply(model, "bf16-mixed")
    assert type(model).forward.__wrapped__ is Coder.forward
    assert model.forward.__name__ == "forward"


# ---- which calls record amaxes --------------------------------------------------------------------------------------


def amaxes(model):
    return {name: float(state[1]) for name, state in Scalings(model).state_dict().items()}


def test_scaling_states_record_by_the_roots_training_mode():
    model, x = mlp(), batch()[0]
    halfstep.apply(model, "fp8-delayed")
    model[0].eval().requires_grad_(False)
    model(x).sum().backward()
    assert all(amaxes(model)[name] > 0 for name in ("0.input", "0.weight", "3.input", "3.weight"))
    halfstep.advance(model)
    model.eval()
    model(x).sum().backward()
    assert set(amaxes(model).values()) == {0.0}


def test_a_submodule_called_from_outside_records_by_its_roots_mode():
    model, x = Coder(), batch()[0]
    halfstep.apply(model, "fp8-delayed")
    quiet(model.encoder, x)
    assert amaxes(model)["encoder.input"] == x.abs().max()
    halfstep.advance(model)
    alone = copy.deepcopy(model.encoder)  # without a root its own mode decides
    alone.eval()
    alone(x)
    assert_same(alone._halfstep_scaling_input[1], torch.tensor(0.0))
    alone.train()
    alone(x)
    assert alone._halfstep_scaling_input[1] > 0
    assert amaxes(model)["encoder.input"] == 0


# ---- recomputation, threads, graphs ---------------------------------------------------------------------------------


class CheckpointedBody(nn.Module):
    """A body that may be checkpointed, whose second layer disables autocast."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.reentrant = nn.Linear(8, 16), nn.Linear(16, 4), reentrant

    def body(self, x):
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return self.second(x.float())

    def forward(self, x):
        return self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant)


@pytest.mark.quick("bf16-mixed", "fp16-mixed")
@pytest.mark.parametrize("name", mostly_slow([name for name in PLAIN if get_recipe(name).weights == "fp32"]))
def test_checkpointing_gives_the_same_gradients(name):
    found = []
    for reentrant in (None, False, True):
        model, _, _ = prepared(name, CheckpointedBody(reentrant))
        x = batch()[0].requires_grad_()
        model(x).square().sum().backward()
        found.append([x.grad, *(p.grad.float() for p in model.parameters())])
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


def test_following_in_one_thread_does_not_affect_another():
    model, x, found = Pair(), batch()[0], []
    halfstep.apply(model, "bf16-mixed")
    expected = model.critic(x)
    with halfstep.following(model):
        thread = threading.Thread(target=lambda: found.append(model.critic(x)))
        thread.start()
        thread.join()
    assert_same(found[0], expected)


@pytest.mark.slow  # conformance/test_every_recipe.py has traced graphs
@pytest.mark.parametrize(
    "name",
    slow_unless("fp8-current".__eq__, ["fp32", "bf16-mixed", "fp16-master", "fp8-current"]),
)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does, as it traces
def test_compiled_submodules_follow_the_recipe(name):
    torch._dynamo.reset()
    model, x = Coder().requires_grad_(False), batch()[0]
    halfstep.apply(model, name)
    expected = model(x)
    compiled = torch.compile(model.decoder, backend="aot_eager", fullgraph=True)
    with halfstep.following(model):
        hidden = model.encode(x)
    assert_same(compiled(hidden), expected)  # from outside: only the submodule is traced
    model.decoder.compile(backend="aot_eager")
    assert_same(model(x), expected)  # within its root


# ---- classes, copies and pickles ------------------------------------------------------------------------------------


class Registered(nn.Module):
    """A base class that registers its subclasses, and takes a keyword of them."""

    known: tuple = ()

    def __init_subclass__(cls, *, key, **options):
        super().__init_subclass__(**options)
        Registered.known += (key,)


class Known(Registered, key="known"):
    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        return self.body(x)


class Meta(type(nn.Module)):
    made: tuple = ()

    def __new__(cls, name, bases, namespace, **options):
        Meta.made += (name,)
        return super().__new__(cls, name, bases, namespace, **options)


class Made(Known, metaclass=Meta, key="made"):
    pass


class Abstract(nn.Module, ABC):
    def __init__(self):
        super().__init__()
        self.body = mlp()

    @abstractmethod
    def forward(self, x): ...


class Concrete(Abstract):
    def forward(self, x):
        return self.body(x)


class Outermost(nn.Module):
    """A base class that wraps its subclasses' forwards; only the outermost wrapper acts."""

    def __init_subclass__(cls):
        forward = cls.forward

        @functools.wraps(forward)
        def wrapped(self, x):
            return 2 * forward(self, x) if type(self).forward is wrapped else forward(self, x)

        cls.forward = wrapped


class Always(nn.Module):
    """A base class that wraps its subclasses' forwards; all wrappers act."""

    def __init_subclass__(cls):
        forward = cls.forward

        @functools.wraps(forward)
        def wrapped(self, x):
            return 2 * forward(self, x)

        cls.forward = wrapped


@for_each("base", [Outermost, Always])
@for_each("name", ["bf16-mixed", "fp8-delayed until 50%, then bf16-mixed"])
def test_a_forward_wrapped_by_its_base_class_is_not_wrapped_again(name, base):
    class Doubled(base):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            return self.body(x)

    model, x = nn.Sequential(Doubled()), batch()[0]  # as a submodule and as a root
    expected = [2 * model[0].body(x), 2 * model[0].body(x)]
    found = []
    for root in (model, model[0]):
        halfstep.apply(root, name)
        found.append(root(x))
        own = root.forward
        root.forward = lambda *args, own=own: own(*args)
        assert_same(root(x), found[-1])
        del root.forward
        halfstep.revert(root)
    torch.testing.assert_close(found, expected, rtol=0.2, atol=0.2)


@pytest.mark.parametrize("kind", [Known, Made, Concrete])
def test_apply_triggers_no_subclass_hook_and_no_metaclass(kind):
    before = Registered.known, Meta.made
    model = kind()
    halfstep.apply(model, "bf16-mixed")
    assert (Registered.known, Meta.made) == before
    assert isinstance(model, kind)
    assert issubclass(type(model), kind)
    assert type(type(model)) is type(kind)
    assert model(batch()[0]).dtype == torch.float32
    halfstep.revert(model)
    assert type(model) is kind


@pytest.mark.quick("bf16-master", "bf16-stochastic", "fp8lm-o3")
@pytest.mark.parametrize("name", mostly_slow(EVERY))
def test_a_loaded_model_equals_the_saved_one(name):
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler, 2)
    x, file = batch()[0], io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
    assert_same(twin(x), model(x))
    if get_recipe(name).weights == "fp32" and not get_recipe(name).codes:
        assert_same(pickle.loads(pickle.dumps(model))(x), model(x))
    halfstep.revert(twin)
    assert type(twin) is nn.Sequential


def test_a_pickle_names_no_generated_class():
    model = mlp()
    halfstep.apply(model, "fp8-current")
    text = pickle.dumps(model)
    assert b"Sequential" in text
    assert b"_subclass" not in text


# ---- failures, and apply and optimize apart -------------------------------------------------------------------------


def test_a_failing_apply_leaves_the_model_unchanged(monkeypatch):
    model = mlp()
    kinds, attributes = [type(m) for m in model.modules()], [set(vars(m)) for m in model.modules()]
    monkeypatch.setattr(import_module("halfstep.nn.apply"), "follow", lambda *_: [].pop())
    with pytest.raises(IndexError):
        halfstep.apply(model, "fp8-delayed")
    assert [type(m) for m in model.modules()] == kinds
    assert [set(vars(m)) for m in model.modules()] == attributes
    assert not list(model.buffers())


@pytest.mark.quick("fp32", "bf16-mixed", "bf16-stochastic")
@pytest.mark.parametrize("name", mostly_slow(EVERY))
def test_apply_and_optimize_equal_prepare_for_representable_weights(name):
    """`apply` rounds the weights, so masters that `optimize` makes later start from rounded values."""
    found = []
    for two in (True, False):
        model = model_for(name)
        if get_recipe(name).master is not None:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(
                        parameter.to(getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[get_recipe(name).weights]))
                    )
        if two:
            halfstep.apply(model, name)
            optimizer, scaler = halfstep.optimize(model, adamw(model), generator=3)
        else:
            model, optimizer, scaler = prepared(name, model)
        found.append((train(model, optimizer, scaler), dict(model.state_dict())))
    assert_same(found[0], found[1])


def test_optimize_refuses_models_without_recipe_or_gradients():
    with pytest.raises(RecipeError, match="follows no recipe"):
        halfstep.optimize(mlp(), adamw(mlp()))
    model = mlp()
    halfstep.apply(model, "bf16-master")
    with pytest.raises(OptimizerError, match=r"none of the model's parameters.*\(fully_shard, to_empty\)"):
        halfstep.optimize(model, adamw(mlp()))
    inference = mlp()
    halfstep.quantize_model(inference, "fp8-current")
    with pytest.raises(RecipeError, match="is quantised for inference"):
        halfstep.optimize(inference, adamw(inference))


@pytest.mark.quick("fp32", "bf16-mixed", "bf16-stochastic")
@every_plain
def test_a_model_from_the_meta_device_trains_as_one_with_values(name):
    """apply, to_empty, load_state_dict, then training."""
    with torch.device("meta"):
        model = mlp()
    with pytest.raises(halfstep.HalfstepError, match=r"0.weight is on the meta device.*model.to_empty"):
        halfstep.prepare(model, adamw(model), name)
    halfstep.apply(model, name)
    model.to_empty(device="cpu")
    twin = mlp()
    halfstep.apply(twin, name)
    model.load_state_dict(twin.state_dict())
    found = []
    for each in (model, twin):
        optimizer, scaler = halfstep.optimize(each, adamw(each), generator=3)
        found.append(train(each, optimizer, scaler))
    assert_same(found[0], found[1])


def test_a_model_with_16_bit_weights_warns_unless_the_recipe_stores_them():
    for name in ("bf16-master", "fp16-mixed", "fp8-current", "fp32"):
        with pytest.warns(
            UserWarning, match=r"4 of 4 parameters arrive in 16 bits \(0.weight in torch.bfloat16\).*float32"
        ):
            halfstep.apply(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16(), name)
    for name in ("bf16-nomaster", "bf16-stochastic"):
        halfstep.apply(mlp().bfloat16(), name)  # no warning, which is an error here


@pytest.mark.parametrize("name", ["bf16-mixed", "galore"])
def test_a_training_loop_within_following_equals_one_outside(name):
    """Autocast caches casts of weights while it lasts, and would round the matmuls of an optimizer step."""
    found = []
    for around in (halfstep.following, lambda model: nullcontext()):
        model, optimizer, scaler = prepared(name, mlp())
        with around(model):
            train(model, optimizer, scaler, loss_of=lambda y, target: F.mse_loss(y.float(), target))
        found.append(dict(model.state_dict()))
    assert_same(*found)


def test_restoring_a_forward_leaves_no_attribute():
    """Lightning under DDP sets another forward for each step, and restores the one it found."""
    model, x = prepared("bf16-mixed", mlp())[0], batch()[0]
    expected = model(x)
    for own in (None, lambda x: 2 * x):
        if own is not None:
            model.forward = own
            expected = model(x)
        for _ in range(3):
            found = model.forward
            model.forward = lambda x: x - 1
            assert_same(model(x), x - 1)
            model.forward = found
        assert vars(model).get("forward") is own
        assert_same(model(x), expected)
