"""Every operation has unit scale, or the scale of its constraint, over random shapes."""

import math
import re
from pathlib import Path
from types import FunctionType

import pytest
import torch
from hypothesis import given, settings, strategies as st

from halfstep import unit
from halfstep.unit import activations, factors, functions, modules


SIZES = st.integers(24, 160)
TIED = pytest.mark.filterwarnings("ignore:unit.* is broadcast to")  # tested below
RULES = {
    "none": lambda output, *grads: (output, *grads),
    "geometric_mean": lambda *f: (math.prod(f) ** (1 / len(f)),) * len(f),
    "to_output": lambda output, *grads: (output,) * (1 + len(grads)),
    "to_grad_input": lambda output, *grads: (math.prod(grads) ** (1 / len(grads)),) * (1 + len(grads)),
}
"""The constraints' formulas, written independently."""

EXCEPTIONS = {
    "attention": "one factor for all: q and k have gradients as small as softmax's derivative is",
    "add to a number": "a shift has no factor",
    "readout": "its output is of size fan_in^-1/2, which u-muP asks for",
    "edges": "a convolution's places at the edges of its input stand in fewer windows, so their gradients are smaller",
    "square root": "its weights are functions of each other: it has no factor, and torch's gradients",
}
"""The operations without unit scale when unconstrained, and why; each has a test below."""


def sizes(op, *tensors, grads=True):
    """The standard deviation of the output, and the root mean square of each input's gradient."""
    leaves = [t.requires_grad_() for t in tensors]
    y = op(*leaves)
    found = torch.autograd.grad(y, leaves, torch.randn_like(y))
    return [float(y.detach().double().std()), *[float(g.double().square().mean().sqrt()) for g in found]]


def predicted(rule, *ideal):
    """The scales of an output and its gradients under a constraint, from the ideal factors."""
    return [factor / alone for factor, alone in zip(RULES[rule](*ideal), ideal, strict=True)]


def assert_sizes(found, expected):
    assert found == pytest.approx(expected, rel=0.1)


@settings(max_examples=30)
@given(b=st.integers(80, 300), m=SIZES, n=SIZES, rule=st.sampled_from(list(RULES)))
def test_linear_has_the_scale_of_its_constraint(b, m, n, rule):
    torch.manual_seed(b + m + n)
    op = lambda x, w: unit.linear(x, w, constraint=rule)  # noqa: E731
    assert_sizes(sizes(op, torch.randn(b, m), torch.randn(n, m)), [*predicted(rule, m**-0.5, n**-0.5), 1])


@settings(max_examples=10)
@given(b=st.integers(80, 300), m=SIZES, n=SIZES)
def test_a_readouts_output_is_smaller_by_the_root_of_its_fan_in(b, m, n):
    assert "readout" in EXCEPTIONS
    torch.manual_seed(b + m + n)
    assert_sizes(sizes(unit.linear_readout, torch.randn(b, m), torch.randn(n, m)), [m**-0.5, 1, 1])


@settings(max_examples=20)
@given(
    rows=SIZES, shared=SIZES, columns=SIZES, rule=st.sampled_from(list(RULES)), shape=st.sampled_from(["2", "3", "b"])
)
def test_matmul_has_the_scale_of_its_constraint(rows, shared, columns, rule, shape):
    torch.manual_seed(rows + shared)
    first, second = {"2": ((), ()), "3": ((3,), (3,)), "b": ((3,), ())}[shape]
    copies = 3 if shape == "b" else 1
    op = lambda x, y: unit.matmul(x, y, constraint=rule)  # noqa: E731
    ideal = shared**-0.5, columns**-0.5, (rows * copies) ** -0.5
    assert_sizes(
        sizes(op, torch.randn(*first, rows, shared), torch.randn(*second, shared, columns)), predicted(rule, *ideal)
    )


