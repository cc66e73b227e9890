"""`nn.EmbeddingBag` with a 16-bit table and wider per-sample weights, which torch's kernels refuse together."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


FORWARD_OF = (nn.EmbeddingBag,)


def forward(
    stock: Any, module: Any, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
) -> Tensor:
    """The stock forward; where the weights of the samples are wider than the table, the rows that the bags name are
    widened (never the table) and summed so."""
    table = module.weight
    if per_sample_weights is None or per_sample_weights.dtype == table.dtype or module.mode != "sum":
        return stock(module, input, offsets, per_sample_weights)  # type: ignore[no-any-return]
    dtype = torch.promote_types(per_sample_weights.dtype, table.dtype)
    options = (module.padding_idx, module.max_norm, module.norm_type, module.scale_grad_by_freq, module.sparse)
    rows = F.embedding(input.reshape(-1), table, *options).to(dtype)
    weights = per_sample_weights.to(dtype)
    if module.padding_idx is not None:
        weights = weights.masked_fill(input == module.padding_idx, 0.0)
    places = torch.arange(input.numel(), device=input.device, dtype=torch.int64).view(input.shape)
    last = module.include_last_offset
    offsets = offsets if offsets is None else offsets.to(places.dtype)
    return F.embedding_bag(places, rows, offsets, mode="sum", per_sample_weights=weights, include_last_offset=last)
