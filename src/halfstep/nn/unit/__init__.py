"""Unit scaling of an existing model, in place."""

from halfstep.nn.unit.report import UnitReport
from halfstep.nn.unit.scale import is_unit_scaled, revert_unit, unit_scale


__all__ = ["UnitReport", "is_unit_scaled", "revert_unit", "unit_scale"]
