"""GPTs smaller than `gpt-nano`, for a law of runs that see many tokens for each parameter (`law.py`)."""

from torch import nn

from halfstep.lab.models.gpt import GPT


def width_8() -> nn.Module:
    """Two layers of width 8: 6 thousand parameters."""
    return GPT(256, 64, 2, 8, 1)


def width_16() -> nn.Module:
    """Two layers of width 16: 16 thousand parameters."""
    return GPT(256, 64, 2, 16, 2)
