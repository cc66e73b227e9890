"""Unit-scaled transformer layers: multi-head self-attention, MLPs, and stacks of them.

The weights of residual branches follow a scheme, a function (index, layers) -> ratio. Residual layers are counted from
0, two a transformer block: attention, then MLP. A branch f(x) with ratio r becomes (x + r f(x)) / sqrt(1 + r^2), which
keeps the variance.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import ModelError, one_of
from halfstep.ops.attention import stacked_linear
from halfstep.ops.linear_passes import product_dtype
from halfstep.ops.part import key_of, part_of
from halfstep.recipe import AttentionSpec
from halfstep.unit.activations import gated_silu
from halfstep.unit.functions import (
    dropout as unit_dropout,
    residual_add,
    residual_split,
    scaled_dot_product_attention,
)
from halfstep.unit.modules.activations import GELU, Dropout, LayerNorm, RMSNorm
from halfstep.unit.modules.linear import SAME, Linear
from halfstep.unit.roles import set_unit_part


PLACES = {
    "pre": "x + f(norm(x)): GPT-2, Llama; u-muP",
    "post": "norm(x + f(x)): the first transformers, BERT",
    "res-post": "x + norm(f(x)): Swin-v2; munit scaling",
}


class Attention(nn.Module):
    """Self-attention on (batch, time, width) with logits mult q k^T / head, its output scaled to unit variance.

    A recipe's `attention` rounds the operands of its two matmuls; the factors stay.

    Args:
        is_causal: a position attends to itself and those before it.
        dropout: the probability with which an attention weight becomes zero in training.
        mult: the temperature; sqrt(head) gives logits q k^T / sqrt(head), as in munit scaling and stock models.
        square_root: take the square root of softmax's weights, whose squares then sum to 1: the variance is 1 at every
            position if values are independent. Real values are not, and the variance grows with the position: munit
            scaling's final recipe does without it and has norms after the branch.
        constraint: of the two linear layers.

    Raises:
        ModelError: heads that do not divide the width.

    Source: Blake et al. 2025, arXiv 2407.17465; Narayan et al. 2025, arXiv 2502.05967, section 2.1 (the square root).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        is_causal: bool = False,
        dropout: float = 0.0,
        mult: float = 1.0,
        square_root: bool = False,
        bias: bool = False,
        constraint: str = "to_output",
        **factory: Any,
    ) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise ModelError(f"{heads} heads for a width of {width} given; expected a number that divides it")
        self.heads, self.is_causal, self.dropout = heads, is_causal, dropout
        self.mult, self.square_root = mult, square_root
        self.qkv = Linear(width, 3 * width, bias, constraint=constraint, **factory)
        self.out_proj = Linear(width, width, bias, constraint=constraint, ends_branch=True, **factory)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(batch, time, width) -> the same shape; the mask is added to the logits, or boolean: False is masked out."""
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attend = square_root_attention if self.square_root else scaled_dot_product_attention
        options: Any = {"dropout_p": self.dropout if self.training else 0.0, "is_causal": self.is_causal}
        options |= {"spec": part_of(self).attention, "noise": key_of(self)}
        mixed = attend(q, k, v, attn_mask=mask, mult=self.mult, **options)
        return self.out_proj(mixed.transpose(1, 2).reshape(batch, time, width))  # type: ignore[no-any-return]


def square_root_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    mult: float = 1.0,
    spec: AttentionSpec | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """sqrt(softmax(mult q k^T / d + mask)) v for q, k, v of shape (..., time, d).

    The square root is computed from the logarithm, whose gradient is finite where a weight is zero. Dropout keeps the
    variance: kept weights are divided by sqrt(1 - p).

    Args:
        spec: how the operands of the two matmuls are rounded; scores and weights are then float32.

    Source: Narayan et al. 2025, arXiv 2502.05967, equation 8, whose norm of the weights is to be squared.
    """
    if spec is not None and spec.rounds:
        dtype = product_dtype(query)
        with torch.autocast(query.device.type, enabled=False):
            logits = stacked_linear(query, key, spec.scores, dtype, noise) * (mult / query.shape[-1])
            weights = _square_roots(logits, attn_mask, dropout_p, is_causal)
            return stacked_linear(weights, value.mT, spec.mix, dtype, noise).to(dtype)
    logits = query @ key.mT * (mult / query.shape[-1])
    return _square_roots(logits, attn_mask, dropout_p, is_causal) @ value


def _square_roots(logits: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool) -> Tensor:
    """The square roots of softmax's weights, after dropout."""
    if is_causal:
        after = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(after, -torch.inf)
    if attn_mask is not None:
        is_added = attn_mask.is_floating_point()
        logits = logits + attn_mask if is_added else logits.masked_fill(~attn_mask, -torch.inf)
    return unit_dropout((logits.log_softmax(-1) / 2).exp(), dropout_p, dropout_p > 0)


