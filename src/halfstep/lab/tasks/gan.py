"""Image generation: a generator and a discriminator on real handwritten digits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from halfstep.lab.task import Batch, Facts, Metric, Task, TaskSpec, drawn, load_digits, stream


_COMPONENTS, _SAMPLES = 24, 1000


class Generation(Task):
    """Digits from noise: the discriminator's cross-entropy plus the generator's (non-saturating, Goodfellow 2014).

    Both are updated at every step. A model takes noise (batch, 32) and, in training, real images (batch, 1, 8, 8), and
    returns images or three tensors of logits, as `DCGAN` does.
    """

    def __init__(self, train: Batch, held_out: Batch, batch: int) -> None:
        self.train = train
        self.test = held_out
        self.size = batch
        pixels = train["images"].flatten(1)
        self.space = Space.of(pixels, _COMPONENTS)
        self.real = self.space.features(pixels)

    def models(self) -> dict[str, Callable[[], nn.Module]]:
        """dcgan: a small version of Radford et al. 2016."""
        return {"dcgan": DCGAN}

    def batch(self, seed: int, step: int) -> Batch:
        """Real images and noise, drawn at random."""
        generator = stream(seed, step)
        which = drawn(len(self.train["images"]), self.size, generator)
        noise = torch.randn(self.size, DCGAN.noise, generator=generator, dtype=torch.float32, device="cpu")
        return {"images": self.train["images"][which], "noise": noise}

    def held_out(self) -> list[Batch]:
        """The held-out images, with fixed noise."""
        noise = torch.randn(
            len(self.test["images"]), DCGAN.noise, generator=stream(-1, 0), dtype=torch.float32, device="cpu"
        )
        return [{"images": self.test["images"], "noise": noise}]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The sum of both losses; it says which of the two is ahead, not how good the images are."""
        real, fake, judged = model(batch["noise"], batch["images"])
        return F.softplus(-real).mean() + F.softplus(fake).mean() + F.softplus(-judged).mean()

    def metric(self, model: nn.Module, losses: Sequence[float]) -> float:
        """The Frechet distance of 1000 images to the training images in the space of their first 24 principal
        components."""
        noise = torch.randn(_SAMPLES, DCGAN.noise, generator=stream(-1, 1), dtype=torch.float32, device="cpu")
        return frechet_distance(self.space.features(model(noise).flatten(1)), self.real)


gan = TaskSpec(
    name="gan",
    summary="a generator and a discriminator on scikit-learn's digits (real images); judged by a Frechet distance",
    facts=Facts(
        metric=Metric("Frechet distance", higher_is_better=False, best=0.0, judges=True),
        unit="images",
        defaults={
            "model": "dcgan",
            "steps": 500,
            "batch": 64,
            "lr": 2e-3,
            "warmup": 10,
            "betas": (0.5, 0.99),
            "weight_decay": 0.0,
            "clip": 10.0,
        },
    ),
    open=lambda experiment: Generation(*load_digits(), experiment.batch),
)


class Blur(nn.Module):
    """Adds noise to the discriminator's input in training; without it, exact zeros would identify real images.

    Source: Sonderby et al. 2017 (instance noise).
    """

    def __init__(self, deviation: float) -> None:
        super().__init__()
        self.deviation = deviation

    def forward(self, images: Tensor) -> Tensor:
        """The images; in training with added normal noise."""
        return images + self.deviation * torch.randn_like(images) if self.training else images


class DCGAN(nn.Module):
    """Noise (batch, 32) -> images (batch, 1, 8, 8) in [0, 1]; given real images, the discriminator's logits instead.

    Source: Radford et al. 2016 (transposed convolutions and batch norm in the generator, leaky ReLU in the other).
    """

    noise = 32

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.start = nn.Linear(self.noise, 8 * width)
        self.generator = nn.Sequential(
            nn.Unflatten(1, (width // 2, 4, 4)), nn.BatchNorm2d(width // 2), nn.ReLU(),
            nn.ConvTranspose2d(width // 2, width, 4, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 1, 3, padding=1), nn.Sigmoid(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            Blur(0.3),
            nn.Conv2d(1, width, 4, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Dropout(0.3),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.LeakyReLU(0.2), nn.Dropout(0.3),
            nn.Flatten(), nn.Linear(32 * width, 1),
        )  # fmt: skip

    def forward(self, noise: Tensor, real: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """The images; or the discriminator's logits for the real ones, for the images, and for the images again.

        The gradient of the second stops at the images, that of the third at the discriminator's weights: so one
        backward gives both networks their own gradients.
        """
        images: Tensor = self.generator(self.start(noise))
        if real is None:
            return images
        frozen = {name: p.detach() for name, p in self.discriminator.named_parameters()}
        judged: Tensor = functional_call(self.discriminator, frozen, (images,))
        both = self.discriminator(torch.cat([real.to(images.dtype), images.detach()]))
        return both[: len(real)], both[len(real) :], judged


@dataclass(frozen=True)
class Space:
    """A fixed linear feature space: the first principal components of some data."""

    centre: Tensor
    directions: Tensor

    @classmethod
    def of(cls, data: Tensor, size: int) -> Space:
        """The first `size` principal components of data (count, features), scaled to a total variance of 1."""
        data = data.double()
        centre = data.mean(0)
        _, _, directions = torch.linalg.svd(data - centre, full_matrices=False)
        kept = directions[:size].t()
        return cls(centre, kept / ((data - centre) @ kept).square().sum(1).mean().sqrt())

    def features(self, data: Tensor) -> Tensor:
        """The data's coordinates (count, size) float64."""
        return (data.double() - self.centre) @ self.directions


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """|mean a - mean b|^2 + tr(A + B - 2 (A B)^(1/2)) with the covariances A and B of features (count, size).

    Source: Dowson and Landau 1982; Heusel et al. 2017 for its use on generated images.
    """
    a, b = a.double(), b.double()
    if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        return float("nan")
    first, second = torch.cov(a.t()), torch.cov(b.t())
    values, vectors = torch.linalg.eigh(first)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.t()
    shared = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0).sqrt().sum()
    return float((a.mean(0) - b.mean(0)).square().sum() + first.trace() + second.trace() - 2 * shared)
