"""Unit-scaled modules: published figures, torch's parameter names, copies, and the official library's values."""

import copy
import pickle

import pytest
import torch
import unit_scaling as uu
from torch import nn
from unit_scaling._modules import TransformerStack

import halfstep
from families import for_each
from halfstep import unit
from halfstep.errors import ModelError


F64 = torch.float64


def forward_and_backward(module, x, grad):
    """The output, the input's gradient and those of the weights, by name."""
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(grad[: y.numel()].view(y.shape).to(y.dtype))
    return y.detach(), x.grad, {name: p.grad for name, p in module.named_parameters()}


# ---- published figures ----------------------------------------------------------------------------------------------


def test_a_transformer_layer_has_unit_scale():
    """uu.TransformerLayer(128, 2 heads, tau .5): y 1.01, dx 1.11, weights' gradients .65 to 1.12."""
    torch.manual_seed(0)
    layer = unit.TransformerLayer(128, 2, ratios=(0.5, 0.5), is_causal=False)
    y, dx, grads = forward_and_backward(layer, torch.randn(8, 64, 128), torch.randn(8 * 64 * 128))
    assert float(y.std()) == pytest.approx(1.01, abs=0.03)
    assert float(dx.std()) == pytest.approx(1.11, abs=0.04)
    stds = [float(grad.std()) for grad in grads.values()]
    assert min(stds) > 0.6
    assert max(stds) < 1.2
    assert all(float(p.detach().std()) == pytest.approx(1, abs=0.02) for p in layer.parameters())


@for_each("count,softmax", [(16, 0.1326), (64, 0.0383), (256, 0.0102), (1024, 0.0026)])
def test_variance_of_softmax_and_square_root_attention(count, softmax):
    """Over `count` independent values: softmax attention's variance falls as e / count, square root attention's is
    1."""
    q, k, v = _attention_inputs(count)
    plain = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1) @ v
    square = unit.square_root_attention(q, k, v, mult=q.shape[-1] ** 0.5)
    assert float(plain.var()) == pytest.approx(softmax, rel=0.05)
    assert float(square.var()) == pytest.approx(1.0, abs=0.03)


def _attention_inputs(count):
    torch.manual_seed(count)
    batch = 16384 // count
    return torch.randn(batch, 64, 256), torch.randn(batch, count, 256), torch.randn(batch, count, 64)


@pytest.mark.slow
@for_each("count", [16, 64, 256])
def test_repeated_values_raise_the_variance_of_square_root_attention(count):
    """Why munit scaling leaves it off."""
    q, k, v = _attention_inputs(count)
    four, all_ = v[:, : count // 4].repeat_interleave(4, 1), v[:, :1].expand_as(v)
    mult = q.shape[-1] ** 0.5
    assert float(unit.square_root_attention(q, k, four, mult=mult).pow(2).mean()) == pytest.approx(3.4, rel=0.15)
    found = torch.stack([unit.square_root_attention(q, k, all_, mult=mult)]).pow(2).mean() / v[:, :1].pow(2).mean()
    assert float(found) == pytest.approx({16: 12.8, 64: 50, 256: 199}[count], rel=0.05)
    plain = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1) @ all_
    assert float(plain.pow(2).mean() / v[:, :1].pow(2).mean()) == pytest.approx(1.0, abs=0.01)
    normed = unit.LayerNorm(64)(unit.square_root_attention(q, k, four, mult=mult))
    torch.testing.assert_close(normed.var(-1, unbiased=False), torch.ones(normed.shape[:2]), rtol=1e-3, atol=1e-3)


def test_square_root_attention_has_finite_gradients_behind_a_mask():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 4, dtype=F64, requires_grad=True) for _ in range(3))
    kept = torch.ones(6, 6, dtype=torch.bool).tril()
    one = unit.square_root_attention(q, k, v, is_causal=True)
    assert torch.equal(one, unit.square_root_attention(q, k, v, attn_mask=kept))
    assert torch.equal(one, unit.square_root_attention(q, k, v, attn_mask=torch.zeros(6, 6).masked_fill(~kept, -1e9)))
    assert torch.autograd.gradcheck(lambda q, k, v: unit.square_root_attention(q, k, v, is_causal=True), (q, k, v))
    torch.testing.assert_close(one[..., 0, :], v[..., 0, :])  # the first position attends to itself


