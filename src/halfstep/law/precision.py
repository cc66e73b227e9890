"""The law of Kumar et al. 2024 (arXiv 2411.04330): fewer bits act like fewer parameters, and quantising adds a term.

    L(N, D, P) = A N_eff^-a + B D^-b + E + damage        N_eff = N * prod over parts x of (1 - exp(-P_x / g_x + n_x))
    damage(N, D, P) = C D^gD / N^gN exp(-P / g + n)      for a model trained in 16 bits whose weights are then rounded

N parameters, D tokens, P bits; L in nats a token. Equations 2, 4 and 11, with the offsets n of appendix K, which the
main text leaves out: without them the constants give 3.7 bits as the best width, with them the paper's 7 to 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from halfstep.errors import LawError, one_of


PARTS = ("weights", "activations", "kv")
"""The parts of a model whose bits the published law tells apart."""
_WIDEST = 16.0
"""Bits beyond which a part is taken for unrounded."""


@dataclass(frozen=True)
class Width:
    """What one part's bits do: the share 1 - exp(-P / gamma + offset) of the parameters stays effective."""

    gamma: float
    offset: float = 0.0

    def share(self, bits: float) -> float:
        """The share that stays effective: 0 where the law has none left.

        >>> round(Width(2.6745, 0.3037).share(8), 2)
        0.93
        """
        return max(0.0, -math.expm1(-bits / self.gamma + self.offset))


@dataclass(frozen=True)
class PostTraining:
    """What rounding a trained model's weights adds to its loss: C D^gD / N^gN exp(-P / gamma + offset)."""

    scale: float
    tokens: float
    """The exponent of D."""
    parameters: float
    """The exponent of N, in the denominator."""
    gamma: float
    offset: float = 0.0

    def damage(self, parameters: float, tokens: float, bits: float) -> float:
        """The loss that rounding to so many bits adds, in nats a token."""
        decay = math.exp(-bits / self.gamma + self.offset)
        return self.scale * math.pow(tokens, self.tokens) / math.pow(parameters, self.parameters) * decay


