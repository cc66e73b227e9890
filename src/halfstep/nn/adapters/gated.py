"""Gated MLPs of Hugging Face's models (Llama, Mistral, Qwen, Gemma, and others written alike): forwards and smoothing.

Their forward is down_proj(act_fn(gate_proj(x)) * up_proj(x)). For inference, Smooth-SwiGLU's scales are measured on a
model and merged into its weights.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import ops
from halfstep.errors import ModelError
from halfstep.nn.adapters import linear, nonlinear
from halfstep.nn.adopt import has_forward_of
from halfstep.ops import saved_traced


_PARTS = ("down_proj", "act_fn", "gate_proj", "up_proj")


def resembles(module: nn.Module) -> bool:
    """Whether the module has the submodules of a gated MLP."""
    return callable(getattr(module, "act_fn", None)) and all(
        isinstance(getattr(module, part, None), nn.Linear) for part in _PARTS if part != "act_fn"
    )


def refusal(module: nn.Module) -> str | None:
    """Why the forwards below must not replace the module's own; None if they may.

    A forward whose code uses other names than the four submodules, or in another order, computes something else (such
    as Gemma 3n's sparse activations).
    """
    code = getattr(type(module).forward, "__code__", None)
    if "forward" in vars(module) or code is None or code.co_names != _PARTS or code.co_argcount != 2:
        return "its forward is not down_proj(act_fn(gate_proj(x)) * up_proj(x)), so it is not smoothed"
    if not has_forward_of(module.down_proj, linear.LINEAR.forward_of):
        return "its down_proj's forward is not nn.Linear's, so it is not smoothed"
    return None


def kept(stock: Any, module: Any, x: Tensor) -> Tensor:
    """The stock forward, where tensors saved by the activation and the product may be stored in few bits."""
    gate, up = module.gate_proj(x), module.up_proj(x)
    storage, around = nonlinear.kept(module, gate)
    if storage is not None:
        hidden = saved_traced.multiplied(module.act_fn(gate), up, storage)
    else:
        with around:
            hidden = module.act_fn(gate) * up
    return module.down_proj(hidden)  # type: ignore[no-any-return]


def by_channel(stock: Any, module: Any, x: Tensor) -> Tensor:
    """The stock forward with the down-projection's input multiplied by a power of two a channel; the down-projection
    divides its rounded input by it."""
    hidden, scale = _smoothed(module, x, ops.smooth_channels)
    return module.down_proj(hidden, channels=scale)  # type: ignore[no-any-return]


def by_token(stock: Any, module: Any, x: Tensor) -> Tensor:
    """The stock forward with the down-projection's input divided by a scale a token; its output is multiplied by it."""
    hidden, scale = _smoothed(module, x, ops.smooth_tokens)
    return module.down_proj(hidden, tokens=scale)  # type: ignore[no-any-return]


def _smoothed(module: Any, x: Tensor, smooth: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The scaled input of the down-projection, and the scale."""
    gate, up = module.gate_proj(x), module.up_proj(x)
    with nonlinear.kept(module, gate)[1]:
        return smooth(gate, up, module.act_fn)


FORWARDS = {"channel": by_channel, "token": by_token}
"""The forwards by the value of `Recipe.smooth_glu`."""


def measure_smooth_scales(model: nn.Module, run: Callable[[], object]) -> dict[str, Tensor]:
    """The scales (channels) of every gated MLP, by module path, measured on the tokens that `run()` feeds the model.

    If `run` calls the model several times, a channel's scale is the smallest one, so that nothing exceeds 1.

    Raises:
        ModelError: the model has no gated MLPs, or `run` calls none of them.
    """
    found: dict[str, Tensor] = {}
    handles = [
        module.up_proj.register_forward_hook(_keep(found, path))
        for path, module in model.named_modules()
        if resembles(module)
    ]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        raise ModelError(
            f"{type(model).__name__}: {len(handles)} gated MLPs (gate_proj, up_proj, down_proj, act_fn), and none was "
            "called; expected at least one"
        )
    return found


def _keep(found: dict[str, Tensor], path: str) -> Callable[[nn.Module, object, Tensor], None]:
    def hook(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        scale = ops.channel_scale(output)
        found[path] = torch.minimum(found[path], scale) if path in found else scale

    return hook


@torch.no_grad()
def merge_smooth_scales(model: nn.Module, scales: Mapping[str, Tensor]) -> None:
    """Merge Smooth-SwiGLU's scales into the weights of each gated MLP, in place: up_proj * s and down_proj / s.

    Powers of two change no bit of a mantissa, so the model's outputs are equal bit for bit, as long as nothing leaves
    the range of its dtype; biases of up_proj are scaled too.

    Raises:
        ModelError: a path that is not a gated MLP; scales of another shape, or that are not powers of two; a weight
            that the merge would move out of its dtype's range. Nothing was changed.
    """
    merged: list[tuple[Tensor, Tensor]] = []
    for path, scale in scales.items():
        module = dict(model.named_modules()).get(path)
        if module is None or not resembles(module):
            raise ModelError(
                f"{type(model).__name__}: {path!r} is not a gated MLP (gate_proj, up_proj, down_proj, act_fn)"
            )
        up, down = module.up_proj, module.down_proj
        if scale.shape != (up.out_features,):
            raise ModelError(f"{path}: scales of shape {tuple(scale.shape)}; expected ({up.out_features},)")
        if not bool(((scale > 0) & scale.isfinite() & (torch.frexp(scale)[0] == 0.5)).all()):
            raise ModelError(f"{path}: scales that are not powers of two do not merge exactly; see ops.channel_scale")
        merged.append(_scaled(f"{path}.up_proj.weight", up.weight, scale[:, None]))
        if up.bias is not None:
            merged.append(_scaled(f"{path}.up_proj.bias", up.bias, scale))
        merged.append(_scaled(f"{path}.down_proj.weight", down.weight, scale.reciprocal()))
    for parameter, value in merged:
        parameter.copy_(value)


def _scaled(name: str, parameter: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    factor = scale.to(parameter)
    value = parameter * factor
    if not torch.equal(value / factor, parameter):
        raise ModelError(
            f"{name}: some weights times their scale leave the range of {parameter.dtype}; merge in float32"
        )
    return parameter, value
