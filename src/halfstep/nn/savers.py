"""Which modules of a model save something that a recipe keeps in few bits, and what they keep it by."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from halfstep import ops
from halfstep.nn.adapters import gated, nonlinear
from halfstep.nn.adopt import Forward, adopt
from halfstep.ops.part import own_part
from halfstep.recipe import LinearSpec, Saved


Savers = Mapping[str, Forward | None]
"""By path, the forward that keeps what a module saves in few bits; None where its own knows how."""


def find(
    model: nn.Module, saved: Saved, specs: Mapping[str, LinearSpec], smoothed: Collection[str]
) -> dict[str, Forward | None]:
    """The savers of a model of which nothing is adopted yet, whose layers follow these specs."""
    found: dict[str, Forward | None] = {}
    for path, module in model.named_modules():
        if path in specs:
            if saved.operands and specs[path].input_codes is not None:
                found[path] = None
        elif saved.nonlinear is not None and nonlinear.fits(module):
            found[path] = nonlinear.forward
        elif saved.nonlinear is not None and gated.resembles(module) and gated.refusal(module) is None:
            found[path] = None if path in smoothed else gated.kept
    return found


def adopt_savers(model: nn.Module, saved: Saved, savers: Savers) -> None:
    """Give them what they keep it by: one for all, so that two of them keep one tensor once."""
    keeping = ops.Keeping(saved)
    for path, forward in savers.items():
        module = model.get_submodule(path)
        own_part(module).keeping = keeping
        if forward is not None:
            adopt(module, forward)
