"""Weights that are tensor subclasses of other libraries: kept if frozen, refused if a recipe would change them."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import halfstep
from halfstep import ops
from halfstep.errors import ModelError
from halfstep.kernels.cpu.arrays import array
from halfstep.recipe import LinearSpec, get_recipe
from tiny import RECIPES, assert_same, batch, mlp, mostly_slow, prepared


ROUNDS = {name for name in RECIPES if any(rule.linear.rounds for rule in get_recipe(name).rules)}


class Packed(torch.Tensor):
    """An int8 weight that looks like float32 to torch's functions, as torchao's are; only `linear` supports it."""

    @staticmethod
    def __new__(cls, codes, scale, requires_grad=False):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, requires_grad=requires_grad)

    def __init__(self, codes, scale, requires_grad=False):
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            x, weight, bias = (*args, None)[:3] if len(args) < 3 else args[:3]
            return nn.functional.linear(x, (weight.codes.float() * weight.scale).to(x.dtype), bias)
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return Packed(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{function} of Packed")

    def __repr__(self):
        return "Packed"


def packed(layer, trained=False):
    weight = layer.weight.detach()
    scale = weight.abs().max() / 127
    codes = (weight / scale).round().to(torch.int8)
    layer.weight = nn.Parameter(Packed(codes, scale), requires_grad=trained)
    layer.bias.requires_grad_(trained)


class Adapted(nn.Module):
    """A frozen base and a low-rank adapter."""

    def __init__(self, base):
        super().__init__()
        torch.manual_seed(0)
        self.base, self.a, self.b, self.head = base, nn.Linear(8, 4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.base(x) + self.b(self.a(x)))


def adapted():
    torch.manual_seed(0)
    base = nn.Linear(8, 8)
    packed(base)
    return Adapted(base)


def not_the_base(module, path):
    return path != "base"


def steps(name, model, **options):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer, scaler = prepared(name, model, optimizer, **options)
    losses = []
    for _ in range(4):
        loss = (model(batch()[0]) - batch()[1]).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.quick("own-bf16-mixed", "own-fp16-mixed", "carried-fp32")
@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("name", mostly_slow(RECIPES))
def test_a_frozen_foreign_weight_stays_and_adapters_train(name):
    model = adapted()
    weight = model.base.weight
    codes = weight.codes.clone()
    losses = steps(name, model, **({"module_filter": not_the_base} if name in ROUNDS else {}))
    assert losses[-1] < losses[0] or name == "fp16-pure"
    assert model.base.weight is weight
    assert torch.equal(weight.codes, codes)


def test_the_report_names_a_foreign_weight():
    assert halfstep.apply(adapted(), "bf16-master").kept["base.weight"].endswith(".Packed")


@pytest.mark.parametrize("name", sorted(ROUNDS))
def test_a_rule_that_would_round_a_foreign_weight_is_refused(name):
    model = adapted()
    before = copy.copy(vars(model.a))
    with pytest.raises(ModelError, match=r"rounds base, whose weight is a .*Packed: apply the recipe before .*_filter"):
        halfstep.apply(model, name)
    assert type(model) is Adapted
    assert vars(model.a) == before


@pytest.mark.parametrize("name", ["fp32", "bf16-mixed", "bf16-stochastic", "fp8-current"])
def test_a_trained_foreign_weight_is_refused(name):
    model = mlp()
    packed(model[0], trained=True)
    with pytest.raises(ModelError, match=r"0\.weight is trained and is a .*Packed, .* freeze these weights"):
        halfstep.apply(model, name)


def test_a_weight_quantized_by_another_library_after_apply_is_refused():
    model = mlp()
    halfstep.apply(model, "fp8-current")
    packed(model[0])
    with pytest.raises(ModelError, match=r"is a .*Packed: halfstep\.revert the model before another library"):
        model(batch()[0])
    halfstep.revert(model)
    model(batch()[0])


def test_rounding_a_dtensor_weight_is_refused():
    weight = nn.Parameter(torch.randn(4, 8))
    weight.device_mesh = "a mesh"
    spec = get_recipe("fp8-current").rules[-1].linear
    weight.placements = ["Shard(0)"]
    with pytest.raises(ModelError, match=r"spread over ranks as \['Shard\(0\)'\].* fully_shard, or module_filter"):
        ops.linear(torch.randn(3, 8), weight, None, spec)
    with pytest.raises(ModelError, match=r"a DTensor.* shard by fully_shard, keep these layers"):
        ops.rounded_weight(weight, spec, torch.float32)
    ops.linear(torch.randn(3, 8), weight, None, LinearSpec())


@pytest.mark.parametrize("trained", [False, True])
def test_an_async_collective_tensor_as_input_is_waited_for(trained):
    """As tensor parallelism passes it on. It has no storage of its own that a kernel could read."""
    x, weight = torch.randn(3, 8, requires_grad=trained), torch.randn(4, 8)
    spec, late = get_recipe("fp8-current").rules[-1].linear, AsyncCollectiveTensor(x)
    with pytest.raises(ModelError, match=r"a AsyncCollectiveTensor of shape \(3, 8\) has no storage"):
        array(late)
    found = ops.linear(late, weight, None, spec)
    whole = x.detach().requires_grad_(trained)
    expected = ops.linear(whole, weight, None, spec)
    assert_same(found.detach(), expected.detach())
    if trained:
        found.sum().backward()
        expected.sum().backward()
        assert_same(late.grad, whole.grad)


torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")


@pytest.mark.filterwarnings("ignore")
def test_torchaos_weights_are_kept_or_refused():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    model[0].weight.requires_grad_()
    with pytest.raises(ModelError, match=r"trained and is a torchao\."):
        halfstep.apply(model, "bf16-stochastic")
    model.requires_grad_(False)
    with pytest.raises(ModelError, match=r"rule .* rounds 0, whose weight is a torchao\."):
        halfstep.apply(model, "fp8-current", lambda module, path: True)
    expected, x = model(torch.ones(2, 64)), torch.ones(2, 64)
    halfstep.apply(model, "bf16-mixed")
    torch.testing.assert_close(model(x), expected, rtol=0.02, atol=0.02)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["fp32", "bf16-mixed", "bf16-master", "bf16-stochastic", "fp8-current", "fp8-delayed"])
def test_adapters_train_on_a_frozen_bitsandbytes_base(name):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    base = bitsandbytes.nn.Linear4bit(8, 8, compute_dtype=torch.float32).to("cpu").requires_grad_(False)
    losses = steps(name, Adapted(base))
    assert losses[-1] < losses[0]
    assert base.weight.dtype == torch.uint8
