"""The bytes of a training setup, by role, before it exists: a recipe is run on tensors without memory."""

from halfstep.accounting.account import OPTIMIZERS, Account, account
from halfstep.accounting.checkpointing import CHECKPOINTING
from halfstep.accounting.fit import bytes_from, largest
from halfstep.accounting.inference import InferenceBytes, inference
from halfstep.accounting.models import architectures, load_subject
from halfstep.accounting.sharing import Share, check_ranks, share
from halfstep.accounting.subject import Batch, Subject


__all__ = [
    "CHECKPOINTING", "OPTIMIZERS", "Account", "Batch", "InferenceBytes", "Share", "Subject", "account",
    "architectures", "bytes_from", "check_ranks", "inference", "largest", "load_subject", "share",
]  # fmt: skip
