"""Roles of tensors from their names, for model families in use."""

import pytest

from halfstep.inspection.roles import NAMES, WEIGHTS, role_of


EXPECTED = {
    "embedding": (
        "model.embed_tokens.weight", "transformer.wte.weight", "transformer.wpe.weight", "wte.weight", "shared.weight",
        "bert.embeddings.word_embeddings.weight", "bert.embeddings.position_embeddings.weight", "token_embd.weight",
        "gpt_neox.embed_in.weight", "vit.embeddings.patch_embeddings.projection.weight", "tok_embeddings.weight",
        "transformer.word_embeddings.weight", "vit.embeddings.cls_token", "decoder.embed_positions.weight",
    ),
    "norm": (
        "model.norm.weight", "model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight",
        "transformer.h.0.ln_1.weight", "transformer.ln_f.bias",
        "bert.encoder.layer.0.attention.output.LayerNorm.weight",
        "encoder.block.0.layer.0.layer_norm.weight", "decoder.final_layer_norm.weight", "blk.0.attn_norm.weight",
        "output_norm.weight", "layer1.0.bn1.running_var", "model.layers.0.self_attn.q_norm.weight", "ln_1/scale",
        "model.layers.0.self_attn.kv_a_layernorm.weight", "transformer.word_embeddings_layernorm.weight",
        "vit.encoder.layer.0.layernorm_before.weight", "blocks.0.norm1.weight", "blk.1.ffn_norm.weight",
    ),
    "attention": (
        "model.layers.0.self_attn.q_proj.weight", "transformer.h.0.attn.c_proj.weight", "blk.0.attn_q.weight",
        "bert.encoder.layer.0.attention.self.query.weight", "bert.encoder.layer.0.attention.output.dense.weight",
        "encoder.block.0.layer.0.SelfAttention.q.weight", "gpt_neox.layers.0.attention.query_key_value.weight",
        "transformer.h.0.self_attention.query_key_value.weight", "model.layers.3.self_attn.sinks",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "blocks.0.attn.qkv.weight",
        "model.layers.0.self_attn.kv_b_proj.weight", "decoder.layers.0.self_attn.out_proj.weight",
    ),
    "mlp": (
        "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.experts.3.down_proj.weight", "blk.0.ffn_up.weight",
        "transformer.h.0.mlp.c_proj.weight", "bert.encoder.layer.0.intermediate.dense.weight",
        "bert.encoder.layer.0.output.dense.weight", "decoder.layers.0.fc1.weight",
        "encoder.block.0.layer.1.DenseReluDense.wi_0.weight", "model.layers.0.block_sparse_moe.experts.0.w1.weight",
        "gpt_neox.layers.0.mlp.dense_h_to_4h.weight", "layers.0.feed_forward.w1.weight",
    ),
    "router": (
        "model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.gate.weight", "blk.0.ffn_gate_inp.weight",
        "model.layers.0.mlp.router.weight", "model.layers.3.mlp.gate.e_score_correction_bias",
        "model.layers.0.mlp.shared_expert_gate.weight",
    ),
    "head": (
        "lm_head.weight", "output.weight", "gpt_neox.embed_out.weight", "embed_out.weight", "classifier.weight",
        "score.weight", "cls.predictions.decoder.weight", "qa_outputs.bias", "head.weight",
    ),
    "scales": (
        "model.layers.0.mlp.down_proj.weight_scale_inv", "model.layers.0.self_attn.q_proj.weight_scale",
        "model.layers.0.mlp.down_proj.input_scale", "model.layers.0.mlp.down_proj.weight_scale_2",
        "model.layers.0.mlp.experts.gate_up_proj_scales", "model.layers.0.self_attn.k_scale",
        "model.layers.0.mlp.down_proj.weight.absmax", "model.layers.0.self_attn.q_proj.SCB", "layers.0.qzeros",
        "state.3.exp_avg_scale", "0.exp_avg_sq_residual_scale", "0.master_scale",
    ),
    "moments": (
        "0.exp_avg", "12.exp_avg_sq", "optimizer.state.3.exp_avg", "state.3.momentum_buffer", "0.exp_avg_sq_residual",
        "optim.model.layers.0.mlp.gate_proj.weight.exp_avg_sq", "opt/mu/h/attn/kernel",
    ),
    "master": ("0.master", "optimizer.fp32_flat_groups.0", "state.4.master_weight"),
    "other": (
        "0.step", "random", "encoder.mu.weight", "decoder.nu.bias",
        "model.layers.0.rotary_emb.inv_freq", "rope_freqs.weight", "conv1.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("role", "name"), [(role, name) for role, names in EXPECTED.items() for name in names])
def test_role_of_names(role, name):
    assert role_of(name) == role


def test_all_roles_are_tested():
    assert set(EXPECTED) == set(NAMES)
    assert set(WEIGHTS) < set(NAMES)


def test_names_of_any_length_are_read_in_linear_time():
    """A pattern that tried every end of a part took 20 s at 99 KB; these names would take hours."""
    for part in ("layer_norm_", "norm_", "a_embedding_", "router", "mlp_ffn_", "mu."):
        assert role_of(part * 40_000 + "!") in NAMES
