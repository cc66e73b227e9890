"""What training keeps in memory, by role, and what a model does; measured from live tensors."""

from halfstep.memory.measure import measure, stored_bytes
from halfstep.memory.step import StepBytes, measure_persistent, measure_step


__all__ = ["StepBytes", "measure", "measure_persistent", "measure_step", "stored_bytes"]
