"""Modules that are one operation: layers, norms and activation functions of any library.

torch's own are known by their class. Others, Hugging Face's hand-written norms and activations, are called on numbers,
and are what they compute; a name proves nothing.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from halfstep.nn.adapters import convolution, linear
from halfstep.nn.adopt import twin
from halfstep.nn.attention import DotProductAttention
from halfstep.nn.layers import kind_of
from halfstep.unit.activations import IN_PLACE, value


PRODUCTS = linear.LINEAR, linear.CONV1D, convolution.CONVOLUTION
NORMS: dict[type[nn.Module], str] = {
    nn.LayerNorm: "layer_norm", nn.RMSNorm: "rms_norm", nn.GroupNorm: "group_norm", nn.BatchNorm1d: "batch_norm",
    nn.BatchNorm2d: "batch_norm", nn.BatchNorm3d: "batch_norm",
}  # fmt: skip
_SILENT = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.Identity, nn.Sequential, nn.ModuleList,
    nn.ModuleDict, nn.Flatten, nn.Unflatten,
)  # fmt: skip


@dataclass(frozen=True)
class Leaf:
    """A module that is one operation."""

    kind: str
    """`product`, `embedding`, `norm`, `elementwise` or `attention`."""
    name: str
    """Which: of norms `layer_norm`, `rms_norm`, `group_norm` or `batch_norm`."""
    eps: float = 0.0
    """Of a norm that is written by hand."""
    activation: str = ""
    """Which of `unit.activations.IN_PLACE` it computes, where it is one of them."""


def leaf_of(module: nn.Module) -> Leaf | None:
    """Which one operation the module is; None where it is more, or something else."""
    stock = "forward" not in vars(module)
    kind = kind_of(module)
    if kind is not None and kind in PRODUCTS:
        return Leaf("product", kind.name)
    if isinstance(module, nn.Embedding):
        plain = stock and type(module).forward is nn.Embedding.forward and module.max_norm is None
        return Leaf("embedding", "embedding") if plain else None
    if isinstance(module, DotProductAttention):
        return Leaf("attention", "scaled_dot_product_attention")
    for norm, name in NORMS.items():
        if isinstance(module, norm):
            return Leaf("norm", name) if stock and type(module).forward is norm.forward else None
    if isinstance(module, _SILENT) or next(module.children(), None) is not None:
        return None
    return _measured_norm(module) or _measured_elementwise(module)


def _measured_norm(module: nn.Module) -> Leaf | None:
    """A norm over the last dimension, by what it computes with random weights and inputs."""
    parameters = {name: p for name, p in module.named_parameters() if p is not None}
    if parameters.keys() not in ({"weight"}, {"weight", "bias"}) or any(p.dim() != 1 for p in parameters.values()):
        return None
    size, generator = parameters["weight"].numel(), torch.Generator().manual_seed(0)
    draw = {name: torch.randn(size, generator=generator, dtype=torch.float32, device="cpu") for name in parameters}
    small = torch.randn(3, 5, size, generator=generator, dtype=torch.float32, device="cpu")
    inputs = small * 3 + 1, small * 1e-3
    norms: dict[str, Any] = {"layer_norm": partial(F.layer_norm, bias=draw.get("bias"))}
    norms |= {} if "bias" in draw else {"rms_norm": F.rms_norm}
    for eps in {v for v in vars(module).values() if isinstance(v, float) and 0 < v < 0.1}:
        for name, norm in norms.items():
            expected = [norm(x, (size,), weight=draw["weight"], eps=eps) for x in inputs]
            if _computes(module, draw, inputs, expected):
                return Leaf("norm", name, eps)
    return None


def _computes(module: nn.Module, weights: dict[str, Tensor], inputs: Any, expected: Any) -> bool:
    found = [_called(module, weights, x) for x in inputs]
    return all(
        isinstance(y, Tensor) and y.shape == z.shape and torch.allclose(y.float(), z, rtol=1e-4, atol=1e-5)
        for y, z in zip(found, expected, strict=True)
    )


def _measured_elementwise(module: nn.Module) -> Leaf | None:
    """A function of each element alone, by what it does to the same elements in another order and shape."""
    if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
        return None
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    order = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(1), dtype=torch.int64, device="cpu")
    first, again, other = (_called(module, {}, each) for each in (x, x, x.flatten()[order].view(4, 3, 8)))
    if not all(isinstance(y, Tensor) and y.is_floating_point() for y in (first, again, other)):
        return None
    if first.shape != x.shape or other.shape != (4, 3, 8) or torch.equal(first, x) or not torch.equal(first, again):
        return None
    if not _same(first.flatten()[order], other.flatten()):
        return None
    return Leaf("elementwise", type(module).__name__, activation=_activation(module))


def _activation(module: nn.Module) -> str:
    """Which of `IN_PLACE` an elementwise module computes, far beyond the usual inputs too; of one that writes to
    its input, which other code may use further, none."""
    x = torch.linspace(-100, 100, 2**12, dtype=torch.float32, device="cpu")
    y = _called(module, {}, x)
    known = (name for name in IN_PLACE if isinstance(y, Tensor) and _same(y, value(x, name)))
    return "" if getattr(module, "inplace", False) else next(known, "")


def _same(x: Tensor, y: Tensor) -> bool:
    return torch.allclose(x, y, rtol=1e-5, atol=1e-6)


def _called(module: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Any:
    """What the module makes of numbers, without its hooks, its weights or anybody's random state."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.autocast("cpu", enabled=False):
        try:
            return functional_call(_without_hooks(module), weights, (x.clone(),))
        except Exception:  # whatever it is, it is no function of one tensor
            return None


def _without_hooks(module: nn.Module) -> nn.Module:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    others: dict[str, Any] = {**{name: {} for name in hooks}, "_parameters": dict(module._parameters)}
    return twin(module, type(module), **others)


def measured(function: Any, size: float) -> tuple[float, float, float]:
    """Of a function f of one number z of N(0, size^2): its standard deviation, the root mean square of its slope
    and its mean square, by a sum over 2^14 quantiles in float64."""
    count = 2**14
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        levels = (torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) / count
        z = (torch.erfinv(2 * levels - 1) * math.sqrt(2) * size).float().requires_grad_()
        y = function(z.clone())
        (slope,) = torch.autograd.grad(y.sum(), z)
    y = y.detach().double()
    mean, square = y.mean(), y.square().mean()
    deviation = math.sqrt(max(float(square - mean.square()), 0.0))
    return deviation, float(slope.double().square().mean().sqrt()), float(square)
