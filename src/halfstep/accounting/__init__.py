"""What a training setup takes before it exists, on tensors without memory: bytes by role, and its products."""

from halfstep.accounting.account import CHECKPOINTING, OPTIMIZERS, Account, InferenceBytes, account, inference
from halfstep.accounting.cost import cost
from halfstep.accounting.models import architectures, load_subject, named
from halfstep.accounting.products import HEAD, OVERHEADS, PASSES, SPEEDS, Cost, Work, speeds_from
from halfstep.accounting.sharing import Share, bytes_from, check_ranks, largest, sent_a_parameter, share
from halfstep.accounting.subject import Batch, Subject


__all__ = [
    "CHECKPOINTING", "HEAD", "OPTIMIZERS", "OVERHEADS", "PASSES", "SPEEDS", "Account", "Batch", "Cost",
    "InferenceBytes", "Share", "Subject", "Work", "account", "architectures", "bytes_from", "check_ranks", "cost",
    "inference", "largest", "load_subject", "named",
    "sent_a_parameter", "share", "speeds_from",
]  # fmt: skip
