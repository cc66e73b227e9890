"""Smooth-SwiGLU: SwiGLU whose outliers are scaled down before the down-projection rounds them.

SwiGLU multiplies two branches, w1 x and act(w2 x). Where the two weights of a channel align, its output grows with the
square of the input, and the channel's outliers saturate in 8 bits. Divided by the magnitude of the linear branch it
grows linearly; the down-projection multiplies by that magnitude again.

Source: Fishman et al. 2025, arXiv 2409.12517 (per channel), and its released code (per token). The paper does not say
which tensor's maximum is taken; here it is that of the linear branch, as in the code.
"""

from collections.abc import Callable
from math import frexp

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.quant.family import power_of_two


def channel_scale(linear: Tensor) -> Tensor:
    """s (channels), float32: the largest power of two with s * max |w1 x| <= 1, the maximum over all tokens.

    linear is (..., channels). A channel of zeros has s = 1, and so has a channel with an infinity or NaN, which then
    shows in the output. A multiplication by a power of two is exact, so s can be merged into the weights.

    >>> channel_scale(torch.tensor([[3.0, 0.0, 0.25], [-5.0, 0.0, 0.1]]))
    tensor([0.1250, 1.0000, 4.0000])
    """
    rows = linear.detach().flatten(0, -2) if linear.dim() > 1 else linear.detach().unsqueeze(0)
    if not rows.numel():
        return torch.ones(linear.shape[-1], device=linear.device, dtype=torch.float32)
    amax = rows.abs().amax(0).float()
    fraction, power = torch.frexp(amax)
    limit = min(frexp(torch.finfo(linear.dtype).max)[1], 128) - 2  # so that s and 1/s fit the dtype
    power = (power.long() - (fraction == 0.5).long()).clamp(-limit, limit)
    return torch.where((amax > 0) & amax.isfinite(), power_of_two(-power).float(), 1.0)


def token_scale(linear: Tensor) -> Tensor:
    """s (..., 1): max |w1 x| over the channels of each token, 1 for a token of zeros; without a gradient.

    (The released code divides by the maximum even if it is 0.)
    """
    amax = linear.detach().abs().amax(-1, keepdim=True)
    return torch.where((amax > 0) & amax.isfinite(), amax, torch.ones_like(amax))


def smooth_channels(
    gate: Tensor, linear: Tensor, activation: Callable[[Tensor], Tensor] = F.silu
) -> tuple[Tensor, Tensor]:
    """s * act(gate) * linear, and s: the down-projection rounds it and divides the rounded values by s (`ops.linear`).

    gate is w2 x and linear w1 x, both (..., channels). Gradients do not pass through s.

    >>> smooth_channels(torch.tensor([[2.0]]), torch.tensor([[8.0]]), activation=torch.relu)
    (tensor([[2.]]), tensor([0.1250]))
    """
    scale = channel_scale(linear)
    return activation(gate) * (linear * scale.to(linear.dtype)), scale


def smooth_tokens(
    gate: Tensor, linear: Tensor, activation: Callable[[Tensor], Tensor] = F.silu
) -> tuple[Tensor, Tensor]:
    """act(gate) * (linear / s), and s, by which the output of the down-projection must be multiplied.

    s differs from token to token, so it cannot be merged into weights.
    """
    scale = token_scale(linear)
    return activation(gate) * (linear / scale), scale
