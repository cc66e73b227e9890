"""MLPs; a transformer's block, attention and an MLP, each on a weighted residual branch; and stacks of blocks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from halfstep.errors import ModelError, unknown
from halfstep.unit.activations import gated_silu
from halfstep.unit.layers import residual_add, residual_split
from halfstep.unit.modules.activations import GELU, Dropout
from halfstep.unit.modules.attention import Attention
from halfstep.unit.modules.linear import SAME, Linear
from halfstep.unit.modules.norms import LayerNorm, RMSNorm
from halfstep.unit.part import set_unit_part
from halfstep.unit.residual import Residual, equal_shares


class GatedMLP(nn.Module):
    """down(up(x) silu(gate(x))): SwiGLU.

    The layers are not constrained one by one, since up and gate and down mirror each other: the product of their
    factors is the same in both directions.

    Args:
        width: of the input and the output.
        hidden: between them; None: 4 width.
        mult: how sharp the gate is, silu(g) = g sigmoid(mult g).
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
    """down(gelu(up(x))); arguments as of `GatedMLP`."""

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


PLACES = {
    "pre": "x + f(norm(x)): GPT-2, Llama; u-muP",
    "post": "norm(x + f(x)): the first transformers, BERT",
    "res-post": "x + norm(f(x)): Swin-v2; munit scaling",
}
_NORMS = {"layer": LayerNorm, "rms": RMSNorm}
_MLPS = {"gated": GatedMLP, "gelu": MLP}


class TransformerLayer(nn.Module):
    """Attention, then an MLP; every sum is weighted so that it keeps the variance.

    Args:
        ratios: of attention's branch and of the MLP's beside the stream (`unit.equal_shares` and its kin).
        place: where the norms stand (`PLACES`).
        norm: `rms` or `layer`, without gain and bias unless `affine`.
        mlp: `gated` or `gelu`.
        hidden: the MLP's; None: 4 width.
        is_causal: attend to the present and the past alone.
        dropout: of attention's weights and of both branches.
        mult: the temperature of attention's logits, mult q k^T / (width / heads).
        square_root: attention's weights are the square root of softmax's (`unit.Attention`).
        bias: whether linear layers add one.
        constraint: of the layers; `unit.SAME` for munit scaling.

    Raises:
        ModelError: a name that there is not; heads that do not divide the width.
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
            if name not in known:
                raise ModelError(unknown(f"{kind} of a transformer's layer", name, known))
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
        """(batch, time, width) -> the same shape; the mask is added to attention's logits, or says where to attend."""
        x = self._branch(x, lambda x: self.attention(x, mask), self.attention_norm, self.ratios[0])
        return self._branch(x, self.mlp, self.mlp_norm, self.ratios[1])

    def _branch(self, x: Tensor, layer: Any, norm: nn.Module, ratio: float) -> Tensor:
        branch, skip = residual_split(x, ratio=ratio)
        branch = layer(norm(branch) if self.place == "pre" else branch)
        branch = self.dropout(norm(branch) if self.place == "res-post" else branch)
        x = residual_add(branch, skip, ratio=ratio)
        return norm(x) if self.place == "post" else x


class Stack(nn.Sequential):
    """An nn.Sequential of residual blocks, whose parameters have the depth len(stack) in their roles (`unit.roles`).

    The depth follows blocks that are added or taken away later. The official unit-scaling library counts blocks, as
    this does; Aleph Alpha's code counts residual layers, two a block, which multiplies the stack's learning rates by
    2^-1/2.
    """

    def __init__(self, *blocks: Any) -> None:
        super().__init__(*blocks)
        set_unit_part(self, depth=len)


class TransformerStack(Stack):
    """So many `TransformerLayer`s, each with its two ratios from a residual scheme.

    Args:
        layers: blocks, of two residual layers each.
        residual: `unit.equal_shares(...)` (u-muP), `unit.fixed(...)` (munit scaling), `unit.running_mean()`, or a
            function of a residual layer's index and their number.
        options: as `TransformerLayer` takes them.
    """

    def __init__(
        self, layers: int, width: int, heads: int, *, residual: Residual | None = None, **options: Any
    ) -> None:
        scheme = equal_shares() if residual is None else residual
        ratios = [scheme(index, 2 * layers) for index in range(2 * layers)]
        pairs = zip(ratios[::2], ratios[1::2], strict=True)
        super().__init__(*(TransformerLayer(width, heads, ratios=pair, **options) for pair in pairs))
