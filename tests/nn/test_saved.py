"""What autograd keeps in few bits: which numbers change, which do not, and what is kept of what."""

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


def under(recipe, saved):
    recipe = get_recipe(recipe)
    return replace(recipe, name=f"{recipe.name}-kept", saved=saved)


class LlamaRMSNorm(nn.Module):
    """As Hugging Face writes it."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    """A norm, three products of what it gives, a gated MLP."""

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


def gradients(recipe, made=None, x=None, apply=True):
    made = model() if made is None else made
    if apply:
        halfstep.apply(made, recipe)
    for parameter in made.parameters():
        parameter.grad = None
    inputs, target = data()
    F.mse_loss(made(inputs if x is None else x), target).backward()
    return grads(made)


def error_of(found, expected):
    a, b = (torch.cat([grad.flatten().float() for grad in each.values()]) for each in (found, expected))
    return float((a - b).norm() / b.norm())


# ---- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.quick("fp8-delayed", "fp8-amax")
@pytest.mark.parametrize("recipe", ROUNDS)
def test_codes_of_operands_move_no_bit(recipe):
    expected = gradients(get_recipe(recipe))
    assert_same(gradients(under(recipe, OPERANDS)), expected)


def test_steps_with_scaling_states_and_accumulation_move_no_bit():
    def trained(recipe):
        made = model()
        made, optimizer, scaler = halfstep.prepare(made, torch.optim.AdamW(made.parameters(), lr=1e-2), recipe)
        for step in range(3):
            optimizer.zero_grad()
            for part in range(2):
                x, y = data(10 * step + part)
                scaler.scale(F.mse_loss(made(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        return made.state_dict()

    assert_same(trained(under("fp8-delayed", OPERANDS)), trained(get_recipe("fp8-delayed")))


def test_a_storage_of_the_tensors_own_dtype_moves_no_bit():
    saved = Saved(nonlinear=get_storage("bf16"))
    made, twin = model(), model()
    for each in (made, twin):
        for block in each[1:3]:
            block.last = block.norm = nn.Identity()  # what is left saves tensors in bfloat16 alone
    assert_same(gradients(under("bf16-mixed", saved), made), gradients("bf16-mixed", twin))


def test_groups_change_gradients_a_little_and_outputs_not_at_all():
    made, twin = model(), model()
    found, expected = gradients(under(FP8, COAT), made), gradients(FP8, twin)
    x, _ = data()
    assert torch.equal(made(x), twin(x))
    assert 1e-4 < error_of(found, expected) < 0.1


@pytest.mark.parametrize("kind", [nn.GELU, nn.SiLU, lambda: nn.LayerNorm(32, elementwise_affine=False)])
def test_the_gradient_is_that_at_the_values_of_the_codes(kind):
    """Those of a function that is its input's alone."""
    made = nn.Sequential(nn.Linear(32, 32), kind())
    halfstep.apply(made, replace(get_recipe("fp32"), name="kept", saved=Saved(nonlinear=COAT.nonlinear)))
    x = torch.randn(5, 32)
    middle = made[0](x).detach().requires_grad_()
    weights = torch.randn(5, 32)
    (got,) = torch.autograd.grad((made[1](middle + 0) * weights).sum(), middle)
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


def test_last_blocks_that_are_short_and_inputs_that_are_not_contiguous():
    for shape in ((5, 24), (3, 7, 10), (1, 3)):
        made = nn.Sequential(nn.Linear(shape[-1], shape[-1]), nn.LayerNorm(shape[-1]), nn.GELU())
        twin = copy.deepcopy(made)
        halfstep.apply(made, replace(get_recipe("fp32"), name="kept", saved=Saved(nonlinear=COAT.nonlinear)))
        x = torch.randn(*shape[:-1], shape[-1])
        x = x.transpose(0, -2).contiguous().transpose(0, -2) if x.dim() > 2 else x
        for each in (made, twin):
            each(x).square().sum().backward()
        assert error_of(grads(made), grads(twin)) < 0.2


# ---- what is kept ---------------------------------------------------------------------------------------------------


