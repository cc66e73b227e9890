"""Matmuls of a few rows: inference from codes equals evaluation under the recipe, bit for bit."""

import copy
import pickle
import weakref

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import halfstep
from families import slow_unless
from halfstep import formats
from halfstep.errors import QuantizationError
from halfstep.kernels.cpu import few_rows
from halfstep.quant import Quantizer, Scales, Tile, get_quantizer
from halfstep.quant.scaling import get_scaling
from halfstep.recipe import Recipe, Rule, linear_spec
from tiny import assert_same


pytestmark = pytest.mark.usefixtures("products")
COLUMNS, ACROSS = 96, 70  # whole runs of columns; rows of the weight that fill no group, and no four
E4M3 = formats.get("e4m3fn")
KNOWN = {
    **{name: get_quantizer(name) for name in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "nvfp4", "fp8_128x128")},
    "nf4": get_quantizer("nf4", scale="absmax"),
    "plain": Quantizer(E4M3),
    "tensor": Quantizer(E4M3, scales=Scales(Tile(0, 0), get_scaling("current"))),
    "row": Quantizer(E4M3, scales=Scales(Tile(1, 0), get_scaling("current"))),
    "int8": get_quantizer("int8_row"),
    "int8 tiles": Quantizer(formats.get("int8"), scales=Scales(Tile(2, 16), get_scaling("rceil"))),
    "pair of rows": Quantizer(E4M3, scales=Scales(Tile(2, 16), get_scaling("rceil"))),
    "posit8": Quantizer(formats.get("posit8_1")),
    "posit16": Quantizer(formats.get("posit16_1")),
    "bf16": Quantizer(formats.get("bf16")),
    "fp16": Quantizer(formats.get("fp16")),
    "fnuz": Quantizer(formats.get("e4m3fnuz"), scales=Scales(Tile(0, 0), get_scaling("current"))),
    "codebook tiles": Quantizer(formats.get("dynamic8"), scales=Scales(Tile(2, 16), get_scaling("absmax"))),
    "fp16 tiles": Quantizer(formats.get("fp16"), scales=Scales(Tile(1, 32), get_scaling("rceil"))),
    "int4": get_quantizer("int4_64"),
}
PARTS = ("tensor", "nf4", "int8", "posit8")
"""8 bits with a scale, 4 bits, integers, and a table; each of the others needs another compilation."""
each_kind = pytest.mark.parametrize("kind", slow_unless(PARTS.__contains__, KNOWN))
each_compute = pytest.mark.parametrize("compute", slow_unless("bf16".__eq__, ["bf16", "fp32"]))
UNKNOWN = {
    "mxfp6": get_quantizer("mxfp6_e2m3"),
    "three rows": Quantizer(E4M3, scales=Scales(Tile(3, 32), get_scaling("rceil"))),
    "outliers": Quantizer(E4M3, scales=Scales(Tile(1, 32), get_scaling("absmax")), outliers=0.3),
}


def recipe_of(quantizer, compute="fp32"):
    return Recipe("made", "", "", compute=compute, rules=(Rule("*", linear_spec(quantizer, quantizer, quantizer)),))


def both(quantizer, compute="fp32", layer=None):
    """A layer that is quantized for inference, and the same layer under the recipe in evaluation."""
    torch.manual_seed(0)
    layer = layer or nn.Linear(COLUMNS, ACROSS)
    model, twin = nn.Sequential(layer), nn.Sequential(copy.deepcopy(layer))
    halfstep.quantize_model(model, recipe_of(quantizer, compute))
    halfstep.apply(twin, recipe_of(quantizer, compute))
    return model, twin.eval()


@pytest.fixture
def kernel_calls(monkeypatch):
    """The number of matmuls that the kernel has computed, from codes ("run") and from values ("run_values")."""
    calls = {"run": 0, "run_values": 0}

    def counted(name, function):
        def call(*arguments):
            calls[name] += 1
            calls["run"] -= name == "run_values"  # run_values calls run
            return function(*arguments)

        return call

    for name in calls:
        monkeypatch.setattr(few_rows, name, counted(name, getattr(few_rows, name)))
    return calls


