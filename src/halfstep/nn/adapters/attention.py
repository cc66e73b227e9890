"""Adapter of `nn.MultiheadAttention`, whose projections round their operands; the rest is computed as torch does.

torch's own forward reads the weights of `out_proj` and does not call it, so adopting `out_proj` alone would have no
effect. Rules match the in-projection by the path of the attention module, and `out_proj` by its own path. Queries, keys
and values come from one weight (or three) and share one scaling state for each operand.

`nn.TransformerEncoder` and its layers have a fast path in evaluation that calls no module and so rounds nothing; it
converts padded batches to nested tensors. torch's switch for it is global; here it is turned off by attributes of the
modules that have no other effect.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import ops
from halfstep.nn.adapters import linear
from halfstep.nn.adopt import has_forward_of, is_stock, twin
from halfstep.nn.product import product, weight_of
from halfstep.nn.quantized_weights import Kind, Weight
from halfstep.ops.part import key_of, part_of


_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def fits(module: Any) -> bool:
    """Whether out_proj, which the module does not call, has the forward of nn.Linear."""
    return is_stock(module) and has_forward_of(module.out_proj, linear.LINEAR.forward_of)


def weights(module: Any) -> tuple[Weight, ...]:
    """The weights of the in-projection: one for queries, keys and values, or three if their inputs differ in width."""
    return (Weight("in_proj_weight"),) if module._qkv_same_embed_dim else tuple(map(Weight, _SEPARATE))


def forward(
    stock: Any,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """torch's `multi_head_attention_forward`, with its projections through `ops.linear`."""
    if is_causal and attn_mask is None:
        raise RuntimeError("is_causal is a hint about attn_mask, which is None; pass the mask")  # torch's own condition
    if query.is_nested:
        raise RuntimeError("nested tensors need torch's fast path, which rounds nothing; pad, or revert the recipe")
    batched, same, self_attention = query.dim() == 3, key is value, query is key
    if not batched:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        same = False  # as in torch: three matmuls
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    elif module.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    if same:
        value = key
    q, k, v = _in_projection(module, query, key, value, same, same and self_attention)
    merged, is_causal = _mask(module, q, k, key_padding_mask, attn_mask, is_causal and not need_weights)
    mixed, weights = _attention(module, q, k, v, merged, is_causal, need_weights)
    out = module.out_proj
    output = product(out, mixed, weight_of(out, "weight", mixed), out.bias).view(query.shape[0], query.shape[1], -1)
    if weights is not None and average_attn_weights:
        weights = weights.mean(dim=1)
    if not batched:
        return output.squeeze(1), None if weights is None else weights.squeeze(0)
    return output.transpose(0, 1) if module.batch_first else output, weights


def _in_projection(
    module: Any, query: Tensor, key: Tensor, value: Tensor, same: bool, self_attention: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, (time, batch, width), by as few matmuls as in torch."""
    bias, width = module.in_proj_bias, module.embed_dim
    biases = (None, None, None) if bias is None else bias.split(width)
    if module._qkv_same_embed_dim:
        whole = weight_of(module, "in_proj_weight", query)
        if self_attention:
            q, k, v = product(module, query, whole, bias).chunk(3, dim=-1)
            return q.contiguous(), k.contiguous(), v.contiguous()
        weights = whole.split(width)
        if same:
            both = None if bias is None else bias[width:]
            k, v = product(module, key, whole[width:], both).chunk(2, dim=-1)
            return product(module, query, weights[0], biases[0]), k.contiguous(), v.contiguous()
    else:
        weights = tuple(weight_of(module, name, query) for name in _SEPARATE)
    inputs = zip((query, key, value), weights, biases, strict=True)
    q, k, v = (product(module, x, weight, part) for x, weight, part in inputs)
    return q, k, v


def _mask(
    module: Any, q: Tensor, k: Tensor, padding: Tensor | None, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor | None, bool]:
    """The additive mask of the scores, (batch, heads or 1, time, sources), or None; and whether `is_causal` replaces
    it."""
    if is_causal and padding is None:
        return None, True
    batch, extra = k.shape[1], (module.bias_k is not None) + module.add_zero_attn
    mask, padding = _additive(mask, q.dtype), _additive(padding, q.dtype)
    if mask is not None:
        mask = F.pad(mask, (0, extra))
        mask = mask[None, None] if mask.dim() == 2 else mask.view(batch, module.num_heads, *mask.shape[1:])
    if padding is not None:
        padding = F.pad(padding, (0, extra))[:, None, None]
        mask = padding if mask is None else mask + padding
    return mask, False


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)


def _attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """The attention output, (time * batch, width), and the weights, (batch, heads, time, sources), if needed."""
    time, batch, width = q.shape
    heads, size = module.num_heads, module.head_dim
    if module.bias_k is not None:
        k = torch.cat([k, module.bias_k.to(k.dtype).repeat(1, batch, 1)])
        v = torch.cat([v, module.bias_v.to(v.dtype).repeat(1, batch, 1)])
    q, k, v = (x.reshape(x.shape[0], batch * heads, size).transpose(0, 1) for x in (q, k, v))
    if module.add_zero_attn:
        k, v = (torch.cat([x, x.new_zeros(batch * heads, 1, size)], dim=1) for x in (k, v))
    dropout = module.dropout if module.training else 0.0
    sources, spec = k.shape[1], part_of(module).attention
    if spec is not None:
        q, k, v = (x.view(batch, heads, -1, size) for x in (q, k, v))
        with torch.autocast(q.device.type, enabled=False):
            mixed, weights = ops.rounded_attention(q, k, v, is_causal, mask, dropout, spec, q.dtype, key_of(module))
        return mixed.to(q.dtype).permute(2, 0, 1, 3).reshape(time * batch, width), weights if need_weights else None
    if not need_weights:
        q, k, v = (x.view(batch, heads, -1, size) for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        return mixed.permute(2, 0, 1, 3).contiguous().view(time * batch, width), None
    scaled = q * math.sqrt(1.0 / float(size))
    if mask is None:
        scores = torch.bmm(scaled, k.transpose(-2, -1))
    else:
        flat = mask.expand(batch, heads, -1, -1).reshape(batch * heads, -1, sources)
        scores = torch.baddbmm(flat, scaled, k.transpose(-2, -1))
    weights = F.softmax(scores, dim=-1)
    if dropout > 0.0:
        weights = F.dropout(weights, p=dropout)
    mixed = torch.bmm(weights, v).transpose(0, 1).reshape(time * batch, width)
    return mixed, weights.view(batch, heads, time, sources)


ATTENTION = Kind("nn.MultiheadAttention", (nn.MultiheadAttention,), weights, forward, fits)


ENCODERS = (nn.TransformerEncoder, nn.TransformerEncoderLayer)
NESTS = nn.TransformerEncoder
"""The class that converts padded batches to nested tensors, on which torch's layers with float32 weights fail under
autocast on a CPU."""


def encoder_forward(stock: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """The stock forward without the fast path and nested tensors, so that all modules are called."""
    return stock(twin(module, type(module), use_nested_tensor=False, activation_relu_or_gelu=0), *args, **kwargs)
