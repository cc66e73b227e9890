"""A small convolutional generator and its discriminator, trained against each other."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call


class Blur(nn.Module):
    """Noise on what the discriminator sees in training, or it would know real images by their exact zeros.

    Source: Sonderby et al. 2017 (instance noise).
    """

    def __init__(self, deviation: float) -> None:
        super().__init__()
        self.deviation = deviation

    def forward(self, images: Tensor) -> Tensor:
        """The images; in training with normal noise."""
        return images + self.deviation * torch.randn_like(images) if self.training else images


class DCGAN(nn.Module):
    """Noise (batch, 32) -> images (batch, 1, 8, 8) in [0, 1]; with real images also what the discriminator thinks.

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
        backward gives each of the two players its own gradient.
        """
        images: Tensor = self.generator(self.start(noise))
        if real is None:
            return images
        frozen = {name: p.detach() for name, p in self.discriminator.named_parameters()}
        judged: Tensor = functional_call(self.discriminator, frozen, (images,))
        both = self.discriminator(torch.cat([real.to(images.dtype), images.detach()]))
        return both[: len(real)], both[len(real) :], judged
