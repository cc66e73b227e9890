"""Checkpoints on disk: which tensors a file holds, in which types, and their values without loading the file."""

from halfstep.checkpoint.inspection import inspect
from halfstep.checkpoint.opening import open_checkpoint
from halfstep.checkpoint.report import Report, RoleReport, TensorReport
from halfstep.checkpoint.stored import Checkpoint, StoredTensor


__all__ = ["Checkpoint", "Report", "RoleReport", "StoredTensor", "TensorReport", "inspect", "open_checkpoint"]
