"""Image generation: a generator and a discriminator on real handwritten digits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.lab.digits import Digits, load_digits
from halfstep.lab.experiment import Experiment
from halfstep.lab.facts import Facts, Metric
from halfstep.lab.measures.distance import Space, frechet_distance
from halfstep.lab.models.dcgan import DCGAN
from halfstep.lab.task import Batch, Task, TaskSpec, stream


_COMPONENTS, _SAMPLES = 24, 1000


class Generation(Task):
    """Digits out of noise: the discriminator's cross-entropy plus the generator's (non-saturating, Goodfellow 2014).

    Both players move at every step. A model takes noise (batch, 32) and, in training, real images (batch, 1, 8, 8), and
    returns images or three tensors of logits, as `DCGAN` does.
    """

    def __init__(self, train: Digits, held_out: Digits, batch: int) -> None:
        self.train = train
        self.test = held_out
        self.size = batch
        pixels = train.images.flatten(1)
        self.space = Space.of(pixels, _COMPONENTS)
        self.real = self.space.features(pixels)

    def models(self) -> dict[str, Callable[[], nn.Module]]:
        """dcgan: Radford et al. 2016, small."""
        return {"dcgan": DCGAN}

    def batch(self, seed: int, step: int) -> Batch:
        """Real images and noise, drawn at random."""
        generator = stream(seed, step)
        which = torch.randint(
            0, len(self.train.images), (self.size,), generator=generator, dtype=torch.int64, device="cpu"
        )
        noise = torch.randn(self.size, DCGAN.noise, generator=generator, dtype=torch.float32, device="cpu")
        return {"images": self.train.images[which][:, None], "noise": noise}

    def held_out(self) -> list[Batch]:
        """The held-out images, with noise that stays the same."""
        noise = torch.randn(
            len(self.test.images), DCGAN.noise, generator=stream(-1, 0), dtype=torch.float32, device="cpu"
        )
        return [{"images": self.test.images[:, None], "noise": noise}]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The sum of the players' losses: it says who is winning, not how good the images are."""
        real, fake, judged = model(batch["noise"], batch["images"])
        discriminator = F.softplus(-real).mean() + F.softplus(fake).mean()
        return discriminator + F.softplus(-judged).mean()

    def metric(self, model: nn.Module, losses: Sequence[float]) -> float:
        """The Frechet distance of 1000 images to the training images in the space of their 24 first components."""
        noise = torch.randn(_SAMPLES, DCGAN.noise, generator=stream(-1, 1), dtype=torch.float32, device="cpu")
        return frechet_distance(self.space.features(model(noise).flatten(1)), self.real)


def _open(experiment: Experiment) -> Generation:
    return Generation(*load_digits(), experiment.batch)


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
    open=_open,
)
