"""Smooth-SwiGLU's scales for inference: measured on a model, and merged into its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from halfstep.errors import ModelError
from halfstep.nn.adapters import gated
from halfstep.ops import channel_scale


def measure_smooth_scales(model: nn.Module, run: Callable[[], object]) -> dict[str, Tensor]:
    """The scale of every channel of every gated MLP, by module path, from the tokens that `run()` sends through.

    Where `run` calls the model several times, a channel's scale is the smallest of them: nothing exceeds 1.

    Raises:
        ModelError: the model has no gated MLPs, or `run` calls none of them.
    """
    found: dict[str, Tensor] = {}
    handles = [
        module.up_proj.register_forward_hook(_keep(found, path))
        for path, module in model.named_modules()
        if gated.resembles(module)
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
        scale = channel_scale(output)
        found[path] = torch.minimum(found[path], scale) if path in found else scale

    return hook


@torch.no_grad()
def merge_smooth_scales(model: nn.Module, scales: Mapping[str, Tensor]) -> None:
    """w1 <- s w1 and w3 <- w3 / s in place, by gated MLP: the scaled network, at no cost when it runs.

    Powers of two move no bit of a weight, so the model computes what it did, bit for bit, as long as nothing leaves
    the range of its dtype; the biases of the linear branch are scaled along.

    Raises:
        ModelError: a path that is not a gated MLP; scales of another shape, or that are not powers of two; a weight
            that the merge would push out of its dtype's range. Nothing was changed.
    """
    merged: list[tuple[Tensor, Tensor]] = []
    for path, scale in scales.items():
        module = dict(model.named_modules()).get(path)
        if module is None or not gated.resembles(module):
            raise ModelError(
                f"{type(model).__name__}: {path!r} is not a gated MLP (gate_proj, up_proj, down_proj, act_fn)"
            )
        up: nn.Linear = module.up_proj
        down: nn.Linear = module.down_proj
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
