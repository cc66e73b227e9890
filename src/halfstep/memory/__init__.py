"""What training keeps in memory, by role, and what a model does."""

from halfstep.memory.measure import measure, stored_bytes


__all__ = ["measure", "stored_bytes"]
