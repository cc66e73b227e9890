"""Linear layers in FP4 with one scale per row, clamps and estimators, against their quantizers in float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from families import slow_unless
from halfstep import formats, get_recipe, ops
from halfstep.errors import RecipeError
from halfstep.kernels.cpu import clamp_operators
from halfstep.ops.convolution import Window
from halfstep.quant import Clamp, Estimator, Hadamard, Quantizer, Scales, get_quantizer
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import ROW, TENSOR, Tile
from halfstep.recipe import AttentionSpec, LinearSpec, Matmul, Recipe, Rule, get_storage, linear_spec
from tiny import assert_same, grads, mlp, prepared


FP4, E5M2 = formats.get("fp4"), formats.get("e5m2")
GRAD = Quantizer(E5M2, scales=Scales(TENSOR, get_scaling("current")))
SHAPES = ((64, 96, 80), (33, 17, 5), (1, 7, 3), (5, 1, 1), (2, 300, 129))


def fp4(tile=ROW, rule="current", **fields):
    return Quantizer(FP4, "nearest_up", scales=Scales(tile, get_scaling(rule)), **fields)


def spec_of(name):
    return get_recipe(name).rules[-1].linear


def drawn(rows, inputs, outputs, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=g) * torch.exp(torch.randn(rows, 1, generator=g))
    x = torch.where(torch.rand(x.shape, generator=g) < 0.02, 8 * x, x).to(dtype)
    w, b = torch.randn(outputs, inputs, generator=g) / inputs**0.5, torch.randn(outputs, generator=g)
    dy = (torch.randn(rows, outputs, generator=g) * torch.exp(torch.randn(rows, 1, generator=g))).to(dtype)
    return x, w, b, dy


def e5m2(x):
    """x rounded to E5M2 with one scale, in float64."""
    factor = 57344 / x.abs().max()
    return halfstep.round_to(x * factor, "e5m2").double() / factor.double()


def scales(x):
    """amax / 6 of each row."""
    amax = x.float().abs().amax(1, keepdim=True)
    return torch.where(amax == 0, 1.0, amax / 6)


def reference(spec, x, w, dy):
    """The forward and both gradients from the quantizers' values; scales along a sum are multiplied into dy before
    rounding."""
    inputs, weights = spec.output.lhs, spec.output.rhs
    xr, wr = inputs(x.float()).double(), weights(w).double()
    dx_of = dw_of = e5m2(dy.float())
    if inputs.steps is not None:
        low, high = inputs.clamp.bounds(x) if inputs.clamp is not None else x.float().aminmax()
        sx, sw = scales(x.float().clamp(low, high)), scales(w)
        dx_of, dw_of = e5m2(dy.float() * sw.t()) / sw.t(), e5m2(dy.float() * sx) / sx
    slope = weights.derivative(w).double() if weights.estimator else 1.0
    return xr @ wr.t(), dx_of @ wr, dw_of.t() @ xr * slope


def assert_near(found, wanted, tolerance):
    assert found.shape == wanted.shape
    assert float((found.detach().double() - wanted).norm()) <= tolerance * float(wanted.norm()) + 1e-30


@pytest.mark.quick("fp4-wang-dtype0-shape3", "fp4-wang-msamp-dtype0-shape3")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "dtype",
    slow_unless({torch.bfloat16}.__contains__, [torch.bfloat16, torch.float32, torch.float16]),  # another compilation
)
@pytest.mark.parametrize("name", ["fp4-wang", "fp4-wang-msamp"])
def test_matmuls_equal_those_of_the_quantizers_values(name, dtype, shape):
    spec = spec_of(name)
    x, w, b, dy = drawn(*shape, dtype)
    x, w, b = (t.requires_grad_() for t in (x, w, b))
    y = ops.linear(x, w, b, spec)
    found = torch.autograd.grad(y, (x, w, b), dy)
    x, w, b = (t.detach() for t in (x, w, b))
    wanted, dx, dw = reference(spec, x, w, dy)
    tolerance = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert_near(y, wanted + b.double(), tolerance)
    for gradient, expected in zip(found, (dx, dw, dy.double().sum(0)), strict=True):
        assert_near(gradient, expected, tolerance)


def test_the_forward_of_fp4_rows_is_exact_before_one_rounding():
    """Sums of FP4's values, multiples of 0.5, are exact in float64; then rounded once to float32 for the scales."""
    x, w, _, _ = drawn(96, 384, 80)
    spec = linear_spec(fp4(), fp4(), GRAD)
    y = ops.linear(x, w, None, spec)
    fx, fw = (torch.div(torch.tensor(6.0), t.float().abs().amax(1, keepdim=True)) for t in (x, w))
    xr, wr = (halfstep.round_to(t.float() * f, "fp4", "nearest_up").double() for t, f in ((x, fx), (w, fw)))
    sums = (xr @ wr.t()).float()
    assert torch.equal(sums.double(), xr @ wr.t())
    sx, sw = fx.reciprocal(), fw.reciprocal()
    assert torch.equal(y, (sums * 4 * ((sx / 2) * (sw / 2).t())).to(y.dtype))