# ---- positions of norms, and errors ---------------------------------------------------------------------------------


@for_each("place", ["pre", "post", "res-post"])
def test_norms_are_applied_at_the_given_place(place):
    torch.manual_seed(0)
    layer = unit.TransformerLayer(32, 4, place=place, norm="layer", mlp="gelu", ratios=(0.5, 0.25)).double()
    x = torch.randn(2, 5, 32, dtype=F64)
    expected = x
    for part, norm, ratio in ((layer.attention, layer.attention_norm, 0.5), (layer.mlp, layer.mlp_norm, 0.25)):
        over = (1 + ratio**2) ** 0.5
        branch = part(norm(expected)) if place == "pre" else part(expected)
        branch = norm(branch) if place == "res-post" else branch
        expected = (expected + ratio * branch) / over
        expected = norm(expected) if place == "post" else expected
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


@for_each("options", [{"square_root": True}, {"dropout": 0.1}, {"affine": True, "bias": True}, {"mlp": "gelu"}])
def test_layers_with_options_train_and_stay_causal(options):
    torch.manual_seed(0)
    layer = unit.TransformerLayer(32, 4, **options)
    x = torch.randn(3, 7, 32, requires_grad=True)
    layer(x).pow(2).mean().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in layer.parameters())
    layer.eval()
    later = x.detach().clone()
    later[:, 4:] += 1
    torch.testing.assert_close(layer(later)[:, :4], layer(x)[:, :4])
    assert not torch.allclose(layer(later)[:, 4:], layer(x)[:, 4:])


def test_invalid_arguments_raise():
    with pytest.raises(ModelError, match="unknown place of a transformer's layer 'after'"):
        unit.TransformerLayer(8, 2, place="after")
    with pytest.raises(ModelError, match="3 heads for a width of 8 given"):
        unit.Attention(8, 3)
    with pytest.raises(ModelError, match="unknown constraint 'gmean'"):
        unit.Linear(2, 2, constraint="gmean")
    with pytest.raises(ModelError, match="unknown role of a parameter 'output'"):
        unit.Linear(2, 2, role="output")


# ---- stacks ---------------------------------------------------------------------------------------------------------


def test_a_stack_sets_depth_and_residual_ratios():
    stack = unit.TransformerStack(4, 16, 2)
    assert {role.depth for role in unit.roles(stack).values()} == {4}
    ratios = [ratio for layer in stack for ratio in layer.ratios]
    assert ratios == [unit.equal_shares()(index, 8) for index in range(8)]
    stack.append(unit.TransformerLayer(16, 2))
    assert {role.depth for role in unit.roles(copy.deepcopy(stack)).values()} == {5}
    assert unit.roles(pickle.loads(pickle.dumps(stack))) == unit.roles(stack)
    with pytest.raises(ModelError, match="is a residual stack within"):
        unit.roles(unit.Stack(stack))


def test_a_stack_of_many_layers_keeps_its_scale():
    torch.manual_seed(0)
    for options in ({}, {"place": "res-post", "constraint": unit.SAME, "residual": unit.fixed(0.2), "mult": 4.0}):
        stack = unit.TransformerStack(8, 64, 4, mlp="gelu", norm="layer", **options)
        y, _, _ = forward_and_backward(stack, torch.randn(8, 32, 64), torch.randn(8 * 32 * 64))
        # Norms at the ends of branches keep it; else positions with alike attention add up, as in the official library.
        assert 0.85 < float(y.std()) < (1.15 if options else 1.5)


# ---- torch's modules ------------------------------------------------------------------------------------------------


PAIRS = [
    (unit.Linear(6, 4, bias=True), nn.Linear(6, 4)),
    (unit.LinearReadout(6, 4), nn.Linear(6, 4, bias=False)),
    (unit.Embedding(6, 4), nn.Embedding(6, 4)),
    (unit.LayerNorm(6, elementwise_affine=True), nn.LayerNorm(6)),
    (unit.LayerNorm(6), nn.LayerNorm(6, elementwise_affine=False)),
    (unit.RMSNorm(6, elementwise_affine=True), nn.RMSNorm(6)),
]