def kept(recipe, made=None, x=None):
    made = model() if made is None else made
    halfstep.apply(made, recipe)
    with saving(made) as saved:
        output = made(data()[0] if x is None else x)
    return saved.now(), output


def test_products_of_one_input_keep_it_once():
    rows = {(row.module, row.form): row.bytes for row in kept(under(FP8, COAT))[0].rows}
    elements = 3 * 24 * 32
    assert rows["1.norm", "codes"] == 2 * (elements + elements // 8)  # x, and x / rms, which torch keeps too
    assert rows["1.q", "codes"] == elements
    assert ("1.k", "codes") not in rows
    assert rows["1.last", "codes"] == elements + elements // 8
    assert rows["1.mlp.gate_proj", "codes"] == elements
    assert ("1.mlp.up_proj", "codes") not in rows
    inner = 3 * 24 * 48
    assert rows["1.mlp.down_proj", "codes"] == inner
    assert rows["1.mlp", "codes"] + rows["1.mlp.act_fn", "codes"] == 3 * (inner + inner // 8)
    assert rows["1", "bfloat16"] == 2 * 2 * elements  # the model's own product, which nothing is known of


def test_it_is_less():
    with_codes, without = kept(under(FP8, COAT))[0], kept(FP8)[0]
    assert without.codes == 0
    assert without.total > 2 * with_codes.total


def test_the_report_names_what_is_saved_so():
    report = halfstep.apply(model(), under(FP8, COAT))
    assert {"1.norm", "1.mlp", "1.q"} < set(report.saved)
    assert "saved for the backward pass in few bits" in str(report)
    bare = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    report = halfstep.apply(bare, replace(get_recipe("bf16-mixed"), name="kept", saved=Saved(nonlinear=COAT.nonlinear)))
    assert not report.saved
    assert "no norm, activation function" in str(report)


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_nothing_is_kept_where_nobody_asks_for_gradients(quiet):
    made, twin = model(), model()
    halfstep.apply(made, under(FP8, COAT))
    halfstep.apply(twin, FP8)
    with quiet():
        assert torch.equal(made(data()[0]), twin(data()[0]))
    keeping = made[1].q._halfstep.saved_codes
    assert not keeping._kept


def test_frozen_weights_keep_no_input():
    made = model()
    for parameter in made[1].q.parameters():
        parameter.requires_grad_(False)
    rows = {(row.module, row.form) for row in kept(under(FP8, COAT), made)[0].rows}
    assert ("1.q", "codes") not in rows
    assert ("1.k", "codes") in rows
    made, twin = model(), model()
    for each, recipe in ((made, under(FP8, OPERANDS)), (twin, FP8)):
        each[1].q.requires_grad_(False)
        halfstep.apply(each, recipe)
        each(data()[0]).square().sum().backward()
    found, expected = (dict(each.named_parameters()) for each in (made, twin))
    assert found["1.q.weight"].grad is None
    assert_same(*({n: p.grad for n, p in each.items() if p.requires_grad} for each in (found, expected)))


def test_memory_that_is_taken_again_is_not_taken_for_what_it_held():
    """A tensor that is gone, and another at its address: `place_of` alone could not tell them apart."""
    made, twin = nn.Sequential(nn.Linear(64, 64)), nn.Sequential(nn.Linear(64, 64))
    twin.load_state_dict(made.state_dict())
    halfstep.apply(made, under(FP8, OPERANDS))
    halfstep.apply(twin, FP8)
    addresses, alive = set(), []
    for number in range(100):
        x = torch.full((64, 64), float(number + 1))
        addresses.add(x.data_ptr())
        alive.append(made(x))
        assert torch.equal(alive[-1], twin(x)), number
        del x
    assert len(addresses) < 100, "no address came twice: the test shows nothing"


def test_the_codes_of_what_was_written_to_are_made_anew():
    made, twin = model()[1], model()[1]
    halfstep.apply(made, under(FP8, COAT))
    halfstep.apply(twin, FP8)
    for each in (made, twin):
        x = torch.ones(4, 32)
        with halfstep.following(each):
            first = each.q(x)
            x[0] = 3
            (first.sum() + each.k(x).sum()).float().backward()
    assert torch.equal(made.k.weight.grad, twin.k.weight.grad)
    assert torch.equal(made.q.weight.grad, twin.q.weight.grad)
    assert not torch.equal(made.q.weight.grad, made.k.weight.grad)


def by_numpy(x, values):
    x.numpy()[:] = values.numpy()


def by_data(x, values):
    x.data.copy_(values)


@pytest.mark.parametrize("write", [by_numpy, by_data])
@pytest.mark.parametrize("seen", [lambda x: x, lambda x: x.view(6, 32)], ids=["itself", "a view"])
def test_inputs_written_to_without_a_version_are_read_anew(write, seen):
    """A loader's memory, or what a rank receives into, filled again while the first graph lives."""
    made = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)), nn.Sequential(nn.Linear(32, 8))
    first, second = data(rows=4)[0].reshape(-1, 32), data(seed=5, rows=4)[0].reshape(-1, 32)
    for each in made:
        halfstep.apply(each, under(FP8, COAT))
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


