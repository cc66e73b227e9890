"""What is kept beside a weight, followed to the weight: a kernel where one supports the call, else the reference."""

from torch import Tensor

from halfstep.kernels.cpu import masters as kernel
from halfstep.quant.masters import Kept, Master


def follow(master: Master, weight: Tensor, kept: Kept) -> None:
    """`master.follow(weight, kept)`."""
    if not kernel.run(weight, master.name, kept):
        master.follow(weight, kept)
