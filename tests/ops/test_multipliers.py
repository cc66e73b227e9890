"""Multipliers of matmuls: the exact result times the multiplier, rounded once, on every path; and
scale_forward/backward."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from families import for_each, slow_unless
from halfstep import ops
from halfstep.errors import ModelError, RecipeError
from halfstep.kernels import carried, scaled_mm
from halfstep.ops.convolution import Window
from halfstep.ops.operand import Operand
from halfstep.ops.plain import weighted_sum
from halfstep.quant import get_accumulator, get_quantizer
from halfstep.recipe import AttentionSpec, LinearSpec, Matmul, Multiplier, from_data, get_recipe, linear_spec, to_data
from oracles.numbers import same_bits


traces = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of its own
TIMES = LinearSpec(
    Matmul(multiplier=Multiplier(shared=-0.5, constant=1.25)),
    Matmul(multiplier=Multiplier(columns=-0.25, shared=-0.25)),
    Matmul(multiplier=Multiplier(shared=-0.5, rows=0.5)),
)
OPERANDS = {
    "nothing rounded": LinearSpec(),
    "casts": linear_spec(get_quantizer("e4m3fn"), get_quantizer("e4m3fn"), get_quantizer("e5m2")),
    "a scale of the tensor": get_recipe("fp8-current").rules[-1].linear,
    "tiles": get_recipe("mxfp8").rules[-1].linear,
    "squares": get_recipe("fp8-block").rules[-1].linear,
}
DTYPES = torch.float32, torch.bfloat16, torch.float16
EPSILON = {torch.float64: 2.0**-53, torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
every_path = for_each(
    "dtype, carries, operands, bias",
    [
        (dtype, carries, name, bias)
        for dtype, carries, name, bias in itertools.product(DTYPES, (False, True), OPERANDS, (False, True))
        if carries <= (dtype != torch.float32)
    ],
)


@pytest.fixture(autouse=True)
def _cpu(monkeypatch):
    monkeypatch.setattr(carried, "CARRIED", frozenset())


def carry(monkeypatch, dtype, carries):
    monkeypatch.setattr(carried, "CARRIED", frozenset({dtype} if carries else ()))


def tensors(dtype, bias=True, rows=(2, 24), fan_in=40, fan_out=56, seed=0):
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(shape, generator=generator).to(dtype)  # noqa: E731
    return make(*rows, fan_in), make(fan_out, fan_in), make(fan_out) if bias else None, make(*rows, fan_out)


def passes(function, *inputs, grad):
    leaves = [x.detach().requires_grad_() for x in inputs if x is not None]
    given = iter(leaves)
    y = function(*[None if x is None else next(given) for x in inputs])
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def factors_of(rows, fan_in, fan_out, spec=TIMES):
    """The factors of y, dx, dw and db."""
    sizes = (rows, fan_in, fan_out), (rows, fan_out, fan_in), (fan_out, rows, fan_in), (fan_out, rows, 1)
    products = spec.output, spec.grad_input, spec.grad_weight, spec.grad_weight
    return [1.0 if p.multiplier is None else p.multiplier.of(*size) for p, size in zip(products, sizes, strict=True)]


def assert_rounded_once(found, exact, dtype, size):
    """The error is at most one rounding to the dtype plus that of float32 sums of terms of that size."""
    error = (found.double() - exact).abs()
    allowed = EPSILON[dtype] * 1.001 * exact.abs() + 2.0**-20 * size + torch.finfo(dtype).tiny
    assert bool((error <= allowed).all()), float((error / allowed).max())


@every_path
def test_multipliers_apply_before_the_one_rounding_of_a_linear_layers_matmuls(
    dtype, carries, operands, bias, monkeypatch
):
    carry(monkeypatch, dtype, carries)
    spec = OPERANDS[operands]
    x, w, b, grad = tensors(dtype, bias)
    found = passes(lambda *t: ops.linear(*t, spec.times(TIMES)), x, w, b, grad=grad)
    kind = (
        torch.float64 if operands == "nothing rounded" else torch.float32
    )  # the dtype in which both are rounded alike
    wide = [t if t is None else t.to(kind) for t in (x, w, b)]
    exact = passes(lambda *t: ops.linear(*t, spec), *wide, grad=grad.to(kind))  # no multiplier, no rounding
    exact, wide = [t.double() for t in exact], [t if t is None else t.double() for t in wide]
    factors = factors_of(48, 40, 56)
    if bias:
        exact[0] = (exact[0] - wide[2]) * factors[0] + wide[2]
    else:
        exact[0] = exact[0] * factors[0]
    for one, other, factor in zip(found, exact, [1.0, *factors[1:]], strict=False):
        assert_rounded_once(one, other * factor, dtype, 60 * factor + 4)
        assert one.dtype == dtype


@pytest.mark.slow
@for_each("carries", [False, True])
def test_a_multiplier_prevents_an_overflow_in_fp16(carries, monkeypatch):
    carry(monkeypatch, torch.float16, carries)
    x, w = torch.full((4, 64), 60.0, dtype=torch.float16), torch.full((8, 64), 60.0, dtype=torch.float16)
    assert torch.isinf(ops.linear(x, w, None, LinearSpec())).all()
    for spec in OPERANDS.values():
        y = ops.linear(x, w, None, spec.times(LinearSpec(Matmul(multiplier=Multiplier(shared=-0.5)))))
        assert (y == 28800).all()


def test_with_an_accumulator_the_multiplier_applies_after_the_sum():
    accumulate = get_accumulator("hopper")
    spec = linear_spec(get_quantizer("e4m3fn"), get_quantizer("e4m3fn"), get_quantizer("e5m2"), accumulate)
    x, w, _, grad = tensors(torch.float32, False)
    found = passes(lambda *t: ops.linear(*t, None, spec.times(TIMES)), x, w, grad=grad)
    without = passes(lambda *t: ops.linear(*t, None, spec), x, w, grad=grad)
    for one, other, factor in zip(found, without, factors_of(48, 40, 56), strict=False):
        torch.testing.assert_close(one, other * factor, rtol=1e-6, atol=0)


def test_the_biass_gradient_has_the_multiplier_of_its_own_size():
    x, w, b, grad = tensors(torch.float32)
    *_, db = passes(lambda *t: ops.linear(*t, TIMES), x, w, b, grad=grad)
    torch.testing.assert_close(db, grad.double().sum((0, 1)).mul(56**0.5 * 48**-0.5).float())


@for_each("operands", list(OPERANDS))
def test_a_rounded_weight_in_inference_uses_the_outputs_multiplier(operands):
    spec = OPERANDS[operands]
    x, w, b, _ = tensors(torch.float32)
    weight = ops.rounded_weight(w, spec, torch.float32).sides.output
    found = ops.linear(x, weight, b, spec.times(TIMES))
    expected = (ops.linear(x.double(), w.double(), None, spec) * (1.25 * 40**-0.5)).float() + b
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@traces
@for_each("operands", ["nothing rounded", "casts", "a scale of the tensor"])
def test_a_traced_layer_matches_eager(operands):
    spec = OPERANDS[operands].times(TIMES)
    x, w, b, grad = tensors(torch.float32)
    traced = torch.compile(lambda *t: ops.linear(*t, spec), backend="aot_eager", fullgraph=True)
    for one, other in zip(
        passes(traced, x, w, b, grad=grad), passes(lambda *t: ops.linear(*t, spec), x, w, b, grad=grad), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow  # what the fast tests trace goes the same way
@traces
def test_a_traced_layer_accepts_any_batch_size():
    traced = torch.compile(lambda *t: ops.linear(*t, TIMES), backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in ((2, 24), (3, 7), (5, 11)):
        x, w, b, grad = tensors(torch.float32, rows=rows)
        found, expected = (passes(f, x, w, b, grad=grad) for f in (traced, lambda *t: ops.linear(*t, TIMES)))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="before torch 2.10 there is no torch.nn.functional.scaled_mm")
def test_native_fp8_matmuls_multiply_the_scale_by_the_multiplier(monkeypatch):
    """scaled_mm is replaced by its definition, since no GPU is needed."""

    def product(a, b, scale_a, kind_a, scale_b, kind_b, *swizzles, bias, output_dtype):
        y = (a.double() @ b.double()) * scale_a.double() * scale_b.double()
        return (y if bias is None else y + bias.double()).to(output_dtype)

    monkeypatch.setattr(F, "scaled_mm", product)
    x, w, b, _ = tensors(torch.bfloat16, rows=(16,), fan_in=32, fan_out=48)
    values = [t.to(torch.float8_e4m3fn) for t in (x, w.t())]
    scales = torch.tensor(0.5), torch.tensor(4.0)
    lhs, rhs = (Operand(v, s) for v, s in zip(values, scales, strict=True))
    found = scaled_mm.run(lhs, rhs, b, torch.bfloat16, 0.3)
    exact = 2 * torch.tensor(0.3).double() * (values[0].double() @ values[1].double()) + b.double()
    assert_rounded_once(found, exact, torch.bfloat16, 50)
    rows = Operand(values[0], torch.full((16, 1), 0.5)), Operand(values[1], torch.full((1, 48), 4.0))
    same_bits(scaled_mm.run(*rows, b, torch.bfloat16, 0.3), found)


WINDOWS = {
    "plain": (Window((1, 1), (1, 1), (1, 1)), (8, 6, 3, 3)),
    "strides and groups": (Window((2, 1), (0, 1), (1, 2), groups=2), (8, 3, 3, 2)),
    "transposed": (Window((2, 2), (1, 0), (1, 1), transposed=True, output_padding=(1, 0)), (6, 4, 3, 3)),
    "one place": (Window((1, 1), (0, 0), (1, 1)), (8, 6, 1, 1)),
    "margins": (Window((1, 1), (0, 0), (1, 1), margins=(1, 1, 0, 2)), (8, 6, 3, 3)),
}


def factors_of_convolution(window, x, w, y):
    """The factors of y, dx, dw and db, from their definition."""
    taps, stride = w[2] * w[3], window.stride[0] * window.stride[1]
    terms = w[1] * taps, w[0] // window.groups * taps / stride
    fan_in, fan_out = reversed(terms) if window.transposed else terms
    before, beyond = x[0] * x[2] * x[3], y[0] * y[2] * y[3]
    sizes = {
        "output": (beyond, fan_in, fan_out),
        "grad_input": (before, fan_out, fan_in),
        "grad_weight": (y[1], before if window.transposed else beyond, fan_in),
        "grad_bias": (y[1], beyond, 1),
    }
    multipliers = TIMES.output, TIMES.grad_input, TIMES.grad_weight, TIMES.grad_weight
    return [p.multiplier.of(*size) for p, size in zip(multipliers, sizes.values(), strict=True)]


@pytest.mark.parametrize(
    ("dtype", "carries"),
    slow_unless(
        (torch.bfloat16, True).__eq__, [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
    ),
)
@for_each("window, operands", itertools.product(WINDOWS, OPERANDS))
def test_multipliers_apply_to_a_convolutions_matmuls(window, operands, dtype, carries, monkeypatch):
    carry(monkeypatch, dtype, carries)
    spec, (window, shape) = OPERANDS[operands], WINDOWS[window]
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(s, generator=generator).to(dtype) for s in ((2, 6, 9, 7), shape, (shape[0],)))
    b = b if not window.transposed else b[: shape[1]].repeat(window.groups)[: shape[1] * window.groups]
    y = ops.convolution(x, w, b, window)
    grad = torch.randn(y.shape, generator=generator).to(dtype)
    found = passes(lambda *t: ops.convolution(*t, window, spec.times(TIMES)), x, w, b, grad=grad)
    wide = [t.double() for t in (x, w, b)]
    exact = passes(lambda *t: ops.convolution(*t, window, spec), *wide, grad=grad.double())
    exact[0] = exact[0] - wide[2].view(-1, 1, 1)
    widened = window.widened(x)
    factors = factors_of_convolution(window, widened.shape, w.shape, y.shape)
    for number, (one, other, factor) in enumerate(zip(found, exact, factors, strict=True)):
        expected = other * factor + (wide[2].view(-1, 1, 1) if number == 0 else 0)
        assert_rounded_once(one, expected, dtype, 60 * factor + 4)


@for_each("dtype, carries", [(torch.float32, False), (torch.bfloat16, True), (torch.float64, False)])
def test_multipliers_apply_to_attentions_matmuls(dtype, carries, monkeypatch):
    """On torch's path, which multiplies the inputs, and on the rounded path; with and without a causal mask."""
    carry(monkeypatch, dtype, carries)
    scores = LinearSpec(*[Matmul(multiplier=Multiplier(constant=c)) for c in (0.5, 0.75, 1.5)])
    mix = LinearSpec(*[Matmul(multiplier=Multiplier(constant=c)) for c in (3.0, 1.25, 0.6)])
    spec = AttentionSpec(scores, mix)
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 3, n, 8, generator=generator).to(dtype) for n in (7, 9, 9, 7))
    for causal in (False, True):
        found = passes(lambda *t: ops.attention(*t, causal, spec=spec), q, k, v, grad=grad)  # noqa: B023
        exact = _reference(q.double(), k.double(), v.double(), grad.double(), causal)
        for one, other in zip(found, exact, strict=True):
            assert_rounded_once(one, other, dtype, 8)
        rounded = AttentionSpec(scores, mix.times(LinearSpec()) if dtype != torch.float32 else mix)
        slow = passes(lambda *t: ops.rounded_attention(*t, causal, None, 0.0, rounded, dtype)[0], q, k, v, grad=grad)  # noqa: B023
        for one, other in zip(slow, exact, strict=True):
            torch.testing.assert_close(
                one.double(), other, rtol=4 * EPSILON[dtype] + 1e-6, atol=2e-2 if carries else 2e-6
            )


