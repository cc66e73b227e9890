"""`halfstep.unit_scale` on Hugging Face's GPT-2, Llama, BERT and T5: gradients, sizes, generation, errors."""

import pytest
import torch

import halfstep
from families import slow_unless
from halfstep.errors import ModelError
from unit_scaled import off_direction, passes, sizes


transformers = pytest.importorskip("transformers")
IDS = torch.randint(3, 97, (8, 24), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, 18:] = 0


def built(name, attention="sdpa", dropout=0.0, layers=2):
    """A small model with random weights, and its inputs."""
    torch.manual_seed(0)
    common = {"vocab_size": 97, "attn_implementation": attention}
    if name == "gpt2":
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        config = transformers.GPT2Config(n_positions=32, n_embd=64, n_layer=layers, n_head=4, **common, **drops)
        return transformers.GPT2LMHeadModel(config), {"input_ids": IDS}
    if name == "llama":
        config = transformers.LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, attention_dropout=dropout, **common,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config), {"input_ids": IDS}
    if name == "bert":
        config = transformers.BertConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
            hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **common,
        )  # fmt: skip
        return transformers.BertForMaskedLM(config), {"input_ids": IDS, "token_type_ids": IDS % 2}
    if attention == "sdpa" and not transformers.T5PreTrainedModel._supports_sdpa:
        pytest.skip(f"transformers {transformers.__version__} has one attention for T5, the eager one")
    config = transformers.T5Config(
        d_model=64, d_ff=128, d_kv=16, num_layers=layers, num_heads=4, dropout_rate=dropout,
        decoder_start_token_id=0, **common,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), {"input_ids": IDS, "decoder_input_ids": IDS.flip(0)}


NAMES = ("gpt2", "llama", "bert", "t5")
EACH = [(name, attention) for name in NAMES for attention in ("sdpa", "eager")]
every_model = pytest.mark.parametrize(("name", "attention"), EACH)


# Llama's softmax is always in float32, so finite differences are no reference; it is compared with sdpa below.
@pytest.mark.quick("gpt2-eager-False")
@pytest.mark.parametrize(
    ("name", "attention", "masked"),
    slow_unless(
        lambda case: case[2] == (case[1] == "sdpa") and case != ("t5", "eager", False),
        [(*each, masked) for each in EACH if each != ("llama", "eager") for masked in (False, True)],
    ),
)
def test_gradients_are_multiples_of_true_gradients(name, attention, masked):
    model, inputs = built(name, attention, layers=2 if masked else 1)
    inputs |= {"attention_mask": MASK} if masked else {}
    if name == "t5" and not model._supports_sdpa:
        pytest.skip(f"T5's softmax of transformers {transformers.__version__} is in float32, as Llama's")
    if name == "t5":  # ReLU has no finite-difference slopes
        for module in model.modules():
            if isinstance(getattr(module, "act", None), torch.nn.ReLU):
                module.act = torch.nn.GELU()
    halfstep.unit_scale(model, **inputs)
    found = off_direction(model.double().train(), (), inputs)
    assert max(found.values()) < 1e-6, found


@pytest.mark.quick("llama-eager", "t5-sdpa")
@every_model
def test_tensor_sizes_are_near_1_at_initialization(name, attention):
    """Forward sizes within 1/3 and 3; gradients of queries and keys are smaller, by attention's nature."""
    model, inputs = built(name, attention, dropout=0.1)
    halfstep.unit_scale(model.train(), attention_mask=MASK, **inputs)
    values, grads, weights = sizes(model, (), {"attention_mask": MASK, **inputs})
    assert all(1 / 3 <= size <= 3 for size in values.values()), values
    assert sum(0.8 <= size <= 1.25 for size in values.values()) >= 0.5 * len(values), values
    attended = ("query", "key", ".q", ".k", "bias", ".q.weight", ".k.weight")
    for found in (grads, weights):
        assert all(1 / 20 <= size <= 3 for size in found.values()), found
        others = {path: size for path, size in found.items() if not any(part in path for part in attended)}
        assert all(1 / 10 <= size <= 3 for size in others.values()), others