QUANTIZERS = {
    "rows": fp4(),
    "columns": fp4(ROW.transposed),
    "tensor": fp4(TENSOR),
    "mx": get_quantizer("mxfp4"),
    "squares": fp4(Tile(16, 16), "rceil"),
    "two-level": get_quantizer("nvfp4"),
    "absmax": fp4(ROW, "absmax"),
    "unscaled": Quantizer(FP4),
    "delayed": fp4(TENSOR, "delayed"),
    "fp8": Quantizer(formats.get("e4m3fn"), scales=Scales(ROW, get_scaling("rceil"))),
    "codebook": get_quantizer("nf4"),
}


@pytest.mark.quick("rows", "unscaled", "delayed")
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_an_estimator_multiplies_the_weights_gradient_for_every_scaling(kind):
    quantizer = QUANTIZERS[kind]
    x, w, _, dy = drawn(32, 64, 48, torch.float32)
    states = None
    factor = None
    if quantizer.stateful:
        states = {"weight": quantizer.stateful.init()}
        factor = 6 / w.abs().max()
    gradients = []
    for q in (quantizer, replace(quantizer, estimator=Estimator())):
        weight = w.clone().requires_grad_()
        ops.linear(x, weight, None, linear_spec(weight=q), states).backward(dy)
        gradients.append(weight.grad)
    slope = replace(quantizer, estimator=Estimator()).derivative(w, factor)
    assert slope.std() > 0.1
    torch.testing.assert_close(gradients[1], gradients[0] * slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("kind", ["rows", "mx", "tensor"])
def test_an_estimator_multiplies_a_convolutions_gradient(kind, kernel, transposed):
    torch.manual_seed(0)
    x = torch.randn(2, 8, 6, 6)
    make = nn.ConvTranspose2d if transposed else nn.Conv2d
    gradients, steps = [], []
    for quantizer in (QUANTIZERS[kind], replace(QUANTIZERS[kind], estimator=Estimator())):
        layer = make(8, 12, kernel, bias=False)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(1)))
        window = Window((1, 1), (0, 0), (1, 1), 1, transposed, (0, 0))
        y = ops.convolution(x, layer.weight, None, window, linear_spec(weight=quantizer))
        y.backward(torch.ones_like(y))
        gradients.append(layer.weight.grad)
        rows = layer.weight.detach().transpose(0, 1) if transposed else layer.weight.detach()
        rows = rows.flatten(2).transpose(1, 2)  # one row per output channel, with the input channels of each tap
        matrix = rows.flatten(0, 1) if kind == "mx" else rows.flatten(1)  # blocks restart at each tap
        slope = replace(quantizer, estimator=Estimator()).derivative(matrix.contiguous()).view(rows.shape)
        slope = slope.transpose(1, 2).reshape(rows.shape[0], rows.shape[2], kernel, kernel)
        steps.append(slope.transpose(0, 1) if transposed else slope)
    torch.testing.assert_close(gradients[1], gradients[0] * steps[1], rtol=1e-5, atol=1e-5)