@dataclass(frozen=True)
class Law:
    """The constants of the law. N and D are raw counts.

    Raises:
        LawError: of a method, for a number that is not positive, or a part that the law has no width for.
    """

    a_scale: float
    a: float
    b_scale: float
    b: float
    floor: float
    widths: Mapping[str, Width]
    post: PostTraining | None = None
    source: str = ""

    def without_offsets(self) -> Law:
        """The form of the main text (equation 4), with the same constants."""
        widths = {part: replace(width, offset=0.0) for part, width in self.widths.items()}
        return replace(self, widths=widths, post=self.post and replace(self.post, offset=0.0))

    def share(self, bits: Mapping[str, float]) -> float:
        """The share of the parameters that stays effective, with so many bits a part; parts left out are whole.

        Raises:
            LawError: a part that the law does not know, or bits that are not positive.
        """
        for part, width in bits.items():
            one_of("part", part, self.widths, LawError)
            _positive(f"bits of {part}", width)
        return math.prod(self.widths[part].share(width) for part, width in bits.items())

    def loss(
        self, parameters: float, tokens: float, bits: Mapping[str, float] | None = None, post: float | None = None
    ) -> float:
        """The loss after training, in nats a token; infinite where no parameter stays effective.

        Args:
            post: bits that the weights of the model, trained in 16 bits, are then rounded to.

        >>> round(KUMAR.loss(220e6, 26e9), 2)
        3.2
        """
        _positive("parameters", parameters)
        _positive("tokens", tokens)
        effective = parameters * self.share(bits or {})
        if not effective:
            return math.inf
        sized, fed = self.a_scale * math.pow(effective, -self.a), self.b_scale * math.pow(tokens, -self.b)
        trained = sized + fed + self.floor
        return trained if post is None else trained + self.damage(parameters, tokens, post)

    def damage(self, parameters: float, tokens: float, bits: float) -> float:
        """The loss that rounding the weights after training adds.

        >>> round(KUMAR.damage(30e6, 26e9, 3), 3)
        0.586
        """
        _positive("bits after training", bits)
        return self._post().damage(parameters, tokens, bits)

    def harmful_tokens(self, parameters: float, bits: float) -> float:
        """The tokens beyond which more of them make the loss after rounding to so many bits worse (equation 13)."""
        post = self._post()
        _positive("parameters", parameters)
        _positive("bits after training", bits)
        decay = math.exp(bits / post.gamma - post.offset)
        numerator = self.b * self.b_scale * math.pow(parameters, post.parameters) * decay
        return math.pow(numerator / (post.tokens * post.scale), 1 / (post.tokens + self.b))

    def best_bits(self) -> float:
        """The bits, the same for all parts, at which a compute budget reaches the lowest loss, N and D free.

        With a = b and a cost of (6 / 16) N D P it minimises P / share(P), whatever the budget, A, B, E and a. A law
        whose a and b differ has no such width; theirs is `best_bits_for`.

        Raises:
            LawError: a and b differ.

        >>> round(KUMAR.best_bits(), 2), round(KUMAR.without_offsets().best_bits(), 2)
        (7.0, 3.47)
        """
        if not math.isclose(self.a, self.b):
            raise LawError(f"a = {self.a:g} and b = {self.b:g} differ: the best bits depend on the compute; give it")
        return _lowest(lambda bits: bits / max(self.share(dict.fromkeys(self.widths, bits)), 1e-300))

    def best_for(self, compute: float) -> tuple[float, float, float]:
        """The bits, parameters and tokens that reach the lowest loss with so many floating point operations.

        The cost is (6 / 16) N D P: bits of 16 cost what they cost today, fewer in proportion.
        """
        _positive("compute", compute)

        def sized(bits: float) -> tuple[float, float]:
            share, product = self.share(dict.fromkeys(self.widths, bits)), compute * 16 / 6 / bits
            if not share:
                return math.inf, math.nan
            # The minimum over N of A' N^-a + B (product / N)^-b, in closed form.
            ratio = self.a * self.a_scale * math.pow(share, -self.a) / (self.b * self.b_scale)
            parameters = math.pow(ratio * math.pow(product, self.b), 1 / (self.a + self.b))
            return self.loss(parameters, product / parameters, dict.fromkeys(self.widths, bits)), parameters

        bits = _lowest(lambda width: sized(width)[0])
        parameters = sized(bits)[1]
        return bits, parameters, compute * 16 / 6 / bits / parameters

    def _post(self) -> PostTraining:
        if self.post is None:
            raise LawError("this law has no term for rounding after training; fit one on a sweep with damage measured")
        return self.post


KUMAR = Law(
    a_scale=4.299e3,
    a=0.4965,
    b_scale=1.806e4,
    b=0.4965,
    floor=2.7648,
    widths={
        "weights": Width(2.6745, 0.3037),
        "activations": Width(2.2102, 1.4072),
        "kv": Width(0.9578, 2.4185),
    },
    post=PostTraining(scale=0.0598, tokens=0.5068, parameters=0.3439, gamma=0.5907, offset=1.1277),
    source="Kumar et al. 2024, arXiv 2411.04330, appendix K, table 2: integers, 30M to 220M parameters",
)
"""The published constants; the authors call them not portable."""


def _positive(what: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise LawError(f"{what} = {value:g}; expected a positive number")


def _lowest(function: Callable[[float], float], low: float = 0.5, high: float = 3 * _WIDEST) -> float:
    """Where a function of the bits that has one valley is lowest: a scan, then golden sections."""
    grid = [low + (high - low) * i / 400 for i in range(401)]
    place = min(range(401), key=lambda i: function(grid[i]))
    left, right = grid[max(0, place - 1)], grid[min(400, place + 1)]
    golden = (math.sqrt(5) - 1) / 2
    while right - left > 1e-6:
        first, second = right - golden * (right - left), left + golden * (right - left)
        left, right = (left, second) if function(first) < function(second) else (first, right)
    return (left + right) / 2
