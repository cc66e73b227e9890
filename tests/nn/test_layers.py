"""`apply` on particular layers: norms, buffers, batch norm, linear layers that a rule matches."""

import copy

import pytest
import torch
from torch import nn

import halfstep
from families import for_each
from halfstep import formats, ops
from halfstep.quant import Quantizer
from halfstep.recipe import DTYPES, LinearSpec, Matmul, Recipe, Rule, get_recipe
from tiny import FOUR, RECIPES, Estimated, adamw, assert_same, batch, fast_and_every, mlp, mostly_slow, prepared, train


FP8 = Quantizer(formats.get("e4m3fn"))
SPEC = LinearSpec(Matmul(FP8, FP8), Matmul(FP8, FP8), Matmul(FP8, FP8))


def recipe_of(*rules, **fields):
    return Recipe("made", "", "", rules=rules, **fields)


@pytest.mark.quick("bf16-mixed", "bf16-master")
@pytest.mark.parametrize("name", mostly_slow(RECIPES))
def test_batch_norm_stays_float32_and_trains(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))
    model(torch.ones(2, 2, 4))
    model, optimizer, scaler = prepared(name, model)
    before = copy.deepcopy(model[1].state_dict())
    losses = train(model, optimizer, scaler, 10, (batch()[0].view(12, 2, 4), batch()[1]))
    for key, value in model[1].state_dict().items():
        assert value.dtype == before[key].dtype
        assert not torch.equal(value, before[key])
    assert losses[-1] < losses[0] or name == "fp16-pure"
    stored = DTYPES[get_recipe(name).weights]
    assert (model[0].weight.dtype, model[1].weight.dtype) == (stored, torch.float32)


def test_the_report_names_parameters_kept_in_float32():
    report = halfstep.apply(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), "bf16-master")
    assert report.stored == {"bfloat16": 12, "float32": 6}
    assert set(report.kept) == {"1.weight", "1.bias"}
    text = str(report)
    for words in ("under bf16-master", "12 in bfloat16", "its running statistics", "1.{weight,bias}", "not seen"):
        assert words in text


class Positions(nn.Module):
    """Adds a float32 buffer to the activations before a norm, as positional encodings do."""

    def __init__(self, norm):
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(8, 8), norm, nn.Linear(8, 4)
        self.register_buffer("positions", torch.randn(8))

    def forward(self, x):
        return self.outer(self.norm(self.inner(x) + self.positions))


NORMS = [
    nn.LayerNorm(8),
    nn.LayerNorm(8, bias=False),
    nn.LayerNorm(8, elementwise_affine=False),
    nn.RMSNorm(8),
    nn.GroupNorm(2, 8),
]


@pytest.mark.quick("bf16-stochastic", "fp8lm-o3")
@pytest.mark.parametrize("name", mostly_slow(RECIPES))
@for_each("norm", NORMS)
def test_a_norm_with_16_bit_weights_takes_a_float32_input(name, norm):
    torch.manual_seed(0)
    model = Positions(copy.deepcopy(norm))
    expected = model(batch()[0])
    model, optimizer, scaler = prepared(name, model)
    few = any(rule.linear.rounds for rule in get_recipe(name).rules)
    torch.testing.assert_close(model(batch()[0]), expected, rtol=0.1, atol=0.3 if few else 0.1)
    assert model.positions.dtype == torch.float32
    train(model, optimizer, scaler)


@pytest.mark.filterwarnings("ignore:.*does not round")
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.Linear])
def test_a_subclass_keeps_its_own_forward(kind):
    class Mine(kind):
        def forward(self, input):
            return super().forward(input) * 100

    arguments = (4,) if kind is nn.LayerNorm else (4, 4)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Mine(*arguments))
    expected = model(torch.ones(2, 4))
    report = halfstep.apply(model, recipe_of(Rule("*", SPEC, optional=True), weights="bf16", compute="bf16"))
    torch.testing.assert_close(model(torch.ones(2, 4)), expected, rtol=0.1, atol=10)
    assert report.quantized == ("0",)
    if kind is nn.Linear:
        assert report.kept["1"] == "its forward is not nn.Linear's"


@pytest.mark.filterwarnings("ignore:.*does not round")
def test_a_patched_linear_is_kept_and_reported():
    model = mlp()
    model[3].forward = model[3].forward
    report = halfstep.apply(model, recipe_of(Rule("*", SPEC)))
    assert report.quantized == ("0",)
    assert "3" in report.kept