@pytest.mark.quick("tensor-input", "tensor-grad_output")
@pytest.mark.parametrize("side", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("quantizer", [fp4(), get_quantizer("mxfp4"), fp4(TENSOR)], ids=["rows", "mx", "tensor"])
def test_a_clamps_remainder_is_added_to_any_operand(side, quantizer):
    """With only that operand rounded, in float32: the result is that of the quantizer's values with the remainder."""
    clamped = replace(quantizer, clamp=Clamp(0.95))
    x, w, _, dy = drawn(32, 64, 48, torch.float32)
    x, w = x.requires_grad_(), w.requires_grad_()
    y = ops.linear(x, w, None, linear_spec(**{side: clamped}))
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    x, w = x.detach(), w.detach()
    down = lambda t: clamped(t.t().contiguous()).t() if quantizer.scales.tile != TENSOR else clamped(t)  # noqa: E731
    one, two = (clamped(x), down(x)) if side == "input" else (x, x)
    w1, w2 = (clamped(w), down(w)) if side == "weight" else (w, w)
    g1, g2 = (clamped(dy), down(dy)) if side == "grad_output" else (dy, dy)
    assert_near(y, one.double() @ w1.double().t(), 1e-6)
    assert_near(dx, g1.double() @ w2.double(), 1e-6)
    assert_near(dw, g2.double().t() @ two.double(), 1e-6)


def test_remainders_of_both_operands_are_added():
    spec = linear_spec(fp4(clamp=Clamp(0.9)), fp4(clamp=Clamp(0.9)))
    x, w, _, _ = drawn(32, 64, 48, torch.float32)
    assert_near(ops.linear(x, w, None, spec), spec.output.lhs(x).double() @ spec.output.rhs(w).double().t(), 1e-6)


def test_a_row_with_an_infinity_becomes_nan():
    x, w, _, _ = drawn(8, 64, 48)
    x[3, 5] = float("inf")
    y = ops.linear(x, w, None, linear_spec(fp4(), fp4()))
    assert y.isnan().any(1).tolist() == [row == 3 for row in range(8)]
    assert (
        ops.linear(x, w, None, spec_of("fp4-wang")).isnan().all()
    )  # its clamp's quantiles are those of the whole tensor


@pytest.mark.parametrize("name", ["fp4-wang", "fp4-wang-msamp"])
def test_gradients_with_and_without_the_estimator_differ(name):
    """Else a recipe that lost its estimator would not be noticed."""
    spec = spec_of(name)
    straight = replace(spec.output.rhs, estimator=None)
    without = LinearSpec(
        Matmul(spec.output.lhs, straight), Matmul(spec.grad_input.lhs, straight.down), spec.grad_weight
    )
    x, w, _, dy = drawn(32, 64, 48)
    found = []
    for each in (spec, without):
        weight = w.clone().requires_grad_()
        y = ops.linear(x, weight, None, each)
        y.backward(dy)
        found.append((y.detach(), weight.grad))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1] * spec.output.rhs.derivative(w))
    assert not torch.allclose(found[0][1], found[1][1], rtol=0.1)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_use_the_estimator(kind):
    """One step of a layer with two matmuls: each gradient equals that without the estimator, times the slopes."""
    found = []
    for estimator in (None, Estimator()):
        torch.manual_seed(0)
        layer = kind(8, 12)
        rule = Rule("*", linear_spec(weight=replace(fp4(), estimator=estimator)))
        halfstep.apply(layer, Recipe("made", "", "", rules=(rule,)))
        layer(torch.ones(1, 3, 8), None)[0].sum().backward()
        found.append(layer.weight_ih_l0.grad)
        slope = fp4(estimator=Estimator()).derivative(layer.weight_ih_l0.detach())
    torch.testing.assert_close(found[1], found[0] * slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda q: linear_spec(input=q), "estimator k=5 cap=3 for input: expected one for the weight of the forward"),
        (lambda q: linear_spec(grad_output=q), "for grad_output"),
        (lambda q: LinearSpec(grad_input=Matmul(None, q)), "for the weight of the backward matmul alone"),
        (lambda q: AttentionSpec(linear_spec(weight=q)), "attention with float4_e2m1fn .estimator.*not weights"),
        (lambda q: AttentionSpec(linear_spec(fp4(clamp=Clamp()))), "attention .*clamp 0.99, compensated.*remainder"),
        (
            lambda q: LinearSpec(Matmul(fp4(), q, hadamard=Hadamard())),
            "estimator .* for a weight that .* rotates first",
        ),
        (lambda q: get_storage(q), "stored with a estimator|stored with an estimator"),
        (lambda q: get_storage(fp4(clamp=Clamp())), "stored with a clamp 0.99, compensated.*operands of matmuls"),
    ],
)
def test_unsupported_uses_of_estimators_and_clamps_are_refused(make, words):
    with pytest.raises(RecipeError, match=words):
        make(fp4(estimator=Estimator()))


