"""Checkpoints on disk: which tensors a file holds, in which types, and their values without loading the file."""

from halfstep.inspection.inspector import inspect
from halfstep.inspection.opening import open_checkpoint
from halfstep.inspection.report import Inspection, RoleReport, TensorReport
from halfstep.inspection.stored import Checkpoint, StoredTensor


__all__ = ["Checkpoint", "Inspection", "RoleReport", "StoredTensor", "TensorReport", "inspect", "open_checkpoint"]
