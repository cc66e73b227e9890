"""Reads checkpoints on disk: the tensors of a file, their types, and their values without loading the file."""

from halfstep.inspection.difference import Difference, diff
from halfstep.inspection.difference_text import TensorDifference
from halfstep.inspection.files import Checkpoint, StoredTensor
from halfstep.inspection.inspector import inspect, open_checkpoint
from halfstep.inspection.report import Inspection, RoleReport, TensorReport


__all__ = [
    "Checkpoint",
    "Difference",
    "Inspection",
    "RoleReport",
    "StoredTensor",
    "TensorDifference",
    "TensorReport",
    "diff",
    "inspect",
    "open_checkpoint",
]
