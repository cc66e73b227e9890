"""The numerics log of `halfstep.track` in transformers' Trainer and its subclasses.

Trainer(model=model, args=args, train_dataset=data, callbacks=[NumericsCallback(every=100, to="numerics.jsonl")])
"""

from typing import Any

from halfstep.errors import MissingLibraryError
from halfstep.tracking import Log, track


with MissingLibraryError.of("trainer"):
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


__all__ = ["NumericsCallback"]


class NumericsCallback(TrainerCallback):
    """Tracks a Trainer's model and optimizer from the first step to the last; the rows are in `log`."""

    def __init__(self, every: int = 100, to: Any = "numerics.jsonl") -> None:
        self.log: Log | None = None
        self._every, self._to = every, to

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start tracking, on rank 0 only."""
        if state.is_world_process_zero:
            self.log = track(kwargs["model"], kwargs["optimizer"], self._every, self._to)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record the loss that the Trainer logs."""
        loss = (kwargs.get("logs") or {}).get("loss")
        if self.log is not None and loss is not None:
            self.log.note(float(loss))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop tracking; the rows stay available."""
        if self.log is not None:
            self.log.remove()
