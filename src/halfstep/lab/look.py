"""The statistics of one step: exponents, zeroed shares, and how much of updates and states was lost."""

from collections.abc import Mapping
from dataclasses import asdict, astuple
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import formats
from halfstep.lab.experiment import Row
from halfstep.ops import values_of
from halfstep.optim import LowBit, Update
from halfstep.tracking import (
    Amaxes,
    Arrival,
    arrivals,
    exponents,
    share_lost,
    share_zeroed,
    vanished_states,
    zeros,
)


FORMATS = ("fp16", "bf16", "float8_e4m3fn", "float8_e5m2")
"""The formats whose losses the statistics count."""


class Look:
    """A context around one optimizer step, created between the backward and any clip; `rows` is what it recorded."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: LowBit,
        step: int,
        scale: float,
        activations: Mapping[str, list[Tensor]],
        closely: bool,
        tensors: Amaxes | None,
    ) -> None:
        """Record the step's state before its update.

        Args:
            scale: the loss scale, which the gradients contain.
            activations: the gradients of modules' outputs, by module.
            closely: whether to record a row of statistics, which costs more than one of ranges.
            tensors: what `amaxes` recorded in the passes, if it was asked to.
        """
        self._optimizer = optimizer
        self._names: dict[Any, str] = {p: name for name, p in model.named_parameters() if p.grad is not None}
        stored = {p: values_of(p.grad) for p in self._names if p.grad is not None}
        self._taken = {p: grad != 0 for p, grad in stored.items()}
        self._rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
        self._largest: dict[str, float] = {}
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._closely, self._tensors = closely, tensors
        self._updates: dict[str, float] = {}
        self._ranges: Row = {
            "kind": "ranges",
            "step": step,
            **counted(activations, {self._names[p]: grad for p, grad in stored.items()}),
        }
        self._statistics: Row = {"kind": "statistics", "step": step, "loss_scale": scale}
        if closely:
            weights, gradients = [optimizer.full(p) for p in stored], [grad.float() / scale for grad in stored.values()]
            self._statistics |= {
                "weights": exponents(weights).to_dict(),
                "gradients": exponents(stored.values()).to_dict(),
                "activation_gradients": exponents(one for found in activations.values() for one in found).to_dict(),
                "zeroed": {
                    "weights": {name: share_zeroed(weights, formats.get(name)) for name in FORMATS},
                    "gradients": {name: share_zeroed(gradients, formats.get(name)) for name in FORMATS},
                },
            }
        self._arrivals = arrivals(optimizer, self._names, self._note)

    def beside(self, zeros: Row) -> None:
        """Add what `counted` found in the same step in float32."""
        self._ranges["in_float32"] = zeros

    @property
    def rows(self) -> list[Row]:
        """The recorded rows."""
        rows = [self._statistics, self._ranges] if self._closely else [self._ranges]
        if self._tensors is None:
            return rows
        tensors = {"kind": "tensors", "step": self._ranges["step"], **asdict(self._tensors), "updates": self._updates}
        return [*rows, tensors]

    def _note(self, update: Update) -> None:
        rate = self._rates.get(update.weight, 0.0)
        if rate and update.wanted.numel():
            self._largest[self._names[update.weight]] = float(update.wanted.abs().max()) / rate
        if self._tensors is not None:
            name, _, kind = self._names[update.weight].rpartition(".")
            held = float(update.before.norm())
            self._updates[f"{kind} of {name or 'the model'}"] = float(update.wanted.norm()) / held if held else 0.0
        if self._closely:
            self._pairs.append((update.before, update.before + update.wanted))

    def __enter__(self) -> None:
        self._found = self._arrivals.__enter__()

    @torch.no_grad()
    def __exit__(self, *error: Any) -> None:
        self._arrivals.__exit__(*error)
        states = vanished_states(self._optimizer, self._taken) if self._found.layers else {}  # none in a skipped step
        self._ranges |= {
            "states": {
                self._names[p]: {name: list(astuple(found)) for name, found in kinds.items()}
                for p, kinds in states.items()
            },
            "largest": self._largest,
        }
        if self._closely:
            lost = {name: share_lost(self._pairs, formats.get(name)) for name in FORMATS}
            layers = {name: _arrived(arrival) for name, arrival in self._found.layers.items()}
            self._statistics |= {"lost": lost, "descent": {**_arrived(self._found.model), "layers": layers}}


def counted(activations: Mapping[str, list[Tensor]], gradients: Mapping[str, Tensor]) -> Row:
    """[zeros, elements] by tensor: of the gradients of activations by module, and of weights by name."""
    return {
        "activation_gradients": {name: list(astuple(zeros(found))) for name, found in activations.items()},
        "gradients": {name: list(astuple(zeros([grad]))) for name, grad in gradients.items()},
    }


def _arrived(arrival: Arrival) -> dict[str, float | None]:
    return {"quality": arrival.quality, "lost_share": arrival.lost_share}
