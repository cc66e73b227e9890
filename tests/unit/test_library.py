"""The factors of the unit-scaling library 0.3.5 are equal where its models are exact; else by the stated ratio."""

import math
import re
import warnings
from pathlib import Path

import pytest
import torch

from families import for_each
from halfstep import unit


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it imports what torch has deprecated
    import unit_scaling.functional as U

LONG = (64, 32)
RULES = {
    "to_output": "to_output_scale",
    "geometric_mean": "gmean",
    "to_grad_input": "to_grad_input_scale",
    "none": None,
}


def passes(function, leaves):
    y = function(*leaves)
    torch.manual_seed(1)
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.randn(y.shape).to(y.dtype))]


def ratios(ours, theirs, shapes):
    """The ratios of our numbers to the library's: of the output and of each gradient, one float each."""
    leaves = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    found = []
    for one, other in zip(passes(ours, leaves), passes(theirs, leaves), strict=True):
        ratio = float((one * other).sum() / other.square().sum())
        torch.testing.assert_close(one, other * ratio, rtol=1e-5, atol=1e-6)  # its RMS norm is in float32
        found.append(ratio)
    return found


EXACT = {
    "linear": (unit.linear, lambda x, w, **k: U.linear(x, w, None, **k), [(64, 32), (48, 32)], True),
    "linear_readout": (
        unit.linear_readout,
        lambda x, w, **k: U.linear_readout(x, w, None, **k),
        [(64, 32), (48, 32)],
        True,
    ),
    "matmul": (unit.matmul, U.matmul, [(64, 32), (32, 48)], False),
    "conv1d": (
        lambda x, w, **k: unit.conv1d(x, w, None, 1, 2, 2, 2, **k),
        lambda x, w, **k: U.conv1d(x, w, None, 1, 2, 2, 2, **k),
        [(5, 8, 33), (12, 4, 3)],
        None,
    ),
    "layer_norm": (
        lambda x, w: unit.layer_norm(x, (32,), w),
        lambda x, w: U.layer_norm(x, (32,), w),
        [LONG, (32,)],
        None,
    ),
    "rms_norm": (
        lambda x, w: unit.rms_norm(x, (32,), w, 1e-5),
        lambda x, w: U.rms_norm(x, (32,), w.clone(), 1e-5),
        [LONG, (32,)],
        None,
    ),
    "add": (unit.add, U.add, [LONG, LONG], False),
    "add, broadcast": (unit.add, U.add, [LONG, (32,)], False),
    "embedding": (
        lambda w: unit.embedding(torch.arange(100) % 40, w),
        lambda w: U.embedding(torch.arange(100) % 40, w),
        [(40, 8)],
        None,
    ),
    "residual": (
        lambda x: _residual(unit, x, "ratio"),
        lambda x: _residual(U, x, "tau"),
        [LONG],
        None,
    ),
    "residual of a function": (
        lambda x: _residual(unit, x, "ratio"),
        lambda x: U.residual_apply(torch.sin, x, 0.6),
        [LONG],
        None,
    ),
    "cross_entropy": (
        lambda x: unit.cross_entropy(x, torch.arange(64) % 32, mult=1.5),
        lambda x: U.cross_entropy(x, torch.arange(64) % 32, mult=1.5),
        [LONG],
        None,
    ),
    "mse_loss": (unit.mse_loss, U.mse_loss, [LONG, LONG], None),
}
"""Ours, theirs, shapes, and whether constraints apply: with two factors (True), with three (False), or not (None)."""


def _residual(library, x, name):
    branch, skip = library.residual_split(x, **{name: 0.6})
    return library.residual_add(branch.sin(), skip, **{name: 0.6})


@pytest.mark.filterwarnings("ignore:unit.* is broadcast to")
@for_each(
    "case, rule",
    [
        (case, rule)
        for case, (_, _, _, tied) in EXACT.items()
        for rule in RULES
        if rule == "to_output" or (tied is not None and (tied or rule != "to_grad_input"))
    ],
)
def test_factors_equal_the_librarys_where_its_models_are_exact(case, rule):
    ours, theirs, shapes, tied = EXACT[case]
    if tied is not None:
        found = ratios(lambda *t: ours(*t, constraint=rule), lambda *t: theirs(*t, constraint=RULES[rule]), shapes)
    else:
        found = ratios(ours, theirs, shapes)
    assert found == pytest.approx([1.0] * len(found), rel=1e-6)