def _reference(q, k, v, grad, causal):
    """y, dq, dk, dv with each matmul's factor, by the chain rule."""
    scores = q @ k.mT * q.shape[-1] ** -0.5 * 0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:]).bool().tril(), -torch.inf)
    p = scores.softmax(-1)
    dp = grad @ v.mT * 1.25
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    return p @ v * 3, ds @ k * 0.75, ds.mT @ q * 1.5, p.mT @ grad * 0.6


def test_second_derivatives_are_those_of_the_multiplied_gradients():
    """y = a x w^T and dx = c dy w: the derivative of a function of dx with respect to dy and w has the factor c."""
    x, w, b, grad = (t.double().requires_grad_() for t in tensors(torch.float32))
    y = ops.linear(x, w, b, TIMES)
    (dx,) = torch.autograd.grad(y, x, grad, create_graph=True)
    factor = factors_of(48, 40, 56)[1]
    torch.testing.assert_close(dx, grad @ w * factor)
    found = torch.autograd.grad(dx.square().sum(), [grad, w])
    expected = torch.autograd.grad((grad @ w * factor).square().sum(), [grad, w])
    torch.testing.assert_close(found, expected)


@traces
@for_each("name", ["linear", "convolution"])
def test_forward_mode_and_vmap_use_the_forwards_multiplier(name):
    if name == "linear":
        x, w, b, _ = (t.double() for t in tensors(torch.float32))
        function = lambda x, w: ops.linear(x, w, b, TIMES)  # noqa: E731
        plain = lambda x, w: F.linear(x, w) * (1.25 * 40**-0.5) + b  # noqa: E731
    else:
        x, w = torch.randn(2, 6, 9, 7).double(), torch.randn(8, 6, 3, 3).double()
        window = Window((1, 1), (1, 1), (1, 1))
        function = lambda x, w: ops.convolution(x, w, None, window, TIMES)  # noqa: E731
        plain = lambda x, w: F.conv2d(x, w, padding=1) * (1.25 * 54**-0.5)  # noqa: E731
    tangents = torch.randn_like(x), torch.randn_like(w)
    found = torch.func.jvp(function, (x, w), tangents)
    expected = torch.func.jvp(plain, (x, w), tangents)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.func.vmap(function, (0, None))(x[:, None], w)[:, 0], plain(x, w))


