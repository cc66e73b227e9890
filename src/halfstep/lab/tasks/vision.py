"""Image classification: a small convolutional network with batch norm on real handwritten digits."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.lab.task import Batch, Facts, Metric, Task, TaskSpec, drawn, load_digits, stream


class Vision(Task):
    """Which digit is it: the mean cross-entropy in nats.

    A model takes images (batch, 1, 8, 8) float32 in [0, 1] and returns logits (batch, 10).
    """

    def __init__(self, train: Batch, held_out: Batch, batch: int) -> None:
        self.train = train
        self.test = held_out
        self.size = batch

    def models(self) -> dict[str, Callable[[], nn.Module]]:
        """cnn and cnn-wide: five convolutions."""
        return {"cnn": partial(CNN, 10, 24), "cnn-wide": partial(CNN, 10, 64)}

    def batch(self, seed: int, step: int) -> Batch:
        """Random images, each shifted by up to a pixel, with a little noise."""
        generator = stream(seed, step)
        which = drawn(len(self.train["images"]), self.size, generator)
        down, right = torch.randint(0, 3, (2, self.size, 1, 1), generator=generator, dtype=torch.int64, device="cpu")
        images = F.pad(self.train["images"][which, 0], (1, 1, 1, 1))[
            torch.arange(self.size, dtype=torch.int64, device="cpu")[:, None, None],
            torch.arange(8, dtype=torch.int64, device="cpu")[:, None] + down,
            torch.arange(8, dtype=torch.int64, device="cpu") + right,
        ]
        images = images + 0.1 * torch.randn(images.shape, generator=generator, dtype=torch.float32, device="cpu")
        return {"images": images[:, None], "classes": self.train["classes"][which]}

    def held_out(self) -> list[Batch]:
        """Every fifth image, unchanged."""
        return [self.test]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(model(batch["images"]), batch["classes"])

    def metric(self, model: nn.Module, losses: Sequence[float]) -> float:
        """Accuracy: the share of held-out images whose largest logit is correct."""
        right = [(model(b["images"]).argmax(-1) == b["classes"]).float().mean() for b in self.held_out()]
        return float(torch.stack(right).mean())


vision = TaskSpec(
    name="vision",
    summary="a convolutional network with batch norm on scikit-learn's digits (real images)",
    facts=Facts(
        metric=Metric("accuracy", higher_is_better=True, best=1.0, form="{:.2%}"),
        unit="images",
        defaults={
            "model": "cnn",
            "steps": 400,
            "batch": 64,
            "lr": 3e-3,
            "warmup": 20,
            "betas": (0.9, 0.99),
            "weight_decay": 0.05,
        },
    ),
    open=lambda experiment: Vision(*load_digits(), experiment.batch),
)


def conv_block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """3x3 convolution, batch norm, ReLU on (batch, channels, height, width)."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class CNN(nn.Module):
    """Images (batch, 1, 8, 8) -> logits (batch, classes)."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            conv_block(1, width), conv_block(width, width), conv_block(width, 2 * width, stride=2),
            conv_block(2 * width, 2 * width), conv_block(2 * width, 4 * width, stride=2),
        )  # fmt: skip
        self.head = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """The logits: features averaged over positions, then one linear layer."""
        return self.head(self.features(images).mean(dim=(2, 3)))  # type: ignore[no-any-return]