@for_each("mine,stock", PAIRS)
def test_state_dicts_equal_the_stock_layers(mine, stock):
    assert {k: v.shape for k, v in mine.state_dict().items()} == {k: v.shape for k, v in stock.state_dict().items()}
    stock.load_state_dict(mine.state_dict())
    copy.deepcopy(mine).load_state_dict(stock.state_dict())
    assert isinstance(mine, type(stock))


@for_each("mine,stock", [(unit.LayerNorm(6), nn.LayerNorm(6)), (unit.RMSNorm(6), nn.RMSNorm(6, eps=1e-5))])
def test_norms_equal_the_stock_ones(mine, stock):
    torch.manual_seed(0)
    x = torch.randn(3, 6)
    torch.testing.assert_close(mine(x), stock(x))


# ---- the official library -------------------------------------------------------------------------------------------


def test_linear_layers_agree_with_the_library():
    torch.manual_seed(0)
    x, grad = torch.randn(12, 48, dtype=F64), torch.randn(12 * 80, dtype=F64)
    for mine, theirs in (
        (unit.Linear(48, 80), uu.Linear(48, 80)),
        (unit.Linear(48, 80, constraint="none"), uu.Linear(48, 80, constraint=None)),
        (unit.Linear(48, 80, constraint="geometric_mean"), uu.Linear(48, 80, constraint="gmean")),
        (unit.LinearReadout(48, 80), uu.LinearReadout(48, 80)),
    ):
        theirs.load_state_dict(mine.state_dict())
        _agree(forward_and_backward(mine.double(), x, grad), forward_and_backward(theirs.double(), x, grad))


def test_norms_and_embeddings_agree_with_the_library():
    torch.manual_seed(0)
    x, grad = torch.randn(12, 48, dtype=F64), torch.randn(12 * 48, dtype=F64)
    for mine, theirs in (
        (unit.LayerNorm(48, elementwise_affine=True), uu.LayerNorm(48, elementwise_affine=True)),
        (unit.RMSNorm(48, elementwise_affine=True), uu.RMSNorm(48, elementwise_affine=True)),
    ):
        rtol = 1e-5 if isinstance(mine, nn.RMSNorm) else 1e-9  # the library's takes the mean in float32
        _agree(forward_and_backward(mine.double(), x, grad), forward_and_backward(theirs.double(), x, grad), rtol)
    mine, theirs, places = unit.Embedding(9, 48), uu.Embedding(9, 48), torch.randint(0, 9, (3, 4))
    theirs.load_state_dict(mine.state_dict())
    for table in (mine, theirs):
        table(places).backward(grad.view(3, 4, 48).float())
    torch.testing.assert_close(mine.weight.grad, theirs.weight.grad)


RENAMED = {
    "attention.qkv": "mhsa.linear_qkv",
    "attention.out_proj": "mhsa.linear_o",
    "mlp.up_proj": "mlp.linear_1",
    "mlp.gate_proj": "mlp.linear_gate",
    "mlp.down_proj": "mlp.linear_2",
}


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_stack_agrees_with_the_library(is_causal, monkeypatch):
    """Values and gradients, given our factors of the gate and of attention, which the library fits and we integrate."""
    library = uu._modules.U
    monkeypatch.setattr(library, "silu_glu", unit.gated_silu)
    monkeypatch.setattr(library, "scaled_dot_product_attention", unit.scaled_dot_product_attention)
    torch.manual_seed(0)
    mine = unit.TransformerStack(3, 32, 4, is_causal=is_causal).double()
    theirs = TransformerStack(layers=3, hidden_size=32, heads=4, is_causal=is_causal).double()
    theirs.load_state_dict({_renamed(name): p for name, p in mine.state_dict().items()})
    x, grad = torch.randn(2, 9, 32, dtype=F64), torch.randn(2 * 9 * 32, dtype=F64)
    y, dx, grads = forward_and_backward(mine, x, grad)
    _agree((y, dx, {_renamed(name): g for name, g in grads.items()}), forward_and_backward(theirs, x, grad), 1e-5)


def _renamed(name):
    number, _, rest = name.partition(".")
    return f"{number}.{RENAMED[rest.rpartition('.')[0]]}.weight"


