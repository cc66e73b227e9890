"""Speech recognition: convolutions over time and CTC on synthesised formants."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import groupby, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.lab.measures import error_rate
from halfstep.lab.task import Batch, Facts, Metric, Task, TaskSpec, stream


class Speech(Task):
    """Which characters were spoken: the CTC loss in nats a character (Graves et al. 2006), in float32.

    A model takes features (batch, 96, 64) float32 and returns logits (batch, time, 13), with 0 the blank.
    """

    def __init__(self, batch: int, utterances: int = 128) -> None:
        self.size = batch
        self.utterances = utterances

    def models(self) -> dict[str, Callable[[], nn.Module]]:
        """tdnn and tdnn-wide: three convolutions over time with batch norm."""
        return {"tdnn": partial(TDNN, BINS, CHARACTERS, 64), "tdnn-wide": partial(TDNN, BINS, CHARACTERS, 192)}

    def batch(self, seed: int, step: int) -> Batch:
        """New utterances."""
        return speak(self.size, stream(seed, step))

    @cached_property
    def _held_out(self) -> Batch:
        return speak(self.utterances, stream(-1, 0))

    def held_out(self) -> list[Batch]:
        """Utterances from a separate random stream."""
        return [self._held_out]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean over utterances of the CTC loss divided by their length."""
        log_p = model(batch["features"]).float().log_softmax(-1).transpose(0, 1)
        times = torch.full((log_p.shape[1],), log_p.shape[0], dtype=torch.int64, device="cpu")
        return F.ctc_loss(log_p, batch["characters"], times, batch["lengths"], zero_infinity=True)

    def metric(self, model: nn.Module, losses: Sequence[float]) -> float:
        """CER of the best path, with repeats merged and blanks dropped, on the held-out utterances."""
        batch = self._held_out
        paths = model(batch["features"]).argmax(-1).tolist()
        found = [[c for c, _ in groupby(path) if c] for path in paths]
        wanted = [row[:n] for row, n in zip(batch["characters"].tolist(), batch["lengths"].tolist(), strict=True)]
        return error_rate(found, wanted)


speech = TaskSpec(
    name="speech",
    summary="convolutions over time with CTC on formant sounds (synthetic)",
    facts=Facts(
        metric=Metric("CER", higher_is_better=False, best=0.0, form="{:.1%}"),
        unit="utterances",
        defaults={
            "model": "tdnn",
            "steps": 250,
            "batch": 32,
            "lr": 4e-3,
            "warmup": 20,
            "betas": (0.9, 0.99),
            "validations": 5,
        },
    ),
    open=lambda experiment: Speech(experiment.batch),
)


class TDNN(nn.Module):
    """Spectra (batch, frames, bins) -> logits (batch, frames / 2, characters + 1), the first for CTC's blank."""

    def __init__(self, bins: int, characters: int, width: int) -> None:
        super().__init__()
        widths, strides = (bins, width, width, width), (2, 1, 1)
        layers = [
            nn.Sequential(nn.Conv1d(a, b, 5, stride=s, padding=2, bias=False), nn.BatchNorm1d(b), nn.ReLU())
            for (a, b), s in zip(pairwise(widths), strides, strict=True)
        ]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, characters + 1)

    def forward(self, features: Tensor) -> Tensor:
        """The logits of each second frame."""
        return self.head(self.layers(features.transpose(1, 2)).transpose(1, 2))  # type: ignore[no-any-return]


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


def speak(count: int, generator: torch.Generator) -> Batch:
    """Utterances of three to seven characters, of 50 to 100 ms each with pauses between, with gliding formants.

    A voice stretches all its formants by up to 10%; there is noise about 4 dB below the voice. `features` are log
    spectra (count, 96 frames, 64 bins), `characters` (count, 7) int64, 0 after the last, `lengths` (count,).
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
    stretched = formants * uniform(0.9, 1.1, count, 1, 1)
    controls = torch.cat([stretched, voiced.any(1)[..., None].float()], -1).transpose(1, 2)
    smooth = F.avg_pool1d(F.pad(controls, (1, 1), mode="replicate"), 3, 1).repeat_interleave(_HOP, -1)
    phase = (2 * torch.pi / _RATE * smooth[:, :2]).cumsum(-1)
    wave = (phase.sin() * torch.tensor([[1.0], [0.6]], dtype=torch.float32, device="cpu")).sum(1) * smooth[:, 2]
    wave = wave + 0.5 * torch.randn(wave.shape, generator=generator, dtype=torch.float32, device="cpu")
    spectrum = torch.stft(
        wave, 2 * BINS, _HOP, window=torch.hann_window(2 * BINS, dtype=torch.float32, device="cpu"), return_complex=True
    ).abs()
    features = (spectrum[:, :BINS, :FRAMES] + 0.1).log().transpose(1, 2)
    return {"features": features, "characters": characters, "lengths": lengths}