@pytest.mark.quick("own-bf16-int8", "carried-bf16-nf4", "carried-bf16-tensor", "carried-bf16-posit8")
@each_kind
@each_compute
def test_inference_from_codes_equals_evaluation(kind, compute, kernel_calls):
    model, twin = both(KNOWN[kind], compute)
    for rows in (1, 3, 8):
        x = torch.randn(rows, COLUMNS)
        before = dict(kernel_calls)
        y, expected = model(x), twin(x)
        assert_same(y, expected)
        assert kernel_calls == {name: count + 1 for name, count in before.items()}
        exact = twin(x.repeat(9, 1))[:rows]  # the matmul of many rows
        torch.testing.assert_close(y, exact, rtol=2.0**-7 if compute == "bf16" else 2.0**-18, atol=1e-2)
    assert_same(model(x.repeat(9, 1)), twin(x.repeat(9, 1)))
    assert kernel_calls == {"run": 3, "run_values": 3}


@pytest.mark.quick("own-outliers", "carried-three rows")
@pytest.mark.parametrize("kind", UNKNOWN)
def test_quantizers_without_a_kernel_take_the_general_matmul(kind, kernel_calls):
    model, twin = both(UNKNOWN[kind])
    x = torch.randn(2, COLUMNS)
    assert_same(model(x), twin(x))
    assert kernel_calls == {"run": 0, "run_values": 0}


@pytest.mark.parametrize("shape", [(95, 70), (16, 70), (96, 3), (96, 4), (160, 65)])
def test_shapes_with_and_without_a_kernel_equal_evaluation(shape, kernel_calls):
    model, twin = both(KNOWN["tensor"], "bf16", nn.Linear(*shape))
    x = torch.randn(2, shape[0])
    assert_same(model(x), twin(x))
    known = shape[0] % 32 == 0 and shape[1] >= 4
    assert kernel_calls == {"run": known, "run_values": known}
    assert model(torch.randn(0, shape[0])).shape == (0, shape[1])


@pytest.mark.parametrize(
    "kind", slow_unless(PARTS.__contains__, ["mxfp8_e4m3", "nvfp4", "nf4", "int8", "tensor", "fp8_128x128"])
)
@each_compute
def test_inputs_with_special_values_and_strides_equal_evaluation(kind, compute):
    """NaN, infinities, subnormal values, signed zeros, rows of zeros, and strided columns."""
    model, twin = both(KNOWN[kind], compute)
    hard = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1e38, -3e38, 1.0, -1.0]).repeat(12)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0]).repeat(24)
    for x in (hard, special, torch.zeros(COLUMNS), torch.randn(COLUMNS, 3).t(), torch.randn(4, 2 * COLUMNS)[:, ::2]):
        assert_same(model(x), twin(x))


@pytest.mark.parametrize(
    "kind",
    slow_unless(PARTS.__contains__, ["mxfp8_e4m3", "mxfp8_e5m2", "nvfp4", "nf4", "int8", "fp8_128x128", "plain"]),
)
@each_compute
@pytest.mark.parametrize("weight", [torch.nan, torch.inf, 3e38, 1e-40, 0.0])
def test_weights_with_special_values_equal_evaluation(kind, compute, weight):
    """One block of the weight is NaN, infinite, or needs a scale at either end of float32's range."""
    layer = nn.Linear(COLUMNS, ACROSS)
    with torch.no_grad():
        layer.weight[5, 32:64] = weight
        layer.weight[9] = 0.0
    if KNOWN[kind].format.has_nan or KNOWN[kind].scales is not None:
        model, twin = both(KNOWN[kind], compute, layer)
        x = torch.randn(2, COLUMNS)
        y, expected = model(x), twin(x)
        assert torch.equal(y.isnan(), expected.isnan())
        assert_same(y.nan_to_num(), expected.nan_to_num())
        assert y.isfinite()[:, 9].all() or kind == "fp8_128x128"  # row 9 is in the same tile