def _agree(mine, theirs, rtol=1e-9):
    torch.testing.assert_close(mine, theirs, rtol=rtol, atol=rtol)


def test_residual_ratios_agree_with_the_library():
    for options in ({}, {"residual_mult": 0.5, "residual_attn_ratio": 2.0}):
        theirs = uu.core.functional.transformer_residual_scaling_rule(**options)
        mine = unit.equal_shares(*options.values())
        assert [mine(i, 10) for i in range(10)] == pytest.approx([theirs(i, 10) for i in range(10)], rel=1e-15)


@pytest.mark.parametrize(
    ("theirs", "mine", "constraint"),
    [
        (uu.optim.Adam, torch.optim.Adam, None),
        (uu.optim.AdamW, torch.optim.AdamW, None),
        (uu.optim.SGD, torch.optim.SGD, None),
        (uu.optim.SGD, torch.optim.SGD, "to_output"),
    ],
)
def test_learning_rates_and_decays_agree_with_the_librarys_optimizers(theirs, mine, constraint):
    """On its own decoder with our roles; but Adam's decay, which the library normalizes, raises here."""
    options = {"readout_constraint": f"{constraint}_scale"} if constraint else {}
    decay = 0.0 if mine is torch.optim.Adam else 2**-10
    decoder = uu.TransformerDecoder(32, 50, layers=3, heads=4)
    reference = theirs(decoder.parameters(), lr=0.5, weight_decay=decay, **options)
    expected = {id(p): (g["lr"], g["weight_decay"]) for g in reference.param_groups for p in g["params"]}
    unit.set_roles(decoder, {"projection.weight": "readout", "embedding.weight": "embedding", "*": "hidden"})
    unit.set_depth(decoder.layers, 3)
    groups = unit.parameter_groups(decoder, mine, lr=0.5, weight_decay=decay, readout_constraint=constraint or "none")
    found = {id(p): (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert found.keys() == expected.keys()
    assert all(found[key] == pytest.approx(expected[key], rel=1e-12) for key in expected)


# ---- convolutions ---------------------------------------------------------------------------------------------------


CONVOLUTIONS = [
    (unit.Conv1d, nn.Conv1d, (8, 12, 3), {"padding": 1, "stride": 2}),
    (unit.Conv1d, nn.Conv1d, (8, 12, 5, 1, 2, 1, 4), {"bias": True, "padding_mode": "circular"}),
    (unit.Conv2d, nn.Conv2d, (8, 12, (3, 1)), {"padding": "same", "bias": True}),
]


@for_each("mine,stock,sizes,options", CONVOLUTIONS)
def test_convolutions_equal_the_stock_ones_times_their_factor(mine, stock, sizes, options):
    torch.manual_seed(0)
    layer = mine(*sizes, **options)
    other = stock(*sizes, **{"bias": False, **options})
    assert {k: v.shape for k, v in layer.state_dict().items()} == {k: v.shape for k, v in other.state_dict().items()}
    other.load_state_dict(
        {
            "weight": layer.weight * layer.weight[0].numel() ** -0.5,
            **({"bias": layer.bias} if other.bias is not None else {}),
        }
    )
    x = torch.randn(2, 8, *(9,) * (layer.weight.dim() - 2))
    torch.testing.assert_close(layer(x), other(x))
    assert unit.roles(layer)["weight"].fan_in == layer.weight[0].numel()
    torch.testing.assert_close(copy.deepcopy(layer)(x), layer(x))


@for_each("mine,stock,sizes,options", CONVOLUTIONS)
def test_recipes_round_the_operands_of_convolutions(mine, stock, sizes, options):
    torch.manual_seed(0)
    model = nn.Sequential(mine(*sizes, **options))
    x = torch.randn(2, 8, *(9,) * (model[0].weight.dim() - 2))
    exact = model(x).detach()
    for recipe in ("bf16-mixed", "munit-fp8"):
        report = halfstep.apply(model, recipe)
        assert report.quantized == (("0",) if recipe == "munit-fp8" else ())
        error = float((model(x).detach() - exact).norm() / exact.norm())
        assert 1e-4 < error < (0.06 if report.quantized else 0.01)
        halfstep.revert(model)
    assert torch.equal(model(x), exact)
