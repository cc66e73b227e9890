"""How well sentences were transcribed or translated: error rates and BLEU, on sequences of anything hashable."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence


Sentence = Sequence[Hashable]


def edit_distance(found: Sentence, wanted: Sentence) -> int:
    """The fewest insertions, deletions and substitutions that turn one into the other.

    >>> edit_distance("kitten", "sitting")
    3
    """
    row = list(range(len(wanted) + 1))
    for i, a in enumerate(found, 1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(wanted, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


def error_rate(found: Sequence[Sentence], wanted: Sequence[Sentence]) -> float:
    """The edits of all sentences over the length of all wanted ones: CER on characters, WER on words.

    >>> error_rate(["abc", "d"], ["abd", "d"])
    0.25
    """
    edits = sum(edit_distance(f, w) for f, w in zip(found, wanted, strict=True))
    return edits / max(1, sum(map(len, wanted)))


def bleu(found: Sequence[Sentence], wanted: Sequence[Sentence], order: int = 4) -> float:
    """BLEU of a corpus with one reference a sentence, in [0, 1], unsmoothed.

    exp(mean over n = 1..order of log p_n) * min(1, exp(1 - wanted words / found words)), p_n the share of found n-grams
    that are in the reference, each counted no more often than there.

    Source: Papineni et al. 2002.

    >>> bleu(["the cat sat on the mat".split()], ["the cat sat on the mat".split()])
    1.0
    """
    matches, totals = [0] * order, [0] * order
    for f, w in zip(found, wanted, strict=True):
        for n in range(1, order + 1):
            ours, theirs = _ngrams(f, n), _ngrams(w, n)
            matches[n - 1] += sum((ours & theirs).values())
            totals[n - 1] += sum(ours.values())
    if not all(matches):
        return 0.0
    precision = sum(math.log(m / t) for m, t in zip(matches, totals, strict=True)) / order
    shortness = 1 - sum(map(len, wanted)) / max(1, sum(map(len, found)))
    return math.exp(precision + min(0.0, shortness))


def _ngrams(words: Sentence, n: int) -> Counter[tuple[Hashable, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
