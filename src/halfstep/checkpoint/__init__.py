"""Checkpoints on disk: which tensors a file holds, in which types, and their values without loading the file."""

from halfstep.checkpoint.opening import open_checkpoint
from halfstep.checkpoint.stored import Checkpoint, StoredTensor


__all__ = ["Checkpoint", "StoredTensor", "open_checkpoint"]
