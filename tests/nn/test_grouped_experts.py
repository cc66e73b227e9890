"""Stacked experts equal one linear layer per expert: the same bits, forward and backward, on every path."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import halfstep
from families import for_each
from halfstep.nn.product import spec_of
from halfstep.ops.linear import supports_grouped
from oracles.numbers import identical


GROUPED = ("fp8-rowwise", "fp8-block", "mxfp8", "mxfp8-floor", "mxfp4")
LOOPED = ("fp8-current", "fp8-rowwise-gw-hp", "fp8-delayed", "nvfp4", "mxfp4-rht", "fp4-wang", "nf4", "bf16-accumulate")
WIDTH, INNER = 40, 64


class Stack(nn.Module):
    """All experts' matrices in two parameters, as transformers has them."""

    def __init__(self, experts, transposed=False, bias=False):
        super().__init__()
        config = MixtralConfig(hidden_size=WIDTH, intermediate_size=INNER, num_local_experts=experts)
        config._experts_implementation = "eager"
        torch.manual_seed(0)
        self.experts = own = MixtralExperts(config)
        own.has_bias, own.is_transposed = bias, transposed
        for name, parameter in [*own.named_parameters()]:
            value = torch.randn(parameter.shape) * 0.3
            setattr(own, name, nn.Parameter(value.mT.contiguous() if transposed else value))
            if bias:
                setattr(own, f"{name}_bias", nn.Parameter(torch.randn(value.shape[:2])))

    def forward(self, x, index, weights):
        return self.experts(x, index, weights)


class Layers(nn.Module):
    """The same experts as linear layers, called one by one."""

    def __init__(self, stack):
        super().__init__()
        self.act_fn, layers = stack.act_fn, {"up": nn.ModuleList(), "down": nn.ModuleList()}
        self.up, self.down = layers["up"], layers["down"]
        for part, name in (("up", "gate_up_proj"), ("down", "down_proj")):
            for expert, matrix in enumerate(getattr(stack, name).detach()):
                matrix = (matrix.t() if stack.is_transposed else matrix).contiguous()
                layer = nn.Linear(*matrix.shape[::-1], bias=stack.has_bias)
                layer.weight = nn.Parameter(matrix)
                if stack.has_bias:
                    layer.bias = nn.Parameter(getattr(stack, f"{name}_bias")[expert].detach().clone())
                layers[part].append(layer)

    def forward(self, x, index, weights):
        total = torch.zeros_like(x)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, slot = torch.where(index == expert)
            if len(token):
                gate, linear = up(x[token]).chunk(2, -1)
                output = down(self.act_fn(gate) * linear) * weights[token, slot, None]
                total = total.index_add(0, token, output.to(total.dtype))
        return total


def routed(experts, slots, tokens=70, hit=None, dtype=torch.float32):
    """x, the experts of each token, and their weights. Experts from `hit` on get no token."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, WIDTH, generator=generator).to(dtype).requires_grad_()
    index = torch.rand(tokens, hit or experts, generator=generator).topk(slots).indices
    return x, index, torch.rand(tokens, slots, generator=generator, requires_grad=True)


def cancelling(stack, x):
    """Give the first matmul large terms that cancel and small ones between them: float32 sums in another order, or on
    other hardware units, change the first bits."""
    with torch.no_grad():
        for matrix, sign in ((x, 1), (stack.experts.gate_up_proj, -1)):
            large = 200 + 20 * torch.randn_like(matrix[..., :10])
            matrix[..., :10], matrix[..., 10:20], matrix[..., 20:30] = large, matrix[..., 10:20] / 4, sign * large
    return stack


def outputs_and_grads(model, x, index, weights):
    """The output, and the gradients of x, of the routing weights, and of each expert's matrices and biases."""
    y = model(x, index, weights)
    given = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    of_x, of_weights, *others = torch.autograd.grad(
        y, [x, weights, *model.parameters()], given, allow_unused=True, materialize_grads=True
    )
    if isinstance(model, Layers):
        stacks = {}
        for (name, _), grad in zip(model.named_parameters(), others, strict=True):
            stacks.setdefault(name.replace(name.split(".")[1], "*"), []).append(grad)
        up, down = [{k: torch.stack(v) for k, v in stacks.items() if k.startswith(part)} for part in ("up", "down")]
        others = [*up.values(), *down.values()]
    else:
        named = {name: grad for (name, _), grad in zip(model.named_parameters(), others, strict=True)}
        turned = model.experts.is_transposed
        others = [
            named[f"experts.{name}"].mT if turned and not name.endswith("bias") else named[f"experts.{name}"]
            for part in ("gate_up_proj", "down_proj")
            for name in (part, f"{part}_bias")
            if f"experts.{name}" in named
        ]
    return [y, of_x, of_weights, *others]


