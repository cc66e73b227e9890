"""Tensors saved for backward in few bits (`saved` of a recipe): which results change, and which tensor is saved how."""

import copy
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep import ops
from halfstep.recipe import COAT, Saved, get_recipe, get_storage
from halfstep.tracking import saving
from tiny import Gated, assert_same, grads


FP8 = get_recipe("fp8-current")
OPERANDS = Saved(operands=True)
ROUNDS = ("fp8-current", "fp8-delayed", "fp8lm-o1", "fp8-amax")


def with_saved(recipe, saved):
    recipe = get_recipe(recipe)
    return replace(recipe, name=f"{recipe.name}-kept", saved=saved)


class LlamaRMSNorm(nn.Module):
    """A copy of Hugging Face's."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    """A norm, three matmuls of its output, and a gated MLP."""

    def __init__(self, width=32):
        super().__init__()
        self.norm = LlamaRMSNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.last = nn.LayerNorm(width)
        self.mlp = Gated(width, 48)
        self.gelu = nn.GELU()

    def forward(self, x):
        y = self.norm(x)
        x = x + self.gelu(self.q(y)) * self.k(y) + self.v(y)
        return x + self.mlp(self.last(x))


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), Block(), Block(), nn.Linear(32, 8))


def data(seed=1, rows=24):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, rows, 16, generator=generator), torch.randn(3, rows, 8, generator=generator)


def gradients(recipe, net=None, x=None, apply=True):
    net = model() if net is None else net
    if apply:
        halfstep.apply(net, recipe)
    for parameter in net.parameters():
        parameter.grad = None
    inputs, target = data()
    F.mse_loss(net(inputs if x is None else x), target).backward()
    return grads(net)


def error_of(found, expected):
    a, b = (torch.cat([grad.flatten().float() for grad in each.values()]) for each in (found, expected))
    return float((a - b).norm() / b.norm())


# ---- bits of gradients ----------------------------------------------------------------------------------------------


@pytest.mark.quick("fp8-delayed", "fp8-amax")
@pytest.mark.parametrize("recipe", ROUNDS)
def test_saving_operands_as_codes_changes_no_bit(recipe):
    expected = gradients(get_recipe(recipe))
    assert_same(gradients(with_saved(recipe, OPERANDS)), expected)


def test_saving_operands_as_codes_changes_no_bit_of_a_trained_model():
    def trained(recipe):
        net = model()
        net, optimizer, scaler = halfstep.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2), recipe)
        for step in range(3):
            optimizer.zero_grad()
            for part in range(2):
                x, y = data(10 * step + part)
                scaler.scale(F.mse_loss(net(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        return net.state_dict()

    assert_same(trained(with_saved("fp8-delayed", OPERANDS)), trained(get_recipe("fp8-delayed")))


def test_saving_in_the_tensors_own_dtype_changes_no_bit():
    saved = Saved(nonlinear=get_storage("bf16"))
    net, twin = model(), model()
    for each in (net, twin):
        for block in each[1:3]:
            block.last = block.norm = nn.Identity()  # the other modules save bfloat16 tensors only
    assert_same(gradients(with_saved("bf16-mixed", saved), net), gradients("bf16-mixed", twin))


def test_coats_groups_change_gradients_slightly_and_outputs_not():
    net, twin = model(), model()
    found, expected = gradients(with_saved(FP8, COAT), net), gradients(FP8, twin)
    x, _ = data()
    assert torch.equal(net(x), twin(x))
    assert 1e-4 < error_of(found, expected) < 0.1


@pytest.mark.parametrize("kind", [nn.GELU, nn.SiLU, lambda: nn.LayerNorm(32, elementwise_affine=False)])
def test_the_gradient_is_computed_from_the_decoded_input(kind):
    """For functions whose gradient depends on their input only."""
    net = nn.Sequential(nn.Linear(32, 32), kind())
    halfstep.apply(net, replace(get_recipe("fp32"), name="kept", saved=Saved(nonlinear=COAT.nonlinear)))
    x = torch.randn(5, 32)
    middle = net[0](x).detach().requires_grad_()
    weights = torch.randn(5, 32)
    (got,) = torch.autograd.grad((net[1](middle + 0) * weights).sum(), middle)
    rounded = ops.quantize(middle.detach().view(1, -1), COAT.nonlinear.quantizer).dequantize().view(5, 32)
    if kind is nn.GELU:
        expected = torch.ops.aten.gelu_backward(weights, rounded)
    elif kind is nn.SiLU:
        expected = torch.ops.aten.silu_backward(weights, rounded)
    else:
        _, mean, rstd = torch.ops.aten.native_layer_norm(middle.detach(), [32], None, None, 1e-5)
        backward = torch.ops.aten.native_layer_norm_backward
        expected = backward(weights, rounded, [32], mean, rstd, None, None, [True, False, False])[0]
    assert torch.equal(got, expected)
    plain = torch.autograd.grad((kind()(middle) * weights).sum(), middle)[0]
    assert not torch.equal(got, plain)


def test_short_last_blocks_and_strided_inputs_give_near_gradients():
    for shape in ((5, 24), (3, 7, 10), (1, 3)):
        net = nn.Sequential(nn.Linear(shape[-1], shape[-1]), nn.LayerNorm(shape[-1]), nn.GELU())
        twin = copy.deepcopy(net)
        halfstep.apply(net, replace(get_recipe("fp32"), name="kept", saved=Saved(nonlinear=COAT.nonlinear)))
        x = torch.randn(*shape[:-1], shape[-1])
        x = x.transpose(0, -2).contiguous().transpose(0, -2) if x.dim() > 2 else x
        for each in (net, twin):
            each(x).square().sum().backward()
        assert error_of(grads(net), grads(twin)) < 0.2


# ---- what is saved --------------------------------------------------------------------------------------------------


def saved_tensors(recipe, net=None, x=None):
    """The report of the tensors that a forward saves, and the output."""
    net = model() if net is None else net
    halfstep.apply(net, recipe)
    with saving(net) as saved:
        output = net(data()[0] if x is None else x)
    return saved.now(), output


def test_an_input_of_several_matmuls_is_saved_once():
    rows = {(row.module, row.form): row.bytes for row in saved_tensors(with_saved(FP8, COAT))[0].rows}
    elements = 3 * 24 * 32
    assert rows["1.norm", "codes"] == 2 * (elements + elements // 8)  # x, and x / rms, which torch saves too
    assert rows["1.q", "codes"] == elements
    assert ("1.k", "codes") not in rows
    assert rows["1.last", "codes"] == elements + elements // 8
    assert rows["1.mlp.gate_proj", "codes"] == elements
    assert ("1.mlp.up_proj", "codes") not in rows
    inner = 3 * 24 * 48
    assert rows["1.mlp.down_proj", "codes"] == inner
    assert rows["1.mlp", "codes"] + rows["1.mlp.act_fn", "codes"] == 3 * (inner + inner // 8)
    assert rows["1", "bfloat16"] == 2 * 2 * elements  # a product in the model's own forward, which no adapter handles


def test_saving_codes_halves_the_saved_bytes():
    with_codes, without = saved_tensors(with_saved(FP8, COAT))[0], saved_tensors(FP8)[0]
    assert without.codes == 0
    assert without.total > 2 * with_codes.total


def test_the_report_names_modules_that_save_in_few_bits():
    report = halfstep.apply(model(), with_saved(FP8, COAT))
    assert {"1.norm", "1.mlp", "1.q"} < set(report.saved)
    assert "saved for the backward pass in few bits" in str(report)
    bare = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    report = halfstep.apply(bare, replace(get_recipe("bf16-mixed"), name="kept", saved=Saved(nonlinear=COAT.nonlinear)))
    assert not report.saved
    assert "no norm, activation function" in str(report)


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_nothing_is_saved_without_gradients(quiet):
    net, twin = model(), model()
    halfstep.apply(net, with_saved(FP8, COAT))
    halfstep.apply(twin, FP8)
    with quiet():
        assert torch.equal(net(data()[0]), twin(data()[0]))
    keeping = net[1].q._halfstep.saved_codes
    assert not keeping._kept


def test_frozen_layers_save_no_input():
    net = model()
    for parameter in net[1].q.parameters():
        parameter.requires_grad_(False)
    rows = {(row.module, row.form) for row in saved_tensors(with_saved(FP8, COAT), net)[0].rows}
    assert ("1.q", "codes") not in rows
    assert ("1.k", "codes") in rows
    net, twin = model(), model()
    for each, recipe in ((net, with_saved(FP8, OPERANDS)), (twin, FP8)):
        each[1].q.requires_grad_(False)
        halfstep.apply(each, recipe)
        each(data()[0]).square().sum().backward()
    found, expected = (dict(each.named_parameters()) for each in (net, twin))
    assert found["1.q.weight"].grad is None
    assert_same(*({n: p.grad for n, p in each.items() if p.requires_grad} for each in (found, expected)))


def test_a_reused_address_is_not_mistaken_for_the_freed_tensor():
    """`place_of` alone could not distinguish a new tensor from a freed one at the same address."""
    net, twin = nn.Sequential(nn.Linear(64, 64)), nn.Sequential(nn.Linear(64, 64))
    twin.load_state_dict(net.state_dict())
    halfstep.apply(net, with_saved(FP8, OPERANDS))
    halfstep.apply(twin, FP8)
    addresses, alive = set(), []
    for number in range(100):
        x = torch.full((64, 64), float(number + 1))
        addresses.add(x.data_ptr())
        alive.append(net(x))
        assert torch.equal(alive[-1], twin(x)), number
        del x
    assert len(addresses) < 100, "no address was reused: the test shows nothing"


def test_an_input_written_in_place_is_encoded_again():
    net, twin = model()[1], model()[1]
    halfstep.apply(net, with_saved(FP8, COAT))
    halfstep.apply(twin, FP8)
    for each in (net, twin):
        x = torch.ones(4, 32)
        with halfstep.following(each):
            first = each.q(x)
            x[0] = 3
            (first.sum() + each.k(x).sum()).float().backward()
    assert torch.equal(net.k.weight.grad, twin.k.weight.grad)
    assert torch.equal(net.q.weight.grad, twin.q.weight.grad)
    assert not torch.equal(net.q.weight.grad, net.k.weight.grad)


def by_numpy(x, values):
    x.numpy()[:] = values.numpy()


def by_data(x, values):
    x.data.copy_(values)


@pytest.mark.parametrize("write", [by_numpy, by_data])
@pytest.mark.parametrize("seen", [lambda x: x, lambda x: x.view(6, 32)], ids=["itself", "a view"])
def test_inputs_written_without_a_version_counter_are_encoded_again(write, seen):
    """As a loader's buffer, or a receive buffer of a rank, that is refilled while the first graph lives."""
    net = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)), nn.Sequential(nn.Linear(32, 8))
    first, second = data(rows=4)[0].reshape(-1, 32), data(seed=5, rows=4)[0].reshape(-1, 32)
    for each in net:
        halfstep.apply(each, with_saved(FP8, COAT))
        x = first.clone()
        alive = each(seen(x))
        write(x, second)
        found = each(seen(x))
        found.square().sum().backward()
        got = {name: grad.clone() for name, grad in grads(each).items()}
        each.zero_grad()
        expected = each(second.clone())
        expected.square().sum().backward()
        assert torch.equal(found, expected)
        assert not torch.equal(alive, found)
        assert_same(grads(each), got)


