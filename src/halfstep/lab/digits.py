"""Real handwritten digits, 8 by 8 pixels: the 1797 images that come with scikit-learn."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from halfstep.errors import DataError


@dataclass(frozen=True)
class Digits:
    """Images (count, 8, 8) float32 in [0, 1] and their classes (count,) int64."""

    images: Tensor
    classes: Tensor

    def part(self, which: Tensor) -> Digits:
        """Some of them."""
        return Digits(self.images[which], self.classes[which])


@cache
def load_digits() -> tuple[Digits, Digits]:
    """Training and held-out digits: every fifth is held out. scikit-learn itself is not imported, which takes seconds.

    Raises:
        DataError: scikit-learn is not installed, or keeps the file elsewhere.

    Source: Alpaydin and Kaynak 1998, Optical Recognition of Handwritten Digits (UCI), its test part.
    """
    found = find_spec("sklearn")
    path = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz" if found and found.origin else None
    if path is None or not path.is_file():
        raise DataError("the digits come with scikit-learn, which is not there: pip install 'halfstep[lab]'")
    with gzip.open(path, "rt") as file:
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    every = Digits(table[:, :64].reshape(-1, 8, 8) / 16, table[:, 64].long())
    fifth = torch.arange(len(table), dtype=torch.int64, device="cpu") % 5 == 4
    return every.part(~fifth), every.part(fifth)
