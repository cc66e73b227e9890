"""FP8-LM's reduction, as a reproduction: codes of one shared scale a tensor, summed in their own format."""

from collections.abc import Sequence

import torch
from torch import Tensor

from halfstep.distributed.collectives import Exchange
from halfstep.distributed.mean import Steps, shares
from halfstep.kernels.largest import amax_of
from halfstep.ops.casts import decode, encode, round_to
from halfstep.quant import Quantizer


MOST, SHARE, RAISE = 2.0, 1e-5, 2.0 ** (1 / 1000)
"""mu's largest value, the share of saturated sums from which on it is halved, and what it is raised by elsewhere."""


def fp8lm_steps(
    values: Tensor, lengths: Sequence[int], quantizer: Quantizer, exchange: Exchange, mu: Tensor, adapts: bool = True
) -> Steps:
    """Replace gradients of so many parameters, laid out one after the other, by the mean that FP8-LM forms.

    s = mu 2^floor(log2(max / amax)) for each parameter, amax being the largest of all ranks; codes(s g) are summed rank
    by rank, each sum rounded and saturated; the mean is the sum over s N. A parameter of which a gradient is not finite
    becomes NaN. What a ring or a tree sums in another order rounds otherwise.

    Args:
        mu: float32, one for each parameter: halved where over 0.001% of the sum saturates, else raised by 2^(1/1000),
            up to 2, alike on all ranks.
        adapts: whether mu moves.

    Source: Peng et al. 2023, arXiv 2310.18313, section 2.1.
    """
    format, ranks, size = quantizer.format, exchange.ranks, values.numel()
    scale = mu * (yield from _factors(values, lengths, quantizer, exchange))
    pieces = zip(values.split_with_sizes(list(lengths)), scale, strict=True)
    scaled = torch.cat([piece.float() * each for piece, each in pieces])
    share = -(-size // ranks)
    sent = torch.stack([encode(piece, format) for piece in shares(scaled, ranks, share)])
    got = sent.clone()
    yield exchange.all_to_all(got, sent)
    total = decode(got[0], format)
    for other in got[1:]:
        total = round_to(total + decode(other, format), format)
    sent[exchange.rank] = encode(total, format)
    yield exchange.all_gather(sent)
    mean = decode(sent.view(-1)[:size], format)
    parts = mean.split_with_sizes(list(lengths))
    if adapts:
        full = torch.stack([(part.abs() == format.max).float().mean() for part in parts])
        mu.copy_(torch.where(full > SHARE, mu / 2, (mu * RAISE).clamp(max=MOST)))
    values.copy_(torch.cat([part / (each * ranks) for part, each in zip(parts, scale, strict=True)]))


def _factors(values: Tensor, lengths: Sequence[int], quantizer: Quantizer, exchange: Exchange) -> Steps:
    """What each parameter is multiplied by, before mu; NaN where a gradient is not finite on any rank."""
    assert quantizer.scales is not None
    amax = torch.stack([amax_of(piece).float() for piece in values.split_with_sizes(list(lengths))])
    amax = torch.where(amax.isnan(), torch.inf, amax)  # a NaN is lost in some backends' maximum
    everyone = amax.repeat(exchange.ranks, 1)
    yield exchange.all_gather(everyone)
    factor = quantizer.scales.rule.factor(everyone.amax(0), quantizer.format)
    assert factor is not None
    return torch.where(everyone.amax(0) == 0, 1.0, factor)