def test_attention_accepts_a_clamp_without_compensation():
    layer = nn.MultiheadAttention(16, 2, batch_first=True)
    quantizer = fp4(clamp=Clamp(0.9, "row", compensation=False))
    x = torch.randn(2, 5, 16)
    stock = layer(x, x, x)[0]
    halfstep.apply(layer, Recipe("made", "", "", attention=AttentionSpec(linear_spec(quantizer))))
    assert not torch.equal(layer(x, x, x)[0], stock)


@pytest.mark.parametrize("name", ["fp4-wang", "fp4-wang-msamp"])
def test_a_layer_quantized_for_inference_equals_the_trained_one(name):
    model, _, _ = prepared(name)
    x = torch.randn(5, 8)
    with torch.no_grad():
        before = model(x)
        halfstep.revert(model)
        stored = mlp()
        stored.load_state_dict(model.state_dict())
        halfstep.quantize_model(stored, name)
        assert_same(stored(x), before)


def test_channel_scales_apply_to_the_remainder():
    x, w, _, _ = drawn(16, 32, 8, torch.float32)
    channels = torch.exp2(torch.randint(-3, 4, (32,)).float())
    spec = linear_spec(fp4(clamp=Clamp(0.9)), None)
    assert_near(
        ops.linear(x, w, None, spec, channels=channels), spec.output.lhs(x).double() / channels @ w.double().t(), 1e-6
    )


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does, as it traces
@pytest.mark.slow  # what the fast tests trace goes the same way
@pytest.mark.parametrize("name", ["fp4-wang", "fp4-wang-msamp"])
def test_traced_graphs_equal_eager_bit_for_bit(name):
    results = []
    for backend in (None, "aot_eager"):
        model, _, scaler = prepared(name)
        run = torch.compile(model, backend=backend, fullgraph=True) if backend else model
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
        scaler.scale(F.mse_loss(run(x), torch.ones(16, 4))).backward()
        results.append(grads(model))
    assert_same(*results)


FEW_BITS = ("mxfp4", "mxfp4-rht", "nvfp4", "fp4-wang", "fp4-wang-msamp", "fp4-zhou", "fp4-zhou-dgrad-bf16")


@pytest.mark.quick("mxfp4-rht", "fp4-wang-msamp")
@pytest.mark.parametrize("name", FEW_BITS)
def test_every_operand_of_fp4_recipes_has_a_kernel(name, monkeypatch):
    """The reference would make a step ten times as slow."""
    for module, function in ((Quantizer, "quantize"), (clamp_operators, "round_to"), (clamp_operators, "sparse")):
        monkeypatch.setattr(module, function, lambda *arguments, found=function, **options: pytest.fail(found))
    x, w, b, dy = drawn(64, 96, 80)
    for spec in dict.fromkeys(rule.linear for rule in get_recipe(name).rules if rule.linear.rounds):
        ops.linear(x.clone().requires_grad_(), w.clone().requires_grad_(), b, spec).backward(dy.to(torch.float32))
