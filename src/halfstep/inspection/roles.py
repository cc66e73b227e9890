"""The role of a tensor, by its name: embedding, norm, attention ...; defined by the table below."""

import re
from functools import lru_cache


ROLES: tuple[tuple[str, str], ...] = (
    ("master", r"master(_weights?|_params?)?|fp32_(flat_)?groups?|single_fp32_\w+|fp32_params?"),
    (
        "moments",
        r"exp_avg(_sq)?(_residual)?|exp_inf|max_exp_avg_sq|momentum(_buffer)?(_residual)?|square_avg|acc_delta|grad_avg"
        r"|compensation",
    ),
    (
        "scales",
        r"(\w+_)?(weight|input|output|activation|act|kv?|v|q|prob)_(global_)?scale(_inv|_2)?|\w*scale_inv|\w*scales"
        r"|(exp_avg(_sq)?|momentum_buffer)(_residual)?_scale|master_scale"
        r"|q?zeros|qzeros|scb|absmax|nested_absmax|quant_map|nested_quant_map|zero_point|amax_history\w*",
    ),
    (
        "norm",
        r"\w*(layer_?norm|rms_?norm|group_?norm|batch_?norm)\w*|(\w+_)?norm(_?\d+|_\w+)?|ln(_?\d+|_\w+)?|bn_?\d*",
    ),
    ("router", r"\w*router\w*|ffn_gate_inp|shared_expert_gate|e_score_correction_bias"),
    ("router", r"(block_sparse_moe|mlp|moe|feed_forward|ffn|mixer)\.gate\.(weight|bias|wg)"),
    ("head", r"lm_head|embed_out|score|classifier|cls|qa_outputs|(\w+_)?head"),
    (
        "embedding",
        r"\w*embed(ding)?s?|embed_(tokens|positions|in)|\w+_embeddings?(_\w+)?|wte|wpe|token_embd|position_embd|embeddings"
        r"|tok_embeddings|pos_embed|cls_token|token|position|patch_embed\w*",
    ),
    ("embedding", r"shared\.weight"),
    (
        "attention",
        r"\w*attn\w*|\w*attention\w*|[qkvo]_proj|(qkv|kv)\w*|query(_key_value)?|key|value|attn_\w+|sinks|c_attn",
    ),
    (
        "mlp",
        r"mlp\w*|\w*ffn\w*|feed_?forward\w*|fc_?\d+|experts?|(gate|up|down|gate_up)_proj\w*|dense_\w+|intermediate|c_fc"
        r"|DenseReluDense|w[i123o](_\d)?|lin\d|linear\d|block_sparse_moe|shared_expert|moe",
    ),
    ("head", r"^output\.(weight|bias)|^head\.(weight|bias)"),
    ("mlp", r"output\.dense"),
)
"""Roles and patterns, the first match wins. A pattern without a dot must match one whole part of the name between dots
or slashes; one with a dot is searched for in the name."""

NAMES = (*dict.fromkeys(role for role, _ in ROLES), "other")
"""All roles, in the table's order."""

WEIGHTS = ("norm", "router", "head", "embedding", "attention", "mlp", "other")
"""The roles of a model's parameters: neither optimizer state nor scales."""


def role_of(name: str) -> str:
    """The role of a tensor with that name.

    >>> role_of("model.layers.3.self_attn.q_proj.weight"), role_of("transformer.h.0.ln_1.weight")
    ('attention', 'norm')
    >>> role_of("model.layers.0.mlp.gate.weight"), role_of("model.layers.0.mlp.gate_proj.weight_scale_inv")
    ('router', 'scales')
    """
    parts = [part for part in _SEPARATORS.split(name) if not part.isdecimal()]  # without layer numbers
    first = min(map(_row_of, parts), default=len(ROLES))
    if not _OPTAX.isdisjoint(parts) and any(part.startswith("opt") for part in parts):
        return "moments"
    first = next((i for i, pattern in _SEARCHED.items() if i < first and pattern.search(name)), first)
    return ROLES[first][0] if first < len(ROLES) else "other"


@lru_cache(1 << 12)
def _row_of(part: str) -> int:
    """The first row of the table whose pattern matches this part of a name; the number of rows where none does."""
    # Patterns that end in \w* would backtrack over parts with other characters, so these are excluded first.
    if not _WORD.fullmatch(part):
        return len(ROLES)
    return next((i for i, pattern in _WHOLE.items() if pattern.fullmatch(part)), len(ROLES))


_SEPARATORS, _WORD = re.compile(r"[./]"), re.compile(r"\w+")
_OPTAX = {"mu", "nu"}  # Adam's moments in optax; only under its states' names, as a variational encoder has a mu, too
_COMPILED = {i: re.compile(pattern, re.IGNORECASE) for i, (_, pattern) in enumerate(ROLES)}
_SEARCHED = {i: pattern for i, pattern in _COMPILED.items() if r"\." in pattern.pattern}
_WHOLE = {i: pattern for i, pattern in _COMPILED.items() if i not in _SEARCHED}