class GatedMLP(nn.Module):
    """down(up(x) silu(gate(x))): SwiGLU.

    The layers have no constraints of their own, since up and gate on the one hand and down on the other mirror each
    other: the product of their factors is the same forward and backward.

    Args:
        width: the size of input and output.
        hidden: the size in between; None: 4 width.
        mult: the sharpness of the gate, silu(g) = g sigmoid(mult g).
        constraint: `unit.SAME` for munit scaling's factors; None otherwise.
    """

    def __init__(
        self, width: int, hidden: int | None = None, mult: float = 1.0, constraint: str | None = None, **factory: Any
    ) -> None:
        super().__init__()
        hidden, constraint = hidden or 4 * width, constraint or "none"
        self.mult = mult
        self.up_proj = Linear(width, hidden, constraint=constraint, **factory)
        self.gate_proj = Linear(width, hidden, constraint=constraint, **factory)
        self.down_proj = Linear(hidden, width, constraint=constraint, ends_branch=True, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)"""
        return self.down_proj(  # type: ignore[no-any-return]
            gated_silu(self.up_proj(x), self.gate_proj(x), mult=self.mult)
        )


class MLP(nn.Module):
    """down(gelu(up(x))); arguments as for `GatedMLP`."""

    def __init__(
        self, width: int, hidden: int | None = None, mult: float = 1.0, constraint: str | None = None, **factory: Any
    ) -> None:
        super().__init__()
        hidden, constraint = hidden or 4 * width, constraint or "none"
        self.up_proj = Linear(width, hidden, constraint=constraint, **factory)
        self.act = GELU(mult=mult)
        self.down_proj = Linear(hidden, width, constraint=constraint, ends_branch=True, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)"""
        return self.down_proj(self.act(self.up_proj(x)))  # type: ignore[no-any-return]


_NORMS = {"layer": LayerNorm, "rms": RMSNorm}
_MLPS = {"gated": GatedMLP, "gelu": MLP}


class TransformerLayer(nn.Module):
    """Attention, then an MLP, each a residual branch whose weighted sum keeps the variance.

    Args:
        ratios: the ratios of attention's branch and of the MLP's (see `unit.equal_shares`).
        place: the position of the norms (`PLACES`).
        norm: `rms` or `layer`, without gain and bias unless `affine`.
        mlp: `gated` or `gelu`.
        hidden: the hidden size of the MLP; None: 4 width.
        is_causal: a position attends to itself and those before it.
        dropout: of attention's weights and of both branches' outputs.
        mult: the temperature of attention's logits, mult q k^T / (width / heads).
        square_root: take the square root of softmax's weights (`unit.Attention`).
        bias: whether linear layers have a bias.
        constraint: of the layers; `unit.SAME` for munit scaling.

    Raises:
        ModelError: an unknown name; heads that do not divide the width.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        ratios: tuple[float, float] = (0.5, 0.5),
        place: str = "pre",
        norm: str = "rms",
        affine: bool = False,
        mlp: str = "gated",
        hidden: int | None = None,
        is_causal: bool = True,
        dropout: float = 0.0,
        mult: float = 1.0,
        square_root: bool = False,
        bias: bool = False,
        constraint: str = "to_output",
        **factory: Any,
    ) -> None:
        super().__init__()
        for kind, name, known in (("place", place, PLACES), ("norm", norm, _NORMS), ("mlp", mlp, _MLPS)):
            one_of(f"{kind} of a transformer's layer", name, known, ModelError)
        self.ratios, self.place = ratios, place
        make = _NORMS[norm]
        self.attention_norm = make(width, elementwise_affine=affine, **factory)
        self.attention = Attention(
            width, heads, is_causal=is_causal, dropout=dropout, mult=mult, square_root=square_root,
            bias=bias, constraint=constraint, **factory,
        )  # fmt: skip
        self.mlp_norm = make(width, elementwise_affine=affine, **factory)
        self.mlp = _MLPS[mlp](
            width, hidden, bias=bias, constraint=constraint if constraint == SAME else None, **factory
        )
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(batch, time, width) -> the same shape; the mask is added to attention's logits, or is boolean."""
        x = self._branch(x, lambda x: self.attention(x, mask), self.attention_norm, self.ratios[0])
        return self._branch(x, self.mlp, self.mlp_norm, self.ratios[1])

    def _branch(self, x: Tensor, layer: Any, norm: nn.Module, ratio: float) -> Tensor:
        branch, skip = residual_split(x, ratio=ratio)
        branch = layer(norm(branch) if self.place == "pre" else branch)
        branch = self.dropout(norm(branch) if self.place == "res-post" else branch)
        x = residual_add(branch, skip, ratio=ratio)
        return norm(x) if self.place == "post" else x


