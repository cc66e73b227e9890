"""PEFT adapters under recipes: float32 and unrounded in both orders, readable by stock libraries merged or saved."""

import itertools
import warnings
from importlib.metadata import version

import pytest
import torch
from lora import adamw, adapted, batch, llama, logits, train, trained
from peft import IA3Config, LNTuningConfig, LoHaConfig, LoraConfig, PeftModel, PromptTuningConfig, VeraConfig
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

import halfstep
from families import in_turn, slow_unless
from halfstep.errors import OptimizerError
from halfstep.ops import CodeTensor
from tiny import assert_same


ORDERS = ("adapters first", "recipe first")
every_order = pytest.mark.parametrize("order", ORDERS)


def prepared(name, order="adapters first", model=None, config=None, **options):
    model = llama() if model is None else model
    if order == "adapters first":
        model = adapted(model, config, **options)
        return halfstep.prepare(model, adamw(model), recipe=name, generator=3)
    halfstep.apply(model, name)
    model = adapted(model, config, **options)
    return model, *halfstep.optimize(model, adamw(model), generator=3)


def distance(x, y):
    return ((x - y).norm() / y.norm()).item()


@pytest.mark.quick("fp32")
@pytest.mark.parametrize("name", ["fp32", "fp8-delayed"])
def test_both_orders_train_equally(name):
    """For bases that stay in float32; PEFT rounds a new adapter to the dtype of the layer it adapts."""
    first, second = (prepared(name, order) for order in ORDERS)
    assert train(*first) == train(*second)
    for one, other in zip(trained(first[0]).values(), trained(second[0]).values(), strict=True):
        assert_same(one.detach(), other.detach())


STORED = {"bf16-stochastic": 2e-2, "fp16-pure": 4e-3, "fp8-current": 0.1, "fp8lm-o3": 0.1}


@pytest.mark.quick("bf16-stochastic-adapters first")
@pytest.mark.parametrize(
    ("name", "order"),
    slow_unless(in_turn([*STORED], ORDERS).__contains__, itertools.product(STORED, ORDERS)),
)
def test_merged_model_is_a_stock_model(name, order, tmp_path):
    model, optimizer, scaler = prepared(name, order, use_dora=name == "fp16-pure")
    train(model, optimizer, scaler)
    expected = logits(model)
    merged = model.merge_and_unload()
    halfstep.revert(model)
    assert type(merged) is LlamaForCausalLM
    assert {p.dtype for p in merged.parameters()} == {torch.float32}
    merged.save_pretrained(tmp_path)
    stock = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name_, parameter in merged.named_parameters():
        assert type(parameter) is torch.nn.Parameter
        assert_same(stock.get_parameter(name_).detach(), parameter.detach())
    assert distance(logits(stock), expected) < STORED[name]
    assert distance(logits(llama()), expected) > 2 * distance(logits(stock), expected)  # the adapters are included


@pytest.mark.parametrize("name", ["bf16-stochastic", "fp8lm-o2"])
def test_merged_weight_is_rounded_once_to_the_base_format(name):
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler)
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    base = layer.base_layer.weight
    full = base.float().detach() + layer.get_delta_weight("default").detach()
    coded = isinstance(base, CodeTensor)
    wanted = CodeTensor.encode(full, base.quantizer).values() if coded else full.bfloat16()
    model.merge_adapter()
    found = layer.base_layer.weight
    assert_same(found.values() if coded else found.detach(), wanted)


@pytest.mark.quick("bf16-master")
@pytest.mark.parametrize("name", ["bf16-master", "fp8-delayed"])
def test_adapter_file_loads_in_stock_peft(name, tmp_path):
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler)
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        stock = PeftModel.from_pretrained(llama(), tmp_path)
    ours = {n: p.detach() for n, p in model.named_parameters() if "lora_" in n}
    theirs = {n: p.detach() for n, p in stock.named_parameters() if "lora_" in n}
    assert ours.keys() == theirs.keys()
    for n, value in theirs.items():
        assert value.dtype == torch.float32
        assert_same(ours[n], value)
    assert distance(logits(model), logits(stock)) < 0.1


