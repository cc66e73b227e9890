"""Two made-up languages and the rules that turn one into the other. Openly synthetic: invented for this.

The first puts its verb between subject and object, its adjectives before nouns, and marks plural and tense by words of
their own. The second puts the verb last and adjectives behind, gives every noun one of three genders, with which its
case ending and its adjectives' endings agree, and ends verbs by the subject's gender and number and by the tense.
Half of its verbs have two words, used at random: like any translation, none is the only one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


PAD, START, END = 0, 1, 2
NOUNS, ADJECTIVES, VERBS, TENSES, GENDERS = 60, 24, 30, 3, 3
LONGEST = 16
"""No sentence of either has more words, END included."""

_NOUN, _ADJECTIVE, _VERB = 3, 3 + NOUNS, 3 + NOUNS + ADJECTIVES
_AFTER = _VERB + VERBS
_THE, _PLURAL, _TENSE = _AFTER, _AFTER + 1, _AFTER + 2
_CASE = _AFTER  # of the second language: 2 cases x 3 genders x 2 numbers
_AGREEMENT = _CASE + 2 * GENDERS * 2  # adjectives' endings: 3 genders x 2 numbers
_VERB_ENDING = _AGREEMENT + GENDERS * 2  # 3 genders x 2 numbers x 3 tenses
SOURCE_WORDS = _TENSE + TENSES
_SYNONYM = _VERB_ENDING + GENDERS * 2 * TENSES  # of the first half of the verbs
TARGET_WORDS = _SYNONYM + VERBS // 2


@dataclass(frozen=True)
class Phrase:
    """A noun with what belongs to it."""

    noun: int
    adjective: int | None
    plural: int
    definite: bool

    @property
    def gender(self) -> int:
        """Fixed for each noun, and not to be seen in the first language."""
        return self.noun * 7 % 11 % GENDERS

    def first(self) -> list[int]:
        """In the first language: (the) (adjective) noun (plural)."""
        words = [_THE] * self.definite + ([] if self.adjective is None else [_ADJECTIVE + self.adjective])
        return [*words, _NOUN + self.noun, *[_PLURAL] * self.plural]

    def second(self, case: int) -> list[int]:
        """In the second: noun, case ending, (adjective, its ending)."""
        form = self.gender * 2 + self.plural
        words = [_NOUN + self.noun, _CASE + case * GENDERS * 2 + form]
        return words if self.adjective is None else [*words, _ADJECTIVE + self.adjective, _AGREEMENT + form]


def sentences(count: int, generator: torch.Generator) -> list[tuple[list[int], list[int]]]:
    """Pairs of a sentence and its translation, as word numbers, each with END at its end."""
    drawn = torch.randint(0, 2**31, (count, 14), generator=generator, dtype=torch.int64, device="cpu").tolist()
    pairs = []
    for numbers in drawn:
        n = iter(numbers)
        subject, obj = (
            Phrase(next(n) % NOUNS, next(n) % ADJECTIVES if next(n) % 2 else None, next(n) % 2, bool(next(n) % 2))
            for _ in range(2)
        )
        verb, tense = next(n) % VERBS, next(n) % TENSES
        first = [*subject.first(), _VERB + verb, _TENSE + tense, *obj.first(), END]
        ending = _VERB_ENDING + (subject.gender * 2 + subject.plural) * TENSES + tense
        spoken = _SYNONYM if verb < VERBS // 2 and next(n) % 2 else _VERB
        pairs.append((first, [*subject.second(0), *obj.second(1), spoken + verb, ending, END]))
    return pairs
