"""The law of activation memory: what the backward pass of a GPT layer waits for, from its sizes alone."""

from __future__ import annotations

from halfstep.errors import AccountError, unknown


_RECOMPUTED = ("none", "selective", "full")


def activation_bytes(
    batch: int,
    sequence: int,
    width: int,
    heads: int,
    *,
    nbytes: int = 2,
    mask_bytes: int = 1,
    inner: int | None = None,
    dropout: bool = True,
    parallel: int = 1,
    split_sequence: bool = False,
    recompute: str = "none",
    statistics: bool = False,
) -> float:
    """Bytes of one layer: with s tokens, b examples, h width, a heads, p and m bytes a value and a mask's element,

        s b h ((16 p + 2 m) + (2 p + m) a s / h)

    which is s b h (34 + 5 a s / h) for p = 2 and m = 1. The layer is GPT's: two norms, attention with an explicit
    softmax, an MLP of two matrices with GELU, three dropouts. torch's CPU keeps a dropout's mask in the activations'
    dtype: there m is p.

    Args:
        inner: the width within the MLP; 4 h unless told.
        dropout: without, both masks of the residual branch, and all of attention's probabilities but the softmax's
            output, are not there.
        parallel: over how many devices the matrices are split (tensor parallelism).
        split_sequence: split what stands beside the matrices too (sequence parallelism).
        recompute: `selective`: attention's scores and probabilities are computed again; `full`: all but the input is.
        statistics: count the mean and the deviation that each norm keeps, p bytes each.

    Raises:
        AccountError: an unknown way to recompute.

    Source: Korthikanti et al. 2022, arXiv 2205.05198, section 4.

    >>> activation_bytes(1, 2048, 12288, 96) / (2048 * 12288)  # 34 + 5 a s / h = 34 + 80
    114.0
    """
    if recompute not in _RECOMPUTED:
        raise AccountError(unknown("way to recompute", recompute, _RECOMPUTED))
    if recompute == "full":
        return float(nbytes * sequence * batch * width)
    masks = 2 * mask_bytes if dropout else 0
    inner = 4 * width if inner is None else inner
    beside = 4 * nbytes + masks  # the inputs of both norms and of both groups of matrices; the masks
    split = 4 * nbytes + 2 * nbytes * inner / width
    scores = (2 * nbytes + mask_bytes if dropout else nbytes) * heads * sequence / width
    if recompute == "selective":
        scores = 0.0
    total = beside / (parallel if split_sequence else 1) + (split + scores) / parallel
    return sequence * batch * width * total + (4 * sequence * batch * nbytes if statistics else 0)