# ---- in-place writes, checkpointing, hooks --------------------------------------------------------------------------


def test_a_write_to_an_unencoded_saved_tensor_is_torchs_error():
    net = model()
    halfstep.apply(net, with_saved(FP8, COAT))
    loss = net(data()[0]).sum()
    with torch.no_grad():
        net[1].last.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*expected version"):
        loss.backward()


def test_a_write_to_an_encoded_saved_tensor_changes_no_gradient():
    """Without `saved`, torch would refuse."""
    recipe = replace(get_recipe("fp32"), name="kept", saved=Saved(nonlinear=COAT.nonlinear))

    def found(write):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 32), nn.GELU())
        halfstep.apply(net, recipe)
        x = net[0](torch.ones(4, 32))
        y = net[1](x)
        if write:
            x.mul_(2)
        y.sum().backward()
        return grads(net)

    assert_same(found(True), found(False))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_no_bit(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.how, self.body = how, model()

        def forward(self, x):
            x = self.body[0](x)
            for block in self.body[1:3]:
                x = block(x) if self.how is None else checkpoint(block, x, use_reentrant=self.how)
            return self.body[3](x)

    expected = gradients(with_saved(FP8, COAT), Checkpointed(None))
    assert_same(gradients(with_saved(FP8, COAT), Checkpointed(reentrant)), expected)


def test_checkpointing_a_block_with_a_leaf_input_changes_no_bit():
    """As behind a frozen embedding whose output requires a gradient for adapters in a checkpointed block."""
    found = []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        block = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
        halfstep.apply(net := nn.Sequential(block), with_saved(FP8, COAT))
        x = data()[0].repeat(1, 1, 2).requires_grad_()
        with halfstep.following(net):
            y = checkpoint(block, x, use_reentrant=False) if checkpoints else block(x)
        y.float().square().sum().backward()
        found.append([x.grad, *grads(net).values()])
    assert_same(*found)


def test_checkpointing_the_whole_model_changes_no_bit():
    net, twin = model(), model()
    halfstep.apply(net, with_saved(FP8, COAT))
    x, target = data()
    F.mse_loss(checkpoint(net, x, use_reentrant=False), target).backward()
    assert_same(grads(net), gradients(with_saved(FP8, COAT), twin))


def test_offloading_saved_tensors_offloads_codes_and_changes_no_bit():
    net, seen = model(), []
    halfstep.apply(net, with_saved(FP8, COAT))
    x, target = data()

    class Offload(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self):
            super().__init__(lambda t: seen.append(t.dtype) or t.clone(), lambda t: t)

    with torch.autograd.graph.save_on_cpu():
        F.mse_loss(net(x), target).backward()
    expected = gradients(with_saved(FP8, COAT))
    assert_same(grads(net), expected)
    net.zero_grad()
    with Offload():
        F.mse_loss(net(x), target).backward()
    assert_same(grads(net), expected)
    assert seen.count(torch.uint8) > 8


def test_a_retained_graph_gives_the_same_gradients_twice():
    net = model()
    halfstep.apply(net, with_saved(FP8, COAT))
    loss = net(data()[0]).square().mean()
    loss.backward(retain_graph=True)
    once = {name: grad.clone() for name, grad in grads(net).items()}
    net.zero_grad()
    loss.backward()
    assert_same(grads(net), once)


def test_second_derivatives_work_without_rounded_matmuls_and_are_refused_with():
    recipe = replace(get_recipe("fp32"), name="kept", saved=Saved(nonlinear=COAT.nonlinear))

    def penalty(net):
        x = data()[0].requires_grad_()
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}

    net, twin = model(), model()
    halfstep.apply(net, recipe)
    found = penalty(net)
    assert 0 < error_of(found, penalty(twin)) < 0.1
    net = model()
    halfstep.apply(net, with_saved(FP8, COAT))
    with pytest.raises(halfstep.HalfstepError, match="second derivative"):
        penalty(net)


