"""The real state of a live training setup: dtypes as stored, precision by the bits, bytes, and problems."""

from halfstep.auditing.audit import audit
from halfstep.auditing.report import Audit, Finding, Item, Row
from halfstep.auditing.watch import Running, Updates, Watch, running


__all__ = ["Audit", "Finding", "Item", "Row", "Running", "Updates", "Watch", "audit", "running"]
