"""Gradients in few bits across ranks: DDP's hook, a reducer of our own, and FSDP2's collectives."""

from halfstep.distributed.compress import Dealt, GatherCodes, compress, reduce_gradients
from halfstep.distributed.sharded import Reduction, fp8_hook


__all__ = ["Dealt", "GatherCodes", "Reduction", "compress", "fp8_hook", "reduce_gradients"]