def test_multipliers_round_trip_through_data_and_show_in_describe():
    recipe = from_data(
        {
            "name": "mine",
            "rules": [
                {
                    "path": "*",
                    "input": "e4m3fn",
                    "output": {"multiplier": {"shared": -0.5}},
                    "grad_input": {"multiplier": {"columns": -0.5, "constant": 2}},
                }
            ],
        },
        get_recipe,
    )
    spec = recipe.rules[-1].linear
    assert spec.output.multiplier == Multiplier(shared=-0.5)
    assert spec.grad_input.multiplier == Multiplier(columns=-0.5, constant=2.0)
    assert from_data(to_data(recipe), get_recipe) == recipe
    text = " ".join(recipe.describe().split())
    assert "output float8_e4m3fn x - times shared^-0.5, grad_input - x - times 2 columns^-0.5" in text


@for_each(
    "given, message",
    [
        ({"shared": "half"}, "shared = 'half' found; expected a number"),
        ({"shard": -0.5}, "unknown key of a multiplier 'shard'; nearest: shared"),
        ({"constant": -1.0}, "expected finite powers"),
        (0.5, "multiplier = 0.5 found; expected a table"),
    ],
)
def test_invalid_multipliers_are_refused(given, message):
    data = {"name": "mine", "rules": [{"path": "*", "output": {"multiplier": given}}]}
    with pytest.raises(RecipeError, match=message):
        from_data(data, get_recipe)