Residual = Callable[[int, int], float]


def equal_shares(mult: float = 1.0, attention_ratio: float = 1.0) -> Residual:
    """u-muP's scheme: the embedding, all attention layers and all MLPs each contribute a third of the variance.

        a_mlp = mult sqrt(2 / (1 + attention_ratio^2)),  a_attention = attention_ratio a_mlp
        ratio_l = a_l / sqrt(layers / 2 + n_attention a_attention^2 + n_mlp a_mlp^2)

    where n counts the layers before. `mult` is the contribution of residual layers relative to the embedding,
    `attention_ratio` that of attention relative to MLPs, both as standard deviations.

    Raises:
        ModelError: a multiplier that is not positive.

    Source: Blake et al. 2025, arXiv 2407.17465, appendix G; unit-scaling, `transformer_residual_scaling_rule`.

    >>> [round(equal_shares()(layer, 8), 4) for layer in range(4)]
    [0.5, 0.4472, 0.4082, 0.378]
    """
    if not (mult > 0 and attention_ratio > 0):
        raise ModelError(f"mult = {mult}, attention_ratio = {attention_ratio} given; expected positive numbers")
    mlp = mult * (2 / (1 + attention_ratio**2)) ** 0.5
    attention = attention_ratio * mlp

    def ratio(index: int, layers: int) -> float:
        before = layers / 2 + (index + 1) // 2 * attention**2 + index // 2 * mlp**2
        return float((mlp if index % 2 else attention) / before**0.5)

    return ratio


def fixed(variance_fraction: float) -> Residual:
    """munit scaling's scheme: sqrt(1 - tau) x + sqrt(tau) f(x), with one tau for all layers.

    Raises:
        ModelError: a tau outside (0, 1).

    Source: Narayan et al. 2025, arXiv 2502.05967, equation 10; tau falls with depth: 0.4 with 4 layers there.
    """
    if not 0 < variance_fraction < 1:
        raise ModelError(f"variance_fraction = {variance_fraction} given; expected a number between 0 and 1")
    return lambda index, layers: float((variance_fraction / (1 - variance_fraction)) ** 0.5)


def running_mean() -> Residual:
    """The scheme sqrt(l / (l + 1)) x + sqrt(1 / (l + 1)) f(x), l = 1, 2 ...: all layers and the embedding contribute
    equally.

    Source: Blake et al. 2023, arXiv 2303.11257.
    """
    return lambda index, layers: float((index + 1) ** -0.5)


class Stack(nn.Sequential):
    """An nn.Sequential of residual blocks, which sets the depth of its parameters' roles to len(stack) (`unit.roles`).

    The depth changes if blocks are added or removed. As the official unit-scaling library does, it counts blocks; Aleph
    Alpha's code counts residual layers, two a block, which multiplies the stack's learning rates by 2^-1/2.
    """

    def __init__(self, *blocks: Any) -> None:
        super().__init__(*blocks)
        set_unit_part(self, depth=len)


class TransformerStack(Stack):
    """A stack of `TransformerLayer`s, each with two ratios from a residual scheme.

    Args:
        layers: the number of blocks, of two residual layers each.
        residual: `unit.equal_shares(...)` (u-muP), `unit.fixed(...)` (munit scaling), `unit.running_mean()`, or a
            function of a residual layer's index and their number.
        options: as for `TransformerLayer`.
    """

    def __init__(
        self, layers: int, width: int, heads: int, *, residual: Residual | None = None, **options: Any
    ) -> None:
        scheme = equal_shares() if residual is None else residual
        ratios = [scheme(index, 2 * layers) for index in range(2 * layers)]
        pairs = zip(ratios[::2], ratios[1::2], strict=True)
        super().__init__(*(TransformerLayer(width, heads, ratios=pair, **options) for pair in pairs))
