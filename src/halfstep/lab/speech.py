"""Utterances to transcribe: every character is a vowel-like sound of two formants, spoken by ever other voices."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


CHARACTERS = 12
"""Characters are numbered from 1; 0 is CTC's blank."""
LONGEST = 7
FRAMES, BINS = 96, 64
_HOP, _RATE = 40, 4000  # samples a frame, samples a second: frames of 10 ms
_FORMANTS = torch.tensor(
    [(f1, f2) for f1 in (300.0, 500.0, 700.0) for f2 in (900.0, 1150.0, 1400.0, 1650.0)],
    dtype=torch.float32,
    device="cpu",
)  # Hz


@dataclass(frozen=True)
class Utterances:
    """Log spectra (count, 96 frames, 64 bins); characters (count, 7) int64, 0 after the last; lengths (count,)."""

    features: Tensor
    characters: Tensor
    lengths: Tensor


def speak(count: int, generator: torch.Generator) -> Utterances:
    """Utterances of three to seven characters, of 50 to 100 ms each with pauses between, gliding into each other.

    A voice stretches all its formants by up to 10%; there is noise about 4 dB below the voice.
    """

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")

    lengths = torch.randint(3, LONGEST + 1, (count,), generator=generator, dtype=torch.int64, device="cpu")
    characters = torch.randint(
        1, CHARACTERS + 1, (count, LONGEST), generator=generator, dtype=torch.int64, device="cpu"
    )
    characters = characters * (torch.arange(LONGEST, dtype=torch.int64, device="cpu") < lengths[:, None])
    sounds = torch.randint(5, 11, (count, LONGEST), generator=generator, dtype=torch.int64, device="cpu")
    pauses = torch.randint(1, 4, (count, LONGEST), generator=generator, dtype=torch.int64, device="cpu")
    ends = (sounds + pauses).cumsum(1)
    starts = ends - sounds
    frame = torch.arange(FRAMES, dtype=torch.int64, device="cpu")
    voiced = (frame >= starts[..., None]) & (frame < ends[..., None]) & (characters > 0)[..., None]
    place = ((frame[None, None] >= starts[..., None]).sum(1) - 1).clamp(
        min=0
    )  # which character a frame is of, or after
    formants = _FORMANTS[(characters - 1).clamp(min=0)].gather(1, place[..., None].expand(-1, -1, 2))
    formants = formants * uniform(0.9, 1.1, count, 1, 1)
    controls = torch.cat([formants, voiced.any(1)[..., None].float()], -1).transpose(1, 2)
    smooth = F.avg_pool1d(F.pad(controls, (1, 1), mode="replicate"), 3, 1)
    smooth = smooth.repeat_interleave(_HOP, -1)
    phase = (2 * math.pi / _RATE * smooth[:, :2]).cumsum(-1)
    wave = (phase.sin() * torch.tensor([[1.0], [0.6]], dtype=torch.float32, device="cpu")).sum(1) * smooth[:, 2]
    wave = wave + 0.5 * torch.randn(wave.shape, generator=generator, dtype=torch.float32, device="cpu")
    spectrum = torch.stft(
        wave, 2 * BINS, _HOP, window=torch.hann_window(2 * BINS, dtype=torch.float32, device="cpu"), return_complex=True
    ).abs()
    return Utterances((spectrum[:, :BINS, :FRAMES] + 0.1).log().transpose(1, 2), characters, lengths)
