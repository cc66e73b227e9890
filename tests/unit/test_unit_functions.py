"""The scaled functions equal torch's times their factors: in any dtype, under autocast, traced, differentiated
twice."""

import math

import pytest
import torch
import torch.nn.functional as F

from families import for_each
from halfstep import unit
from halfstep.errors import ModelError
from halfstep.unit import factors
from oracles.numbers import same_bits


traces = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when it traces
ROPE = torch.arange(6).view(2, 3)
CASES = {
    "linear": (lambda x, w, b: unit.linear(x, w, b), [(3, 4, 8), (6, 8), (6,)]),
    "readout": (lambda x, w: unit.linear_readout(x, w), [(4, 8), (6, 8)]),
    "matmul": (lambda x, y: unit.matmul(x, y), [(2, 4, 8), (2, 8, 5)]),
    "matmul, broadcast": (lambda x, y: unit.matmul(x, y, None), [(3, 2, 4, 8), (2, 8, 5)]),
    "conv1d": (lambda x, w, b: unit.conv1d(x, w, b, 2, 1), [(2, 4, 9), (6, 4, 3), (6,)]),
    "conv2d": (lambda x, w: unit.conv2d(x, w, padding="same", groups=2), [(2, 4, 5, 6), (6, 2, 3, 2)]),
    "embedding": (lambda w: unit.embedding(ROPE, w, 4), [(6, 8)]),
    "embedding of a few": (lambda w: unit.embedding(ROPE, w), [(50, 8)]),
    "gelu": (lambda x: unit.gelu(x, mult=0.7), [(3, 8)]),
    "gelu_tanh": (lambda x: unit.gelu(x, "tanh"), [(3, 8)]),
    "silu": (lambda x: unit.silu(x, mult=1.5), [(3, 8)]),
    "relu": (lambda x: unit.relu(x), [(3, 8)]),
    "tanh": (lambda x: unit.tanh(x), [(3, 8)]),
    "sigmoid": (lambda x: unit.sigmoid(x, mult=2.0), [(3, 8)]),
    "gated_silu": (lambda x, g: unit.gated_silu(x, g, mult=0.8), [(3, 8), (3, 8)]),
    "softmax": (lambda x: unit.softmax(x, -1, mult=1.5), [(3, 8)]),
    "layer_norm": (lambda x, w, b: unit.layer_norm(x, (8,), w, b), [(3, 8), (8,), (8,)]),
    "rms_norm": (lambda x, w: unit.rms_norm(x, (8,), w, 1e-6), [(3, 8), (8,)]),
    "add": (lambda x, y: unit.add(x, y), [(3, 8), (3, 8)]),
    "add, broadcast": (lambda x, y: unit.add(x, y, "geometric_mean"), [(3, 8), (8,)]),
    "residual": (lambda x: _residual(x), [(3, 8)]),
    "attention": (lambda q, k, v: unit.scaled_dot_product_attention(q, k, v, is_causal=True), [(2, 2, 5, 8)] * 3),
    "cross_entropy": (lambda x: unit.cross_entropy(x, torch.tensor([1, -100, 0])), [(3, 8)]),
    "mse_loss": (lambda x, t: unit.mse_loss(x, t), [(3, 8), (3, 8)]),
}
"""Each operation, and the shapes of its inputs."""
every_case = for_each("case", list(CASES))


def _residual(x):
    branch, skip = unit.residual_split(x, ratio=0.5)
    return unit.residual_add(branch.sin(), skip, ratio=0.5)


def inputs(case, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    function, shapes = CASES[case]
    return function, [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def passes(function, leaves):
    y = function(*leaves)
    torch.manual_seed(1)
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.randn(y.shape).to(y.dtype))]


@for_each("case, dtype", [(case, dtype) for case in CASES for dtype in (torch.float32, torch.bfloat16, torch.float16)])
def test_narrow_dtypes_agree_with_float64_within_their_rounding(case, dtype):
    function, leaves = inputs(case, dtype)
    found = passes(function, leaves)
    exact = passes(function, [leaf.detach().double().requires_grad_() for leaf in leaves])
    epsilon = max(torch.finfo(dtype).eps, 2.0**-20)
    for one, other in zip(found, exact, strict=True):
        assert float((one.double() - other).norm()) <= 4 * epsilon * float(other.norm()) + 1e-6
    wide = dtype if case not in ("cross_entropy", "mse_loss") else torch.float32
    assert [one.dtype for one in found] == [wide] + [dtype] * len(leaves)


