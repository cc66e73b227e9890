"""Weights rounded once for all micro-batches of a step, in transformers' Trainer and its subclasses.

HalfstepTrainer(model=model, args=args, train_dataset=data, callbacks=[CachedWeightsCallback()])
"""

from contextlib import ExitStack
from typing import Any

from halfstep.errors import MissingLibraryError
from halfstep.nn.product import CachedWeights, cached_weights


with MissingLibraryError.of("trainer"):
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


__all__ = ["CachedWeightsCallback"]


class CachedWeightsCallback(TrainerCallback):
    """Enters `halfstep.cached_weights` for the micro-batches of each optimizer step (`gradient_accumulation_steps`)."""

    def __init__(self) -> None:
        self.cached: CachedWeights | None = None
        """The cache of the last step."""
        self._entered = ExitStack()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Enter the cache before a step's first micro-batch."""
        self._entered.close()
        self.cached = self._entered.enter_context(cached_weights(kwargs["model"]))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave it after the last micro-batch."""
        self._entered.close()

    on_train_end = on_pre_optimizer_step
