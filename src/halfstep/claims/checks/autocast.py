"""Check of what torch.autocast does on the CPU to operations that it runs in float32 on CUDA."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.claims.checks.base import Numbers, check


_Op = Callable[[Tensor], Tensor]

# Each is on torch.autocast's float32 lists for CUDA (cross_entropy by way of log_softmax and nll_loss).
_OPS: dict[str, _Op] = {
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "group_norm": lambda x: F.group_norm(x, 2),
    "softplus": F.softplus,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "pow": lambda x: torch.pow(x, 3),
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "tan": torch.tan,
    "sum": torch.sum,
    "norm": lambda x: torch.linalg.vector_norm(x),
    "cumsum": lambda x: torch.cumsum(x, -1),
    "cumprod": lambda x: torch.cumprod(x, -1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x),
    "prod": torch.prod,
    "cdist": lambda x: torch.cdist(x, x),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long, device="cpu")),
}
_NAMED = {"prod", "cdist", "mse_loss", "binary_cross_entropy_with_logits", "cross_entropy"}


@check("autocast-cpu")
def autocast() -> Numbers:
    """How many operations, fed bf16, return float32 under CPU autocast, and how many of those the row names."""
    x = torch.rand(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu").to(
        torch.bfloat16
    )
    with torch.autocast("cpu", torch.bfloat16):
        widened = {name for name, op in _OPS.items() if op(x).dtype == torch.float32}
    return {"operations": len(_OPS), "float32": len(widened), "named": len(widened & _NAMED)}