@pytest.mark.parametrize("name", NAMES[:3])  # T5's bias and mask have separate factors in eager attention
def test_eager_and_sdpa_attention_agree(name):
    outputs = []
    for attention in ("sdpa", "eager"):
        model, inputs = built(name, attention)
        halfstep.unit_scale(model, attention_mask=MASK, **inputs)
        outputs.append(passes(model.train(), (), {"attention_mask": MASK, **inputs}))
    (output, grads), (other, found) = outputs
    seen = MASK.bool()
    assert torch.allclose(output[seen], other[seen], rtol=1e-4, atol=1e-4)
    largest = max(float(grad.abs().max()) for grad in grads.values())
    assert all(torch.allclose(grad, found[key], rtol=1e-3, atol=1e-4 * largest) for key, grad in grads.items())


@pytest.mark.quick("gpt2-sdpa-True", "bert-sdpa-True", "t5-eager-False")
@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")  # transformers' own
@pytest.mark.parametrize(
    ("name", "attention", "reentrant"),
    slow_unless(
        lambda case: case[2] == (case[1] == "sdpa"),
        [(*each, reentrant) for each in EACH for reentrant in (True, False)],
    ),
)
def test_activation_checkpointing_gives_the_same_gradients(name, attention, reentrant):
    model, inputs = built(name, attention)
    halfstep.unit_scale(model.train(), **inputs)
    output, grads = passes(model, (), inputs)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    again, found = passes(model, (), inputs)
    assert torch.allclose(again, output, rtol=1e-5, atol=1e-5)  # transformers disables the cache
    largest = max(float(grad.abs().max()) for grad in grads.values())
    assert all(torch.allclose(grad, found[key], rtol=1e-5, atol=1e-6 * largest) for key, grad in grads.items())


@pytest.mark.quick("t5-sdpa", "t5-eager")
@pytest.mark.parametrize(("name", "attention"), [each for each in EACH if each[0] != "bert"])
def test_generation_with_and_without_a_cache_agree(name, attention):
    model, inputs = built(name, attention)
    halfstep.unit_scale(model, **inputs)
    model.eval()
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(IDS[:2, :6], use_cache=True, **options)
    whole = model.generate(IDS[:2, :6], use_cache=False, **options)
    assert torch.equal(cached, whole)


def test_models_own_loss_has_unit_sized_gradients():
    model, inputs = built("bert")
    report = halfstep.unit_scale(model.train(), labels=IDS, **inputs)
    assert [op.name for op in report.operations][-1] == "cross_entropy"
    seen = []
    model.cls.predictions.decoder.register_forward_hook(
        lambda module, given, output: (
            output.register_hook(lambda grad: seen.append(float(grad.square().mean().sqrt()))) and None
        )
    )
    model(labels=IDS, **inputs).loss.backward()
    assert seen[0] == pytest.approx(1, rel=0.4)


def test_save_pretrained_raises_until_reverted(tmp_path):
    model, inputs = built("gpt2")
    halfstep.unit_scale(model, **inputs)
    for part in (model, model.transformer):
        with pytest.raises(ModelError, match=r"the weights are unit-scaled, .* Save model.state_dict\(\)"):
            part.save_pretrained(tmp_path)
    halfstep.revert(model)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").exists()


def test_dummy_inputs_replace_a_batch():
    model, _ = built("llama")
    report = halfstep.unit_scale(model)
    assert "at the traced length" in str(report)
    assert "lm_head: nn.Linear" in str(report)


def test_handwritten_norms_are_recognised_by_computation():
    model, inputs = built("t5", "eager")
    report = halfstep.unit_scale(model, **inputs)
    assert sum(op.name == "rms_norm" for op in report.operations) == 5 * 2 + 2
    model, inputs = built("t5", "eager")

    class Doubled(type(model.encoder.final_layer_norm)):
        def forward(self, x):
            return 2 * super().forward(x)

    model.encoder.final_layer_norm.__class__ = Doubled
    with pytest.raises(ModelError, match=r"branch comes from encoder\.final_layer_norm: "):
        halfstep.unit_scale(model, **inputs)