def test_torch_func_grad_ignores_saved():
    recipe = replace(get_recipe("fp32"), name="kept", saved=Saved(nonlinear=COAT.nonlinear))
    net, twin = nn.Sequential(nn.LayerNorm(16), nn.GELU()), nn.Sequential(nn.LayerNorm(16), nn.GELU())
    halfstep.apply(net, recipe)
    x = torch.randn(4, 16)
    assert torch.equal(*[torch.func.grad(lambda x, each=each: each(x).sum())(x) for each in (net, twin)])


# ---- models ---------------------------------------------------------------------------------------------------------


def test_copies_and_pickles_give_the_same_gradients_and_revert_restores():
    net = model()
    halfstep.apply(net, with_saved(FP8, COAT))
    expected = {name: grad.clone() for name, grad in gradients(None, net, apply=False).items()}
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert_same(gradients(None, other, apply=False), expected)
        assert other[1].q._halfstep.saved_codes is not net[1].q._halfstep.saved_codes
        assert other[1].q._halfstep.saved_codes is other[1].norm._halfstep.saved_codes
    assert list(net.state_dict()) == list(model().state_dict())
    halfstep.revert(net)
    assert_same(gradients(None, net, apply=False), gradients(None, model(), apply=False))
    assert not any("_halfstep" in key for module in net.modules() for key in vars(module))


