"""Attention of Hugging Face's models under a recipe: its two matmuls round their operands, forward and backward.

from halfstep.integrations.attention import register_attention

register_attention()
model.set_attn_implementation("halfstep")
model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe)  # a recipe with `attention`
"""

import math
from typing import Any

from torch import Tensor, nn

from halfstep import ops
from halfstep.errors import MissingLibraryError, ModelError
from halfstep.nn.layers import HUGGING_FACE
from halfstep.ops.part import key_of, part_of


with MissingLibraryError.of("hf"):
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask


__all__ = ["register_attention"]

_UNKNOWN = ("softcap", "s_aux", "position_bias", "cache")
"""Arguments of models' attention that change its result and are not supported."""


def register_attention() -> None:
    """Register `attn_implementation="halfstep"` in transformers: scaled_dot_product_attention as in their `sdpa`, whose
    matmuls round their operands if the model's recipe has `attention`. Scores and softmax are then float32.

    Models with other attention (soft caps, sinks, position biases) raise at the first forward.
    """
    AttentionInterface.register(HUGGING_FACE, attention)
    AttentionMaskInterface.register(HUGGING_FACE, sdpa_mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: q, k, v (batch, heads, time, d) -> (batch, time, heads, d). Keys
    and values of grouped queries are repeated.

    Raises:
        ModelError: the model passes an argument that `ops.attention` does not support.
    """
    unknown = [name for name in _UNKNOWN if more.get(name) is not None]
    if unknown:
        raise ModelError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which attn_implementation="
            f"{HUGGING_FACE!r} does not do; take 'eager' or 'sdpa', and a recipe without `attention`"
        )
    if (groups := query.shape[1] // key.shape[1]) > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    causal = causal and query.shape[2] > 1 and attention_mask is None
    width = query.shape[-1]
    if scaling is not None and not math.isclose(scaling, width**-0.5, rel_tol=1e-9):
        query = query * (scaling * width**0.5)
    return ops.attention(
        query, key, value, causal, attention_mask, dropout, part_of(module).attention, noise=key_of(module)
    ).transpose(1, 2).contiguous(), None