@pytest.mark.slow
@pytest.mark.parametrize("bias", [-13, 16])
def test_an_exponent_bias_far_from_float16s_equals_evaluation(bias, kernel_calls):
    format = formats.Float(f"e4m3 bias {bias}", 4, 3, bias, "fn", source="none")
    model, twin = both(Quantizer(format, scales=Scales(Tile(1, 32), get_scaling("absmax"))), "bf16")
    x = torch.randn(1, COLUMNS)
    assert_same(model(x), twin(x))
    assert kernel_calls == {"run": 1, "run_values": 1}


@pytest.mark.quick("carried")
def test_all_fp8_codes_are_read_as_their_values(kernel_calls):
    """With codes that are not finite the kernel refuses, and the values are read instead."""
    model, _ = both(KNOWN["plain"])
    every = torch.arange(COLUMNS * ACROSS).to(torch.uint8).view(ACROSS, COLUMNS)
    x = torch.randn(1, COLUMNS)
    for codes in (every, every.where((every & 0x7F) != 0x7F, 0)):
        model[0].weight_codes.copy_(codes)
        x_rounded = x.to(torch.float8_e4m3fn).double()
        exact = x_rounded @ codes.view(torch.float8_e4m3fn).double().t() + model[0].bias
        torch.testing.assert_close(model(x).double(), exact, rtol=1e-5, atol=1e-2, equal_nan=True)
    assert kernel_calls == {"run": 2, "run_values": 1}


@pytest.mark.quick("own-posit8_2")
@pytest.mark.parametrize(
    "name", slow_unless("posit8_2".__eq__, ["posit8_2", "posit16_2", "e4m3fnuz", "dynamic8", "fp16"])
)
def test_all_codes_of_a_table_are_read_as_their_values(name, kernel_calls):
    """NaN and infinities included."""
    format = formats.get(name)
    model, _ = both(Quantizer(format), layer=nn.Linear(512, 128, bias=False))
    every = torch.arange(512 * 128).to(torch.uint8 if format.bits == 8 else torch.uint16).view(128, 512)
    model[0].weight_codes.copy_(every)
    recipe = Recipe("w", "", "", rules=(Rule("*", linear_spec(None, Quantizer(format), None)),))
    model = nn.Sequential(nn.Linear(512, 128, bias=False))
    halfstep.quantize_model(model, recipe)
    model[0].weight_codes.copy_(every)
    values = torch.tensor([format.decode(code) for code in every.flatten().tolist()], dtype=torch.float64)
    for column in range(0, 512, 97):
        x = torch.zeros(1, 512)
        x[0, column] = 1.0
        expected = values.view(128, 512)[:, column]
        finite = values.view(128, 512).isfinite().all(1)  # the others have zeros times infinities
        y = model(x)[0]
        assert torch.equal(y[finite].double(), expected[finite])
        assert y[~finite].isnan().all()
    assert kernel_calls["run_values"] == 0


def test_training_does_not_use_the_kernel_and_gradients_equal(kernel_calls):
    """Evaluation with gradients gives the output of evaluation without."""
    _, twin = both(KNOWN["mxfp8_e4m3"])
    x = torch.randn(1, COLUMNS, requires_grad=True)
    twin.train()(x).sum().backward()
    assert kernel_calls == {"run": 0, "run_values": 0}
    grad, x.grad = x.grad, None
    y = twin.eval()(x)
    y.sum().backward()
    assert_same(x.grad, grad)
    with torch.no_grad():
        assert_same(twin(x), y.detach())
    assert kernel_calls == {"run": 0, "run_values": 2}


def test_a_transposed_weight_and_a_layer_without_bias_equal_evaluation(kernel_calls):
    model, twin = both(KNOWN["mxfp8_e4m3"], "bf16", Conv1D(ACROSS, COLUMNS))
    x = torch.randn(1, 2, COLUMNS)
    assert_same(model(x), twin(x))
    model, twin = both(KNOWN["nvfp4"], "bf16", nn.Linear(COLUMNS, ACROSS, bias=False))
    assert_same(model(x), twin(x))
    assert kernel_calls == {"run": 2, "run_values": 2}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does, as it traces
