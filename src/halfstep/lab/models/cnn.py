"""A small convolutional classifier with batch norm."""

from torch import Tensor, nn


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
        """The logits: features averaged over places, then one linear layer."""
        return self.head(self.features(images).mean(dim=(2, 3)))  # type: ignore[no-any-return]
