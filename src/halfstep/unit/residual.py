"""How much a residual branch weighs beside the stream: schemes from a layer's place to the ratio of the two.

A scheme is a function (index, layers) -> ratio. Residual layers are counted from 0, two a transformer block: attention,
then MLP. The branch f(x) of ratio r gives (x + r f(x)) / sqrt(1 + r^2), which keeps the variance.
"""

from collections.abc import Callable

from halfstep.errors import ModelError


Residual = Callable[[int, int], float]


def equal_shares(mult: float = 1.0, attention_ratio: float = 1.0) -> Residual:
    """u-muP's: the embedding, all attention layers and all MLPs give a third of the output's variance each.

        a_mlp = mult sqrt(2 / (1 + attention_ratio^2)),  a_attention = attention_ratio a_mlp
        ratio_l = a_l / sqrt(layers / 2 + n_attention a_attention^2 + n_mlp a_mlp^2)

    with the counts of the layers before. `mult` is what the residual layers give relative to the embedding,
    `attention_ratio` what attention gives relative to MLPs, both as standard deviations.

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
    """munit scaling's: sqrt(1 - tau) x + sqrt(tau) f(x), one tau for all layers.

    Raises:
        ModelError: a tau outside (0, 1).

    Source: Narayan et al. 2025, arXiv 2502.05967, equation 10; tau falls with depth: 0.4 with 4 layers there.
    """
    if not 0 < variance_fraction < 1:
        raise ModelError(f"variance_fraction = {variance_fraction} given; expected a number between 0 and 1")
    return lambda index, layers: float((variance_fraction / (1 - variance_fraction)) ** 0.5)


def running_mean() -> Residual:
    """sqrt(l / (l + 1)) x + sqrt(1 / (l + 1)) f(x) with l = 1, 2 ...: every layer and the embedding weigh the same.

    Source: Blake et al. 2023, arXiv 2303.11257.
    """
    return lambda index, layers: float((index + 1) ** -0.5)
