"""A log of a training run's numerics that can stay on: one row every so many optimizer steps."""

from __future__ import annotations

import json
import math
import statistics
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.live import Live
from rich.table import Table
from torch import Tensor, nn

from halfstep.errors import HalfstepError
from halfstep.optim import LowBit
from halfstep.optim.unscaling import unwrapped
from halfstep.tracking.step import Amaxes, Arrivals, amaxes, arrivals, zeros


Row = dict[str, Any]
Sink = Callable[[Row], None]
_SPIKE = 2.0
"""A loss above this many times the median since the last row is a spike."""


def track(
    model: nn.Module,
    optimizer: Any,
    every: int = 100,
    to: str | Path | Any | Iterable[Any] = "numerics.jsonl",
    scaler: Any = None,
) -> Log:
    """Write a row of numerics every `every` optimizer steps; the steps between only increase a counter.

        log = halfstep.track(model, optimizer, every=100, to=["numerics.jsonl", SummaryWriter()], scaler=scaler)
        ...
        log.note(loss)   # optional: spikes of the loss
        log.remove()     # or: with halfstep.track(...) as log:

    A row describes one step: the amaxes of each layer's input, weight and gradient; for tensors that the recipe rounds,
    the shares that saturate and that become zero; the share of gradients that are zero, and the first non-finite one;
    the first non-finite tensor in the order of execution; for a `prepare`d optimizer the share of lost updates, and the
    descent quality (`Arrival.quality`); the loss scale; how many steps a halfstep scaler skipped since the last row;
    and losses above twice the median since then. Passes of steps that were skipped right before it are included, but
    not counted as steps.

    Args:
        model: the model that trains, with a `prepare`d optimizer or a stock one; a wrapper (DDP) works too.
        optimizer: the optimizer whose steps count; accelerate's and Lightning's wrappers work too.
        every: the number of steps between rows.
        to: one or several destinations of rows: a path (JSON lines), a function of a row, an object with `add_scalar`
            (TensorBoard's SummaryWriter), or "live", a table in the terminal.
        scaler: a loss scaler whose scale is written into the rows.

    Raises:
        HalfstepError: `every` is not an integer above 0; `to` is none of these; the optimizer steps none of the model's
            parameters.
    """
    return Log(model, optimizer, every, to, scaler)


class Log:
    """The result of `track`: `rows` so far, `note` for losses, `remove` to stop. A context manager."""

    def __init__(self, model: nn.Module, optimizer: Any, every: int, to: Any, scaler: Any) -> None:
        if type(every) is not int or every < 1:
            raise HalfstepError(f"every = {every!r}; expected a number of optimizer steps from 1 on, such as 100")
        if not isinstance(model, nn.Module):
            raise HalfstepError(f"model is a {type(model).__name__}; expected track(model, optimizer)")
        self._sinks: list[Sink] = [_sink(one) for one in (to if isinstance(to, (list, tuple)) else [to])]
        self.rows: list[Row] = []
        self._model, self._scaler, self._every = weakref.ref(model), scaler, every
        self._optimizer = unwrapped(optimizer)
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        if not any(parameter in self._names for group in self._optimizer.param_groups for parameter in group["params"]):
            raise HalfstepError(
                f"this {type(self._optimizer).__name__} steps no parameter of this {type(model).__name__}; track "
                "the model that it was built on, after whatever replaces parameters (fully_shard, to_empty)"
            )
        self._step, self._skipped, self._losses = 0, self._skips() or 0, list[Tensor]()
        self._looks, self._hooks = ExitStack(), ExitStack()
        self._amaxes, self._arrivals = Amaxes(), Arrivals()
        self._gradients: Row = {}
        disable: Any = torch.compiler.disable
        self._hooks.enter_context(self._optimizer.register_step_pre_hook(disable(self._before)))
        self._hooks.enter_context(self._optimizer.register_step_post_hook(disable(self._after)))
        self._look_at_next()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove every hook."""
        self._looks.close()
        self._hooks.close()

    def note(self, loss: Tensor | float) -> None:
        """Record a loss; it is not read from its device before the next row."""
        self._losses.append(
            loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float32, device="cpu")
        )

    def _due(self) -> bool:
        return (self._step + 1) % self._every == 0 or self._step == 0

    def _look_at_next(self) -> None:
        """Hook the next step's forward and backward pass, if a row is due."""
        model = self._model()
        if model is not None and self._due():
            self._amaxes = self._looks.enter_context(amaxes(model))

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._due():
            return
        found = {name: p.grad for p, name in self._names.items() if p.grad is not None}
        empty = zeros(found.values())
        broken = next((name for name, grad in found.items() if not bool(grad.isfinite().all())), None)
        self._gradients = {"zero": empty.zeros / empty.of if empty.of else None, "first_nonfinite": broken}
        if isinstance(optimizer, LowBit):
            self._arrivals = self._looks.enter_context(arrivals(optimizer, self._names))

    def _after(self, *_: Any) -> None:
        if self._due():
            self._looks.close()
            row = self._row()
            self.rows.append(row)
            for sink in self._sinks:
                sink(row)
            self._losses.clear()
        self._step += 1
        self._look_at_next()

    def _skips(self) -> int | None:
        """The number of steps that the scaler has skipped; None if it does not count them."""
        return getattr(self._scaler, "skipped_steps", None)

    def _row(self) -> Row:
        whole, before, skips = self._arrivals.model, self._skipped, self._skips()
        self._skipped = skips or 0
        amaxes = dict(self._amaxes.amaxes)
        broken = [name for name, amax in amaxes.items() if not math.isfinite(amax)]
        if (gradient := self._gradients["first_nonfinite"]) is not None:
            broken.append(f"gradient of {gradient}")
        row: Row = {
            "step": self._step + 1,
            "loss_scale": None if self._scaler is None else float(self._scaler.get_scale()),
            "skipped": None if skips is None else skips - before,
            "first_nonfinite": next(iter(broken), None),
            "amax": amaxes,
            "saturated": _some(self._amaxes.saturated),
            "underflowed": _some(self._amaxes.underflowed),
            "gradients": self._gradients,
            "lost_updates": whole.lost_share,
            "arrived": whole.quality,
            "lost_by_parameter": {n: a.lost_share for n, a in self._arrivals.layers.items() if a.lost},
            "spikes": self._spikes(),
        }
        if not self._amaxes.amaxes:
            row["unseen"] = "no layer's forward ran through its hooks, as under torch.compile: no amax, no share"
        self._arrivals = Arrivals()
        return row

    def _spikes(self) -> list[float]:
        losses = [float(loss) for loss in self._losses]
        usual = statistics.median_low(list(filter(math.isfinite, losses)) or [math.inf])
        return [loss for loss in losses if loss > _SPIKE * usual or not math.isfinite(loss)]


