"""Update formulas: traced once, they compute the same numbers on the host, in LLVM, and as Triton source."""

import ast
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from families import for_each
from halfstep.kernels.arithmetic import SQUARES, double, is_nan, maximum, norm, root, single, traced, where
from halfstep.kernels.cpu.optimizer import Numbers, prepare
from halfstep.kernels.gpu import source
from halfstep.optim import convert, update_rules
from halfstep.optim.rules.elementwise import elementwise
from halfstep.recipe import get_recipe
from kernels.inputs import ORDERS, near_a_tie
from oracles.numbers import same_bits


GROUPS = {
    "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "nadam": torch.optim.NAdam,
    "rmsprop": lambda p, **o: torch.optim.RMSprop(p, centered=True, **o),
    "sgd": lambda p, **o: torch.optim.SGD(p, momentum=0.9, nesterov=True, **o),
}  # fmt: skip


def shared_value(formula, *given):
    """The value of a formula of options a, b, ... that all elements share."""
    names = "abcdefgh"[: len(given)]
    program = traced(
        lambda weight, grad, moments, o: (weight * formula(*(o[name] for name in names)), {}), names, [], [], {}
    )
    (found,), _ = program.numbers(given)
    return found


@pytest.mark.parametrize(
    ("formula", "given"),
    [
        (lambda a, b: 1 - a * b, (0.1, 0.3)),
        (lambda a, b: a / (1 - b), (0.1, 0.999)),
        (lambda a, b: (2 - a) / 3 + -abs(b), (0.1, -0.7)),
        (lambda a, b: where(a > 1, b, 0.1) * a, (0.1, 0.3)),
        (lambda a, b: where(a < 1, b, 0.1) * root(a), (0.1, 0.3)),
        (lambda a, b: double(single(a)) * b, (0.1, 0.3)),
        (lambda a, b: maximum(a, b) + 0.1, (0.1, 0.3)),
        (lambda a, b: where(is_nan(a), b, a), (math.nan, 0.3)),
    ],
)
def test_shared_values_are_computed_in_float64_and_rounded_once(formula, given):
    same_bits(torch.tensor(shared_value(formula, *given)), torch.tensor(np.float32(formula(*given))))


def test_a_shared_division_by_zero_is_infinity():
    assert shared_value(lambda a, b: a / b, 1.0, 0.0) == math.inf


def test_a_shared_value_is_float32_where_it_meets_an_element():
    """Also for torch, 0.1 in float64 is not 0.1 in float32."""
    program = traced(lambda w, g, m, o: (w * (o["a"] * 3), {}), ["a"], [], [], {})
    assert program.numbers([0.1])[0] == (np.float32(0.1 * 3),)
    assert [operation.name for operation in program.element.operations] == ["mul"]


def test_a_repeated_operation_is_traced_once():
    program = traced(lambda w, g, m, o: ((g * g + w) + g * g, {}), [], [], [], {})
    assert len(program.element.operations) == 3


@pytest.mark.parametrize(
    ("formula", "words"),
    [
        (lambda w, g, m, o: (w if o["a"] > 0 else g, {}), "branches on a value.*Expected `where`"),
        (lambda w, g, m, o: (w * float(o["a"]), {}), "to a Python float. Expected floats"),
        (lambda w, g, m, o: (single(double(w) * 2), {}), "takes an element to float64. Expected float32"),
        (lambda w, g, m, o: (single(o["a"]), {}), "scalars that all elements share. Expected a weight"),
        (lambda w, g, m, o: (0.0, {}), "scalars that all elements share. Expected a weight"),
        (lambda w, g, m, o: (where(g == 0, w, g), {}), "uses __eq__. Expected .*x == 0 is abs"),
        (lambda w, g, m, o: (w - g**2, {}), r"uses __pow__. Expected .*x\*\*2 is x \* x"),
        (lambda w, g, m, o: (w - 2**g, {}), "uses __rpow__. Expected"),
        (lambda w, g, m, o: (w - torch.sqrt(g), {}), "uses torch's sqrt. Expected .*root"),
        (lambda w, g, m, o: (w - g.sign(), {}), "uses .sign. Expected"),
        (lambda w, g, m, o: (where((g > 0) & (w > 0), w, g), {}), "uses __and__. Expected"),
        (lambda w, g, m, o: (w - g, {"other": g}), r"gives the moments \['other'\]. Expected \[\]"),
    ],
)
def test_unsupported_formulas_are_refused(formula, words):
    with pytest.raises(TypeError, match=words):
        traced(formula, ["a"], [], [], {})


