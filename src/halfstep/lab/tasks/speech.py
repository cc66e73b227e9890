"""Speech recognition: convolutions over time and CTC on synthesised formants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.lab.experiment import Experiment
from halfstep.lab.facts import Facts, Metric
from halfstep.lab.measures.sentences import error_rate
from halfstep.lab.models.tdnn import TDNN
from halfstep.lab.speech import BINS, CHARACTERS, speak
from halfstep.lab.task import Batch, Task, TaskSpec, stream


_WIDTHS = {"tdnn": 64, "tdnn-wide": 192}
_HELD_OUT_SEED = -1


class Speech(Task):
    """Which characters were spoken: the CTC loss in nats a character (Graves et al. 2006), in float32.

    A model takes features (batch, 96, 64) float32 and returns logits (batch, time, 13), 0 the blank.
    """

    def __init__(self, batch: int, utterances: int = 128) -> None:
        self.size = batch
        self.utterances = utterances

    def models(self) -> dict[str, Callable[[], nn.Module]]:
        """tdnn and tdnn-wide: three convolutions over time with batch norm."""
        return {name: partial(TDNN, BINS, CHARACTERS, width) for name, width in _WIDTHS.items()}

    def batch(self, seed: int, step: int) -> Batch:
        """New utterances."""
        return vars(speak(self.size, stream(seed, step)))

    @cached_property
    def _held_out(self) -> Batch:
        return vars(speak(self.utterances, stream(_HELD_OUT_SEED, 0)))

    def held_out(self) -> list[Batch]:
        """Utterances of a stream of their own."""
        return [self._held_out]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean over utterances of the CTC loss divided by their length."""
        log_p = model(batch["features"]).float().log_softmax(-1).transpose(0, 1)
        times = torch.full((log_p.shape[1],), log_p.shape[0], dtype=torch.int64, device="cpu")
        return F.ctc_loss(log_p, batch["characters"], times, batch["lengths"], zero_infinity=True)

    def metric(self, model: nn.Module, losses: Sequence[float]) -> float:
        """CER: of the best path, repeats merged and blanks dropped, on the held-out utterances."""
        batch = self._held_out
        paths = model(batch["features"]).argmax(-1).tolist()
        found = [[c for c, _ in groupby(path) if c] for path in paths]
        wanted = [row[:n] for row, n in zip(batch["characters"].tolist(), batch["lengths"].tolist(), strict=True)]
        return error_rate(found, wanted)


def _open(experiment: Experiment) -> Speech:
    return Speech(experiment.batch)


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
    open=_open,
)
