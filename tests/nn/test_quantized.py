"""`halfstep.quantize_model`: inference from one byte per weight equals evaluation under the recipe, bit for bit."""

import copy
import itertools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralTopKRouter
from transformers.pytorch_utils import Conv1D

import halfstep
from families import in_turn, slow_unless
from halfstep import formats
from halfstep.errors import CheckpointError, ModelError, QuantizationError, RecipeError
from halfstep.memory import stored_bytes
from halfstep.nn import measure_smooth_scales
from halfstep.quant import Quantizer, Scales, Tile, get_quantizer
from halfstep.quant.scaling import get_scaling
from halfstep.recipe import LinearSpec, Matmul, Recipe, Rule, get_recipe, linear_spec
from tiny import EVERY, adamw, assert_same, batch, gated, mlp, model_for, mostly_slow, prepared, train


pytestmark = pytest.mark.usefixtures("products")
ABLE = [name for name in EVERY if any(rule.linear.output.rhs is not None for rule in get_recipe(name).rules)]
PRODUCTS = ("own", "carried")
PLAIN = [name for name in ABLE if get_recipe(name).smooth_glu is None]
every_plain = pytest.mark.parametrize("name", mostly_slow(PLAIN))
EIGHT = Quantizer(formats.get("e4m3fn"))


def evaluated(model, *inputs):
    with torch.no_grad():
        return model.eval()(*inputs)


def trained(name, model=None, data=None, steps=3):
    model, optimizer, scaler = prepared(name, model)
    train(model, optimizer, scaler, steps, data)
    return model


def smooth_options(name, model):
    """The `smooth` argument that quantize_model needs for that recipe."""
    if not get_recipe(name).smooth_glu:
        return {}
    return {"smooth": measure_smooth_scales(model, lambda: model(batch()[0]))}


def recipe_of(quantizer, **fields):
    return Recipe("made", "", "", rules=(Rule("*", linear_spec(quantizer, quantizer, quantizer)),), **fields)


# ---- equal outputs --------------------------------------------------------------------------------------------------


SIZES = {"usual": 1.0, "tiny": 2.0**-120}


@pytest.mark.quick("usual-own-fp8-current", "tiny-carried-fp8lm-o3", "tiny-carried-fp4-wang")
@every_plain
@pytest.mark.parametrize(
    ("size", "products"),
    slow_unless(in_turn([*SIZES], PRODUCTS).__contains__, itertools.product(SIZES, PRODUCTS)),
    indirect=["products"],
)
def test_a_trained_model_equals_its_evaluation(name, size):
    """Weights of 2^-120 give subnormal bf16 values, since a tile's scale is as small."""
    model, x = trained(name), batch()[0]
    with torch.no_grad():
        state = model.state_dict()
        model.load_state_dict({**state, "0.weight": state["0.weight"] * SIZES[size]})  # a weight may be stored as codes
    expected, stock = evaluated(model, x), evaluated(copy.deepcopy(model).float(), x)
    report = halfstep.quantize_model(model, name)
    assert_same(model(x), expected)
    assert report.quantized == ("0", "3")
    assert stock.isfinite().all()
    assert type(model[0]).__name__ == "Linear"
    assert "weight" not in model[0]._parameters


@every_plain
def test_an_untrained_model_is_scaled_just_in_time(name):
    """Delayed scales have no history, so current scaling applies."""
    model, x = mlp(), batch()[0]
    twin = copy.deepcopy(model)
    halfstep.quantize_model(model, name)
    stateless = {"fp8-delayed": "fp8-current", "fp8-delayed-megatron": "fp8-current"}.get(name, name)
    halfstep.apply(twin, stateless)
    assert_same(model(x), evaluated(twin, x))
    assert_same(model(7 * x), evaluated(twin, 7 * x))


def test_an_untrained_model_is_scaled_with_the_rules_margin():
    scaling = get_scaling("delayed", margin=2, history=4)
    model = mlp()
    halfstep.quantize_model(model, recipe_of(Quantizer(formats.get("e4m3fn"), scales=Scales(Tile(0, 0), scaling))))
    amax = mlp()[0].weight.abs().max()
    assert_same(model[0].weight_scale.view(()), (448 / amax.double()).float().div(4).reciprocal().detach())


