"""Unit scaling of an existing model, in place."""

from halfstep.nn.unit.scale import UnitReport, is_unit_scaled, revert_unit, unit_scale


__all__ = ["UnitReport", "is_unit_scaled", "revert_unit", "unit_scale"]
