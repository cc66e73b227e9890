"""Check of what weight decay does to a gated MLP: whether the two input weights of its channels align."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep import formats
from halfstep.claims.checks.base import Numbers, check
from halfstep.ops.casts import round_scaled
from halfstep.quant.scaling.current import factor_of


_WIDTH, _CHANNELS, _OUT, _STEPS = 16, 32, 4, 3000
_E4M3 = formats.get("e4m3")  # the one with infinities: its largest is 240


def _product(x: Tensor, linear: Tensor, gate: Tensor) -> Tensor:
    return F.silu(x @ gate.t()) * (x @ linear.t())


def _trained(decay: float) -> Numbers:
    """A gated MLP fitted by AdamW to a small ReLU network; of its channels that contribute, and of its product."""
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int, columns: int, size: float) -> Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=torch.float32, device="cpu") * size

    x = normal(2048, _WIDTH, 1.0)
    y = torch.relu(x @ normal(_WIDTH, 8, 0.25)) @ normal(8, _OUT, 0.5)
    weights = [normal(_CHANNELS, _WIDTH, 0.25), normal(_CHANNELS, _WIDTH, 0.25), normal(_OUT, _CHANNELS, 1 / 6)]
    linear, gate, down = (weight.requires_grad_() for weight in weights)
    optimizer = torch.optim.AdamW([linear, gate, down], lr=3e-3, betas=(0.9, 0.95), weight_decay=decay)
    halfway = torch.ones((), dtype=torch.float32, device="cpu")
    for step in range(_STEPS):
        if step == _STEPS // 2:
            halfway = _product(x, linear, gate).detach().abs().max()
        rows = torch.randint(len(x), (256,), generator=generator, dtype=torch.int64, device="cpu")
        loss = F.mse_loss(_product(x[rows], linear, gate) @ down.t(), y[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        product = _product(x, linear, gate)
        size = product.square().mean(0).sqrt() * down.norm(dim=0)
        cosine = F.cosine_similarity(linear, gate).abs()[size > 0.01 * size.max()]
        factor = factor_of(halfway, _E4M3)
        stale = round_scaled(product, factor, _E4M3, "nearest_even", torch.float32) / factor
        return {
            "mean": float(cosine.mean()),
            "aligned": float((cosine > 0.9).double().mean()),
            "amax": float(product.abs().max()),
            "stale": float((stale - product).norm() / product.norm()),
        }


@check("fishman-alignment")
def alignment() -> Numbers:
    """The same fit without weight decay and with a strong one."""
    found = {"without": _trained(0.0), "decay": _trained(1.0)}
    return {f"{name}_{key}": value for name, numbers in found.items() for key, value in numbers.items()}