BLOCKS = {
    **{name: get_quantizer(name) for name in ("nvfp4", "mxfp4", "mxfp6_e2m3", "mxint8", "nf4", "fp8_1x128")},
    "plain": EIGHT,
    "posit": Quantizer(formats.get("posit8_1")),
    "square": Quantizer(formats.get("e4m3fn"), scales=Scales(Tile(3, 3), get_scaling("rceil"))),
    "down": Quantizer(formats.get("e4m3fn"), scales=Scales(Tile(4, 1), get_scaling("floor"))),
    "absmax": Quantizer(formats.get("e4m3fn"), scales=Scales(Tile(1, 0), get_scaling("absmax"))),
    "outliers": replace(get_quantizer("llm_int8"), outliers=0.3),
}


@pytest.mark.quick("bf16-nf4-own", "bf16-plain-own", "bf16-square-own", "bf16-down-carried", "bf16-outliers-carried")
@pytest.mark.parametrize(
    ("kind", "products"),
    slow_unless(in_turn([*BLOCKS], PRODUCTS).__contains__, itertools.product(BLOCKS, PRODUCTS)),
    indirect=["products"],
)
@pytest.mark.parametrize("compute", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_every_format_of_a_rule_equals_evaluation(kind, compute):
    recipe, x = recipe_of(BLOCKS[kind], compute=compute), batch()[0]
    model, twin = mlp(), mlp()
    halfstep.apply(twin, recipe)
    halfstep.quantize_model(model, recipe)
    assert_same(model(x), evaluated(twin, x))


@pytest.mark.quick("carried-fp8-delayed", "carried-fp8-block")
@pytest.mark.parametrize("name", ["fp8-current", "fp8-delayed", "fp8-block", "mxfp8", "fp8-rowwise"])
def test_conv1d_equals_evaluation(name):
    torch.manual_seed(0)
    model, x = nn.Sequential(Conv1D(16, 8), nn.GELU(), Conv1D(4, 16)), batch()[0]
    model = trained(name, model)
    expected, weight = evaluated(model, x), model[0].weight.detach().clone()
    halfstep.quantize_model(model, name)
    assert_same(model(x), expected)
    assert model[0].weight_codes.shape == (16, 8)
    torch.testing.assert_close(model[0].weight, weight, rtol=0.1, atol=0.01)


class Attends(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)
        self.last = nn.Linear(8, 4)

    def forward(self, x, other=None):
        x = x.unsqueeze(0)
        other = x if other is None else other
        return self.last(self.attention(x, other, other)[0]).squeeze(0)


@pytest.mark.quick("own-fp8-current", "own-fp8-delayed")
@pytest.mark.parametrize("name", ["fp8-current", "fp8-delayed", "fp8-block", "mxfp8", "fp8-amax"])
def test_self_attention_equals_evaluation(name):
    model, x = trained(name, Attends()), batch()[0]
    expected = evaluated(model, x)
    report = halfstep.quantize_model(model, name)
    assert_same(model(x), expected)
    assert report.quantized == ("attention", "attention.out_proj", "last")
    assert model.attention.in_proj_weight_codes.shape == (24, 8)


@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 6}], ids=["packed", "apart"])
def test_cross_attention_equals_evaluation(options):
    """With one scale per row, in_proj_weight is rounded alike as one matrix or in three parts."""
    other, x = torch.randn(1, 5, options.get("kdim", 8)), batch()[0]
    model, twin = Attends(**options), Attends(**options)
    halfstep.apply(twin, "fp8-rowwise")
    halfstep.quantize_model(model, "fp8-rowwise")
    assert_same(model(x, other), evaluated(twin, x, other))


def test_torchs_encoder_equals_evaluation():
    torch.manual_seed(0)
    stock = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    model, twin, x = copy.deepcopy(stock), copy.deepcopy(stock), torch.randn(2, 5, 8)
    halfstep.apply(twin, "mxfp8")
    report = halfstep.quantize_model(model, "mxfp8")
    assert len(report.quantized) == 8
    with torch.no_grad():
        assert_same(model(x), evaluated(twin, x))