def outputs_and_grads_under(name, model, *inputs):
    halfstep.apply(model, name)
    return outputs_and_grads(model, *inputs)


def both(name, stack, *inputs, train=True):
    """outputs_and_grads of a stack and of its experts' linear layers under a recipe."""
    layers = Layers(stack.experts)
    for model in (stack, layers):
        halfstep.apply(model, name)
        model.train(train)
    return outputs_and_grads(stack, *inputs), outputs_and_grads(layers, *inputs)


def assert_equals_layers(name, stack, *inputs, train=True):
    ours, theirs = both(name, stack, *inputs, train=train)
    assert len(ours) == len(theirs)
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert identical(one, other), (name, index)


def test_which_recipes_round_all_experts_in_one_call():
    for names, wanted in ((GROUPED, True), (LOOPED, False)):
        for name in names:
            model = Stack(2)
            halfstep.apply(model, name)
            assert supports_grouped(spec_of(model.experts), torch.ones(1, WIDTH)) == wanted, name


@pytest.mark.quick("mxfp4", "fp8-current")
@pytest.mark.parametrize("name", [*GROUPED, "fp8-current"])
def test_a_stack_equals_one_linear_layer_per_expert(name):
    """Three experts per token; experts without tokens; one expert with a single token and one with all others."""
    assert_equals_layers(name, Stack(9), *routed(9, 3, hit=7))
    assert_equals_layers(name, Stack(5), *routed(5, 2, hit=2))  # most experts get no token
    x, _, weights = routed(3, 1)
    assert_equals_layers(name, Stack(3, bias=True), x, torch.tensor([[0], *[[2]] * 69]), weights)
    assert_equals_layers(name, Stack(3, transposed=True), *routed(3, 2, dtype=torch.bfloat16))


@for_each("name", GROUPED, fast=["fp8-rowwise", "mxfp4"])
def test_few_rows_in_evaluation_are_summed_in_the_layers_order(name):
    """Compared in float32's last bits."""
    wide = replace(halfstep.get_recipe(name), name="wide", compute="fp32")
    assert_equals_layers(wide, Stack(4), *routed(4, 2, tokens=7), train=False)


@pytest.mark.quick("fp8-rowwise")
@pytest.mark.parametrize("name", ["mxfp8", "fp8-rowwise"])
def test_an_expert_with_subnormal_weights_changes_no_bit_of_others(name):
    """Only its own operand is emulated in float32."""
    stack, (x, *routes) = Stack(3), routed(3, 2)
    cancelling(stack, x)
    with torch.no_grad():
        stack.experts.gate_up_proj[1] *= 2.0**-125
    assert_equals_layers(name, stack, x, *routes)


def test_square_tiles_do_not_straddle_experts():
    """128x128 tiles of matrices of 40, 64 and 128 rows."""
    own = Stack(3).experts
    assert [p.shape[1] for p in (own.gate_up_proj, own.down_proj)] == [2 * INNER, WIDTH]
    assert_equals_layers("fp8-block", Stack(3), *routed(3, 2))


