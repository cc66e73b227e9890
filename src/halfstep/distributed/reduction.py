"""How a model's gradients are reduced: what is sent, what is remembered from step to step, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.distributed.collectives import Exchange
from halfstep.distributed.mean import Steps, mean_steps
from halfstep.distributed.message import gather, spread
from halfstep.errors import ModelError, RecipeError
from halfstep.recipe import FP8, Communication, get_storage


class Reduction:
    """The state of `fp8_hook`, and of `reduce_gradients`.

        state = halfstep.distributed.Reduction(FP8)
        ddp.register_comm_hook(state, halfstep.distributed.fp8_hook)

    `halfstep.distributed.compress(ddp)` makes it as the model's recipe says, and has it saved with the scaler.

    Args:
        communication: what is sent; `recipe.FP8` by default. None: gradients in their own dtype.
        process_group: the ranks whose gradients are averaged: DDP's own.
        names: of the parameters, by which what is remembered is saved. Parameters without one cannot be saved.
        scale: gives the loss scale by which gradients are multiplied when they come, for error feedback.

    Attributes:
        exchange: the collectives, which count what they send.
        times: how often gradients were reduced.
    """

    def __init__(
        self,
        communication: Communication | None = FP8,
        process_group: Any = None,
        names: Mapping[Any, str] | None = None,
        scale: Callable[[], float] | None = None,
    ) -> None:
        self.communication, self.exchange = communication, Exchange(process_group)
        self.times = 0
        self.divides_by_all: Callable[[], bool] = lambda: True
        self._names, self._scale = names or {}, scale
        self._residuals: dict[Any, Tensor] = {}
        self._saved: Mapping[str, Tensor] = {}
        self._under_way: deque[tuple[Steps, Any, Callable[[], None]]] = deque()

    def begin(self, values: Tensor, parameters: Sequence[Tensor], done: Callable[[], None]) -> None:
        """Begin to replace gradients of these parameters, laid out one after the other, by their mean over the ranks;
        those that are under way go a step further. `done` is called when it is there.

        Raises:
            ModelError: another rank has failed.
        """
        steps = self._steps(values, parameters)
        waiting, self._under_way = self._under_way, deque([(steps, next(steps), done)])
        while waiting:
            self._go_on(waiting.popleft(), self._under_way.appendleft)

    def finish(self) -> None:
        """Wait for all that are under way."""
        while self._under_way:
            self._go_on(self._under_way.popleft(), self._under_way.appendleft)
        self.times += 1

    def check_begin(self) -> None:
        """Refuse what a new backward pass cannot begin with.

        Raises:
            ModelError: the last one ended before its last gradients were sent; DDP's `join` is to divide by the number
                of ranks that have batches left.
        """
        if not self.divides_by_all():
            raise ModelError(
                "ddp.join(divide_by_initial_world_size=False) divides by the ranks that have batches left, which a "
                "communication hook is not told; leave it True, and gradients in few bits are the mean over all ranks"
            )
        if self._under_way:
            self._under_way.clear()
            raise ModelError(
                "a backward pass begins, and the last one stopped between two buckets: other ranks may wait for the "
                "rest. Restart from the last checkpoint"
            )

    def _go_on(self, one: tuple[Steps, Any, Callable[[], None]], again: Callable[[Any], None]) -> None:
        steps, pending, done = one
        pending.wait()
        pending = next(steps, None)
        if pending is None:
            done()
        else:
            again((steps, pending, done))

    def _steps(self, values: Tensor, parameters: Sequence[Tensor]) -> Steps:
        communication, lengths = self.communication, [parameter.numel() for parameter in parameters]
        given = communication.gradients if communication is not None else None
        storage = given or get_storage(_FORMATS[values.dtype])
        feeds_back = communication is not None and communication.feeds_back
        rows, residual = self.exchange.ranks if feeds_back else 1, None
        laid = spread(values, lengths, storage, rows)
        if feeds_back:
            scale = 1.0 if self._scale is None else self._scale()
            own = [self._residual(parameter) for parameter in parameters]
            taken = torch.cat(own).mul_(scale)  # kept without the loss scale
            residual = spread(taken, lengths, storage, rows)
        yield from mean_steps(laid, storage, self.exchange, residual)
        gather(laid, lengths, storage, values, rows)
        if residual is not None:
            gather(residual, lengths, storage, taken, rows)
            for mine, each in zip(own, taken.div_(scale).split(lengths), strict=True):
                mine.copy_(each)

    def _residual(self, parameter: Tensor) -> Tensor:
        if parameter not in self._residuals:
            zeros = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            saved = self._saved.get(self._names.get(parameter, ""))
            self._residuals[parameter] = zeros if saved is None else zeros.copy_(saved)
        return self._residuals[parameter]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # ranks do not multiply: a copy of a model is reduced by what is called for it

    def state_dict(self) -> dict[str, Any]:
        """What this rank remembers from step to step: nothing without error feedback. Each rank has its own.

        Raises:
            RecipeError: a parameter has no name.
        """
        if not self._residuals:
            return {}
        if not self._residuals.keys() <= self._names.keys():
            raise RecipeError(
                "what error feedback keeps is saved by the parameters' names, and this Reduction was given none: "
                "Reduction(..., names={p: n for n, p in model.named_parameters()})"
            )
        residuals = {self._names[parameter]: each.clone() for parameter, each in self._residuals.items()}
        return {"rank": self.exchange.rank, "ranks": self.exchange.ranks, "residuals": residuals}

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Load it; what cannot be used, to be told.

        A state of another rank, or of another number of ranks, is not this rank's: residuals then begin at zero.
        """
        self._residuals, self._saved = {}, {}
        if not saved:
            return []
        found = saved["rank"], saved["ranks"]
        if found == (self.exchange.rank, self.exchange.ranks):
            self._saved = saved["residuals"]
            return []
        return [
            f"the rounding errors that error feedback keeps are rank {found[0]}'s of {found[1]}, and this is rank "
            f"{self.exchange.rank} of {self.exchange.ranks}: they start over (save the scaler's state on each rank)"
        ]


_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