@pytest.mark.usefixtures("products")
def test_a_matched_layer_equals_ops_linear_with_the_rules_spec():
    model, stock = mlp(), mlp()
    report = halfstep.apply(model, recipe_of(Rule("0", SPEC)))
    assert report.quantized == ("0",)
    assert report.quantized == ("0",)
    x = batch()[0]
    expected = stock[1:](ops.linear(x, stock[0].weight, stock[0].bias, SPEC))
    assert_same(model(x), expected)
    assert not torch.equal(model(x), stock(x))
    model(x).sum().backward()
    expected.sum().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in stock.parameters()])


def test_the_first_matching_rule_applies_unless_the_filter_excludes_the_layer():
    other = LinearSpec(Matmul(rhs=FP8))
    model = mlp()
    halfstep.apply(model, recipe_of(Rule("3", other), Rule("*", SPEC)))
    assert (model[0]._halfstep.linear, model[3]._halfstep.linear) == (SPEC, other)
    model = mlp()
    seen = []
    report = halfstep.apply(model, recipe_of(Rule("*", SPEC)), lambda module, path: seen.append(path) or path != "3")
    assert seen == ["0", "3"]
    assert report.quantized == ("0",)
    assert type(model[3]) is nn.Linear


@pytest.mark.parametrize("weights", DTYPES)
def test_revert_removes_rules(weights):
    model = mlp()
    halfstep.apply(model, recipe_of(Rule("*", SPEC), weights=weights))
    halfstep.revert(model)
    assert {type(m) for m in model} == {nn.Linear, nn.GELU, nn.LayerNorm}
    assert not any(key.startswith("_halfstep") for m in model.modules() for key in vars(m))


def test_an_existing_gradient_is_cast_to_the_weights_dtype():
    model = mlp()
    model(batch()[0]).sum().backward()
    grad = model[0].weight.grad.clone()
    model, _, _ = prepared("bf16-master", model)
    assert_same(model[0].weight.grad, grad.bfloat16())
    halfstep.revert(model)
    assert model[0].weight.grad.dtype == torch.float32


def test_a_bf16_model_is_float32_under_fp32_and_bf16_after_revert():
    model = mlp().bfloat16()
    with pytest.warns(UserWarning, match="arrive in 16 bits"):
        halfstep.prepare(model, adamw(model), recipe="fp32")
    assert model[0].weight.dtype == torch.float32
    assert model(batch()[0]).dtype == torch.float32
    halfstep.revert(model)
    assert model[0].weight.dtype == torch.bfloat16


def test_a_frozen_integer_parameter_is_kept_and_reported():
    model = mlp()
    model.codes = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    report = halfstep.apply(model, "bf16-master")
    assert report.kept == {"codes": "it is torch.int8"}
    assert model.codes.dtype == torch.int8


@pytest.mark.parametrize("names", fast_and_every(RECIPES))
def test_the_error_stays_small_in_a_transformer_layer(names):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 8)
    expected = layer(x)
    for name in names:
        model, near = copy.deepcopy(layer), 0.15 if name.startswith(("fp8", "mx")) else 0.05
        halfstep.apply(model, name)
        found = [model(x)]
        model.eval()
        with torch.no_grad():
            found.append(model(x))
        for y in found:
            if name in FOUR:  # twice what is seen, as a norm: single elements are up to 0.22 away
                assert (y - expected).norm() <= 0.16 * expected.norm()
            else:
                torch.testing.assert_close(y, expected, rtol=near, atol=near)


@pytest.mark.quick("bf16-mixed", "fp4-wang")
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", mostly_slow(RECIPES))
@for_each("sizes, shape", [((0, 3), (4, 0)), ((3, 0), (4, 3)), ((3, 2), (0, 3)), ((3, 2), (3,)), ((3, 2), (2, 0, 3))])
def test_layers_of_size_zero_and_empty_batches_match_stock_layers(name, sizes, shape):
    def layers():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(*sizes), nn.Linear(sizes[1], 4), nn.Linear(4, 2))

    stock, model, x = layers(), layers(), torch.randn(shape)
    model, optimizer, scaler = prepared(name, model)
    with Estimated(name):
        expected = stock(x)
    found = model(x)
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)
    (expected.sum() / 64).backward()
    scaler.scale(found.sum() / 64).backward()  # within fp16's range, at the first scale too
    for own, wanted in zip(model.parameters(), stock.parameters(), strict=True):
        actual = ops.values_of(own.grad).float() / scaler.get_scale()
        torch.testing.assert_close(actual, wanted.grad, rtol=0.1, atol=0.01)
    scaler.step(optimizer)
    scaler.update()