@pytest.mark.quick("recipe first")
@every_order
def test_adapters_can_be_disabled_and_switched(order):
    model, optimizer, scaler = prepared("bf16-stochastic", order)
    with model.disable_adapter():
        before = logits(model)
    train(model, optimizer, scaler)
    first = logits(model)
    with model.disable_adapter():
        assert_same(logits(model), before)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    model.set_adapter("second")
    assert_same(logits(model), before)  # a new adapter's lora_B is zero
    if not version("peft").startswith("0.18."):  # peft 0.18's add_adapter keeps the base layer's dtype
        assert {p.dtype for n, p in model.named_parameters() if "second" in n} == {torch.float32}
    model.set_adapter("default")
    assert_same(logits(model), first)
    model.merge_adapter()
    assert distance(logits(model), first) < 2e-2
    model.unmerge_adapter()
    assert distance(logits(model), first) < 2e-2


def test_16_bit_adapter_added_later_raises():
    model = llama()
    halfstep.apply(model, "bf16-stochastic")
    model = adapted(model, autocast_adapter_dtype=False)
    assert {p.dtype for p in trained(model).values()} == {torch.bfloat16}
    with pytest.raises(OptimizerError, match=r"lora_A.default.weight is an adapter's and is stored in torch.bfloat16"):
        halfstep.optimize(model, adamw(model))
    for parameter in trained(model).values():
        parameter.data = parameter.data.float()
    optimizer, scaler = halfstep.optimize(model, adamw(model), generator=3)
    first, *_, last = train(model, optimizer, scaler)
    assert last < first
    assert {p.dtype for p in trained(model).values()} == {torch.float32}


@pytest.mark.quick("bf16-stochastic-adapters first")
@every_order
@pytest.mark.parametrize("name", ["bf16-stochastic", "fp8-delayed"])
def test_wrapped_model_can_be_audited_advanced_and_reverted(name, order):
    model, optimizer, scaler = prepared(name, order)
    train(model, optimizer, scaler, 1)
    report = halfstep.audit(model, optimizer, scaler)
    assert report.trained == sum(p.numel() for p in trained(model).values())
    model(**batch()).loss.backward()
    optimizer.step()
    halfstep.advance(model)
    dtypes = {p.dtype for p in model.base_model.model.model.embed_tokens.parameters()}
    assert dtypes == {torch.bfloat16 if name == "bf16-stochastic" else torch.float32}
    halfstep.revert(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any("_halfstep" in name for module in model.modules() for name in vars(module))
    assert type(model.get_base_model()) is LlamaForCausalLM


def test_generates_without_warnings():
    model, *_ = prepared("bf16-stochastic")
    model.eval()
    made = model.generate(input_ids=batch()["input_ids"][:1], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert made.shape == (1, 15)


TUNERS = {
    "ia3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": LoHaConfig(r=2, target_modules=["q_proj"]),
    "vera": VeraConfig(r=4, target_modules=["q_proj"]),
    "norms": LNTuningConfig(target_modules=["input_layernorm"]),
    "dora": LoraConfig(r=2, target_modules=["q_proj"], use_dora=True),
    "embedding": LoraConfig(r=2, target_modules=["embed_tokens"]),
    "prompts": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.quick("norms", "prompts")
@pytest.mark.filterwarnings("ignore:Unsupported layer type")  # a warning of PEFT for any norm
@pytest.mark.parametrize("kind", TUNERS)
def test_peft_methods_train_in_float32(kind):
    model, optimizer, scaler = prepared("bf16-stochastic", config=TUNERS[kind])
    assert {p.dtype for p in trained(model).values()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    losses = train(model, optimizer, scaler)
    assert losses[-1] < losses[0]


def test_modules_to_save_follow_the_recipe_like_their_originals():
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(llama().config)
    model.config.pad_token_id = 0
    model = adapted(model, task_type="SEQ_CLS")  # saves a copy of `score`
    report = halfstep.apply(model, "fp8-current")
    score = "base_model.model.score"
    assert report.kept[f"{score}.modules_to_save.default"] == report.kept[f"{score}.original_module"] == "output head"
    halfstep.revert(model)
    halfstep.apply(model, "bf16-nomaster")
    assert model.get_parameter(f"{score}.modules_to_save.default.weight").dtype == torch.bfloat16
    halfstep.revert(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