DIFFERENT = {
    # Models fitted to measurements, over or under the integrated constants:
    "gelu": (lambda x: unit.gelu(x, constraint=None), lambda x: U.gelu(x, constraint=None), [LONG], [0.9627, 0.9774]),
    "silu": (lambda x: unit.silu(x, constraint=None), lambda x: U.silu(x, constraint=None), [LONG], [1.0115, 0.9652]),
    "softmax": (
        lambda x: unit.softmax(x, -1, constraint=None),
        lambda x: U.softmax(x, -1, constraint=None),
        [(200, 200)],
        [1.3315, 1.0749],
    ),
    # One factor for x and for the gate:
    "gated_silu": (
        lambda x, g: unit.gated_silu(x, g, constraint=None),
        U.silu_glu,
        [LONG, LONG],
        [0.9969, 0.9969, 0.9652],
    ),
    # The logarithm for the harmonic number, and no spread of the logits:
    "attention": (
        lambda q, k, v: unit.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v: U.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(2, 64, 32)] * 3,
        None,
    ),
    "attention to all places": (
        unit.scaled_dot_product_attention,
        U.scaled_dot_product_attention,
        [(2, 64, 32)] * 3,
        [1.0008] * 4,
    ),
    # The library scales the bias with the product:
    "bias": (
        lambda b: unit.linear(torch.zeros(5, 16).double(), torch.zeros(3, 16).double(), b),
        lambda b: U.linear(torch.zeros(5, 16).double(), torch.zeros(3, 16).double(), b),
        [(3,)],
        [4.0, 1.0],
    ),
}


@for_each("case", list(DIFFERENT))
def test_ratios_to_the_librarys_fitted_factors(case):
    ours, theirs, shapes, expected = DIFFERENT[case]
    found = ratios(ours, theirs, shapes)
    if case == "attention":
        harmonic = sum(1 / i for i in range(1, 65))
        assert found == pytest.approx([(math.log(64) / harmonic) ** 0.5] * 4, rel=0.02)
        return
    assert found == pytest.approx(expected, rel=2e-3)


def test_dropout_equals_the_librarys():
    """Kept elements are multiplied by (1 - p)^-1/2, forward and backward."""
    for dropout in (unit.dropout, U.dropout):
        x = torch.randn(4, 500, dtype=torch.float64).requires_grad_()
        y = dropout(x, 0.3)
        (grad,) = torch.autograd.grad(y.sum(), x)
        kept = y.detach() != 0
        assert 0.6 < float(kept.double().mean()) < 0.8
        torch.testing.assert_close(y.detach(), torch.where(kept, x.detach() * 0.7**-0.5, 0.0), rtol=1e-6, atol=0)
        torch.testing.assert_close(grad, torch.where(kept, 0.7**-0.5, 0.0).double(), rtol=1e-6, atol=0)


def test_the_library_raises_for_label_smoothing():
    with pytest.raises(ValueError, match="label_smoothing"):
        U.cross_entropy(torch.zeros(4, 6), torch.zeros(4, dtype=torch.long), label_smoothing=0.1)


def test_every_operation_of_the_library_is_compared():
    text = Path(__file__).read_text(encoding="utf-8")
    assert len(U.__all__) == 19
    named = {*re.findall(r"(?:U|library)\.(\w+)", text)}
    assert named >= {*U.__all__}, {*U.__all__} - named


def test_only_the_library_scales_dropout_in_evaluation():
    x = torch.randn(8)
    assert unit.dropout(x, 0.5, training=False) is x
    torch.testing.assert_close(U.dropout(x, 0.5, training=False), x * 0.5**0.5)


def test_only_the_library_counts_ignored_targets_in_a_mean():
    logits, target = torch.randn(4, 6), torch.tensor([1, -100, 2, -100])
    torch.testing.assert_close(unit.cross_entropy(logits, target), 2 * U.cross_entropy(logits, target))
    torch.testing.assert_close(unit.cross_entropy(logits, target), torch.nn.functional.cross_entropy(logits, target))
