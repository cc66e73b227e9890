"""How a recipe gets into somebody's model."""

from halfstep.nn.apply import Report, advance, apply, revert


__all__ = ["Report", "advance", "apply", "revert"]
