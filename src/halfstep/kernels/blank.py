"""Tensors without values, such as torch's FakeTensors: what an operator is told of them, where no kernel can run."""

import torch
from torch import Tensor


_LIBRARY = torch.library.Library("halfstep", "FRAGMENT")
_LIBRARY.define("follow(Tensor x, Tensor(a!) out) -> Tensor(a!)")
_LIBRARY.impl("follow", lambda x, out: out, "CompositeExplicitAutograd")
FOLLOW = torch.ops.halfstep.follow.default
"""The operator by which `blank` says what follows from what."""


def blank(x: Tensor, *outs: Tensor) -> bool:
    """Whether x has no values: then there is nothing to compute, and modes that watch operators see that `outs`
    follow from x."""
    if not hasattr(x, "fake_mode"):
        return False
    for out in outs:
        FOLLOW(x, out)
    return True
