"""Gradients in few bits across ranks: DDP's hook, a reducer of our own, and FSDP2's collectives."""

from halfstep.distributed.compress import compress
from halfstep.distributed.dealt import Dealt
from halfstep.distributed.gradients import reduce_gradients
from halfstep.distributed.hook import fp8_hook
from halfstep.distributed.reduction import Reduction
from halfstep.distributed.tokens import GatherCodes


__all__ = ["Dealt", "GatherCodes", "Reduction", "compress", "fp8_hook", "reduce_gradients"]