def options_of(rule):
    make = GROUPS.get(rule.name) or rule.torch_class
    group = make([torch.nn.Parameter(torch.ones(2))], lr=0.1, weight_decay=0.1).param_groups[0]
    return rule.options(group)


@pytest.mark.parametrize("rule", [rule for rule in update_rules().values() if rule.options], ids=lambda rule: rule.name)
def test_generated_triton_source_uses_only_exact_operations(rule):
    """Divisions and roots must be rounded once (`/` only in float64); and every operation is in the source."""
    options = options_of(rule)
    texts = source.moving(options.program), source.finding(options.program, 1)
    for text, part in zip(texts, (options.program.element, options.program.scalars), strict=True):
        nodes = list(ast.walk(ast.parse(text)))
        in_float64 = sum(one.name == "div" and one.kind == "double" for one in part.operations)
        assert sum(isinstance(node, ast.Div) for node in nodes) == in_float64
        called = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        assert not called & {"sqrt", "exp", "exp2", "log", "log2", "rsqrt", "fma"}
    assert texts[0].count("v") >= len(options.program.element.operations)


def test_the_generated_triton_source_of_sgd():
    rule = update_rules()["sgd"]
    group = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9).param_groups[0]
    assert source.moving(rule.options(group).program) == (
        "@triton.jit\n"
        "def moved(weight, grad, first, second, numbers):\n"
        "    n0 = tl.load(numbers + 0)\n"
        "    n1 = tl.load(numbers + 1)\n"
        "    n2 = tl.load(numbers + 2)\n"
        "    n3 = tl.load(numbers + 3)\n"
        "    v0 = first * n0\n"
        "    v1 = grad * n1\n"
        "    v2 = v0 + v1\n"
        "    v3 = n2 > 0.5\n"
        "    v4 = tl.where(v3, v2, grad)\n"
        "    v5 = v4 * n3\n"
        "    v6 = weight - v5\n"
        "    return v6, v4, second\n"
    )


def test_a_changed_formula_changes_the_cpu_kernel_and_the_gpu_source():
    """The CPU's kernel and the GPU's source are made of it, and of nothing else."""
    found = []
    for factor in (1.0, 3.0):
        rule = elementwise(
            "made_up", torch.optim.SGD, lambda group: (),
            lambda weight, grad, moments, o, factor=factor: (weight - grad * factor * o.lr, {}),
            lambda group: {"lr": float(group["lr"])},
        )  # fmt: skip
        parameter = torch.nn.Parameter(torch.zeros(20))
        optimizer = convert(torch.optim.SGD([parameter], lr=0.5), get_recipe("fp32"), {})
        optimizer.rule = replace(optimizer.rule, fused=rule.fused, numbers=rule.numbers)
        parameter.grad = torch.ones(20)
        optimizer.step()
        assert optimizer._together.ways[0].fused is not None
        found.append((parameter[0].item(), source.moving(rule.options(optimizer.param_groups[0]).program)))
    assert [value for value, _ in found] == [-0.5, -1.5]
    assert [text.count("* 3.0") for _, text in found] == [0, 1]


@for_each("size", [0, 1, 2, SQUARES - 1, SQUARES, SQUARES + 1, 40 * SQUARES + 7, SQUARES * (SQUARES + 3) + 5])
def test_norm_is_within_one_ulp_of_the_exact_norm(size):
    """Compared with Python's exactly rounded sum, also for numbers whose squares overflow float32."""
    for factor in (1.0, 1e-30, 1e30):
        numbers = torch.randn(size, generator=torch.Generator().manual_seed(5)) * factor
        expected = np.float32(math.sqrt(math.fsum(number * number for number in numbers.tolist())))
        found = norm(numbers)
        assert found.dtype == torch.float32
        assert abs(found.item() - expected) <= np.spacing(expected)


