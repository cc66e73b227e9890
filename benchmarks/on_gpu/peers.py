"""Other libraries' counterparts, imported by name when they are called: none needs to be installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from on_gpu.bench import Bench, Run


def found(place: str) -> Any:
    """`module:name`, imported.

    Raises:
        ImportError, AttributeError: the library is not installed, or in another version.
    """
    module, name = place.split(":")
    return getattr(import_module(module), name)


def stochastic(x: Tensor) -> Run:
    """torchao's stochastic rounding of float32 to bf16, compiled."""
    rounded = torch.compile(found("torchao.optim.quant_utils:_fp32_to_bf16_sr"), dynamic=False)
    return lambda: rounded(x)


def tensorwise(x: Tensor) -> Run:
    """torchao's cast to E4M3 with one scale per tensor from its amax, compiled."""
    cast = found("torchao.float8.float8_scaling_utils:hp_tensor_to_float8_dynamic")
    config = found("torchao.float8.float8_training_tensor:LinearMMConfig")()
    compiled = torch.compile(lambda t: cast(t, torch.float8_e4m3fn, config)._data, dynamic=False)
    return lambda: compiled(x)


def two_kernels(x: Tensor, left: str, right: str) -> Run:
    """Two of torchao's block-scaled casts of the same tensor, one for each layout."""
    place = "torchao.prototype.blockwise_fp8_training.kernels:triton_fp8_blockwise_"
    one, other = found(place + left), found(place + right)
    return lambda: (one(x), other(x))


def torchao_linear(bench: Bench, side: int, recipe: str) -> nn.Module:
    """torchao's linear layer that corresponds to our recipe, compiled."""
    if not recipe.startswith("fp8"):
        raise LookupError(f"torchao's float8 layers have no recipe like {recipe}")
    if recipe == "fp8-block":
        kind = found("torchao.prototype.blockwise_fp8_training.linear:Float8BlockwiseLinear")
        return kind(side, side, bias=False, device=bench.device, dtype=torch.bfloat16)  # type: ignore[no-any-return]
    name = "rowwise" if recipe == "fp8-rowwise" else "tensorwise"
    config = found("torchao.float8:Float8LinearConfig").from_recipe_name(name)
    holder = nn.Sequential(nn.Linear(side, side, bias=False, device=bench.device))
    found("torchao.float8:convert_to_float8_training")(holder, config=config)
    holder.compile()
    return holder


def engine_linear(bench: Bench, side: int, recipe: str) -> tuple[nn.Module, Callable[[], Any]]:
    """Transformer Engine's linear layer, and the context to run it in."""
    kinds = {
        "fp8-delayed": "DelayedScaling", "fp8-current": "Float8CurrentScaling", "fp8-block": "Float8BlockScaling",
        "mxfp8": "MXFP8BlockScaling", "nvfp4": "NVFP4BlockScaling",
    }  # fmt: skip
    if recipe not in kinds:
        raise LookupError(f"Transformer Engine has no recipe like {recipe}")
    kind = found(f"transformer_engine.common.recipe:{kinds[recipe]}")
    context = found("transformer_engine.pytorch:fp8_autocast")
    layer = found("transformer_engine.pytorch:Linear")(side, side, bias=False, device=bench.device)
    return layer, lambda: context(enabled=True, fp8_recipe=kind())
