"""What training keeps in memory, by role, and what a model does; measured from live tensors."""

from halfstep.memory.live import Live, parts_of
from halfstep.memory.measure import (
    StepBytes,
    activation_bytes,
    measure,
    measure_persistent,
    measure_step,
    measure_update,
    stored_bytes,
)


__all__ = [
    "Live", "StepBytes", "activation_bytes", "measure", "measure_persistent", "measure_step",
    "measure_update", "parts_of", "stored_bytes",
]  # fmt: skip
