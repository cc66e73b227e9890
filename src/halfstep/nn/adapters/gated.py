"""Gated MLPs of Hugging Face's models: Llama's, Mistral's, Qwen's, Gemma's, and whatever is written like them.

Their forward is down_proj(act_fn(gate_proj(x)) * up_proj(x)).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from halfstep import ops
from halfstep.nn.adapters import linear, nonlinear
from halfstep.nn.adopt import has_forward_of
from halfstep.ops import saved_traced


_PARTS = ("down_proj", "act_fn", "gate_proj", "up_proj")


def resembles(module: nn.Module) -> bool:
    """Whether the module has the parts of a gated MLP."""
    return callable(getattr(module, "act_fn", None)) and all(
        isinstance(getattr(module, part, None), nn.Linear) for part in _PARTS if part != "act_fn"
    )


def refusal(module: nn.Module) -> str | None:
    """Why none of the forwards below may stand in for its own; None where they may.

    A forward that uses other names than the four parts, or in another order, computes something else (Gemma 3n's
    sparse activations, say).
    """
    code = getattr(type(module).forward, "__code__", None)
    if "forward" in vars(module) or code is None or code.co_names != _PARTS or code.co_argcount != 2:
        return "its forward is not down_proj(act_fn(gate_proj(x)) * up_proj(x)), so it is not smoothed"
    if not has_forward_of(module.down_proj, linear.LINEAR.forward_of):
        return "its down_proj's forward is not nn.Linear's, so it is not smoothed"
    return None


def kept(stock: Any, module: Any, x: Tensor) -> Tensor:
    """The stock forward, in whose middle what autograd saves may live in few bits."""
    gate, up = module.gate_proj(x), module.up_proj(x)
    storage, around = nonlinear.kept(module, gate)
    if storage is not None:
        hidden = saved_traced.multiplied(module.act_fn(gate), up, storage)
    else:
        with around:
            hidden = module.act_fn(gate) * up
    return module.down_proj(hidden)  # type: ignore[no-any-return]


def by_channel(stock: Any, module: Any, x: Tensor) -> Tensor:
    """The stock forward with a power of two a channel before the down-projection, which divides by it once rounded."""
    hidden, scale = _smoothed(module, x, ops.smooth_channels)
    return module.down_proj(hidden, channels=scale)  # type: ignore[no-any-return]


def by_token(stock: Any, module: Any, x: Tensor) -> Tensor:
    """The stock forward with a scale a token before the down-projection, whose output is multiplied by it."""
    hidden, scale = _smoothed(module, x, ops.smooth_tokens)
    return module.down_proj(hidden, tokens=scale)  # type: ignore[no-any-return]


def _smoothed(module: Any, x: Tensor, smooth: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """What goes into the down-projection, and the scale taken out of it."""
    gate, up = module.gate_proj(x), module.up_proj(x)
    with nonlinear.kept(module, gate)[1]:
        return smooth(gate, up, module.act_fn)


FORWARDS = {"channel": by_channel, "token": by_token}
"""By the values of `Recipe.smooth_glu`."""
