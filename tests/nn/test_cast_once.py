"""Under autocast an input of several layers is cast and saved once, with the bits of torch.autocast."""

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
    """q, k and v read a norm's float32 output, as in transformers. `between` is called with that output after q."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, 32)
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.between, self.reentrant, self.join = lambda x: None, None, F.scaled_dot_product_attention

    def attend(self, x):
        x = self.norm(x.float())
        q = self.q(x)
        self.between(x)
        return x + self.out(self.join(q, self.k(x), self.v(x)))

    def forward(self, x):
        if self.reentrant is None:
            return self.attend(x)
        return checkpoint(self.attend, x, use_reentrant=self.reentrant)


def stock():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), Block(), Block())


def prepared(name="bf16-mixed", model=None):
    model = stock() if model is None else model
    return halfstep.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), name)[0]


class Autocast(nn.Module):
    """The reference for the recipe: the model under torch.autocast, its output in float32."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.model, self.dtype = stock(), dtype

    def forward(self, x):
        with torch.autocast("cpu", dtype=self.dtype):
            return self.model(x).float()


def x():
    return torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(1))


def outputs_and_grads(model):
    y = model(x())
    y.square().mean().backward()
    return [y.detach(), *(parameter.grad for parameter in model.parameters())]


def equal(one, other):
    assert len(one) == len(other)
    return all(map(torch.equal, one, other))


def saved_storages(model):
    """The number of storages of 2 * 16 * 32 elements that a forward saves for backward."""
    tensors = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: tensors.append(x) or x, lambda x: x):
        model(x())
    return len({each.untyped_storage()._cdata for each in tensors if each.numel() == 2 * 16 * 32})


@pytest.mark.parametrize(("name", "dtype"), [("bf16-mixed", torch.bfloat16), ("fp16-mixed", torch.float16)])
def test_the_cast_input_is_saved_once_and_bits_equal_autocasts(name, dtype):
    ours, theirs = prepared(name), Autocast(dtype)
    if dtype in carried.CARRIED:  # the emulated matmul sums in another order
        assert saved_storages(ours) < saved_storages(theirs)
        return
    assert saved_storages(ours) == saved_storages(theirs) - 2 * 2
    assert equal(outputs_and_grads(ours), outputs_and_grads(theirs))


def test_emulated_matmuls_save_the_cast_input_once(monkeypatch):
    monkeypatch.setattr(carried, "CARRIED", frozenset([torch.bfloat16]))
    shared, ends = saved_storages(prepared()), outputs_and_grads(prepared())
    monkeypatch.setattr(LastInput, "find", lambda *given: None)
    assert saved_storages(prepared()) == shared + 2 * 2
    assert equal(outputs_and_grads(prepared()), ends)


def test_layers_outside_the_filter_of_an_fp8_recipe_share_a_cast_input(monkeypatch):
    def model():
        made = stock()
        halfstep.apply(made, "fp8-current", module_filter=lambda module, path: path.startswith("1."))
        return made

    shared, ends = saved_storages(model()), outputs_and_grads(model())
    monkeypatch.setattr(LastInput, "find", lambda *given: None)
    assert saved_storages(model()) == shared + 2 * 2
    assert equal(outputs_and_grads(model()), ends)


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_activation_checkpointing_gives_the_same_bits(reentrant):
    model = prepared()
    ends = outputs_and_grads(model)
    model.zero_grad()
    model[1].reentrant = model[2].reentrant = reentrant
    assert equal(outputs_and_grads(model), ends)


def test_an_input_written_in_place_is_cast_again():
    outputs = []
    for model in (prepared(), Autocast()):
        for block in list(getattr(model, "model", model))[1:]:
            block.between = lambda x: x.data.mul_(0.5) if x.is_leaf else torch.no_grad()(x.mul_)(0.5)
        outputs.append(model(x()))
    assert torch.equal(*outputs)


@sdpa_kernel(SDPBackend.MATH)  # other backends have no second derivative, and torch 2.14 takes one of them here
def test_second_derivatives_equal_autocasts():
    grads = []
    for model in (prepared(), Autocast()):
        given = x().requires_grad_()
        (first,) = torch.autograd.grad(model(given).square().mean(), given, create_graph=True)
        grads.append(torch.autograd.grad(first.square().sum(), list(model.parameters()), allow_unused=True))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_forward_mode_tangents_equal_autocasts():
    tangents = []
    for model in (prepared(), Autocast()):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x(), torch.ones(2, 16, 8))
            tangents.append(torch.autograd.forward_ad.unpack_dual(_projections(model, dual)).tangent)
    assert torch.equal(*tangents)


def _projections(model, given):
    """The sum of q, k and v, since attention has no forward-mode derivative."""
    first, block = list(getattr(model, "model", model))[:2]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        normed = block.norm(first(given).float())
        return block.q(normed) + block.k(normed) + block.v(normed)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_function_transforms_and_tracers_cast_once_per_layer():
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
    if torch.bfloat16 not in carried.CARRIED:  # torch.fx cannot trace an emulated matmul
        with halfstep.following(model):
            assert torch.equal(torch.fx.symbolic_trace(model[1].q)(wide), model[1].q(wide))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert equal(outputs_and_grads(compiled), outputs_and_grads(copy.deepcopy(model)))


def test_evaluation_and_nested_autocast_equal_autocasts():
    model, theirs = prepared(), Autocast()
    with torch.no_grad():
        assert torch.equal(model(x()), theirs(x()))
    for module in (model, theirs):
        module.eval()
    assert torch.equal(model(x()), theirs(x()))
    with torch.autocast("cpu", dtype=torch.float16):  # the recipe's own autocast is nested in it
        assert torch.equal(model(x()), theirs(x()))


def test_revert_restores_torchs_linear_layers():
    model = prepared()
    halfstep.revert(model)
    assert type(model[1].q) is nn.Linear
    assert "forward" not in vars(model[1].q)
