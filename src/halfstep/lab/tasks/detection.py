"""Object detection: a small single-shot detector finds handwritten digits on a canvas."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.lab.measures import Found, Truth, iou, mean_average_precision, suppress
from halfstep.lab.task import Batch, Facts, Metric, Task, TaskSpec, load_digits, stream
from halfstep.lab.tasks.vision import conv_block


CLASSES = 10
STRIDES = (4, 8, 16)
SCALES = (2.0, 2.0 * 2 ** (1 / 3), 2.0 * 2 ** (2 / 3))  # an anchor's side in strides
RATIOS = (0.5, 1.0, 2.0)
_ALPHA, _GAMMA = 0.25, 2.0  # of the focal loss


def anchors() -> Tensor:
    """Every anchor as (left, top, right, bottom), (anchors, 4), in the order of the model's outputs."""
    boxes = []
    for stride in STRIDES:
        centres = (torch.arange(SIZE // stride, dtype=torch.float32, device="cpu") + 0.5) * stride
        y, x = torch.meshgrid(centres, centres, indexing="ij")
        shapes = torch.tensor(
            [(s * stride * r**-0.5, s * stride * r**0.5) for s in SCALES for r in RATIOS],
            dtype=torch.float32,
            device="cpu",
        )
        centre = torch.stack([x, y], -1)[:, :, None, :]
        boxes.append(torch.cat([centre - shapes / 2, centre + shapes / 2], -1).reshape(-1, 4))
    return torch.cat(boxes)


class Detection(Task):
    """Find and classify digits: focal loss on classes and smooth L1 on boxes, both averaged over all outputs.

    A model takes images (batch, 1, 48, 48) float32 and returns class logits (batch, 1701, 10) and box offsets (batch,
    1701, 4), as in Ren et al. 2015: centre in anchor sizes, logarithm of the size.

    The mean over all anchors (`reduction="mean"`, as in torchvision's sigmoid_focal_loss) makes activation gradients
    small: an image has 1701 anchors, and only a handful contain a digit.
    """

    def __init__(self, train: Batch, held_out: Batch, batch: int, pictures: int = 128) -> None:
        self.train = Glyphs(train)
        self.test = Glyphs(held_out)
        self.size = batch
        self.pictures = pictures
        self.anchors = anchors()

    def models(self) -> dict[str, Callable[[], nn.Module]]:
        """ssd, as in Liu et al. 2016 without batch norm, and ssd-bn."""
        per_place = len(SCALES) * len(RATIOS)
        return {
            "ssd": partial(SSD, CLASSES, per_place, 16, norm=False),
            "ssd-bn": partial(SSD, CLASSES, per_place, 16),
        }

    def batch(self, seed: int, step: int) -> Batch:
        """New pictures from the training digits."""
        return self._batch(compose(self.train, self.size, stream(seed, step)))

    @cached_property
    def _scenes(self) -> Batch:
        return compose(self.test, self.pictures, stream(-1, 0))

    @cached_property
    def _held_out(self) -> Batch:
        return self._batch(self._scenes)

    def held_out(self) -> list[Batch]:
        """Pictures from the held-out digits."""
        parts = zip(*(torch.split(t, 64) for t in self._held_out.values()), strict=True)
        return [dict(zip(self._held_out, part, strict=True)) for part in parts]

    def _batch(self, scenes: Batch) -> Batch:
        """Pictures with the target of each anchor: a class, -1 for background, -2 for neither; offsets."""
        overlap = iou(scenes["boxes"], self.anchors.expand(len(scenes["boxes"]), -1, -1))  # (batch, digits, anchors)
        overlap = overlap.masked_fill((scenes["classes"] < 0)[..., None], -1)
        best, which = overlap.max(1)
        classes = scenes["classes"].gather(1, which)
        classes = torch.where(best >= 0.5, classes, torch.where(best < 0.4, -1, -2))
        image, digit = torch.nonzero(scenes["classes"] >= 0, as_tuple=True)
        nearest = overlap[image, digit].argmax(-1)  # a digit always gets its best anchor, however little it overlaps
        classes[image, nearest], which[image, nearest] = scenes["classes"][image, digit], digit
        boxes = scenes["boxes"].gather(1, which[..., None].expand(-1, -1, 4))
        offsets = torch.where((classes >= 0)[..., None], self._encode(boxes), 0.0)
        return {"images": scenes["images"], "classes": classes, "offsets": offsets}

    def _encode(self, boxes: Tensor) -> Tensor:
        size = self.anchors[:, 2:] - self.anchors[:, :2]
        centre = (boxes[..., :2] + boxes[..., 2:] - self.anchors[:, :2] - self.anchors[:, 2:]) / 2
        return torch.cat([centre / size, ((boxes[..., 2:] - boxes[..., :2]).clamp(min=1) / size).log()], -1)

    def decode(self, offsets: Tensor) -> Tensor:
        """The boxes (..., anchors, 4) that the offsets encode."""
        size = self.anchors[:, 2:] - self.anchors[:, :2]
        centre = (self.anchors[:, :2] + self.anchors[:, 2:]) / 2 + offsets[..., :2] * size
        half = size * torch.exp(offsets[..., 2:].clamp(max=2)) / 2
        return torch.cat([centre - half, centre + half], -1)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean focal loss over (batch, anchors, classes) plus the mean smooth L1 over (batch, anchors, 4).

        Anchors that are neither digit nor background count as zero in the first; in the second all but digits do.
        Source: Lin et al. 2017, arXiv 1708.02002.
        """
        logits, offsets = model(batch["images"])
        digits = (batch["classes"] >= 0)[..., None]
        wanted = (F.one_hot(batch["classes"].clamp(min=0), CLASSES) * digits).to(logits.dtype)
        cross_entropy = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
        p = logits.sigmoid()
        wrong = wanted * (1 - p) + (1 - wanted) * p
        focal = (wanted * _ALPHA + (1 - wanted) * (1 - _ALPHA)) * wrong**_GAMMA * cross_entropy
        focal = focal * (batch["classes"] != -2)[..., None]
        box = F.smooth_l1_loss(offsets, batch["offsets"], reduction="none", beta=0.1)
        return focal.mean() + (box * digits).mean()  # type: ignore[no-any-return]

    def metric(self, model: nn.Module, losses: Sequence[float]) -> float:
        """mAP at an overlap of 0.5, on the held-out pictures."""
        found = [f for batch in self.held_out() for f in self._find(*model(batch["images"]))]
        pairs = zip(self._scenes["boxes"], self._scenes["classes"], strict=True)
        return mean_average_precision(found, [Truth(b[c >= 0], c[c >= 0]) for b, c in pairs], CLASSES)

    def _find(self, logits: Tensor, offsets: Tensor) -> Iterator[Found]:
        """The 60 best boxes of each image, without those that overlap a better one of their class."""
        scores, places = logits.sigmoid().flatten(1).topk(60)
        boxes = self.decode(offsets).gather(1, (places // CLASSES)[..., None].expand(-1, -1, 4))
        for b, s, c in zip(boxes, scores, places % CLASSES, strict=True):
            kept = suppress(b, s, c)
            yield Found(b[kept], s[kept], c[kept])


detection = TaskSpec(
    name="detection",
    summary="a single-shot detector with 1701 anchors finds digits on a canvas (real digits, composed pictures)",
    facts=Facts(
        metric=Metric("mAP@0.5", higher_is_better=True, best=1.0, form="{:.1%}"),
        loss_unit="",
        unit="images",
        defaults={
            "model": "ssd",
            "steps": 250,
            "batch": 32,
            "lr": 3e-3,
            "warmup": 20,
            "validations": 5,
            "betas": (0.9, 0.99),
            "weight_decay": 0.05,
        },
    ),
    open=lambda experiment: Detection(*load_digits(), experiment.batch),
)


class SSD(nn.Module):
    """Images (batch, 1, size, size) -> class logits (batch, anchors, classes) and box offsets (batch, anchors, 4).

    Three feature maps with strides 4, 8 and 16; on each a 3x3 convolution for `per_place` anchors at every position.

    Source: Liu et al. 2016 (single shot, several maps); Lin et al. 2017 (one sigmoid a class, its initial bias).
    """

    def __init__(self, classes: int, per_place: int, width: int, norm: bool = True) -> None:
        super().__init__()
        self.classes = classes
        block = conv_block if norm else _plain_block
        self.stem = nn.Sequential(block(1, width, 2), block(width, 2 * width))
        widths = [2 * width, 3 * width, 4 * width, 4 * width]
        self.stages = nn.ModuleList(nn.Sequential(block(a, b, 2), block(b, b)) for a, b in pairwise(widths))
        self.heads = nn.ModuleList(nn.Conv2d(w, per_place * (classes + 4), 3, padding=1) for w in widths[1:])
        for head in self.heads:
            assert isinstance(head, nn.Conv2d)
            assert head.bias is not None
            nn.init.normal_(head.weight, std=0.01)
            nn.init.zeros_(head.bias)
            with torch.no_grad():  # every anchor starts as background with probability 0.99
                head.bias.view(per_place, classes + 4)[:, :classes] = -math.log(99)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and offsets, the finest map's anchors first, row by row."""
        x = self.stem(images)
        outputs = []
        for stage, head in zip(self.stages, self.heads, strict=True):
            x = stage(x)
            y = head(x).permute(0, 2, 3, 1)
            outputs.append(y.reshape(len(y), -1, self.classes + 4))
        joined = torch.cat(outputs, 1)
        return joined[..., : self.classes], joined[..., self.classes :]


def _plain_block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1)
    nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
    return nn.Sequential(convolution, nn.ReLU())


SIZE = 48
MOST = 4  # digits in a picture
_SIZES = [(h, round(h * stretch)) for h in (9, 12, 16, 20, 26) for stretch in (0.8, 1.0, 1.25)]


class Glyphs:
    """Digits in every size, with the box (left, top, right, bottom) of their ink."""

    def __init__(self, digits: Batch) -> None:
        self.classes: list[int] = digits["classes"].tolist()
        self.images = [F.interpolate(digits["images"], size, mode="bilinear")[:, 0] for size in _SIZES]
        self.boxes = [_ink(images).tolist() for images in self.images]


def _ink(images: Tensor) -> Tensor:
    columns, rows = ((images > 0.2).any(d).int() for d in (1, 2))
    low = [side.argmax(1) for side in (columns, rows)]
    high = [side.shape[1] - side.flip(1).argmax(1) for side in (columns, rows)]
    return torch.stack([*low, *high], 1)


def compose(glyphs: Glyphs, count: int, generator: torch.Generator) -> Batch:
    """Pictures of one to four digits that do not touch; a box encloses the digit's ink, not its frame.

    `images` are (count, 1, 48, 48) float32, `boxes` (count, 4, 4) in pixels, `classes` (count, 4); -1 is no digit.
    """
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
    return {
        "images": images,
        "boxes": torch.tensor(boxes, dtype=torch.float32, device="cpu"),
        "classes": torch.tensor(classes, dtype=torch.int64, device="cpu"),
    }


def _touch(a: list[int], b: list[int]) -> bool:
    """Whether two boxes come within two pixels of each other."""
    return a[0] < b[2] + 2 and b[0] < a[2] + 2 and a[1] < b[3] + 2 and b[1] < a[3] + 2
