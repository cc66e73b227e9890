"""A tiny Llama with PEFT adapters."""

import warnings

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import halfstep
from tiny import descend


def llama(**options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes, **options)).train()


def adapted(model, config=None, autocast_adapter_dtype=True, **options):
    """The model with PEFT adapters; by default LoRA of rank 4."""
    torch.manual_seed(1)
    config = config or LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], **options)
    with warnings.catch_warnings():  # PEFT reads an attribute that transformers renamed
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return get_peft_model(model, config, autocast_adapter_dtype=autocast_adapter_dtype).train()


def quantized(name="nf4"):
    """A base in codes with adapters."""
    model = llama()
    halfstep.quantize_model(model, name, adapters=True)
    return adapted(model)


def batch(seed=1):
    ids = torch.randint(2, 32, (4, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def trained(model):
    """The model's trainable parameters, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def adamw(model, **options):
    return torch.optim.AdamW([*trained(model).values()], **{"lr": 1e-2, **options})


def train(model, optimizer, scaler, steps=4):
    """The documented training loop on one batch; returns the losses."""
    return descend(lambda: model(**batch()).loss, optimizer, scaler, steps)


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(**batch()).logits
