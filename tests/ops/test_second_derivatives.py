"""Second derivatives, vmap and forward mode: equal to torch's without rounding, an error with it."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap

from halfstep import formats, ops
from halfstep.errors import QuantizationError, RecipeError
from halfstep.ops.attention import stacked_linear
from halfstep.quant import Quantizer, Scales, get_quantizer
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import TENSOR
from halfstep.recipe import LinearSpec, Matmul
from tiny import assert_same


pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, in its forward mode

FP8 = Quantizer(formats.get("e4m3fn"))
EMPTY = LinearSpec()
SPECS = {
    "output": LinearSpec(Matmul(FP8, None)),
    "grad_input": LinearSpec(grad_input=Matmul(FP8, None)),
    "grad_weight": LinearSpec(grad_weight=Matmul(None, FP8)),
    "blocks": LinearSpec(*[Matmul(get_quantizer("mxfp4"), get_quantizer("mxfp4"))] * 3),
}


def tensors(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def second_derivatives(function, operands):
    """The gradients of a scalar function of the gradients."""
    first = torch.autograd.grad(function(*operands).tanh().float().square().sum(), operands, create_graph=True)
    return torch.autograd.grad(sum(g.float().tanh().square().sum() for g in first), operands)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (0, 5), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_second_derivatives_without_rounding_equal_torchs(shape, dtype, bias):
    operands = tensors(shape, (4, shape[-1]), *[(4,)] * bias, dtype=dtype)
    linear = lambda x, w, b=None: ops.linear(x, w, b, EMPTY)  # noqa: E731
    torch.testing.assert_close(second_derivatives(linear, operands), second_derivatives(F.linear, operands))


def test_third_derivatives_without_rounding_equal_torchs():
    operands = tensors((2, 3, 5), (4, 5), (4,), dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda x, w, b: ops.linear(x, w, b, EMPTY), operands)
    assert torch.autograd.gradcheck(lambda x, w, b: ops.linear(x, w, b, EMPTY), operands, check_forward_ad=True)
    x, w = tensors((3, 5), (4, 5), dtype=torch.float64)
    third = lambda f: jacrev(jacrev(jacrev(lambda x: f(x, w).pow(4).sum())))(x)  # noqa: E731
    torch.testing.assert_close(third(lambda x, w: ops.linear(x, w, None, EMPTY)), third(F.linear))


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_second_derivatives_in_16_bits_are_as_accurate_as_autocasts(dtype, autocast):
    operands = tensors((3, 5), (4, 5), (4,), dtype=torch.float32 if autocast else dtype)

    def under(function):
        def run(*inputs):
            with torch.autocast("cpu", dtype, enabled=autocast):
                return function(*inputs)

        return second_derivatives(run, operands)

    found, stock = under(lambda *t: ops.linear(*t, EMPTY)), under(F.linear)
    exact = second_derivatives(F.linear, [t.detach().double().requires_grad_() for t in operands])
    for actual, torchs, wanted in zip(found, stock, exact, strict=True):
        assert actual.dtype == torchs.dtype
        scale = wanted.abs().max()
        error, its = ((t.double() - wanted).abs().max() / scale for t in (actual, torchs))
        assert error <= max(2 * its, 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("last", [True, False])
def test_second_derivatives_of_rounded_matmuls_are_refused(name, last):
    """Also if the incoming gradient depends on nothing, as in the last layer."""
    x, w, b = tensors((3, 32), (4, 32), (4,))
    y = ops.linear(x, w, b, SPECS[name])
    loss = y.sum() if last else y.square().sum()
    gradient, its = torch.autograd.grad(loss, [x, w], create_graph=True)
    assert_same([gradient, its], torch.autograd.grad(loss_of(x, w, b, SPECS[name], last), [x, w]))
    for penalty in (gradient.square().sum(), its.square().sum()):
        with pytest.raises(
            RecipeError, match=r"second derivative .* operands are rounded, and it has none: keep these"
        ):
            torch.autograd.grad(penalty, [x, w], retain_graph=True, allow_unused=True)


def loss_of(x, w, b, spec, last):
    y = ops.linear(x, w, b, spec)
    return y.sum() if last else y.square().sum()


@pytest.mark.parametrize("spec", [LinearSpec(), SPECS["blocks"]], ids=["plain", "rounded"])
def test_second_derivatives_of_stacked_matmuls(spec):
    x, w = tensors((2, 3, 5, 32), (2, 3, 7, 32))
    stacked = lambda x, w: stacked_linear(x, w, spec, torch.float32)  # noqa: E731
    if not spec.rounds:
        torch.testing.assert_close(
            second_derivatives(stacked, [x, w]), second_derivatives(lambda x, w: x @ w.mT, [x, w])
        )
        return
    with pytest.raises(RecipeError, match="second derivative"):
        second_derivatives(stacked, [x, w])
    for each in (lambda: vmap(stacked)(x, w), lambda: jvp(stacked, (x, w), (x, w))):
        with pytest.raises(RecipeError, match="rounded"):
            each()


@pytest.mark.usefixtures("products")
def test_torch_func_transforms_without_rounding_equal_torchs():
    x, w, b = (t.detach() for t in tensors((3, 5), (4, 5), (4,)))
    ours, stock = (lambda x, w: ops.linear(x, w, b, EMPTY).tanh()), (lambda x, w: F.linear(x, w, b).tanh())
    for transform in (
        lambda f: grad(lambda w: f(x, w).sum())(w),
        lambda f: vjp(f, x, w)[1](torch.ones(3, 4)),
        lambda f: jvp(f, (x, w), (x, w)),
        lambda f: jacrev(f, argnums=(0, 1))(x, w),
        lambda f: vmap(grad(lambda w, x: f(x, w).sum()), (None, 0))(w, x),
        lambda f: hessian(lambda w: f(x, w).sum())(w),
    ):
        torch.testing.assert_close(transform(ours), transform(stock), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SPECS)
def test_torch_func_grad_of_rounded_matmuls_works_and_others_are_refused(name):
    x, w, b = (t.detach() for t in tensors((3, 32), (4, 32), (4,)))
    function = lambda x, w: ops.linear(x, w, b, SPECS[name]).tanh()  # noqa: E731
    leaf = w.clone().requires_grad_()
    expected = torch.autograd.grad(function(x, leaf).sum(), leaf)[0]
    assert_same(grad(lambda w: function(x, w).sum())(w), expected)
    for transform in (
        lambda: vmap(function, (0, None))(x, w),
        lambda: jacrev(function)(x, w),
        lambda: vmap(grad(lambda w, x: function(x, w).sum()), (None, 0))(w, x),
    ):
        with pytest.raises(RecipeError, match=r"vmap .* rounded; its scales could be .*: loop over the samples"):
            transform()
    with pytest.raises(RecipeError, match="second derivative"):
        grad(lambda x: grad(lambda x: function(x, w).sum())(x).square().sum())(x)
    with pytest.raises(RecipeError, match=r"forward-mode derivative .* take reverse mode"):
        jvp(function, (x, w), (x, w))


def test_batched_gradients_of_rounded_matmuls_are_refused():
    x, w, b = tensors((3, 32), (4, 32), (4,))
    with pytest.raises(RecipeError, match=r"is_grads_batched=True .* loop over the samples"):
        torch.autograd.grad(ops.linear(x, w, b, SPECS["blocks"]).sum(0), x, torch.eye(4), is_grads_batched=True)
    gradients = torch.autograd.grad(ops.linear(x, w, b, EMPTY).sum(0), x, torch.eye(4), is_grads_batched=True)
    torch.testing.assert_close(gradients[0], w.detach()[:, None].expand(4, 3, 32))


def test_fake_quantize_under_grad_and_vmap():
    x = torch.randn(3, 4)
    assert_same(grad(lambda x: ops.fake_quantize(x, FP8).square().sum())(x), 2 * FP8(x))
    assert_same(vmap(lambda x: ops.fake_quantize(x, FP8), in_dims=1, out_dims=1)(x), FP8(x))
    for quantizer in (get_quantizer("mxfp4"), Quantizer(formats.get("e4m3fn"), "stochastic")):
        with pytest.raises(QuantizationError, match=r"vmap goes over fake_quantize .* Loop over the samples"):
            vmap(lambda x, q=quantizer: ops.fake_quantize(x, q))(x)


def test_code_tensors_have_gradients_under_torch_func():
    codes = ops.CodeTensor.encode(torch.randn(4, 5), Quantizer(FP8.format, scales=Scales(TENSOR, get_scaling("rceil"))))
    for read in (lambda w: w, ops.values_of):
        assert_same(grad(lambda w, read=read: (read(w) ** 2).sum())(codes), 2 * codes.values())


@pytest.mark.parametrize("transform", [vmap, lambda f: grad(lambda x: f(x).sum())])
@pytest.mark.parametrize("function", [lambda x: ops.round_to(x, "e4m3fn"), lambda x: ops.quantize(x, "mxfp4").scale])
def test_kernels_refuse_tensors_of_torch_func(transform, function):
    with pytest.raises((RuntimeError, QuantizationError)):
        transform(function)(torch.randn(3, 32))