def _some(shares: Mapping[str, float]) -> dict[str, float]:
    """The shares that are not 0."""
    return {name: share for name, share in shares.items() if share}


# ---- where rows go --------------------------------------------------------------------------------------------------


def _sink(to: Any) -> Sink:
    if to == "live":
        return _Live()
    if isinstance(to, (str, Path)):
        path = Path(to).expanduser()
        if not path.parent.is_dir():
            raise HalfstepError(f"to = {str(to)!r}: there is no folder {path.parent}; make it, or name another place")
        return lambda row: _append(path, row)
    if hasattr(to, "add_scalar"):
        return lambda row: _scalars(to, row)
    if callable(to):
        return to  # type: ignore[no-any-return]
    raise HalfstepError(
        f"to = {to!r}: expected a path for JSON lines, a function of a row, what has add_scalar (TensorBoard's "
        "SummaryWriter), or 'live'"
    )


def _append(path: Path, row: Row) -> None:
    with path.open("a") as file:
        file.write(json.dumps(_plain(row)) + "\n")


def _plain(value: Any) -> Any:
    """A value for JSON: infinities and NaN become their names."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def scalars(row: Row) -> dict[str, float]:
    """The scalars of a row for a plot: of amaxes and shares the largest over all layers."""
    of_layers = {
        f"{name}/{kind}": max((amax for key, amax in row[name].items() if key.startswith(f"{kind} of ")), default=None)
        for name in ("amax", "saturated", "underflowed")
        for kind in ("input", "weight", "grad_output")
    }
    found = {
        **{name: row[name] for name in ("loss_scale", "skipped", "lost_updates", "arrived")},
        **of_layers,
        "gradients/zero": row["gradients"].get("zero"),
        "nonfinite": float(row["first_nonfinite"] is not None),
        "spikes": float(len(row["spikes"])),
    }
    return {name: value for name, value in found.items() if value is not None}


def _scalars(writer: Any, row: Row) -> None:
    for name, value in scalars(row).items():
        writer.add_scalar(f"numerics/{name}", value, row["step"])


class _Live:
    """A table in the terminal, overwritten by each row."""

    def __init__(self) -> None:
        self._live = Live(auto_refresh=False)

    def __call__(self, row: Row) -> None:
        table = Table("numerics", f"step {row['step']}", box=None)
        for name, value in scalars(row).items():
            table.add_row(name, f"{value:.4g}")
        if (broken := row["first_nonfinite"]) is not None:
            table.add_row("first that is not finite", broken)
        if not self._live.is_started:
            self._live.start()
        self._live.update(table, refresh=True)