@settings(max_examples=20)
@given(
    channels=st.sampled_from([8, 12, 32]),
    out=st.sampled_from([16, 24]),
    groups=st.sampled_from([1, 2, 4]),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 2),
    dims=st.integers(1, 2),
    rule=st.sampled_from(list(RULES)),
)
def test_convolutions_have_the_scale_of_their_constraint(channels, out, groups, kernel, stride, dims, rule):
    torch.manual_seed(channels + out + kernel)
    size = 2 * (24 if dims == 2 else 300) + kernel
    function = unit.conv1d if dims == 1 else unit.conv2d
    op = lambda x, w: function(x, w, stride=stride, groups=groups, constraint=rule)  # noqa: E731
    x, w = torch.randn(4, channels, *[size] * dims), torch.randn(out, channels // groups, *[kernel] * dims)
    ideal = (channels // groups * kernel**dims) ** -0.5, (out // groups * (kernel / stride) ** dims) ** -0.5
    y, dx, dw = sizes(op, x, w)
    expected = predicted(rule, *ideal)
    assert y == pytest.approx(expected[0], rel=0.1)
    assert dw == pytest.approx(1, rel=3 * (2 * w.numel()) ** -0.5 + 0.1)  # of a sample of so many gradients
    assert "edges" in EXCEPTIONS
    assert dx == pytest.approx(expected[1], rel=0.1 + 0.1 * (dims * kernel > 4))


@settings(max_examples=40)
@given(
    name=st.sampled_from(["gelu", "gelu_tanh", "silu", "relu", "tanh", "sigmoid"]),
    mult=st.floats(0.25, 4.0),
    rule=st.sampled_from(list(RULES)),
    rows=SIZES,
)
def test_activations_have_the_scale_of_their_constraint(name, mult, rule, rows):
    torch.manual_seed(rows)
    function, _, approximate = name.partition("_")
    shape = {"approximate": approximate} if approximate else {}
    options = {} if name == "relu" else {"mult": mult}
    op = lambda x: getattr(unit, function)(x, constraint=rule, **options, **shape)  # noqa: E731
    z = torch.randn(200_000, dtype=torch.float64, requires_grad=True)
    raw = getattr(torch.nn.functional, function)(z * options.get("mult", 1.0), **shape) / options.get("mult", 1.0)
    (slope,) = torch.autograd.grad(raw.sum(), z)
    ideal = 1 / float(raw.detach().std()), 1 / float(slope.square().mean().sqrt())
    assert_sizes(sizes(op, torch.randn(rows, 512)), predicted(rule, *ideal))


@TIED
@settings(max_examples=10)
@given(rule=st.sampled_from(list(RULES)), gates=st.booleans(), size=st.integers(4, 12))
def test_gated_silu_with_a_broadcast_operand(rule, gates, size):
    torch.manual_seed(size)
    whole, few = torch.randn(16, 24, size, size), torch.randn(16, 24, 1, 1)
    output, of_x, of_gate = factors.gated_silu()
    ideal = (output, of_x, of_gate / size) if gates else (output, of_x / size, of_gate)
    op = lambda x, g: unit.gated_silu(x, g, constraint=rule)  # noqa: E731
    found = sizes(op, *((whole, few) if gates else (few, whole)))
    assert found == pytest.approx(predicted(rule, *ideal), rel=0.2)


BROADCAST = {
    "gated_silu": (lambda x, y: x * torch.nn.functional.silu(y), lambda x: 32 * x.mean((2, 3), keepdim=True), "1,024"),
    "gated_silu of a few": (lambda y, x: y * torch.nn.functional.silu(x), lambda x: 32 * x.mean((2, 3), True), "1,024"),
    "add": (lambda x, y: x + y, lambda x: 32 * x.mean((2, 3), keepdim=True), "1,024"),
    "matmul": (lambda x, y: x @ y, lambda x: 4 * x.mean(0, keepdim=True), "16"),
}


@pytest.mark.quick("gated_silu", "add", "matmul")
@pytest.mark.parametrize("name", BROADCAST)
def test_broadcast_operands_warn_and_the_advice_keeps_the_true_gradient(name):
    torch.manual_seed(0)
    stock, few, copies = BROADCAST[name]
    function = getattr(unit, name.split()[0])
    order = reversed if "few" in name else iter
    x = torch.randn(16, 24, 32, 32, dtype=torch.float64, requires_grad=True)
    (true,) = torch.autograd.grad(stock(*order((x, few(x)))).sum(), x)
    with pytest.warns(UserWarning, match=rf"^unit\.{name.split()[0]}: .* {copies} copies") as seen:
        y = function(*order((x, operand := few(x))))
    said = float(re.search(r"is ([\d.e+]+) times unit size", str(seen[0].message))[1])
    assert root_mean_square(y, operand) == pytest.approx(said, rel=0.1)
    begun = few(unit.scale_backward(x, float(re.search(r"scale_backward\(x, (.*?)\)", str(seen[0].message))[1])))
    y = function(*order((x, begun)), constraint=None)
    (of_x,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    assert float((of_x - true * (of_x * true).sum() / true.square().sum()).norm()) < 1e-3 * float(of_x.norm())
    assert root_mean_square(y, begun) == pytest.approx(1, rel=0.1)
    function(*order((x, few(x.detach()))))  # no warning for an operand without a gradient


def root_mean_square(y, operand):
    """The root mean square of an operand's gradient, over eight gradients of the result."""
    found = [torch.autograd.grad(y, operand, torch.randn_like(y), retain_graph=True)[0] for _ in range(8)]
    return float(torch.stack(found).square().mean().sqrt())


@settings(max_examples=20)
@given(mult=st.floats(0.25, 4.0), rule=st.sampled_from(list(RULES)), rows=SIZES)
def test_gated_silu_has_the_scale_of_its_constraint(mult, rule, rows):
    torch.manual_seed(rows)
    op = lambda x, g: unit.gated_silu(x, g, mult=mult, constraint=rule)  # noqa: E731
    free = sizes(
        lambda x, g: unit.gated_silu(x, g, mult=mult, constraint=None), torch.randn(rows, 512), torch.randn(rows, 512)
    )
    assert_sizes(free, [1, 1, 1])
    assert_sizes(sizes(op, torch.randn(rows, 512), torch.randn(rows, 512)), predicted(rule, *factors.gated_silu(mult)))


@settings(max_examples=12)
@given(size=st.integers(2, 200), mult=st.floats(0.25, 3.0), rule=st.sampled_from(list(RULES)))
def test_softmax_has_the_scale_of_its_constraint(size, mult, rule):
    torch.manual_seed(size)
    rows = 40_000 // size
    ideal = factors.softmax(size, mult)
    assert_sizes(sizes(lambda x: unit.softmax(x, -1, mult=mult, constraint=None), torch.randn(rows, size)), [1, 1])
    op = lambda x: unit.softmax(x, 0, mult=mult, constraint=rule)  # noqa: E731
    assert_sizes(sizes(op, torch.randn(size, rows)), predicted(rule, *ideal))


@settings(max_examples=15)
@given(
    queries=st.integers(16, 128),
    width=st.sampled_from([16, 32, 64]),
    causal=st.booleans(),
    dropout=st.sampled_from([0, 0.2]),
)
def test_attention_and_the_gradient_of_its_values_have_unit_scale(queries, width, causal, dropout):
    assert "attention" in EXCEPTIONS
    torch.manual_seed(queries)
    q, k, v = (torch.randn(8, 4, queries, width) for _ in range(3))
    op = lambda q, k, v: unit.scaled_dot_product_attention(q, k, v, None, dropout, causal)  # noqa: E731
    y, dq, dk, dv = sizes(op, q, k, v)
    assert_sizes([y, dv], [1, 1])
    assert max(dq, dk) < 1


@settings(max_examples=10)
@given(queries=st.integers(16, 128), causal=st.booleans(), dropout=st.sampled_from([0, 0.2]))
def test_square_root_attention_has_unit_scale(queries, causal, dropout):
    assert "square root" in EXCEPTIONS
    torch.manual_seed(queries)
    q, k, v = (torch.randn(16, 4, queries, 64) for _ in range(3))
    op = lambda q, k, v: unit.square_root_attention(q, k, v, None, dropout, causal)  # noqa: E731
    y, dq, dk, dv = sizes(op, q, k, v)
    assert_sizes([y, dv], [1, 1])
    assert max(dq, dk) < 1


@settings(max_examples=15)
@given(rows=st.integers(80, 300), width=SIZES, out=SIZES)
def test_gradients_of_gains_and_biases_have_unit_scale(rows, width, out):
    torch.manual_seed(rows + width)
    gain, bias, x = torch.ones(width), torch.zeros(width), torch.randn(rows, width)
    rel = 3 * (2 * width) ** -0.5 + 0.1  # of a sample of so many gradients
    found = sizes(lambda w, b: unit.layer_norm(x, (width,), w, b), gain, bias)[1:]
    found += sizes(lambda w: unit.rms_norm(x, (width,), w), gain)[1:]
    assert found == pytest.approx([1, 1, 1], rel=rel)
    (of_bias,) = sizes(lambda b: unit.linear(x, torch.randn(out, width), b), torch.zeros(out))[1:]
    assert of_bias == pytest.approx(1, rel=3 * (2 * out) ** -0.5 + 0.1)


@settings(max_examples=15)
@given(rows=st.integers(50, 200), width=SIZES, p=st.floats(0.0, 0.9))
def test_norms_dropout_and_residuals_have_unit_scale(rows, width, p):
    torch.manual_seed(rows)
    x = torch.randn(rows, width)
    for norm in (unit.layer_norm, unit.rms_norm):
        assert_sizes(sizes(lambda x, norm=norm: norm(x, (width,)), x.clone()), [1, 1])
    assert_sizes(sizes(lambda x: unit.dropout(x, p), torch.randn(rows, 512)), [1, 1])
    residual = lambda x, y: unit.residual_add(x, y, variance_fraction=p)  # noqa: E731
    assert_sizes(sizes(residual, x.clone(), torch.randn(rows, width)), [1, 1, 1])
    both = lambda x: sum(unit.residual_split(x, ratio=p))  # noqa: E731
    assert float(sizes(both, x.clone())[1]) == pytest.approx((1 + p) / (1 + p * p) ** 0.5, rel=0.1)


@TIED
@settings(max_examples=15)
@given(rows=st.integers(50, 200), width=SIZES, rule=st.sampled_from(list(RULES)))
def test_sums_have_the_scale_of_their_constraint(rows, width, rule):
    torch.manual_seed(rows)
    op = lambda x, y: unit.add(x, y, constraint=rule)  # noqa: E731
    assert_sizes(sizes(op, torch.randn(rows, width), torch.randn(rows, width)), predicted(rule, 2**-0.5, 1, 1))
    found = sizes(op, torch.randn(rows, 2000), torch.randn(2000))
    assert_sizes(found, predicted(rule, 2**-0.5, 1, rows**-0.5))
    assert "add to a number" in EXCEPTIONS
    assert_sizes(sizes(lambda x: unit.add(x, 3.0), torch.randn(rows, width)), [1, 1])


@settings(max_examples=15)
@given(
    classes=st.integers(2, 300),
    batch=st.integers(1, 50),
    smoothing=st.floats(0, 0.9),
    reduction=st.sampled_from(["mean", "sum"]),
)
def test_losses_have_unit_scale_gradients_under_any_reduction(classes, batch, smoothing, reduction):
    torch.manual_seed(classes)
    logits = torch.zeros(batch, classes, requires_grad=True)
    target = torch.randint(classes, (batch,))
    unit.cross_entropy(logits, target, reduction=reduction, label_smoothing=smoothing).backward()
    assert float(logits.grad.square().mean().sqrt()) == pytest.approx(1, rel=1e-3)
    x, t = (torch.randn(batch, 2000, requires_grad=True) for _ in range(2))
    unit.mse_loss(x, t, reduction=reduction).backward()
    assert [float(z.grad.square().mean().sqrt()) for z in (x, t)] == pytest.approx([1, 1], rel=0.1)


@settings(max_examples=10)
@given(rows=st.integers(20, 300), lookups=st.integers(1000, 4000))
def test_embeddings_have_unit_scale(rows, lookups):
    torch.manual_seed(rows)
    index = torch.randint(rows, (lookups,))
    assert_sizes(sizes(lambda w: unit.embedding(index, w), torch.randn(rows, 64)), [1, 1])


def test_every_operation_has_a_property_test():
    """So the list of exceptions is complete."""
    text = Path(__file__).read_text(encoding="utf-8")
    rooms = activations, functions, modules.transformer
    operations = {
        name
        for name in unit.__all__
        if isinstance(function := getattr(unit, name), FunctionType)
        and function.__module__ in {room.__name__ for room in rooms}
    } - {"equal_shares", "fixed", "running_mean"}  # schemes of residuals, which take no tensor
    assert {"linear", "softmax", "square_root_attention", "cross_entropy", "residual_split"} <= operations
    named = {word for pair in re.findall(r'unit\.(\w+)|"(\w+)"', text) for word in pair}
    assert operations <= named, operations - named
    for key in EXCEPTIONS:
        assert f'assert "{key}" in EXCEPTIONS' in text