@pytest.mark.slow  # fast tests trace some of these functions
@traces
@every_case
def test_traced_functions_equal_eager_ones(case):
    function, leaves = inputs(case, torch.float32)
    torch._dynamo.reset()
    traced = torch.compile(function, backend="aot_eager", fullgraph=True)
    for one, other in zip(passes(traced, leaves), passes(function, leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@traces
def test_a_clone_protects_gradients_that_torch_2_11_loses(monkeypatch):
    """`ops.function.apart`, as under that torch."""
    monkeypatch.setattr("halfstep.ops.function._LOSES", True)
    traced = []
    torch._dynamo.reset()

    def backend(graph, _):
        traced.append(graph)
        return graph

    function, leaves = inputs("softmax", torch.float32)
    found = passes(torch.compile(function, backend=backend, fullgraph=True), leaves)
    for one, other in zip(found, passes(function, leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert "clone" in str([graph.print_readable(print_output=False) for graph in traced])


_ALONE = {"linear", "gelu", "gelu_tanh", "silu", "relu", "tanh", "sigmoid", "gated_silu"}
"""Functions whose inputs pass no scaling function, which would scale the second derivative as well."""


@for_each("case", [case for case in CASES if case != "attention"])  # torch's has none on a CPU
def test_second_derivatives_equal_differences_of_the_gradients(case):
    """Finite differences of the scaled first derivatives, for which no factor is assumed."""
    function, leaves = inputs(case)
    y = function(*leaves)
    grad = torch.randn(y.shape, dtype=y.dtype)
    directions = [torch.randn_like(leaf) for leaf in leaves]

    def total(points):
        value = function(*points)
        grads = torch.autograd.grad(value, points, grad, create_graph=True)
        return sum((g * d).sum() for g, d in zip(grads, directions, strict=True)), grads

    step = [torch.randn_like(leaf) for leaf in leaves]
    sides = []
    for sign in (1, -1):
        points = [
            (leaf + sign * 1e-5 * move).detach().requires_grad_() for leaf, move in zip(leaves, step, strict=True)
        ]
        sides.append(float(total(points)[0].detach()))
    expected = (sides[0] - sides[1]) / 2e-5
    value, _ = total(leaves)
    if not value.requires_grad:
        assert abs(expected) < 1e-6
        return
    seconds = torch.autograd.grad(value, leaves, allow_unused=True)
    found = sum(float((s * move).sum().detach()) for s, move in zip(seconds, step, strict=True) if s is not None)
    if case in _ALONE:
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert bool(torch.isfinite(torch.tensor(found)))


@for_each("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_under_autocast_equal_torchs(dtype):
    x, w = torch.randn(4, 8), torch.randn(6, 8)
    with torch.autocast("cpu", dtype=dtype):
        assert unit.linear(x, w).dtype == F.linear(x, w).dtype == dtype
        assert unit.matmul(x, w.T).dtype == dtype
        y = unit.linear(x, w)
        assert unit.softmax(y, -1).dtype == F.softmax(y, -1).dtype
        assert unit.gelu(y).dtype == F.gelu(y).dtype
        assert unit.cross_entropy(y, torch.zeros(4, dtype=torch.long)).dtype == torch.float32
        q = y.view(1, 1, 4, 6)
        assert unit.scaled_dot_product_attention(q, q, q).dtype == dtype


def test_fp16_softmax_is_scaled_before_rounding():
    x = torch.full((1, 60000), -4.0, dtype=torch.float16)
    x[0, 0] = 14.0
    assert not F.softmax(x, -1)[0, 1:].any()
    assert float(unit.softmax(x, -1)[0, 1]) == pytest.approx(math.exp(-18) * factors.softmax(60000)[0], rel=2e-3)


def test_sums_of_fp16_losses_do_not_overflow():
    logits = torch.randn(20000, 300).half().requires_grad_()
    loss = unit.cross_entropy(logits, torch.zeros(20000, dtype=torch.long))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(
        float(F.cross_entropy(logits.detach().float(), torch.zeros(20000).long())), rel=1e-5
    )
    assert float(logits.grad.float().square().mean().sqrt()) == pytest.approx(1, rel=0.5)
    assert torch.isfinite(unit.mse_loss(torch.full((70000,), 30.0).half(), torch.zeros(70000).half()))


def test_cross_entropy_equals_torchs_and_ignored_targets_have_no_gradient():
    logits = torch.zeros(6, 10, requires_grad=True)
    target = torch.tensor([1, -100, 3, -100, 0, 9])
    loss = unit.cross_entropy(logits, target)
    torch.testing.assert_close(loss, F.cross_entropy(logits, target))
    loss.backward()
    counted = target != -100
    assert not logits.grad[~counted].any()
    assert float(logits.grad[counted].square().mean().sqrt()) == pytest.approx(1)
    deep = torch.randn(2, 10, 5, requires_grad=True)
    words = torch.randint(10, (2, 5))
    torch.testing.assert_close(unit.cross_entropy(deep, words), F.cross_entropy(deep, words))
    torch.testing.assert_close(unit.cross_entropy(deep, deep.softmax(1)), F.cross_entropy(deep, deep.softmax(1)))
    torch.testing.assert_close(
        unit.cross_entropy(deep[0, :, 0], words[0, 0]), F.cross_entropy(deep[0, :, 0], words[0, 0])
    )
    every = unit.cross_entropy(deep, words, reduction="none")
    torch.testing.assert_close(every, F.cross_entropy(deep, words, reduction="none"))
    torch.testing.assert_close(unit.cross_entropy(deep, words, mult=2.0), F.cross_entropy(2 * deep, words))


def test_padding_rows_have_no_gradient_and_sparse_gradients_equal_dense():
    index = torch.tensor([0, 2, 2, 4])
    found = []
    for sparse in (False, True):
        table = torch.ones(5, 3, requires_grad=True)
        unit.embedding(index, table, 2, sparse).sum().backward()
        found.append(table.grad.to_dense() if sparse else table.grad)
    expected = torch.tensor([1.0, 0, 0, 0, 1]).view(5, 1).expand(5, 3) * (5 / 4) ** 0.5
    for one in found:
        torch.testing.assert_close(one, expected)


def test_dropout_drops_torchs_elements_and_is_the_identity_in_evaluation():
    x = torch.randn(1000)
    assert unit.dropout(x, 0.3, training=False) is x
    assert unit.dropout(x, 0.0) is x
    assert not unit.dropout(x, 1.0).any()
    torch.manual_seed(3)
    dropped = unit.dropout(x, 0.3)
    torch.manual_seed(3)
    torch.testing.assert_close(dropped, F.dropout(x, 0.3) * 0.7**0.5)
    with pytest.raises(ModelError, match="expected a probability"):
        unit.dropout(x, 1.5)


def test_attention_takes_grouped_queries_and_masks():
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    found = unit.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    wide = [x.repeat_interleave(2, dim=1) for x in (k, v)]
    factor = factors.attention(6, 6, 8)
    torch.testing.assert_close(found, factor * F.scaled_dot_product_attention(q, *wide, scale=1 / 8))
    mask = torch.ones(6, 6).bool().tril()
    causal = unit.scaled_dot_product_attention(q, *wide, is_causal=True)
    torch.testing.assert_close(unit.scaled_dot_product_attention(q, *wide, mask, is_causal_mask=True), causal)
    assert factors.attention(6, 6, 8, is_causal=True) < factor


def test_factor_of_causal_attention_with_flat_logits_is_harmonic():
    """The library's is a logarithm, which is 7 percent off at 64 positions."""
    harmonic = sum(1 / i for i in range(1, 65))
    assert factors.attention(64, 64, 10**6, mult=1.0, is_causal=True) == pytest.approx((64 / harmonic) ** 0.5, rel=1e-5)
    assert factors.attention(64, 64, 10**6) == pytest.approx(8, rel=1e-5)
    assert factors.attention(100, 64, 16, is_causal=True) < factors.attention(100, 64, 16)


def test_functions_do_not_write_to_their_inputs():
    for case in CASES:
        function, leaves = inputs(case, torch.float32)
        before = [leaf.detach().clone() for leaf in leaves]
        passes(function, leaves)
        for leaf, kept in zip(leaves, before, strict=True):
            same_bits(leaf.detach(), kept)


@for_each(
    "call, message",
    [
        (lambda x: unit.linear(x, x, constraint="gmean"), "unknown constraint 'gmean'; nearest: geometric_mean"),
        (lambda x: unit.linear(x, x, constraint=lambda a, b: ((a + b) / 2,) * 2), "expected .* products of powers"),
        (lambda x: unit.matmul(x, torch.ones(3)), r"expected \(..., rows, shared\)"),
        (lambda x: unit.conv1d(x, x), r"conv1d with a weight of shape \(4, 4\); expected"),
        (lambda x: unit.conv2d(x[None, None], x[None, None], padding="full"), "padding = 'full' found"),
        (lambda x: unit.conv2d(x[None, None], x[None, None], stride=2, padding="same"), "expected a stride of 1"),
        (lambda x: unit.gelu(x, mult=0.0), "mult = 0.0 of gelu; expected a positive number"),
        (lambda x: unit.gelu(x, "sigmoid"), "unknown activation 'gelu_sigmoid'"),
        (lambda x: unit.softmax(x, -1, mult=100.0), "expected between 0.001 and 10"),
        (lambda x: unit.residual_split(x), "expected one of them"),
        (lambda x: unit.residual_split(x, ratio=1.0, variance_fraction=0.5), "expected one of them"),
        (lambda x: unit.residual_split(x, variance_fraction=1.5), "expected a number from 0 to 1"),
        (lambda x: unit.residual_split(x, ratio=-1.0), "expected a finite number"),
        (lambda x: unit.residual_add(x, x[0], ratio=1.0), "expected the same"),
        (lambda x: unit.mse_loss(x, x[0]), "expected the same"),
        (lambda x: unit.mse_loss(x, x, "average"), "unknown reduction 'average'"),
        (lambda x: unit.cross_entropy(x[:, :1], torch.zeros(4).long()), "expected two classes or more"),
    ],
)
def test_invalid_arguments_raise(call, message):
    with pytest.raises(ModelError, match=message):
        call(torch.ones(4, 4))
