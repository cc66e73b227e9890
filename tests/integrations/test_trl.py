"""TRL's trainers under recipes: trained models follow the recipe, reference models do not."""

import math

import matrix  # noqa: F401  (finds what a column imports)
import pytest
import torch
from datasets import Dataset
from lora import adapted
from matrix_trl import tuned
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from trainers import CHECKPOINTING, IS_CHECKPOINTING, MICRO, Recording, llama, options, tokenizer, tokens
from transformers import LlamaForSequenceClassification
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer

import halfstep
from halfstep.errors import OptimizerError, RecipeError
from halfstep.memory import stored_bytes
from tiny import are_same, assert_same, copied


pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # TRL uses the old name


class RecordingDPO(Recording, DPOTrainer):
    """DPOTrainer that records batches and losses."""


class RecordingReward(Recording, RewardTrainer):
    """RewardTrainer that records batches and losses."""


class RecordingGRPO(Recording, GRPOTrainer):
    """GRPOTrainer that records batches and losses."""


def pairs():
    """Prompts with a chosen and a rejected continuation."""
    rows = [" ".join(f"w{i}" for i in row) for row in tokens(rows=32)]
    prompts, chosen = zip(*((row.split(" w", 6)[0], f" {row.rsplit(' ', 4)[1]}") for row in rows), strict=True)
    return Dataset.from_dict({"prompt": list(prompts), "chosen": list(chosen), "rejected": list(chosen[::-1])})


@pytest.mark.parametrize(("recipe", "dtype"), [("fp16-mixed", torch.float16), ("bf16-stochastic", torch.bfloat16)])
def test_sft_computes_in_the_recipes_dtype(recipe, dtype):
    seen, model = [], llama()
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda module, given, out: seen.append(out.dtype))
    trained = tuned(recipe, model, max_steps=2, **{CHECKPOINTING: True})
    assert getattr(model, IS_CHECKPOINTING)
    assert seen == 2 * 2 * MICRO * [dtype]  # in two steps each micro-batch is computed twice
    assert {"raw_loss", "mean_token_accuracy"} <= trained.state.log_history[0].keys()


def test_dpo_reference_model_does_not_follow_the_recipe(tmp_path):
    reference = llama()
    stock = copied(reference.state_dict())
    told = DPOConfig(bf16=False, **options(tmp_path, max_steps=2))
    how = {"train_dataset": pairs(), "processing_class": tokenizer(), "generator": 3, "audit": False}
    trained = RecordingDPO(llama(), reference, told, recipe="fp8lm-o2", **how)
    trained.train()
    assert_same(copied(trained.ref_model.state_dict()), stock)
    with pytest.raises(RecipeError, match="follows no recipe"):
        halfstep.revert(trained.ref_model)
    assert not are_same(copied(trained.model.state_dict()), stock)
    assert {row.dtype for row in halfstep.audit(trained.model).rows} != {"float32"}
    assert all(torch.isfinite(torch.tensor(loss)) for loss in trained.losses)


@pytest.mark.slow
def test_reward_models_train(tmp_path):
    model = LlamaForSequenceClassification(llama(num_labels=1).config)
    told = RewardConfig(bf16=False, **options(tmp_path, max_steps=2))
    data = pairs().remove_columns("prompt")
    trained = RecordingReward(
        model, told, recipe="fp8-delayed", train_dataset=data, processing_class=tokenizer(), audit=False
    )
    trained.train()
    assert {name for name, _ in model.named_buffers() if "scaling" in name}
    assert all(map(math.isfinite, trained.losses))


@pytest.mark.slow
def test_grpo_generates_and_trains(tmp_path):
    how = {"max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-2}
    told = GRPOConfig(bf16=False, num_generations=4, max_completion_length=4, **options(tmp_path, **how))
    model, data = llama(), pairs().select_columns(["prompt"])
    start = copied(model.state_dict())
    more = {"reward_funcs": lambda completions, **_: [float(len(c)) for c in completions], "audit": False}
    trained = RecordingGRPO(
        model, args=told, recipe="bf16-master", train_dataset=data, processing_class=tokenizer(), **more
    )
    trained.train()
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert not are_same(copied(model.state_dict()), start)


def test_trls_default_precision_raises(tmp_path):
    told = DPOConfig(bf16=False, **options(tmp_path))
    told.bf16 = True  # the default on GPUs
    with pytest.raises(RecipeError, match=r"bf16=True with recipe 'fp32'.*TRL's arguments have bf16=True by default"):
        RecordingDPO(llama(), llama(), told, recipe="fp32", train_dataset=pairs(), processing_class=tokenizer())


@pytest.mark.slow  # test_qlora.py has the fast test, with Trainer
def test_sft_trains_adapters_on_a_base_of_codes():
    """With a base quantized before training or by the trainer."""
    trainers, first = [], None
    for quantized in (False, True):
        model = llama()
        if quantized:
            halfstep.quantize_model(model, "nf4", adapters=True)
        model = adapted(model)
        if quantized:  # new adapters have the base layer's dtype
            set_peft_model_state_dict(model, first)
        first = copied(get_peft_model_state_dict(model))
        trainers.append(tuned("nf4", model, max_steps=3))
    whole, codes = trainers
    assert codes.losses == whole.losses
    assert_same(get_peft_model_state_dict(codes.model), get_peft_model_state_dict(whole.model))
    assert stored_bytes(codes.model) == stored_bytes(whole.model) < 0.4 * stored_bytes(llama())


def test_sft_on_codes_without_adapters_raises():
    model = llama()
    halfstep.quantize_model(model, "nf4", adapters=True)
    with pytest.raises(OptimizerError, match="nothing to train beside its codes: add adapters first"):
        tuned("nf4", model)
