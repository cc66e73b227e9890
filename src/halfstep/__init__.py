"""halfstep: train neural networks in few bits; every recipe exact on any machine, measured against fp32.

The public names load what they need when they are first used, so that `import halfstep` imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any


__version__ = "0.1.0"

if TYPE_CHECKING:
    from halfstep import formats, kb, ops
    from halfstep.errors import HalfstepError
    from halfstep.nn.apply import Report, advance, apply, revert
    from halfstep.optim import LossScaler
    from halfstep.prepare import prepare
    from halfstep.quant import Quantizer, round_to
    from halfstep.recipe import Recipe, get_recipe, list_recipes

_HOME = {
    "HalfstepError": "halfstep.errors",
    "LossScaler": "halfstep.optim",
    "Quantizer": "halfstep.quant",
    "Recipe": "halfstep.recipe",
    "Report": "halfstep.nn",
    "advance": "halfstep.nn",
    "apply": "halfstep.nn",
    "get_recipe": "halfstep.recipe",
    "list_recipes": "halfstep.recipe",
    "prepare": "halfstep.prepare",
    "revert": "halfstep.nn",
    "round_to": "halfstep.quant",
}

__all__ = [
    "HalfstepError",
    "LossScaler",
    "Quantizer",
    "Recipe",
    "Report",
    "advance",
    "apply",
    "formats",
    "get_recipe",
    "kb",
    "list_recipes",
    "ops",
    "prepare",
    "revert",
    "round_to",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        # Kept, so that `halfstep.prepare` is the function and not the module of that name, which importing it binds.
        globals()[name] = getattr(import_module(_HOME[name]), name)
        return globals()[name]
    if name in ("formats", "kb", "ops"):
        return import_module(f"halfstep.{name}")
    raise AttributeError(f"module 'halfstep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
