"""Captioning: a small vision-language model looks at a handwritten digit and spells its name."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from halfstep.lab.models.gpt import Block
from halfstep.lab.task import END, PAD, START, Batch, Facts, Metric, Spelling, TaskSpec, load_digits
from halfstep.lab.tasks.vision import Vision


_SIZES = {"captioner": (2, 64, 4), "captioner-wide": (3, 192, 6)}  # layers, width, heads
_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_LETTERS = "".join(sorted(set("".join(_NAMES))))
_LONGEST = 6  # five letters, and the end


def _row(name: str) -> list[int]:
    """START, the letters, END, padding."""
    row = [START, *(_LETTERS.index(letter) + END + 1 for letter in name), END]
    return row + [PAD] * (_LONGEST + 1 - len(row))


_SPELLED = [_row(name) for name in _NAMES]


class Captioning(Spelling):
    """The next letter of a digit's name: the mean cross-entropy in nats over the letters without padding.

    A model takes images (batch, 1, 8, 8) float32 in [0, 1] and the letters so far (batch, time) int64, and returns
    logits (batch, time, letters).
    """

    source, text, classes = "images", "letters", END + 1 + len(_LETTERS)

    def __init__(self, digits: Vision) -> None:
        self.digits = digits

    def models(self) -> dict[str, Callable[[], nn.Module]]:
        """captioner and captioner-wide: decoders that read 16 patches before the letters."""
        return {name: partial(Captioner, self.classes, 8, _LONGEST, *shape) for name, shape in _SIZES.items()}

    def batch(self, seed: int, step: int) -> Batch:
        """Images drawn as in the vision task."""
        return _named(self.digits.batch(seed, step))

    def held_out(self) -> list[Batch]:
        """Every fifth image, unchanged."""
        return [_named(batch) for batch in self.digits.held_out()]

    def metric(self, model: nn.Module, losses: Sequence[float]) -> float:
        """Accuracy: the share of held-out images whose name is spelled correctly, greedily, letter by letter."""
        text, names = self.spelled(model)
        return float(((text == names) | (names == PAD)).all(1).float().mean())


def _named(batch: Batch) -> Batch:
    return {
        "images": batch["images"],
        "letters": torch.tensor(_SPELLED, dtype=torch.int64, device="cpu")[batch["classes"]],
    }


captioning = TaskSpec(
    name="captioning",
    summary="a small vision-language model that spells the names of scikit-learn's digits (real images)",
    facts=Facts(
        metric=Metric("accuracy", higher_is_better=True, best=1.0, form="{:.2%}"),
        unit="images",
        defaults={"model": "captioner", "steps": 400, "batch": 64, "lr": 5e-3, "warmup": 40, "validations": 5},
    ),
    open=lambda experiment: Captioning(Vision(*load_digits(), experiment.batch)),
)


_PATCH = 2  # pixels a side


class Captioner(nn.Module):
    """Images (batch, 1, side, side) and the text so far (batch, time) int64 -> logits (batch, time, vocabulary).

    A patch is projected to the width of the decoder like a token's embedding (as in LLaVA, Liu et al. 2023, arXiv
    2304.08485, but without a separate encoder).
    """

    def __init__(self, vocabulary: int, side: int, longest: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.patches = (side // _PATCH) ** 2
        self.project = nn.Linear(_PATCH**2, width)
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(self.patches + longest, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.3)  # about the scale of the patches' projection

    def forward(self, images: Tensor, text: Tensor) -> Tensor:
        """The logits of the next token at each position of the text."""
        patches = nn.functional.unfold(images, _PATCH, stride=_PATCH).transpose(1, 2)
        x = torch.cat([self.project(patches), self.token(text)], 1)
        x = x + self.position(torch.arange(x.shape[1], device=x.device, dtype=torch.int64))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, self.patches :]))  # type: ignore[no-any-return]
