"""Data parallelism with low-precision gradients: a DDP communication hook, a reducer without DDP, FSDP2 collectives."""

from halfstep.distributed.compress import Dealt, GatherCodes, compress, reduce_gradients
from halfstep.distributed.sharded import Reduction, fp8_hook


__all__ = ["Dealt", "GatherCodes", "Reduction", "compress", "fp8_hook", "reduce_gradients"]