# ---- autograd's promises --------------------------------------------------------------------------------------------


def test_a_write_to_what_is_left_alone_is_the_error_that_it_was():
    made = model()
    halfstep.apply(made, under(FP8, COAT))
    loss = made(data()[0]).sum()
    with torch.no_grad():
        made[1].last.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*expected version"):
        loss.backward()


def test_a_write_to_what_is_codes_does_no_harm():
    """What was kept of it is what it was. Without `saved`, torch would refuse."""
    recipe = replace(get_recipe("fp32"), name="kept", saved=Saved(nonlinear=COAT.nonlinear))

    def found(write):
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(32, 32), nn.GELU())
        halfstep.apply(made, recipe)
        x = made[0](torch.ones(4, 32))
        y = made[1](x)
        if write:
            x.mul_(2)
        y.sum().backward()
        return grads(made)

    assert_same(found(True), found(False))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_moves_no_bit(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.how, self.body = how, model()

        def forward(self, x):
            x = self.body[0](x)
            for block in self.body[1:3]:
                x = block(x) if self.how is None else checkpoint(block, x, use_reentrant=self.how)
            return self.body[3](x)

    expected = gradients(under(FP8, COAT), Checkpointed(None))
    assert_same(gradients(under(FP8, COAT), Checkpointed(reentrant)), expected)


def test_a_checkpoint_that_begins_with_a_leaf_keeps_it_as_it_did():
    """As behind a frozen embedding, whose output adapters in a checkpointed block have require a gradient."""
    found = []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        block = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
        halfstep.apply(made := nn.Sequential(block), under(FP8, COAT))
        x = data()[0].repeat(1, 1, 2).requires_grad_()
        with halfstep.following(made):
            y = checkpoint(block, x, use_reentrant=False) if checkpoints else block(x)
        y.float().square().sum().backward()
        found.append([x.grad, *grads(made).values()])
    assert_same(*found)


def test_checkpointing_the_whole_model_moves_no_bit():
    made, twin = model(), model()
    halfstep.apply(made, under(FP8, COAT))
    x, target = data()
    F.mse_loss(checkpoint(made, x, use_reentrant=False), target).backward()
    assert_same(grads(made), gradients(under(FP8, COAT), twin))


def test_offload_takes_codes_and_moves_no_bit():
    made, seen = model(), []
    halfstep.apply(made, under(FP8, COAT))
    x, target = data()

    class Offload(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self):
            super().__init__(lambda t: seen.append(t.dtype) or t.clone(), lambda t: t)

    with torch.autograd.graph.save_on_cpu():
        F.mse_loss(made(x), target).backward()
    expected = gradients(under(FP8, COAT))
    assert_same(grads(made), expected)
    made.zero_grad()
    with Offload():
        F.mse_loss(made(x), target).backward()
    assert_same(grads(made), expected)
    assert seen.count(torch.uint8) > 8


def test_a_graph_that_is_kept_gives_its_gradients_twice():
    made = model()
    halfstep.apply(made, under(FP8, COAT))
    loss = made(data()[0]).square().mean()
    loss.backward(retain_graph=True)
    once = {name: grad.clone() for name, grad in grads(made).items()}
    made.zero_grad()
    loss.backward()
    assert_same(grads(made), once)


def test_second_derivatives_through_what_no_product_rounds():
    recipe = replace(get_recipe("fp32"), name="kept", saved=Saved(nonlinear=COAT.nonlinear))

    def penalty(made):
        x = data()[0].requires_grad_()
        (slope,) = torch.autograd.grad(made(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        return {name: p.grad for name, p in made.named_parameters() if p.grad is not None}

    made, twin = model(), model()
    halfstep.apply(made, recipe)
    found = penalty(made)
    assert 0 < error_of(found, penalty(twin)) < 0.1
    made = model()
    halfstep.apply(made, under(FP8, COAT))
    with pytest.raises(halfstep.HalfstepError, match="second derivative"):
        penalty(made)


def test_transforms_of_torch_func_take_gradients_as_they_are():
    recipe = replace(get_recipe("fp32"), name="kept", saved=Saved(nonlinear=COAT.nonlinear))
    made, twin = nn.Sequential(nn.LayerNorm(16), nn.GELU()), nn.Sequential(nn.LayerNorm(16), nn.GELU())
    halfstep.apply(made, recipe)
    x = torch.randn(4, 16)
    assert torch.equal(*[torch.func.grad(lambda x, each=each: each(x).sum())(x) for each in (made, twin)])


# ---- models ---------------------------------------------------------------------------------------------------------


def test_copies_pickles_and_the_way_back():
    made = model()
    halfstep.apply(made, under(FP8, COAT))
    expected = {name: grad.clone() for name, grad in gradients(None, made, apply=False).items()}
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert_same(gradients(None, other, apply=False), expected)
        assert other[1].q._halfstep.saved_codes is not made[1].q._halfstep.saved_codes
        assert other[1].q._halfstep.saved_codes is other[1].norm._halfstep.saved_codes
    assert list(made.state_dict()) == list(model().state_dict())
    halfstep.revert(made)
    assert_same(gradients(None, made, apply=False), gradients(None, model(), apply=False))
    assert not any("_halfstep" in key for module in made.modules() for key in vars(module))


def test_two_models_of_a_game():
    """A generator's gradients come through the other model, which is frozen meanwhile."""

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

    assert_same(played(under(FP8, OPERANDS)), played(FP8))


def test_a_part_called_beside_forward():
    made, twin = model(), model()
    x = torch.randn(4, 32)
    for each, recipe in ((made, under(FP8, COAT)), (twin, FP8)):
        halfstep.apply(each, recipe)
        with halfstep.following(each):
            each[1](x).float().square().sum().backward()
    assert 1e-4 < error_of(grads(made[1]), grads(twin[1])) < 0.1


def test_smoothed_mlps_keep_their_product_in_groups_too():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(16, 32), Gated(32, 48))
    rows = {(r.module, r.form): r.bytes for r in kept(under("fp8-smooth-swiglu", COAT), made)[0].rows}
    inner = 3 * 24 * 48
    assert rows["1", "codes"] >= 2 * (inner + inner // 8)


@pytest.mark.slow
def test_a_traced_graph_has_the_eager_gradients():
    """Of torch's own kinds; norms with code of their own keep in it what they will."""
    torch._dynamo.reset()
    made, twin = model()[:2], model()[:2]
    for each in (made, twin):
        each[1].norm = nn.LayerNorm(32)
        halfstep.apply(each, under(FP8, COAT))
    x, _ = data()
    made(x).square().mean().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, as it traces
        torch.compile(twin, backend="aot_eager", fullgraph=True)(x).square().mean().backward()
    assert_same(grads(twin), grads(made))
    halfstep.revert(made)
    made.zero_grad()
    halfstep.apply(made, FP8)
    made(x).square().mean().backward()
    assert error_of(grads(made), grads(twin)) > 1e-4
