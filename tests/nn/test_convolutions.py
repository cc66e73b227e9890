"""Convolution layers under rules: torch's results of rounded operands, for every padding and kind of layer."""

import copy

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import halfstep
from families import for_each, slow_unless
from halfstep import formats, ops, recipe
from halfstep.errors import ModelError, RecipeError
from halfstep.lab.tasks.detection import SSD
from halfstep.lab.tasks.gan import DCGAN
from halfstep.lab.tasks.vision import CNN
from halfstep.quant import Quantizer, get_quantizer
from halfstep.quant.tile import TENSOR
from halfstep.recipe import Recipe, Rule, linear_spec
from tiny import EVERY, PROJECTED, SMOOTH, assert_same, fast_and_every, prepared, reverted, train


_aten = torch.ops.aten
ROUNDING = [n for n in EVERY if n not in SMOOTH and any(r.linear.quantizers for r in recipe.get_recipe(n).rules)]
ROTATED = [n for n in ROUNDING if any(r.linear.rotates for r in recipe.get_recipe(n).rules)]
WINDOWED = "a convolution: its window sums over positions that the rule's Hadamard transform would mix"
STATEFUL = [n for n in ROUNDING if any(r.linear.states for r in recipe.get_recipe(n).rules)]
FP32 = Quantizer(formats.get("fp32"))
IDENTITY = Recipe("identity", "", "", rules=(Rule("*", linear_spec(FP32, FP32, FP32)),))
LAYERS = {
    "conv1d, same": (lambda: nn.Conv1d(3, 4, 4, padding="same", dilation=3), (2, 3, 9)),
    "conv2d, same, even": (lambda: nn.Conv2d(3, 4, (2, 3), padding="same"), (2, 3, 5, 6)),
    "conv2d, valid": (lambda: nn.Conv2d(3, 4, 3, padding="valid", stride=2), (2, 3, 7, 6)),
    "conv2d, reflect": (lambda: nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="reflect", groups=2), (2, 4, 7, 5)),
    "conv2d, circular, same": (lambda: nn.Conv2d(4, 4, 2, padding="same", padding_mode="circular"), (2, 4, 7, 5)),
    "conv2d, depthwise": (lambda: nn.Conv2d(4, 8, 3, padding=1, groups=4, bias=False), (2, 4, 7, 5)),
    "conv2d, one place": (lambda: nn.Conv2d(4, 8, 1), (2, 4, 7, 5)),
    "conv2d, one place, padded": (lambda: nn.Conv2d(4, 8, 1, padding=1, padding_mode="replicate"), (2, 4, 7, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, dilation=2), (1, 2, 4, 4, 4)),
    "transposed1d": (lambda: nn.ConvTranspose1d(3, 4, 4, stride=2, padding=1), (2, 3, 5)),
    "transposed2d": (lambda: nn.ConvTranspose2d(4, 2, 3, stride=2, output_padding=1, groups=2), (2, 4, 3, 3)),
    "transposed3d": (lambda: nn.ConvTranspose3d(2, 2, 2, stride=2, bias=False), (1, 2, 3, 3, 2)),
}


