"""Estimates for a training setup from a run on FakeTensors: bytes by role, and the cost of the matmuls."""

from halfstep.accounting.account import (
    CHECKPOINTING,
    OPTIMIZERS,
    Account,
    InferenceBytes,
    Share,
    account,
    bytes_from,
    check_ranks,
    inference,
    largest,
    sent_a_parameter,
    share,
)
from halfstep.accounting.products import HEAD, OVERHEADS, PASSES, SPEEDS, Cost, Work, cost, speeds_from
from halfstep.accounting.subject import Batch, Subject, architectures, load_subject, named


__all__ = [
    "CHECKPOINTING", "HEAD", "OPTIMIZERS", "OVERHEADS", "PASSES", "SPEEDS", "Account", "Batch", "Cost",
    "InferenceBytes", "Share", "Subject", "Work", "account", "architectures", "bytes_from", "check_ranks", "cost",
    "inference", "largest", "load_subject", "named",
    "sent_a_parameter", "share", "speeds_from",
]  # fmt: skip
