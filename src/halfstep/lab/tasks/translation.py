"""Machine translation: a transformer learns the rules between two made-up languages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from halfstep.lab.measures import bleu
from halfstep.lab.models.seq2seq import SIZES, Seq2Seq
from halfstep.lab.task import END, PAD, START, Batch, Facts, Metric, Spelling, TaskSpec, stream, without_marks


class Translation(Spelling):
    """The next word of the translation: the mean cross-entropy in nats over the words without padding.

    A model takes source (batch, 16) and the target so far (batch, time), int64, and returns logits (batch, time,
    words).
    """

    source, text = "source", "target"

    def __init__(self, batch: int, pairs: int = 128) -> None:
        self.size, self.pairs, self.classes = batch, pairs, TARGET_WORDS

    def models(self) -> dict[str, Callable[[], torch.nn.Module]]:
        """transformer and transformer-wide: encoder and decoder with attention."""
        return {n: partial(Seq2Seq, SOURCE_WORDS, TARGET_WORDS, LONGEST, *size) for n, size in SIZES.items()}

    def batch(self, seed: int, step: int) -> Batch:
        """New sentences."""
        return _batch(sentences(self.size, stream(seed, step)))

    @cached_property
    def _held_out(self) -> Batch:
        return _batch(sentences(self.pairs, stream(-1, 0)))

    def held_out(self) -> list[Batch]:
        """Sentences from a separate random stream; duplicates are as rare as in a language."""
        return [self._held_out]

    def metric(self, model: torch.nn.Module, losses: Sequence[float]) -> float:
        """BLEU of the greedy translation of the held-out sentences."""
        target, right = self.spelled(model)
        return bleu([*map(without_marks, target)], [*map(without_marks, right)])


def _batch(pairs: list[tuple[list[int], list[int]]]) -> Batch:
    def rows(sequences: list[list[int]]) -> torch.Tensor:
        return torch.tensor([row + [PAD] * (LONGEST - len(row)) for row in sequences], dtype=torch.int64, device="cpu")

    return {"source": rows([a for a, _ in pairs]), "target": rows([[START, *b] for _, b in pairs])}


translation = TaskSpec(
    name="translation",
    summary="a transformer encoder and decoder between two made-up languages (synthetic)",
    facts=Facts(
        metric=Metric("BLEU", higher_is_better=True, best=1.0, form="{:.1%}"),
        unit="sentences",
        defaults={"model": "transformer", "steps": 300, "batch": 48, "lr": 4e-3, "warmup": 40, "validations": 5},
    ),
    open=lambda experiment: Translation(experiment.batch),
)


NOUNS, ADJECTIVES, VERBS, TENSES, GENDERS = 60, 24, 30, 3, 3
LONGEST = 16
"""The largest number of words of a sentence in either language, END included."""

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
    """A noun with its modifiers."""

    noun: int
    adjective: int | None
    plural: int
    definite: bool

    @property
    def gender(self) -> int:
        """A fixed gender for each noun, not visible in the first language."""
        return self.noun * 7 % 11 % GENDERS

    def first(self) -> list[int]:
        """The phrase in the first language: (the) (adjective) noun (plural)."""
        words = [_THE] * self.definite + ([] if self.adjective is None else [_ADJECTIVE + self.adjective])
        return [*words, _NOUN + self.noun, *[_PLURAL] * self.plural]

    def second(self, case: int) -> list[int]:
        """The phrase in the second language: noun, case ending, (adjective, its ending)."""
        form = self.gender * 2 + self.plural
        words = [_NOUN + self.noun, _CASE + case * GENDERS * 2 + form]
        return words if self.adjective is None else [*words, _ADJECTIVE + self.adjective, _AGREEMENT + form]


def sentences(count: int, generator: torch.Generator) -> list[tuple[list[int], list[int]]]:
    """Pairs of a sentence and its translation, as word ids, each ending with END."""
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