@for_each("indices,expected", ORDERS)
def test_norm_sums_in_the_documented_order(indices, expected):
    assert norm(near_a_tie(indices)).item() == expected


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
@for_each("indices,expected", ORDERS)
def test_the_cpu_kernel_sums_norms_in_the_documented_order(threads, indices, expected):
    def element(weight, grad, moments, o):
        return weight - norm(weight) * (grad * o.lr), {}

    program, _ = lars({**GROUP, "lr": 1.0}, element, elementwise=False)
    weight, given = near_a_tie(indices), (1.0, 1.0, 0.0)
    numbers = Numbers(program, np.float32(1.0), given, program.numbers(given)[0])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        grad = torch.ones_like(weight)
        assert prepare(((), ()), weight, "none", {}, grad, {}, "nearest_even")(grad, numbers, None)
    finally:
        torch.set_num_threads(before)
    assert weight[0] == 1.0 - expected


def lars(group, element=None, **more):
    """A user's rule: SGD whose step length is a fraction of the weight's norm."""

    def moved(weight, grad, moments, o):
        return weight - grad * (norm(weight) / (norm(grad + weight * o.decay) + 1e-9) * o.lr), {}

    given = lambda group: {"lr": float(group["lr"]), "decay": float(group["weight_decay"])}  # noqa: E731
    rule = elementwise("made_up", torch.optim.SGD, lambda group: (), element or moved, given, **more)
    return rule.options(group).program, rule


GROUP = {"lr": 0.5, "weight_decay": 0.1}


def test_norms_are_inputs_of_the_elements_after_the_shared_values():
    program, _ = lars(GROUP, elementwise=False)
    assert (program.normed.inputs, len(program.normed.results)) == (4, 2)  # learning rate, decay, weight, gradient
    assert program.element.inputs == 6


def test_a_rule_with_norms_is_fused_and_must_declare_elementwise_false():
    _, rule = lars(GROUP, elementwise=False)
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 2000))
    grad, start = torch.linspace(0, 1, 2000), parameter.detach().clone()
    optimizer = convert(torch.optim.SGD([parameter], **GROUP), get_recipe("fp32"), {})
    optimizer.rule = replace(optimizer.rule, fused=rule.fused, numbers=rule.numbers)
    parameter.grad = grad
    optimizer.step()
    assert optimizer._together.ways[0].fused is not None
    same_bits(parameter.detach(), rule.update(start, grad, {}, 1, GROUP)[0])
    length = torch.linalg.vector_norm(grad.double() + start.double() * 0.1)
    expected = start.double() - grad.double() * start.double().norm() / length * 0.5
    torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(TypeError, match="Expected its rule with elementwise=False"):
        lars(GROUP)


@pytest.mark.parametrize(
    ("formula", "words"),
    [
        (lambda w, g, m, o: (w - norm(g / norm(g)), {}), "takes a norm of a norm, .* Expected norms of"),
        (lambda w, g, m, o: (w - g * norm(o.lr), {}), "norm of a scalar that all elements share. Expected"),
    ],
)
def test_unsupported_norms_are_refused(formula, words):
    with pytest.raises(TypeError, match=words):
        lars(GROUP, formula, elementwise=False)


def test_formula_functions_accept_python_numbers_and_tensors():
    tensor = torch.tensor([1.0, torch.nan, 4.0])
    same_bits(maximum(tensor, torch.tensor([2.0, 1.0, torch.nan])), torch.tensor([2.0, torch.nan, torch.nan]))
    same_bits(where(True, 2.0, tensor), torch.full((3,), 2.0))
    same_bits(where(tensor > 2, 0.0, tensor), torch.tensor([1.0, torch.nan, 0.0]))
    assert (root(4.0), double(0.5), single(0.1)) == (2.0, 0.5, float(np.float32(0.1)))
    assert double(torch.ones(1)).dtype == torch.float64