def test_a_gan_trains_with_the_same_bits():
    """A generator's gradients pass through the discriminator while it is frozen."""

    def played(recipe):
        torch.manual_seed(0)
        maker, judge = nn.Sequential(nn.Linear(16, 32), Block()), nn.Sequential(Block(), nn.Linear(32, 1))
        pairs = [halfstep.prepare(m, torch.optim.SGD(m.parameters(), 0.1), recipe) for m in (maker, judge)]
        (maker, first, scale), (judge, second, other) = pairs
        for step in range(3):
            noise, real = data(step)[0], torch.randn(3, 24, 32, generator=torch.Generator().manual_seed(step))
            loss = judge(maker(noise).detach()).mean() - judge(real).mean()
            other.scale(loss).backward()
            other.step(second)
            other.update()
            second.zero_grad()
            judge.requires_grad_(False)
            scale.scale(-judge(maker(noise)).mean()).backward()
            scale.step(first)
            scale.update()
            first.zero_grad()
            judge.requires_grad_(True)
        return {**{f"m.{k}": v for k, v in maker.state_dict().items()}, **judge.state_dict()}

    assert_same(played(with_saved(FP8, OPERANDS)), played(FP8))


def test_a_block_called_within_following_saves_in_few_bits():
    net, twin = model(), model()
    x = torch.randn(4, 32)
    for each, recipe in ((net, with_saved(FP8, COAT)), (twin, FP8)):
        halfstep.apply(each, recipe)
        with halfstep.following(each):
            each[1](x).float().square().sum().backward()
    assert 1e-4 < error_of(grads(net[1]), grads(twin[1])) < 0.1


def test_smoothed_mlps_save_their_product_in_groups():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), Gated(32, 48))
    rows = {(r.module, r.form): r.bytes for r in saved_tensors(with_saved("fp8-smooth-swiglu", COAT), net)[0].rows}
    inner = 3 * 24 * 48
    assert rows["1", "codes"] >= 2 * (inner + inner // 8)


@pytest.mark.slow
def test_a_traced_graph_gives_the_eager_gradients():
    """With torch's own modules; a traced norm with its own code saves its tensors unencoded."""
    torch._dynamo.reset()
    net, twin = model()[:2], model()[:2]
    for each in (net, twin):
        each[1].norm = nn.LayerNorm(32)
        halfstep.apply(each, with_saved(FP8, COAT))
    x, _ = data()
    net(x).square().mean().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, as it traces
        torch.compile(twin, backend="aot_eager", fullgraph=True)(x).square().mean().backward()
    assert_same(grads(twin), grads(net))
    halfstep.revert(net)
    net.zero_grad()
    halfstep.apply(net, FP8)
    net(x).square().mean().backward()
    assert error_of(grads(net), grads(twin)) > 1e-4
