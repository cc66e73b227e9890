"""Linear layers that low-precision recipes leave in the compute dtype, by the names that models give them."""

from halfstep.recipe.spec import LinearSpec, Rule


HEADS = (
    "lm_head", "*.lm_head", "head", "*.head", "embed_out", "*.embed_out", "proj_out", "*.proj_out", "score", "*.score",
    "classifier", "*.classifier", "classifier.*", "*.classifier.*", "qa_outputs", "*.qa_outputs", "*predictions*",
)  # fmt: skip
"""Output heads: Hugging Face's names for language models and classifiers, and `head`."""

ROUTERS = ("router", "*.router", "*.router.*", "gate", "*.gate", "*.shared_expert_gate")
"""Routers of mixtures of experts. A gated MLP's `gate_proj` is none."""

KEEP = tuple(
    Rule(path, LinearSpec(), optional=True, why=why)
    for paths, why in ((HEADS, "output head"), (ROUTERS, "router"))
    for path in paths
)
"""Rules to put before a recipe's own. Embeddings and norms are no linear layers and stay as they are anyway."""