CONFIG = MixtralConfig(hidden_size=8, intermediate_size=12, num_local_experts=4, num_experts_per_tok=2)
CONFIG._experts_implementation = "eager"


class Mixture(nn.Module):
    def __init__(self, transposed=False):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.experts, self.head = MixtralTopKRouter(CONFIG), MixtralExperts(CONFIG), nn.Linear(8, 4)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)
        if transposed:
            self.experts.is_transposed = True
            for parameter in self.experts.parameters():
                parameter.data = parameter.data.transpose(1, 2).contiguous()

    def forward(self, x):
        _, weights, index = self.gate(x)
        return self.head(x + self.experts(x, index, weights))


@pytest.mark.quick("own-False-fp8-current", "own-True-fp8-block", "carried-False-fp8-delayed")
@pytest.mark.parametrize("name", ["fp8-current", "fp8-delayed", "mxfp8", "fp8-block"])
@pytest.mark.parametrize("transposed", [False, True])
def test_fused_experts_equal_evaluation(name, transposed):
    model, x = trained(name, Mixture(transposed)), batch()[0]
    expected, weight = evaluated(model, x), model.experts.down_proj.detach().clone()
    report = halfstep.quantize_model(model, name)
    assert_same(model(x), expected)
    assert report.quantized == ("experts",)
    assert report.kept["gate"] == "router"
    assert model.experts.gate_up_proj_codes.shape == (4, 24, 8)
    torch.testing.assert_close(model.experts.down_proj, weight, rtol=0.1, atol=0.02)


# ---- Smooth-SwiGLU --------------------------------------------------------------------------------------------------


def test_smoothing_by_channel_is_merged_into_the_weights():
    """On the batch of the scales, the same values are rounded as in evaluation."""
    model, x = gated(), batch()[0]
    with torch.no_grad():
        model[1].up_proj.weight *= torch.logspace(-1, 1, 24)[:, None]
    model = trained("fp8-smooth-swiglu", model)
    plain = copy.deepcopy(model)
    halfstep.revert(plain)
    merged, scales = copy.deepcopy(plain), measure_smooth_scales(model, lambda: model(x))
    expected = evaluated(model, x)
    report = halfstep.quantize_model(model, "fp8-smooth-swiglu", smooth=scales)
    assert report.recipe.name == "fp8-smooth-swiglu"
    assert (model(x) - expected).norm() < 0.02 * expected.norm()  # w1's scale per tensor is different now
    assert 0 < (model(x) - evaluated(plain, x)).norm() < 0.2 * expected.norm()

    halfstep.nn.merge_smooth_scales(merged, scales)
    fresh, again = copy.deepcopy(merged), copy.deepcopy(plain)
    halfstep.quantize_model(fresh, "fp8-smooth-swiglu", smooth={})
    halfstep.quantize_model(again, "fp8-smooth-swiglu", smooth=scales)
    assert_same(fresh(x), again(x))
    rough = replace(get_recipe("fp8-smooth-swiglu"), name="rough", smooth_glu=None)
    halfstep.quantize_model(merged, rough)
    assert_same(fresh(x), merged(x))


def test_smoothing_by_token_runs_at_inference():
    recipe = replace(get_recipe("fp8-smooth-swiglu"), name="token", smooth_glu="token")
    model, x = trained(recipe, gated()), batch()[0]
    expected = evaluated(model, x)
    assert halfstep.quantize_model(model, recipe).smoothed == ("1",)
    assert_same(model(x), expected)


# ---- storage --------------------------------------------------------------------------------------------------------


@pytest.mark.quick("own-fp8-current", "own-fp8-delayed", "own-fp8-smooth-swiglu")
@pytest.mark.parametrize("name", mostly_slow(ABLE))
def test_a_state_dict_loads_into_a_model_quantized_by_the_same_call(name, tmp_path):
    model, x = trained(name), batch()[0]
    halfstep.quantize_model(model, name, **smooth_options(name, model))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    fresh = model_for(name)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.mul_(3)
    halfstep.quantize_model(fresh, name, **({"smooth": {}} if get_recipe(name).smooth_glu else {}))
    assert not torch.equal(fresh(x), model(x))
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert_same(fresh(x), model(x))
    assert_same(fresh.state_dict(), model.state_dict())