def passes(model, x, **options):
    x = x.clone().requires_grad_()
    y = model(x, **options)
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@for_each("case", LAYERS)
def test_convolutions_of_operands_rounded_to_float32_match_torch(case):
    make, shape = LAYERS[case]
    stock, x = make(), torch.randn(shape)
    model = copy.deepcopy(stock)
    assert halfstep.apply(model, IDENTITY).quantized == ("",)
    for found, expected in zip(passes(model, x), passes(stock, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert_same(model(x[0]), model(x[:1])[0])
    if stock.transposed:
        size = (
            [length + 1 for length in stock(x).shape[2:]]
            if max(stock.stride) > 1 and not stock.output_padding[0]
            else None
        )
        torch.testing.assert_close(model(x, output_size=size), stock(x, output_size=size), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@for_each("case", LAYERS)
def test_padding_applies_to_the_rounded_values(case):
    """bf16-truncate equals the stock layer in float32 of operands that numpy truncated to 16 bits."""
    make, shape = LAYERS[case]
    stock, x = make(), torch.randn(shape)
    model = copy.deepcopy(stock)
    halfstep.apply(model, "bf16-truncate")
    cut = copy.deepcopy(stock)
    cut.weight.data = truncated(stock.weight)
    with torch.no_grad():
        torch.testing.assert_close(model(x), cut(truncated(x)), rtol=2**-7, atol=2**-7)
        assert not torch.equal(model(x), stock(x).bfloat16().float())


def truncated(x):
    return torch.from_numpy((x.detach().contiguous().numpy().view(np.uint32) & 0xFFFF0000).view(np.float32))


# ---- the operands that reach torch's convolutions --------------------------------------------------------------------


class Operands(TorchDispatchMode):
    """Records the operands of every convolution by matmul: (left, right)."""

    def __init__(self):
        super().__init__()
        self.seen = {"output": [], "grad_input": [], "grad_weight": []}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _aten.convolution.default:
            self.seen["output"].append(args[:2])
        if func is _aten.convolution_backward.default:
            of_input, of_weight, _ = args[10]
            assert of_input != of_weight
            self.seen["grad_input" if of_input else "grad_weight"].append((args[0], args[2] if of_input else args[1]))
        return func(*args, **(kwargs or {}))


def is_rounded(values, raw, quantizer):
    """Whether values equal raw rounded by numpy and ml_dtypes: truncated, or divided by the tensor's scale and cast."""
    values, raw = values.float(), raw.detach().float()
    if quantizer.scales is None:
        assert quantizer.rounding == "toward_zero"
        return torch.equal(values, truncated(raw))
    types = {"e4m3fn": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
    dtype = next(types[name] for name in types if formats.get(name) == quantizer.format)
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    factor = largest / raw.abs().max().numpy()
    scaled = np.clip(raw.contiguous().numpy() * factor, -largest, largest)
    return np.array_equal(values.contiguous().numpy(), scaled.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("name", ["bf16-truncate", "fp8-current"])
def test_operands_of_forward_and_both_gradients_are_rounded(name):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(8, 4, 3, stride=2))
    halfstep.apply(model, name)
    spec = recipe.get_recipe(name).rules[-1].linear
    inputs, grads = [], []
    for layer in (model[0], model[2]):
        layer.register_forward_hook(lambda _, args, y: (inputs.append(args[0]), y.register_hook(grads.append), None)[2])
    x = torch.randn(2, 3, 5, 5).requires_grad_()
    with Operands() as operands:
        model(x).square().mean().backward()
    weights = [model[0].weight, model[2].weight]
    expected = {
        "output": (spec.output, list(zip(inputs, weights, strict=True))),
        "grad_input": (spec.grad_input, list(zip(grads, reversed(weights), strict=True))),
        "grad_weight": (spec.grad_weight, list(zip(grads, reversed(inputs), strict=True))),
    }
    for product, (matmul, raw) in expected.items():
        assert len(operands.seen[product]) == 2
        for found, given in zip(operands.seen[product], raw, strict=True):
            for values, tensor, quantizer in zip(found, given, (matmul.lhs, matmul.rhs), strict=True):
                assert is_rounded(values, tensor, quantizer), (product, quantizer.format.name)


@pytest.mark.quick("fp8-current")
@pytest.mark.parametrize(
    "name",
    slow_unless({"fp8-current", "bf16-truncate"}.__contains__, [n for n in ROUNDING if n not in ROTATED]),
)
def test_every_convolution_of_the_labs_networks_gets_rounded_operands(name):
    """The classifier, the detector, and the generator with its judge. Each convolution is reported, and its operands
    are in the recipe's formats, up to a power of two or a tensor's scale. Operands with a float32 scale per row are
    left out, since scaled values have no fixed number of bits (tests/ops/test_rounded_convolution.py)."""
    significant = {q.format.significant_bits for r in recipe.get_recipe(name).rules for q in r.linear.quantizers}
    networks = {
        "cnn": (CNN(10, 8), (torch.randn(4, 1, 8, 8),)),
        "ssd": (SSD(3, 2, 8), (torch.randn(2, 1, 32, 32),)),
        "dcgan": (DCGAN(8), (torch.randn(4, 32), torch.rand(4, 1, 8, 8))),
    }
    for kind, (model, inputs) in networks.items():
        paths = {p for p, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d))}
        report = halfstep.apply(model, name)
        assert paths <= {*report.quantized}, kind
        with Operands() as operands:
            outputs = model(*inputs)
            sum(y.square().mean() for y in (outputs if isinstance(outputs, tuple) else (outputs,))).backward()
        for product, pairs in operands.seen.items():
            assert len(pairs) >= len(paths) - 1, (kind, product)  # the image needs no gradient
            whole = recipe.get_recipe(name).rules[-1].linear
            matmul = getattr(whole, product)
            for values, quantizer in (
                (v, q) for pair in pairs for v, q in zip(pair, (matmul.lhs, matmul.rhs), strict=True)
            ):
                if quantizer is not None and not has_wide_scales(quantizer):
                    mantissas = torch.frexp(values.float())[0] * 2.0 ** max(significant)
                    assert torch.equal(mantissas, mantissas.round()), (kind, product)


def has_wide_scales(quantizer):
    """Whether tiles smaller than the tensor have scales that are not powers of two."""
    scales = quantizer.scales
    return scales is not None and scales.tile != TENSOR and not scales.rule.exact


# ---- how a model is used ---------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, again=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv1d(2, 6, 3, padding=1, padding_mode="circular")
        self.inner, self.up, self.head = nn.Conv1d(6, 6, 2, groups=3), nn.ConvTranspose1d(6, 4, 2), nn.Linear(16, 4)
        self.again = again

    def features(self, x):
        return self.up(self.inner(self.first(x).relu_()).tanh())

    def forward(self, x):
        x = x.view(-1, 2, 4)
        found = checkpoint(self.features, x, use_reentrant=False) if self.again else self.features(x)
        return self.head(found.flatten(1))


@for_each("name", ["fp8-delayed"])
def test_checkpointed_copied_and_reverted_networks_give_the_same_bits(name):
    reverted(name, Net)


@pytest.mark.slow
@for_each("name", [n for n in EVERY if n not in {*SMOOTH, *PROJECTED}])  # there is no linear layer to project
def test_checkpointed_copied_and_reverted_networks_under_every_recipe(name):
    test_checkpointed_copied_and_reverted_networks_give_the_same_bits.__wrapped__(name)


@pytest.mark.quick("fp8-delayed", "fp8-delayed-megatron")
@pytest.mark.parametrize("name", STATEFUL)
def test_each_operand_has_a_scaling_state_that_only_training_updates(name):
    model, optimizer, scaler = prepared(name, Net())
    spec = recipe.get_recipe(name).rules[-1].linear
    train(model, optimizer, scaler, 2)
    for layer in (model.first, model.inner, model.up):
        states = {key.removeprefix("_halfstep_scaling_"): state for key, state in layer.named_buffers()}
        assert states.keys() == spec.states.keys()
        assert all(float(state[0]) != 1 for state in states.values())
    before = {key: state.clone() for key, state in model.named_buffers()}
    model.eval()
    with torch.no_grad():
        model(torch.randn(3, 8) * 100)
    assert_same(dict(model.named_buffers()), before)


@pytest.mark.parametrize("name", [n for n in EVERY if any(r.linear.accumulates for r in recipe.get_recipe(n).rules)])
def test_a_rule_with_an_accumulator_keeps_convolutions_unquantized(name):
    report = halfstep.apply(Net(), name)
    assert report.quantized == ("head",)
    assert {*report.kept.values()} == {"a convolution: torch sums in its own order, but the rule sets an accumulator"}


@pytest.mark.parametrize("name", ROTATED)
def test_a_rule_with_a_hadamard_transform_keeps_convolutions_unquantized(name):
    """The lone Linear is an output head, so the model has another one."""
    report = halfstep.apply(nn.ModuleDict({"net": Net(), "last": nn.Linear(16, 4)}), name)
    assert report.quantized == ("last",)
    assert report.kept == {**{f"net.{path}": WINDOWED for path in ("first", "inner", "up")}, "net.head": "output head"}


def test_a_filter_or_a_rule_keeps_a_convolution():
    report = halfstep.apply(Net(), "fp8-current", lambda module, path: path != "inner")
    assert report.quantized == ("first", "up")
    assert report.kept == {"head": "output head"}
    keep = Rule("first", recipe.LinearSpec(), why="the first layer")
    made = Recipe("made", "", "", rules=(keep, Rule("*", recipe.get_recipe("fp8-current").rules[-1].linear)))
    report = halfstep.apply(Net(), made)
    assert report.kept == {"first": "the first layer"}
    assert "inner" in report.quantized


@pytest.mark.parametrize("names", fast_and_every(ROUNDING, {"fp8-delayed", "fp8lm-o3"}))
def test_quantize_model_equals_evaluation_and_reports_kept_convolutions(names):
    @for_each("name", names)
    def check(name):
        spec = recipe.get_recipe(name).rules[-1].linear
        if spec.output.rhs is None:
            return
        model, optimizer, scaler = prepared(name, Net())
        train(model, optimizer, scaler, 2)
        x = torch.randn(3, 8)
        model.eval()
        with torch.no_grad():
            expected = model(x)
            report = halfstep.quantize_model(model, name)
            assert_same(model(x), expected)
        whole = "a convolution's weight stays whole and is rounded at every call"
        whole = WINDOWED if spec.rotates else whole
        assert {report.kept[path] for path in ("first", "inner", "up")} == {whole}
        if (
            spec.rotates
        ):  # which rounds no convolution: beside the head there is nothing to quantise, and gradients pass
            model(x.requires_grad_()).sum().backward()
            return
        with pytest.raises(ModelError, match="quantised for inference has no gradients"):
            model(x.requires_grad_())

    check()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does, as it traces
@pytest.mark.slow  # what the fast tests trace goes the same way
@pytest.mark.parametrize("name", ["fp8-current", "fp8-delayed", "fp8-block"])
def test_compiled_training_equals_eager(name):
    torch._dynamo.reset()
    plain, compiled = prepared(name, Net()), prepared(name, Net())
    graph = torch.compile(compiled[0], backend="aot_eager", fullgraph=True)
    assert train(*plain, 2) == train(graph, *compiled[1:], 2)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does, as it traces
def test_a_compiled_convolution_of_any_memory_format_equals_eager():
    """Dynamo cannot call is_contiguous within a layer's autograd Function."""
    model, x = nn.Conv2d(2, 2, 3), torch.randn(1, 2, 4, 4)
    halfstep.apply(model, "fp8-current")
    assert_same(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


def test_second_derivatives_and_vmap_are_refused():
    model = nn.Conv1d(2, 2, 3)
    halfstep.apply(model, "fp8-current")
    x = torch.randn(1, 2, 5, requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RecipeError, match="a second derivative"):
        grad.sum().backward()
    with pytest.raises(RecipeError, match="loop over the samples"):
        torch.func.vmap(model)(x.detach()[None])


@pytest.mark.slow
def test_blocks_longer_than_the_channels_are_cut_to_them():
    """A first layer of one channel: each pixel is its own block with a power-of-two scale."""
    x, weight = torch.randn(1, 1, 4, 4), torch.randn(2, 1, 3, 3)
    q = get_quantizer("mxfp8_e4m3", scale="rceil")
    window = ops.Window((1, 1), (0, 0), (1, 1))
    found = ops.convolution(x, weight, None, window, linear_spec(q, q, q))
    each = [t.view(-1, 1).clone() for t in (x, weight)]
    expected = F.conv2d(q(each[0]).view(x.shape), q(each[1]).view(weight.shape))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
