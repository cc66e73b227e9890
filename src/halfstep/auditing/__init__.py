"""What a live training setup really is: dtypes as stored, precision by the bits, bytes, and what is wrong."""

from halfstep.auditing.audit import audit
from halfstep.auditing.report import Audit, Finding, Item, Row
from halfstep.auditing.watch import Running, Updates, Watch, running


__all__ = ["Audit", "Finding", "Item", "Row", "Running", "Updates", "Watch", "audit", "running"]
