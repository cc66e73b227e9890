"""Forwards of modules that compute in a wider dtype than torch would: in float32, or in their input's dtype.

`forward`: modules that a recipe lists in `float32_modules`, beyond autocast's own lists, compute in float32.
`FORWARDS`: modules with 16-bit weights whose input is wider. A float32 buffer in a model (a positional encoding) widens
activations, and so does a float32 model input; torch's CPU kernels refuse a float32 input with 16-bit weights, its CUDA
kernels differ, and autocast casts the operands of matmuls alone. Here the weights, which are small, are widened and the
layer computes in the input's precision. Power iterations and matrix exponentials (spectral norms, orthogonal weights)
always run in float32.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.overrides import TorchFunctionMode

from halfstep.nn.adopt import Shown, extend, twin
from halfstep.nn.paths import matches


_STRICT: frozenset[Callable[..., Any]] = frozenset(
    {
        F.layer_norm, F.group_norm, F.batch_norm, F.instance_norm, F.rms_norm, F.bilinear,
        torch.layer_norm, torch.group_norm, torch.batch_norm, torch.instance_norm, torch.rms_norm, torch.bilinear,
        torch.mv, torch.dot, torch.vdot, torch.inner, torch.addmv, torch.lerp, torch.tensordot,
        Tensor.mv, Tensor.dot, Tensor.vdot, Tensor.inner, Tensor.addmv, Tensor.lerp,
    }
)  # fmt: skip


def find(model: nn.Module, globs: Sequence[str]) -> dict[str, nn.Module]:
    """The modules, by path, whose path or class name (`*RMSNorm` for `LlamaRMSNorm`) a glob matches."""
    if not globs:
        return {}
    return {
        path: module
        for path, module in model.named_modules()
        if path and any(fnmatchcase(type(module).__name__, glob) or matches(path, glob) for glob in globs)
    }


def forward(stock: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """The stock forward on inputs cast to float32, without autocast; its output stays float32."""
    device = next((a.device.type for a in args if isinstance(a, Tensor)), "cpu")
    with torch.autocast(device, enabled=False):
        return stock(module, *map(_widened, args), **{name: _widened(value) for name, value in kwargs.items()})


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _norm(stock: Any, module: Any, input: Tensor, *more: Tensor) -> Tensor:
    """The stock forward if inputs and weights share a dtype; else the module computes in the wider of the two."""
    weight, bias = module.weight, getattr(module, "bias", None)
    if weight is None or all(x.dtype == weight.dtype for x in (input, *more)):
        return stock(module, input, *more)  # type: ignore[no-any-return]
    running = getattr(module, "track_running_stats", False)
    if running:  # its weights are float32, and the stock forward updates its buffers
        return stock(module, input)  # type: ignore[no-any-return]
    dtype = torch.promote_types(input.dtype, weight.dtype)
    wide = {"weight": weight.to(dtype), "bias": None if bias is None else bias.to(dtype)}
    kind = next(kind for kind in type(module).__mro__ if kind in FORWARDS)
    return kind.forward(twin(module, kind, _parameters=wide), *(x.to(dtype) for x in (input, *more)))  # type: ignore[no-any-return]


def _bag(
    stock: Any, module: Any, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
) -> Tensor:
    """The stock forward; if the samples' weights are wider than the table, the rows that are looked up (not the table)
    are widened and summed in that dtype."""
    table = module.weight
    if per_sample_weights is None or per_sample_weights.dtype == table.dtype or module.mode != "sum":
        return stock(module, input, offsets, per_sample_weights)  # type: ignore[no-any-return]
    dtype = torch.promote_types(per_sample_weights.dtype, table.dtype)
    options = (module.padding_idx, module.max_norm, module.norm_type, module.scale_grad_by_freq, module.sparse)
    rows = F.embedding(input.reshape(-1), table, *options).to(dtype)
    weights = per_sample_weights.to(dtype)
    if module.padding_idx is not None:
        weights = weights.masked_fill(input == module.padding_idx, 0.0)
    places = torch.arange(input.numel(), device=input.device, dtype=torch.int64).view(input.shape)
    last = module.include_last_offset
    offsets = offsets if offsets is None else offsets.to(places.dtype)
    return F.embedding_bag(places, rows, offsets, mode="sum", per_sample_weights=weights, include_last_offset=last)


def _spectral(stock: Any, module: Any, weight: Tensor) -> Tensor:
    """The stock forward of a parametrization in float32, with its result cast to the weight's dtype."""
    with torch.autocast(weight.device.type, enabled=False):
        return stock(module, weight.float()).to(weight.dtype)  # type: ignore[no-any-return]


FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    **dict.fromkeys(
        (
            nn.LayerNorm,
            nn.GroupNorm,
            nn.RMSNorm,
            nn.InstanceNorm1d,
            nn.InstanceNorm2d,
            nn.InstanceNorm3d,
            nn.BatchNorm1d,
            nn.BatchNorm2d,
            nn.BatchNorm3d,
            nn.Bilinear,
        ),
        _norm,
    ),
    **dict.fromkeys((parametrizations._SpectralNorm, parametrizations._Orthogonal), _spectral),
    nn.EmbeddingBag: _bag,
}
"""The forwards, by the torch class whose forward they replace."""


def widen_hooked(module: nn.Module) -> None:
    """Make the hook of the older `torch.nn.utils.spectral_norm`, if the module has one, read its weight in float32."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            extend(module, Shown(f"{hook.name}_orig", _in_float32))


def _in_float32(module: Any, name: str) -> Tensor:
    return module._parameters[name].float()  # type: ignore[no-any-return]


def has_own_code(module: nn.Module) -> bool:
    """Whether the module has parameters of its own and a forward that is not torch's."""
    own = any(parameter is not None for parameter in module._parameters.values())
    return own and not f"{type(module).forward.__module__}.".startswith("torch.")


def own_code(stock: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """The stock forward; if an argument or a buffer is float32, the functions in `_STRICT` cast their operands to the
    widest dtype among them."""
    beside = (*args, *kwargs.values(), *module._buffers.values())
    if any(_is_floating(x) and x.dtype not in (torch.bfloat16, torch.float16) for x in beside):
        with _Widening():
            return stock(module, *args, **kwargs)
    return stock(module, *args, **kwargs)


class _Widening(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _STRICT:
            floating = [x.dtype for x in (*args, *kwargs.values()) if _is_floating(x)]
            if len(set(floating)) > 1:
                widest = reduce(torch.promote_types, floating)
                args = [x.to(widest) if _is_floating(x) else x for x in args]
                kwargs = {name: x.to(widest) if _is_floating(x) else x for name, x in kwargs.items()}
        return function(*args, **kwargs)


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