def test_two_sets_of_multipliers_are_refused():
    with pytest.raises(RecipeError, match="two sets of multipliers"):
        TIMES.times(TIMES)
    assert OPERANDS["casts"].times(LinearSpec()) == OPERANDS["casts"]
    assert TIMES.times(LinearSpec()) == TIMES


def test_multipliers_with_another_librarys_weight_are_refused():
    class Theirs(torch.Tensor):
        pass

    x, w, b, _ = tensors(torch.float32)
    with pytest.raises(ModelError, match="no place for them"):
        ops.linear(x, w.as_subclass(Theirs), b, TIMES)


def test_matmuls_without_rows_or_terms_are_empty_or_zero():
    for rows, fan_in in ((0, 5), (3, 0)):
        x, w = torch.randn(rows, fan_in, requires_grad=True), torch.randn(4, fan_in, requires_grad=True)
        y = ops.linear(x, w, None, TIMES)
        y.sum().backward()
        assert y.shape == (rows, 4)
        assert not y.any()
        assert not w.grad.any()


# ---- scale_forward and scale_backward -------------------------------------------------------------------------------


def test_scale_forward_and_scale_backward_scale_one_pass_each():
    x = torch.randn(5, requires_grad=True)
    y = ops.scale_forward(x, 3.0)
    torch.testing.assert_close(y, 3 * x)
    same_bits(torch.autograd.grad(y, x, torch.ones(5))[0], torch.ones(5))
    y = ops.scale_backward(x, 3.0)
    same_bits(y.detach(), x.detach())
    same_bits(torch.autograd.grad(y, x, torch.ones(5))[0], torch.full((5,), 3.0))
    assert ops.scale_forward(x, 1.0) is x
    assert ops.scale_backward(x, 1) is x


