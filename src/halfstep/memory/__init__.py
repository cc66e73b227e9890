"""What training keeps in memory, by role."""

from halfstep.memory.measure import measure


__all__ = ["measure"]
