"""halfstep: train neural networks in few bits; every recipe exact on any machine, measured against fp32.

The public names load what they need when they are first used, so that `import halfstep` imports no torch.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any


__version__ = "0.1.0"

if TYPE_CHECKING:
    from halfstep import (
        accounting,
        auditing,
        distributed,
        formats,
        kb,
        memory,
        nn,
        ops,
        optim,
        probe,
        quant,
        recipe,
        tracking,
        unit,
    )
    from halfstep.auditing.audit import audit
    from halfstep.errors import HalfstepError
    from halfstep.inspection import diff, inspect
    from halfstep.nn.apply import advance, apply, plan_of, revert
    from halfstep.nn.following import following
    from halfstep.nn.plan import Plan
    from halfstep.nn.product import cached_weights
    from halfstep.nn.quantized import dequantize_model, quantize_model
    from halfstep.nn.unit import UnitReport, unit_scale
    from halfstep.ops import (
        Quantized,
        decode,
        encode,
        is_native_available,
        load_quantized,
        quantize,
        round_to,
        save_quantized,
    )
    from halfstep.optim import GraphedStep, LossScaler
    from halfstep.preparation import optimize, plan, prepare
    from halfstep.probe import ProbeReport, probe_model
    from halfstep.probe.mismatch import mismatch
    from halfstep.quant import CUDAGraph, Quantizer, get_quantizer
    from halfstep.recipe import Recipe, get_recipe, list_recipes
    from halfstep.serving.export import export
    from halfstep.serving.load import from_pretrained
    from halfstep.tracking.log import track

_HOME = {
    "CUDAGraph": "halfstep.quant",
    "GraphedStep": "halfstep.optim",
    "HalfstepError": "halfstep.errors",
    "LossScaler": "halfstep.optim",
    "Plan": "halfstep.nn",
    "ProbeReport": "halfstep.probe",
    "Quantizer": "halfstep.quant",
    "Recipe": "halfstep.recipe",
    "advance": "halfstep.nn",
    "apply": "halfstep.nn",
    "audit": "halfstep.auditing",
    "cached_weights": "halfstep.nn",
    "dequantize_model": "halfstep.nn",
    "diff": "halfstep.inspection",
    "export": "halfstep.serving",
    "following": "halfstep.nn",
    "from_pretrained": "halfstep.serving",
    "get_recipe": "halfstep.recipe",
    "is_native_available": "halfstep.ops",
    "inspect": "halfstep.inspection",
    "list_recipes": "halfstep.recipe",
    "mismatch": "halfstep.probe",
    "optimize": "halfstep.preparation",
    "plan": "halfstep.preparation",
    "plan_of": "halfstep.nn",
    "prepare": "halfstep.preparation",
    "probe_model": "halfstep.probe",
    "quantize_model": "halfstep.nn",
    "revert": "halfstep.nn",
    "UnitReport": "halfstep.nn",
    "unit_scale": "halfstep.nn",
    "Quantized": "halfstep.ops",
    "decode": "halfstep.ops",
    "encode": "halfstep.ops",
    "load_quantized": "halfstep.ops",
    "quantize": "halfstep.ops",
    "get_quantizer": "halfstep.quant",
    "round_to": "halfstep.ops",
    "save_quantized": "halfstep.ops",
    "track": "halfstep.tracking",
}

_ROOMS = (
    "accounting", "auditing", "distributed", "formats", "kb", "memory", "nn", "ops", "optim", "probe", "quant",
    "recipe", "tracking", "unit",
)  # fmt: skip
"""The subpackages with public names, which are imported when they are first used as attributes."""

_DEPRECATED: dict[str, tuple[str, str]] = {}
"""By old public name: the new name, and the version that will remove the old one (CONTRIBUTING.md)."""

__all__ = [
    "CUDAGraph",
    "GraphedStep",
    "HalfstepError",
    "LossScaler",
    "Plan",
    "ProbeReport",
    "Quantized",
    "Quantizer",
    "Recipe",
    "UnitReport",
    "accounting",
    "advance",
    "apply",
    "audit",
    "cached_weights",
    "auditing",
    "decode",
    "dequantize_model",
    "diff",
    "distributed",
    "encode",
    "export",
    "following",
    "formats",
    "from_pretrained",
    "get_quantizer",
    "get_recipe",
    "is_native_available",
    "inspect",
    "kb",
    "list_recipes",
    "load_quantized",
    "memory",
    "mismatch",
    "nn",
    "ops",
    "optim",
    "optimize",
    "plan",
    "plan_of",
    "prepare",
    "probe",
    "probe_model",
    "quant",
    "quantize",
    "quantize_model",
    "recipe",
    "revert",
    "round_to",
    "save_quantized",
    "track",
    "tracking",
    "unit",
    "unit_scale",
]


def __getattr__(name: str) -> Any:
    if name in _DEPRECATED:
        new, version = _DEPRECATED[name]
        message = f"halfstep.{name} is now halfstep.{new}, and halfstep {version} will not have the old name"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        name = new
    if name in _HOME:
        # Cached: later uses find it without this function.
        globals()[name] = getattr(import_module(_HOME[name]), name)
        return globals()[name]
    if name in _ROOMS:
        return import_module(f"halfstep.{name}")
    raise AttributeError(f"module 'halfstep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
