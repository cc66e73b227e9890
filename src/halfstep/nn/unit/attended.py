"""How large a mix of values by softmax's weights is, measured on random scores under the traced mask."""

from __future__ import annotations

import torch
from torch import Tensor


class Attended:
    """Measures the mean, over places, of the sum of squares of softmax's weights; once for each mask and size."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], float] = {}
        self._kept: list[Tensor] = []  # so that no id comes back

    def energy(self, shape: tuple[int, ...], square: float, mask: Tensor | None, causal: bool) -> float:
        """For scores of that shape (..., times, sources) and mean square.

        Independent values of unit size, mixed by such weights, have that mean square. Places that nothing attends to
        are left out.
        """
        times, sources = shape[-2:]
        key = (times, sources, round(square, 6), None if mask is None else id(mask), causal)
        if key not in self._found:
            if mask is not None:
                self._kept.append(mask)
            self._found[key] = _energy(times, sources, square, mask, causal)
        return self._found[key]


def _energy(times: int, sources: int, square: float, mask: Tensor | None, causal: bool) -> float:
    outer = (1,) if mask is None or mask.dim() < 3 else tuple(mask.shape[:-2])
    draws = max(1, 4096 // max(times * sources, 1))
    generator = torch.Generator().manual_seed(0)
    scores = (
        torch.randn(draws, *outer, times, sources, generator=generator, dtype=torch.float32, device="cpu") * square**0.5
    )
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        allowed = torch.ones(times, sources, dtype=torch.bool, device="cpu").tril() if causal else None
        if mask is not None:
            mask = mask.detach().cpu()
            if mask.dtype == torch.bool:
                allowed = mask if allowed is None else allowed & mask
            else:
                scores = scores + mask.float()
                allowed = (mask > torch.finfo(torch.float16).min).expand_as(scores)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        energy = torch.softmax(scores, dim=-1).square().sum(-1)
        energy = energy[energy.isfinite()]
    return float(energy.double().mean()) if energy.numel() else 1.0
