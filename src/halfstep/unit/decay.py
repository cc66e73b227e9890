"""Weight decay that multiplies a weight by 1 - decay at every step, whatever the learning rate of that step."""

from __future__ import annotations

from typing import Any

import torch

from halfstep.errors import OptimizerError


def decouple_decay(optimizer: torch.optim.Optimizer) -> None:
    """Hold, from step to step, the decay of the groups that `parameter_groups(decay="decoupled")` made.

    torch's optimizers, and halfstep's, multiply a weight by 1 - lr * weight_decay. Before each step this sets
    weight_decay to decay_per_step / lr, with the learning rate that the scheduler has left there. Call it once, on the
    optimizer that steps: after `halfstep.prepare`, on what came back; after a copy or a pickle of the optimizer, which
    torch makes without hooks, again. A step with a learning rate of zero moves nothing, and decays nothing.

    Raises:
        OptimizerError: no group has a `decay_per_step`; or one has momentum, which spreads what SGD adds to the
            gradient over the steps that follow.

    Source: Narayan et al. 2025, arXiv 2502.05967 (fully decoupled decay).
    """
    groups = [group for group in optimizer.param_groups if "decay_per_step" in group]
    if not groups:
        raise OptimizerError(
            "no group of this optimizer has decay_per_step: make them by "
            "halfstep.unit.parameter_groups(model, ..., decay='decoupled')"
        )
    if any(group.get("momentum") and group["decay_per_step"] for group in groups):
        raise OptimizerError(
            "SGD with momentum adds decay to the gradient, and so spreads it over later steps: decay per step wants "
            "momentum=0, or AdamW, Lion"
        )
    _set(optimizer)
    optimizer.register_step_pre_hook(_set)


def _set(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        rate = float(group["lr"])
        if "decay_per_step" in group and rate:
            group["weight_decay"] = group["decay_per_step"] / rate