@for_each("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scaling_keeps_the_dtype_and_rounds_once(dtype):
    x = torch.randn(1000).to(dtype).requires_grad_()
    y = ops.scale_forward(x, 0.3)
    same_bits(y.detach(), (x.detach().double() * 0.3).to(dtype) if dtype == torch.float64 else (x.detach() * 0.3))
    (grad,) = torch.autograd.grad(ops.scale_backward(x, 0.3), x, x.detach())
    assert grad.dtype == dtype
    same_bits(grad, x.detach() * 0.3)


@traces
def test_scaling_works_under_compile_checkpoint_and_torch_func():
    x = torch.randn(6, dtype=torch.float64, requires_grad=True)
    function = lambda x: ops.scale_backward(ops.scale_forward(x.sin(), 3.0), 0.5).square()  # noqa: E731
    (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    torch.testing.assert_close(first, 2 * 3 * x.sin() * 0.5 * x.cos())
    traced = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(traced(x).sum(), x)[0], first)
    recomputed = torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(recomputed.sum(), x)[0], first)
    _, tangent = torch.func.jvp(function, (x.detach(),), (torch.ones(6).double(),))
    torch.testing.assert_close(tangent, 18 * (x.sin() * x.cos()).detach())
    torch.testing.assert_close(torch.func.vmap(function)(x), function(x))
    (second,) = torch.autograd.grad(
        torch.autograd.grad(ops.scale_backward(x**3, 0.5).sum(), x, create_graph=True)[0].sum(), x
    )
    torch.testing.assert_close(second, 0.5 * 6 * x)


