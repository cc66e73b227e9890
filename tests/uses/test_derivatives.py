"""Second derivatives, and torch.func."""

import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, jacrev, vmap
from ways import MUST, ROUNDED, ROUNDING, StockFailsToo, prepare, relative_distance, start_of, tolerance, way

from halfstep.recipe import get_recipe
from tiny import batch


def parameters_of(model):
    """The detached parameters as a dict, as torch.func takes them."""
    return {key: parameter.detach() for key, parameter in model.named_parameters()}


def as_float32(tensors):
    return {key: value.detach().float() for key, value in tensors.items()}


def assert_near_fp32(name, found, expected, slack=1.0):
    distance = relative_distance(as_float32(found), as_float32(expected))
    assert distance <= max(slack * tolerance(name), 2e-6), f"{distance:.4f} from fp32"
    assert distance > ROUNDED or name == "fp32", "nothing was rounded"


def pair(name):
    """A prepared model and a stock one."""
    return prepare(name, start_of(name))[0], start_of(name)


def loss_of(model):
    x, y = batch()

    def loss(parameters):
        return F.mse_loss(functional_call(model, parameters, (x,)), y)

    return loss


@way()
def test_input_gradients(name):
    """Gradients of the input: `torch.autograd.grad(model(x).sum(), x)`, for saliency or a perturbation."""
    found = []
    for model in pair(name):
        x = batch()[0].requires_grad_()
        found.append({"x": torch.autograd.grad(model(x).square().sum(), x)[0]})
    assert_near_fp32(name, *found, slack=2)


@way(may_refuse=ROUNDING)
def test_double_backward(name):
    """Double backward: `create_graph=True` and a second derivative, where no matmul is rounded."""
    found = []
    for model in pair(name):
        x = batch()[0].requires_grad_()
        first = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0]
        parameters = dict(model.named_parameters())
        second = torch.autograd.grad(first.square().sum(), list(parameters.values()), allow_unused=True)
        found.append({k: v for k, v in zip(parameters, second, strict=True) if v is not None})
    assert_near_fp32(name, *found, slack=3)


@way()
def test_functional_call(name):
    """torch.func.functional_call: of the prepared model, with parameters in the dtypes that it stores."""
    found = []
    for model in pair(name):
        halves = {key: value * 0.5 for key, value in parameters_of(model).items()}
        found.append({"y": functional_call(model, halves, (batch()[0],))})
    assert_near_fp32(name, *found, slack=2)
    model = prepare(name, start_of(name))[0]
    unchanged = functional_call(model, parameters_of(model), (batch()[0],))
    torch.testing.assert_close(unchanged, model(batch()[0]), rtol=0, atol=0)


@way()
def test_func_grad(name):
    """torch.func.grad: of a loss by `functional_call`, as under stock autocast."""
    found = [grad(loss_of(model))(parameters_of(model)) for model in pair(name)]
    assert_near_fp32(name, *found, slack=2)


@way()
def test_func_jacrev(name):
    """torch.func.jacrev: of a loss by `functional_call`, `chunk_size=1` (without it torch vmaps the backward pass)."""
    found = [jacrev(loss_of(model), chunk_size=1)(parameters_of(model)) for model in pair(name)]
    assert_near_fp32(name, *found, slack=2)


def per_sample(model):
    def loss(parameters, x, y):
        return F.mse_loss(functional_call(model, parameters, (x[None],)).float(), y[None])

    return vmap(grad(loss), in_dims=(None, 0, 0))(parameters_of(model), *batch())


@way(may_refuse=MUST - {"fp32"})
def test_vmap(name):
    """torch.func.vmap: sample by sample, `vmap(grad(loss), in_dims=(None, 0, 0))`; a whole tensor shares a scale."""
    ours, stock = pair(name)
    try:
        found = per_sample(ours)
    except RuntimeError:
        raise_if_stock_fails(name)
        raise
    assert all(value.shape[0] == 12 for value in found.values())
    assert_near_fp32(name, found, per_sample(stock), slack=2)


def raise_if_stock_fails(name):
    """Raise StockFailsToo if torch's own autocast fails too."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(get_recipe(name).compute)
    if get_recipe(name).weights == "fp32" and name not in ROUNDING and dtype is not None:
        try:
            with torch.autocast("cpu", dtype):
                per_sample(start_of(name))
        except RuntimeError as error:
            raise StockFailsToo(str(error)) from error