@pytest.mark.parametrize("products", slow_unless("own".__eq__, ["own", "carried"]), indirect=True)
@pytest.mark.parametrize("kind", slow_unless("tensor".__eq__, ["tensor", "mxfp8_e4m3", "nvfp4"]))
def test_a_traced_graph_equals_eager(kind, kernel_calls):
    torch._dynamo.reset()
    model, _ = both(KNOWN[kind], "bf16")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, COLUMNS)
    with torch.no_grad():
        assert_same(compiled(x), model(x))
    assert kernel_calls == {"run": 1, "run_values": 1}


@pytest.mark.slow  # compiled in parallel
def test_threads_do_not_change_a_sum():
    model, _ = both(KNOWN["tensor"], layer=nn.Linear(1024, 1200))
    x, threads = torch.randn(1, 1024), torch.get_num_threads()
    try:
        results = []
        for number in (1, 2):
            torch.set_num_threads(number)
            results.append(model(x))
    finally:
        torch.set_num_threads(threads)
    assert_same(*results)


def test_a_changed_weight_is_read_anew(kernel_calls):
    """What is cached between two matmuls is computed again after any kind of write."""
    model, _ = both(KNOWN["fp8_128x128"], "bf16")
    other = both(KNOWN["fp8_128x128"], "bf16", nn.Linear(COLUMNS, ACROSS, bias=False))[0]
    layer, x = model[0], torch.randn(2, COLUMNS)
    layer.bias = None
    before, expected = model(x), other(x)
    saved = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    assert not torch.equal(before, expected)
    ways = {
        "in place": lambda: [getattr(layer, n).copy_(v) for n, v in other[0].state_dict().items()],
        "loaded": lambda: layer.load_state_dict(other[0].state_dict()),
        "exchanged": lambda: layer.load_state_dict(other[0].state_dict(), assign=True),
        "data": lambda: [setattr(getattr(layer, n), "data", v.clone()) for n, v in other[0].state_dict().items()],
        "one part": lambda: (
            setattr(layer, "weight_codes", other[0].weight_codes.clone())
            or layer.weight_scale.copy_(other[0].weight_scale)
        ),
    }
    for way, write in ways.items():
        write()
        assert torch.equal(model(x), expected), way
        assert torch.equal(copy.deepcopy(model)(x), expected), way
        layer.load_state_dict({name: tensor.clone() for name, tensor in saved.items()}, assign=True)
        assert torch.equal(model(x), before), way
    called = torch.func.functional_call(model, {f"0.{n}": v for n, v in other[0].state_dict().items()}, x)
    assert torch.equal(called, expected)
    assert torch.equal(model(x), before)
    assert kernel_calls["run_values"] == 0


def test_copies_and_pickles_have_their_own_cache():
    model, _ = both(KNOWN["nvfp4"], "bf16")
    x = torch.randn(1, COLUMNS)
    y = model(x)
    twin, again = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    model[0].weight_codes.zero_()
    model(x)
    assert_same(twin(x), y)
    assert_same(again(x), y)
    assert_same(model(x), model[0].bias.to(torch.bfloat16).float().expand(1, -1))


def test_replaced_codes_are_freed():
    model, _ = both(KNOWN["mxfp8_e4m3"], "bf16")
    model(torch.randn(1, COLUMNS))
    codes = weakref.ref(model[0].weight_codes)
    model[0].weight_codes = model[0].weight_codes.to("meta")
    assert codes() is None
    model[0].weight_codes = torch.zeros(ACROSS, COLUMNS - 32, dtype=torch.uint8)
    with pytest.raises(QuantizationError, match="codes"):
        model(torch.randn(1, COLUMNS))


def test_an_input_with_torchs_negative_bit_is_read_with_its_sign():
    model = nn.Sequential(nn.Linear(256, 64))
    rule = Rule("*", linear_spec(None, get_quantizer("nf4"), None))
    halfstep.apply(model.eval(), Recipe("weights-nf4", "", "", rules=(rule,)))  # takes the input uncopied
    x = torch._neg_view(torch.randn(1, 256))
    assert x.is_neg()
    assert torch.equal(model(x), model(x.clone().resolve_neg()))