def test_a_state_dict_without_a_history_loads_into_a_model_with_one():
    trained_one, fresh, x = trained("fp8-delayed"), mlp(), batch()[0]
    for each in (trained_one, fresh):
        halfstep.quantize_model(each, "fp8-delayed")
    assert "0._halfstep_scaling_input" in trained_one.state_dict()
    trained_one.load_state_dict(fresh.state_dict())
    assert_same(trained_one(x), fresh(x))


def test_codes_of_another_format_are_refused():
    model, other = gated(), gated()
    halfstep.quantize_model(model, "fp8-current")
    halfstep.quantize_model(other, "fp8-smooth-swiglu", smooth={})
    words = (
        r"0.weight was saved as 'float 4 3 7 ieee, whole tensor, current'; here it is 'float 4 3 7 fn, whole tensor, "
    )
    with pytest.raises(CheckpointError, match=words):
        model.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match="weight_codes"):
        model.load_state_dict(gated().state_dict())


@pytest.mark.quick("carried-fp8-current-4", "carried-mxfp8-4096")
@pytest.mark.parametrize(
    ("name", "scales"), [("fp8-current", 4), ("mxfp8", 256 * 512 // 32), ("fp8-block", 2 * 4), ("fp8-rowwise", 512)]
)
@pytest.mark.parametrize("products", slow_unless("carried".__eq__, PRODUCTS), indirect=True)
def test_a_quantized_weight_takes_one_byte(name, scales, tmp_path):
    model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.LayerNorm(512, elementwise_affine=False))
    before = stored_bytes(model)
    halfstep.quantize_model(model, name)
    label = model[0].weight_format.numel()
    assert before == 4 * 256 * 512
    assert stored_bytes(model) == 256 * 512 + scales + label
    assert list(model.parameters()) == []
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_size < 1.04 * 256 * 512
    assert model(torch.ones(1, 256)).shape == (1, 512)


def test_codes_equal_ml_dtypes():
    model = mlp()
    weight = model[0].weight.detach().clone()
    halfstep.quantize_model(model, "fp8-current")
    factor = (448 / weight.abs().max().double()).float()
    expected = (weight * factor).numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert (model[0].weight_codes.numpy() == expected).all()
    assert_same(model[0].weight_codes.view(torch.float8_e4m3fn).float() * model[0].weight_scale, model[0].weight)


def test_int8_codes_equal_numpys_and_are_as_accurate_as_torchaos():
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = mlp().bfloat16()
    other = copy.deepcopy(model)
    full = [layer.weight.detach().float() for layer in model if isinstance(layer, nn.Linear)]
    halfstep.quantize_model(model, "int8-weight-only")
    torchao.quantize_(other, torchao.Int8WeightOnlyConfig())
    layers = [(one, two) for one, two in zip(model, other, strict=True) if isinstance(one, nn.Linear)]
    for weight, (ours, theirs) in zip(full, layers, strict=True):
        scale = weight.abs().amax(1, keepdim=True).numpy() / np.float32(127)
        assert_same(ours.weight_scale, torch.from_numpy(scale))
        assert (ours.weight_codes.view(torch.int8).numpy() == np.rint(weight.numpy() / scale)).all()
        torch.testing.assert_close(theirs.weight.scale * np.float32(127.5) / 127, ours.weight_scale)
        far = [float((one.float() - weight).norm()) for one in (ours.weight, theirs.weight.dequantize())]
        assert far[0] == pytest.approx(far[1], rel=0.1)


def test_a_tied_weight_stays_unquantized_and_outputs_equal_evaluation():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.token, self.body, self.out = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
            self.out.weight = self.token.weight

        def forward(self, ids):
            return self.out(self.body(self.token(ids)))

    ids = torch.arange(16)
    for name in ("mxfp8", "fp8-delayed"):
        model = trained(name, Tied(), (ids, torch.randn(16, 16)))
        expected = evaluated(model, ids)
        report = halfstep.quantize_model(model, name)
        assert_same(model(ids), expected)
        assert report.quantized == ("body",)
        assert report.kept["out"] == "its weight is also token.weight, so it stays whole and is rounded at every call"
        assert model.out.weight is model.token.weight
        twin = Tied()
        halfstep.quantize_model(twin, name)
        assert twin(ids).isfinite().all()
        twin.load_state_dict(model.state_dict())
        assert_same(twin(ids), expected)


def test_layers_without_a_weight_quantizer_or_excluded_by_the_filter_are_kept():
    recipe = Recipe("made", "", "", rules=(Rule("0", LinearSpec(Matmul(EIGHT))), Rule("*", linear_spec(*[EIGHT] * 3))))
    model, twin, x = mlp(), mlp(), batch()[0]
    halfstep.apply(twin, recipe)
    report = halfstep.quantize_model(model, recipe)
    assert report.kept["0"] == "its forward product takes the weight as it is"
    assert_same(model(x), evaluated(twin, x))
    model = mlp()
    report = halfstep.quantize_model(model, "mxfp8", lambda module, path: path == "3")
    assert (report.quantized, report.stored) == (("3",), {"float8_e4m3fn": 64, "float32": 180})
    assert "parameters: 64 in float8_e4m3fn, 180 in float32" in str(report)


def test_quantize_model_reuses_the_module_filter_of_apply():
    model = mlp()
    halfstep.apply(model, "mxfp8", lambda module, path: path == "3")
    assert halfstep.quantize_model(model, "mxfp8").quantized == ("3",)


# ---- copies, tracing and refusals -----------------------------------------------------------------------------------


@pytest.mark.quick("own-fp8-delayed", "carried-fp8-delayed")
@pytest.mark.parametrize("name", ["mxfp8", "fp8-delayed", "fp8-block"])
def test_a_deepcopy_has_its_own_codes(name):
    model, x = trained(name), batch()[0]
    halfstep.quantize_model(model, name)
    twin = copy.deepcopy(model)
    assert_same(twin(x), model(x))
    twin[0].weight_codes.zero_()
    assert not torch.equal(twin(x), model(x))


def test_scales_cast_to_16_bits_are_refused():
    model = mlp()
    halfstep.quantize_model(model, "fp8-current")
    with pytest.raises(QuantizationError, match=r"'scale' is \(1, 1\) torch.float16"):
        model.half()(batch()[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does, as it traces
@pytest.mark.parametrize("products", slow_unless("carried".__eq__, ["own", "carried"]), indirect=True)
@pytest.mark.parametrize("name", slow_unless("fp8-block".__eq__, ["fp8-current", "fp8-delayed", "mxfp8", "fp8-block"]))
def test_a_traced_graph_equals_eager(name):
    torch._dynamo.reset()
    model, x = trained(name), batch()[0]
    halfstep.quantize_model(model, name)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert_same(compiled(x), model(x))


class Gated(nn.Module):
    """A gated MLP applied three times: matmuls, and between them operations that a compiler fuses."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(32, 96), nn.Linear(32, 96), nn.Linear(96, 32)

    def forward(self, x):
        for _ in range(3):
            x = x + self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return x


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, as it traces
def test_inductor_differs_from_eager_only_by_omitted_bf16_roundings():
    """It keeps float32 in fused operations where eager rounds to bf16; with emulate_precision_casts it equals eager."""
    full = Gated().eval()
    model, x = copy.deepcopy(full), torch.randn(32, 32)
    halfstep.quantize_model(model, "fp8-current")

    def compiled(**options):
        torch._dynamo.reset()
        return torch.compile(model, options=options)(x)

    def distance(a, b):
        return float((a - b).norm() / b.norm())

    with torch.no_grad():
        eager, expected = model(x), full(x)
        assert torch.equal(compiled(emulate_precision_casts=True), eager)
        fused = compiled()
        assert 0 < distance(fused, eager) < distance(eager, expected)
        assert distance(fused, expected) < 1.1 * distance(eager, expected)


def test_a_quantized_model_refuses_training():
    model, x = mlp(), batch()[0]
    optimizer = adamw(model)
    halfstep.quantize_model(model, "mxfp8")
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    with pytest.raises(ModelError, match=r"Sequential is quantised for inference: its weights have no gradients. Call"):
        model.train()(x)
    with torch.no_grad():
        model(x)
    with pytest.raises(ModelError, match=r"a layer that is quantised for inference has no gradients, and its input"):
        model.eval()(x.requires_grad_())
    with pytest.raises(RecipeError, match=r"it is quantised under .mxfp8."):
        halfstep.prepare(model, optimizer, "mxfp8")
    with pytest.raises(RecipeError, match="is quantised for inference, and its full weights are gone"):
        halfstep.revert(model)
    halfstep.advance(model)


def test_unsupported_recipes_and_models_are_refused():
    with pytest.raises(RecipeError, match=r"recipe 'bf16-mixed' rounds no weights .* these do: .*fp8-block.*mxfp8"):
        halfstep.quantize_model(mlp(), "bf16-mixed")
    with pytest.raises(RecipeError, match=r"recipe 'fp32' rounds no weights"):
        halfstep.quantize_model(mlp(), "fp32")
    model = mlp()
    halfstep.quantize_model(model, "mxfp8")
    with pytest.raises(RecipeError, match=r"Sequential is quantised already, under 'mxfp8'; quantise a model with its"):
        halfstep.quantize_model(model, "mxfp8")
    model = mlp()
    halfstep.apply(model, "fp8-current")
    with pytest.raises(RecipeError, match=r"Sequential follows 'fp8-current'; quantise it under that recipe, or"):
        halfstep.quantize_model(model, "mxfp8")
    F.mse_loss(model(batch()[0]), batch()[1]).backward()
    with pytest.raises(ModelError, match=r"carries gradients that no step has used: it is in training. Step and"):
        halfstep.quantize_model(model, "fp8-current")
    with pytest.raises(ModelError, match=r"0.weight is float64"):
        halfstep.quantize_model(mlp().double(), "mxfp8")
    with pytest.raises(RecipeError, match=r"smooths gated MLPs by channel, which for inference goes into the weights"):
        halfstep.quantize_model(gated(), "fp8-smooth-swiglu")
    with pytest.raises(RecipeError, match=r"smooth is given, and recipe 'mxfp8' does not smooth by channel; leave it"):
        halfstep.quantize_model(gated(), "mxfp8", smooth={})


# ---- Perez et al. 2023: FP8 inference beside fp16 -------------------------------------------------------------------


@pytest.mark.quick("own")
def test_perez_scales_are_powers_of_two_with_a_margin_and_outputs_near_fp16():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer, x = adamw(model), torch.randn(64, 8)
    target = torch.sin(3 * x[:, :4])
    for _ in range(150):
        F.mse_loss(model(x), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    half = copy.deepcopy(model)
    halfstep.apply(half, "fp16-pure")
    weights = [model[i].weight.detach().half().float() for i in (0, 2, 4)]
    halfstep.quantize_model(model, "fp8-amax")
    for layer, weight in zip((model[0], model[2], model[4]), weights, strict=True):
        scale = 2.0 ** (int(layer.weight_scale) - 127)
        assert 15 < weight.abs().max() / scale <= 30  # 240 / 2^3
        codes = (weight / scale).numpy().astype(ml_dtypes.float8_e4m3fnuz).view(np.uint8)
        assert (layer.weight_codes.numpy() == codes).all()
    error = (model(x) - evaluated(half, x)).norm() / evaluated(half, x).norm()
    assert 0.001 < error < 0.15  # six operands of 4 significant bits, each with an error of 2^-4 / sqrt(3)
    assert F.mse_loss(model(x), target) < 0.2 * target.var()


def test_save_pretrained_writes_codes_and_refuses_submodels_and_options(tmp_path):
    """A submodel is refused because from_pretrained would fill the rest with random weights."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    model, again = LlamaForCausalLM(config), LlamaForCausalLM(config)
    for each in (model, again):
        halfstep.quantize_model(each, "fp8-current")
    with pytest.raises(ModelError, match=r"this LlamaModel is not a whole Hugging Face model.*state_dict"):
        model.model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"and was given push_to_hub too; leave it out"):
        model.save_pretrained(tmp_path, push_to_hub=True)
    assert not list(tmp_path.iterdir())
    copy.deepcopy(model).save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    again.load_state_dict(model.state_dict())
    x = torch.randint(32, (2, 5))
    assert_same(again(x).logits, model(x).logits)