def test_an_in_place_write_to_a_scaled_view_is_refused():
    x = torch.randn(3, requires_grad=True)
    y = ops.scale_backward(x * 1, 2.0)
    with pytest.raises(RuntimeError, match=r"in-?place"):
        y += 1


def test_scaling_integers_or_by_nan_is_refused():
    with pytest.raises(ModelError, match="expected a floating one"):
        ops.scale_forward(torch.arange(3), 2.0)
    with pytest.raises(ModelError, match="expected finite numbers"):
        ops.scale_backward(torch.ones(3), float("nan"))


@for_each("dtype", DTYPES)
def test_create_graph_and_autocast_do_not_change_gradients(dtype):
    x, w, b, grad = tensors(dtype)
    leaves = [t.requires_grad_() for t in (x, w, b)]
    y = ops.linear(*leaves, TIMES)
    found, derived = (
        torch.autograd.grad(y, leaves, grad, retain_graph=True, create_graph=again) for again in (False, True)
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = torch.autograd.grad(y, leaves, grad)
    for one, *others in zip(found, derived, within, strict=True):
        for other in others:
            same_bits(one, other.detach())


@for_each("dtype", DTYPES)
@for_each("shapes", [((3, 4), (3, 4)), ((2, 3, 4), (3, 4)), ((3, 1), (3, 4)), ((0, 4), (0, 4))])
@for_each("weights", [(0.3, 0.7), (0.5, 0.5), (1.0, -2.0)])
def test_weighted_sum_multiplies_values_and_gradients(dtype, shapes, weights):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    total = weighted_sum(x, y, weights, (2.0, 1.0))
    expected = weights[0] * x.double() + weights[1] * y.double()
    close = {"rtol": 3 * EPSILON[dtype], "atol": 3 * EPSILON[dtype]}
    torch.testing.assert_close(total.double(), expected, **close)
    grad = torch.randn(total.shape, generator=generator).to(dtype)
    found = torch.autograd.grad(total, (x, y), grad, retain_graph=True)
    for one, operand, factor in zip(found, (x, y), (2.0, 1.0), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(
            one.double(), factor * grad.double().sum_to_size(operand.shape), rtol=0.02, atol=0.05
        )
    assert torch.equal(
        x, torch.randn(shapes[0], generator=torch.Generator().manual_seed(0)).to(dtype)
    )  # x was not written to
    if shapes[0] == shapes[1] and x.numel():
        mapped = torch.func.vmap(lambda a: weighted_sum(a, y[0], weights, (2.0, 1.0)))(x)
        torch.testing.assert_close(mapped[0], total[0], **close)
        (second,) = torch.autograd.grad(
            torch.autograd.grad(weighted_sum(x**2, y, weights, (2.0, 1.0)).sum(), x, create_graph=True)[0].sum(), x
        )
        torch.testing.assert_close(second, torch.full_like(x, 4.0))  # the second derivative of 2 x^2