def test_tokens_of_experts_on_other_ranks_get_zeros():
    """An index at or above the number of experts means an expert on another rank."""
    model, (x, index, weights) = Stack(2), routed(4, 2)
    halfstep.apply(model, "mxfp8")
    y = model(x, index, weights)
    nowhere = (index >= 2).all(1)
    assert nowhere.any()
    assert torch.equal(y[nowhere], torch.zeros_like(y[nowhere]))
    assert not model(x, index + 2, weights).any()  # no expert has a row


def test_a_batch_without_tokens_gives_an_empty_output_and_zero_gradients():
    for name in ("mxfp8", "fp8-current"):
        y, of_x, _, *grads = outputs_and_grads_under(name, Stack(3), *routed(3, 2, tokens=0))
        assert y.shape == of_x.shape == (0, WIDTH)
        assert all(not grad.any() for grad in grads)


def test_frozen_experts_pass_the_same_gradients_to_their_inputs():
    name, (x, index, weights) = "fp8-rowwise", routed(3, 2)
    model, frozen = Stack(3), Stack(3)
    frozen.requires_grad_(False)
    grads = []
    for each in (model, frozen):
        halfstep.apply(each, name)
        grads.append(torch.autograd.grad(each(x, index, weights).square().sum(), [x, weights]))
    assert all(identical(one, other) for one, other in zip(*grads, strict=True))


def test_a_second_derivative_is_refused():
    model, (x, index, weights) = Stack(3), routed(3, 2)
    halfstep.apply(model, "mxfp8")
    [first] = torch.autograd.grad(model(x, index, weights).square().sum(), x, create_graph=True)
    with pytest.raises(halfstep.HalfstepError, match="a second derivative"):
        first.square().sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, in its forward mode
@pytest.mark.parametrize("name", ["mxfp8", "fp8-current"])
def test_a_forward_mode_derivative_is_refused(name):
    model, (x, index, weights) = Stack(3), routed(3, 2)
    halfstep.apply(model, name)
    with forward_ad.dual_level(), pytest.raises(halfstep.HalfstepError, match="forward-mode derivative"):
        model(forward_ad.make_dual(x.detach(), torch.ones_like(x)), index, weights)


def test_lora_on_the_experts_parameters_trains():
    """PEFT adds a low-rank product to each matrix; the output equals that of the merged weights."""
    peft = pytest.importorskip("peft")
    name, stack, inputs = "fp8-rowwise", Stack(3), routed(3, 2)
    plain = copy.deepcopy(stack)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    model = peft.get_peft_model(stack, peft.LoraConfig(r=2, target_modules=[], target_parameters=targets))
    generator = torch.Generator().manual_seed(3)
    adapters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in adapters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    merged = copy.deepcopy(model).merge_and_unload()
    for mine, its in zip(plain.parameters(), merged.parameters(), strict=True):
        mine.data = its.detach().clone()
    halfstep.apply(model, name)
    halfstep.apply(plain, name)
    y = model(*inputs)
    assert identical(y, plain(*inputs))
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in adapters.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does, as it traces
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch reads it
@pytest.mark.parametrize("name", ["fp8-current", "mxfp8"])
def test_compiled_experts_equal_eager_without_retracing(name):
    """For any number of tokens per expert."""
    model = nn.ModuleDict({"up": nn.Linear(WIDTH, WIDTH), "stack": Stack(4)})
    model.forward = lambda x, index, weights: model["stack"](model["up"](x), index, weights)
    halfstep.apply(model, name)
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(4):
        x, index, weights = routed(4, 2)
        index = (index + step) % 4 if step % 2 else index
        with torch._dynamo.config.patch(error_on_recompile=step > 1):
            ours, theirs = (call_outputs_and_grads(each, x, index, weights, model) for each in (compiled, model))
        assert all(identical(one, other) for one, other in zip(ours, theirs, strict=True))


def call_outputs_and_grads(call, x, index, weights, model):
    y = call(x, index, weights)
    return [y, *torch.autograd.grad(y.square().sum(), [x, weights, *model.parameters()])]
