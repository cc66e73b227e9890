"""Pictures to find digits in: real handwritten digits, resized and set on a noisy canvas."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.lab.digits import Digits


SIZE = 48
MOST = 4  # digits in a picture
_SIZES = [(h, round(h * stretch)) for h in (9, 12, 16, 20, 26) for stretch in (0.8, 1.0, 1.25)]


@dataclass(frozen=True)
class Scenes:
    """Pictures (count, 1, 48, 48) float32; boxes (count, 4, 4) in pixels; classes (count, 4), -1 where no digit is."""

    images: Tensor
    boxes: Tensor
    classes: Tensor


class Glyphs:
    """Digits in every size, with the box (left, top, right, bottom) of their ink."""

    def __init__(self, digits: Digits) -> None:
        self.classes: list[int] = digits.classes.tolist()
        self.images = [F.interpolate(digits.images[:, None], size, mode="bilinear")[:, 0] for size in _SIZES]
        self.boxes = [_ink(images).tolist() for images in self.images]


def _ink(images: Tensor) -> Tensor:
    columns, rows = ((images > 0.2).any(d).int() for d in (1, 2))
    low = [side.argmax(1) for side in (columns, rows)]
    high = [side.shape[1] - side.flip(1).argmax(1) for side in (columns, rows)]
    return torch.stack([*low, *high], 1)


def compose(glyphs: Glyphs, count: int, generator: torch.Generator) -> Scenes:
    """Pictures of one to four digits that do not touch; a box is the digit's ink, not its frame."""
    images = 0.15 * torch.rand(count, 1, SIZE, SIZE, generator=generator, dtype=torch.float32, device="cpu")
    boxes: list[list[list[int]]] = []
    classes: list[list[int]] = []
    drawn = torch.rand(count, MOST, 6, generator=generator, dtype=torch.float64, device="cpu").tolist()
    for image, attempts in zip(images[:, 0], drawn, strict=True):
        placed: list[list[int]] = []
        shown: list[int] = []
        for a, b, c, d, contrast, often in attempts:
            if placed and often < 0.25:
                continue
            which, size = int(a * len(glyphs.classes)), int(b * len(_SIZES))
            height, width = _SIZES[size]
            left, top = int(c * (SIZE - width + 1)), int(d * (SIZE - height + 1))
            x1, y1, x2, y2 = glyphs.boxes[size][which]
            box = [left + x1, top + y1, left + x2, top + y2]
            if any(_touch(box, other) for other in placed):
                continue
            place = image[top : top + height, left : left + width]
            torch.maximum(place, (0.5 + 0.5 * contrast) * glyphs.images[size][which], out=place)
            placed.append(box)
            shown.append(glyphs.classes[which])
        missing = MOST - len(placed)
        boxes.append(placed + [[0, 0, 0, 0]] * missing)
        classes.append(shown + [-1] * missing)
    return Scenes(
        images,
        torch.tensor(boxes, dtype=torch.float32, device="cpu"),
        torch.tensor(classes, dtype=torch.int64, device="cpu"),
    )


def _touch(a: list[int], b: list[int]) -> bool:
    """Whether two boxes come within two pixels of each other."""
    return a[0] < b[2] + 2 and b[0] < a[2] + 2 and a[1] < b[3] + 2 and b[1] < a[3] + 2
