"""Models with one planted fault each, and a healthy one."""

import math

import torch
import torch.nn.functional as F
from torch import nn


WIDTH = 16


class GatedFFN(nn.Module):
    """T5's gated MLP: the product of the two halves is the input of `wo`."""

    def __init__(self, gain=1.0):
        super().__init__()
        self.wi_0 = nn.Linear(WIDTH, 32, bias=False)
        self.wi_1 = nn.Linear(WIDTH, 32, bias=False)
        self.wo = nn.Linear(32, WIDTH, bias=False)
        with torch.no_grad():
            self.wi_0.weight *= gain
            self.wi_1.weight *= gain
            self.wo.weight /= gain**2

    def forward(self, x):
        return self.wo(F.gelu(self.wi_0(x)) * self.wi_1(x))


class Attention(nn.Module):
    """One attention head; `gain` multiplies queries and keys only, so that only the logits are large."""

    def __init__(self, gain=1.0, fused=False):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.fused = fused
        with torch.no_grad():
            self.q.weight *= gain
            self.k.weight *= gain

    def forward(self, x):
        q, k, v = self.q(x)[:, None], self.k(x)[:, None], self.v(x)[:, None]
        if self.fused:
            return self.o(F.scaled_dot_product_attention(q, k, v)[:, 0])
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(WIDTH), -1)
        return self.o((weights @ v)[:, 0])


class Block(nn.Module):
    """A transformer's residual block."""

    def __init__(self, attention=None, ffn=None):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.ffn = attention or Attention(), ffn or GatedFFN()

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.ffn(self.norm_2(x))


class Model(nn.Module):
    """Tokens to logits."""

    def __init__(self, *blocks, embedding=1.0, scale=1.0):
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.scale = scale
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 32)
        with torch.no_grad():
            self.embed.weight *= embedding

    def forward(self, tokens):
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def healthy():
    return Model(Block(), Block())


def wide_ffn():
    """The input of the second block's `wo` exceeds 65504, its output does not."""
    return Model(Block(), Block(ffn=GatedFFN(gain=400.0)))


def large_logits(fused):
    return Model(Block(), Block(attention=Attention(gain=400.0, fused=fused)))


def tiny_embedding():
    """Embeddings near 2^-30, multiplied back in the forward (as Gemma multiplies by the root of the width)."""
    return Model(Block(), Block(), embedding=2.0**-30, scale=2.0**30)


class Gradient(torch.autograd.Function):
    """The identity, with its gradient multiplied by `factor`."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class Slope(nn.Module):
    """A residual block with a steep branch: its gradient is multiplied by `factor`."""

    def __init__(self, factor):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.factor = factor

    def forward(self, x):
        return x + Gradient.apply(self.inner(x), self.factor)


def steep():
    """The residual stream stays small (peak near 350); its gradient overflows even without a loss scale."""
    return Model(Slope(1e4), Slope(1e4), Slope(1e4), embedding=50.0)


class TwoEnds(nn.Module):
    """One branch's gradients are 2^46 times the other's: each fits fp16 at some loss scale, but not both at one."""

    def __init__(self):
        super().__init__()
        self.loud, self.quiet = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return Gradient.apply(self.loud(x), 2.0**18) + Gradient.apply(self.quiet(x), 2.0**-28)


def tokens(seed=1):
    return torch.randint(0, 32, (4, 12), generator=torch.Generator().manual_seed(seed))
