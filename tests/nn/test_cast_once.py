"""Under autocast an input that several layers read is cast once and kept once, and the numbers are torch.autocast's."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.kernels import carried
from halfstep.ops.function import LastInput


class Block(nn.Module):
    """q, k and v read the output of a norm in float32, as in transformers; `between` is called with it, after q did."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, 32)
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.between, self.again, self.join = lambda x: None, None, F.scaled_dot_product_attention

    def attend(self, x):
        x = self.norm(x.float())
        q = self.q(x)
        self.between(x)
        return x + self.out(self.join(q, self.k(x), self.v(x)))

    def forward(self, x):
        if self.again is None:
            return self.attend(x)
        return checkpoint(self.attend, x, use_reentrant=self.again)


def stock():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), Block(), Block())


def prepared(name="bf16-mixed", model=None):
    model = stock() if model is None else model
    return halfstep.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), name)[0]


class Autocast(nn.Module):
    """What the recipe stands for: the model under torch.autocast, its output in float32."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.model, self.dtype = stock(), dtype

    def forward(self, x):
        with torch.autocast("cpu", dtype=self.dtype):
            return self.model(x).float()


def x():
    return torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(1))


def found(model):
    y = model(x())
    y.square().mean().backward()
    return [y.detach(), *(parameter.grad for parameter in model.parameters())]


def equal(one, other):
    assert len(one) == len(other)
    return all(map(torch.equal, one, other))


def kept(model):
    """How many storages of 2 x 16 x 32 numbers a forward keeps for its backward."""
    tensors = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: tensors.append(x) or x, lambda x: x):
        model(x())
    return len({each.untyped_storage()._cdata for each in tensors if each.numel() == 2 * 16 * 32})


@pytest.mark.parametrize(("name", "dtype"), [("bf16-mixed", torch.bfloat16), ("fp16-mixed", torch.float16)])
def test_it_is_kept_once_and_numbers_are_torchs(name, dtype):
    ours, theirs = prepared(name), Autocast(dtype)
    if dtype in carried.CARRIED:  # products of another order
        assert kept(ours) < kept(theirs)
        return
    assert kept(ours) == kept(theirs) - 2 * 2
    assert equal(found(ours), found(theirs))


def test_products_carried_in_float32_keep_it_once_too(monkeypatch):
    monkeypatch.setattr(carried, "CARRIED", frozenset([torch.bfloat16]))
    shared, ends = kept(prepared()), found(prepared())
    monkeypatch.setattr(LastInput, "find", lambda *given: None)
    assert kept(prepared()) == shared + 2 * 2
    assert equal(found(prepared()), ends)


def test_layers_that_a_filter_leaves_out_of_an_fp8_recipe_share_theirs(monkeypatch):
    def model():
        made = stock()
        halfstep.apply(made, "fp8-current", module_filter=lambda module, path: path.startswith("1."))
        return made

    shared, ends = kept(model()), found(model())
    monkeypatch.setattr(LastInput, "find", lambda *given: None)
    assert kept(model()) == shared + 2 * 2
    assert equal(found(model()), ends)


@pytest.mark.parametrize("again", [False, True], ids=["not reentrant", "reentrant"])
def test_activations_that_are_computed_again_are_the_same(again):
    model = prepared()
    ends = found(model)
    model.zero_grad()
    model[1].again = model[2].again = again
    assert equal(found(model), ends)


def test_one_that_is_written_to_is_cast_again():
    outputs = []
    for model in (prepared(), Autocast()):
        for block in list(getattr(model, "model", model))[1:]:
            block.between = lambda x: x.data.mul_(0.5) if x.is_leaf else torch.no_grad()(x.mul_)(0.5)
        outputs.append(model(x()))
    assert torch.equal(*outputs)


@sdpa_kernel(SDPBackend.MATH)  # the others have none, and torch 2.14 takes one here
def test_a_second_derivative_goes_through_it():
    grads = []
    for model in (prepared(), Autocast()):
        given = x().requires_grad_()
        (first,) = torch.autograd.grad(model(given).square().mean(), given, create_graph=True)
        grads.append(torch.autograd.grad(first.square().sum(), list(model.parameters()), allow_unused=True))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_forward_mode_goes_through_it():
    tangents = []
    for model in (prepared(), Autocast()):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x(), torch.ones(2, 16, 8))
            tangents.append(torch.autograd.forward_ad.unpack_dual(_projections(model, dual)).tangent)
    assert torch.equal(*tangents)


def _projections(model, given):
    """The sum of q, k and v: attention has no tangent."""
    first, block = list(getattr(model, "model", model))[:2]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        normed = block.norm(first(given).float())
        return block.q(normed) + block.k(normed) + block.v(normed)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_transforms_and_tracers_see_a_cast_a_layer():
    model, theirs = prepared(), Autocast()
    for block in (*model[1:], *theirs.model[1:]):  # attention's backward fails under autocast and torch.func
        block.join = torch.addcmul
    names = dict(model.named_parameters())

    def loss(parameters, module, prefix=""):
        named = {prefix + name: parameter for name, parameter in parameters.items()}
        return torch.func.functional_call(module, named, (x(),)).square().mean()

    ours = torch.func.grad(loss)(names, model)
    others = torch.func.grad(loss)(dict(theirs.model.named_parameters()), theirs, "model.")
    assert equal(list(ours.values()), list(others.values()))
    expected = model(x())
    assert torch.equal(torch.jit.trace(model, x())(x()), expected)
    assert torch.equal(torch.export.export(model, (x(),)).module()(x()), expected)
    wide = x().repeat(1, 1, 4)
    if torch.bfloat16 not in carried.CARRIED:  # torch.fx traces no product that is carried
        with halfstep.following(model):
            assert torch.equal(torch.fx.symbolic_trace(model[1].q)(wide), model[1].q(wide))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert equal(found(compiled), found(copy.deepcopy(model)))


def test_without_gradients_and_within_another_autocast_numbers_are_torchs():
    model, theirs = prepared(), Autocast()
    with torch.no_grad():
        assert torch.equal(model(x()), theirs(x()))
    for module in (model, theirs):
        module.eval()
    assert torch.equal(model(x()), theirs(x()))
    with torch.autocast("cpu", dtype=torch.float16):  # the recipe's own lies within it
        assert torch.equal(model(x()), theirs(x()))


def test_what_is_reverted_casts_as_torch_does():
    model = prepared()
    halfstep.revert(model)
    assert type(model[1].q) is nn.Linear
    assert "forward" not in vars(model[1].q)
