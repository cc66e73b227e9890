"""Linear layers that low-precision recipes leave in the compute dtype, by the names that models give them."""

from halfstep.recipe.products import LinearSpec
from halfstep.recipe.rule import Rule


HEADS = (
    "lm_head", "*.lm_head", "lm_head.*", "*.lm_head.*", "head", "*.head", "head.fc", "*.head.fc",
    "embed_out", "*.embed_out", "proj_out", "*model.proj_out", "score", "*.score", "qa_outputs", "*.qa_outputs",
    "classifier", "*.classifier", "classifier.*", "*.classifier.*", "*classification_head.*", "*predictions*",
    "*seq_relationship", "*multiple_choice_head.*", "vocab_transform", "vocab_projector",
)  # fmt: skip
"""Output heads: Hugging Face's names for language models and classifiers, and `head`. The layers inside a head are part
of it: RoBERTa's `lm_head.dense` and `lm_head.decoder`."""

ROUTERS = ("router", "*.router", "*.router.*", "gate", "*.gate", "*.shared_expert_gate")
"""Routers of mixtures of experts. A gated MLP's `gate_proj` is not a router."""

ADAPTERS = tuple(f"{before}lora_{which}{after}" for which in "AB" for before in ("", "*.") for after in ("", ".*"))
"""The two factors of LoRA, by PEFT's names: of a few ranks each, so that rounding saves nothing, and trained alone."""

ADAPTER_NAMES = (
    "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "prompt_encoder",
)  # fmt: skip
"""Modules and parameters of adapters, by name: LoRA's and DoRA's, and soft prompts. `Recipe.float32_adapters` means
them, and what a layer declares to be an adapter's, as PEFT's do (`nn.paths`)."""

KEEP = tuple(
    Rule("|".join(paths), LinearSpec(), optional=True, why=why)
    for paths, why in ((ROUTERS, "router"), (HEADS, "output head"), (ADAPTERS, "LoRA adapter"))
)
"""Rules to put before a recipe's own. Embeddings and norms form no products and stay as they are anyway."""
