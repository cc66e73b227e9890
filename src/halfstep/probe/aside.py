"""What runs beside the user's own work: copies of models, and random generators that are left as they were."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from halfstep.errors import ModelError
from halfstep.ops.subclasses import check_initialized


def copied(model: nn.Module) -> nn.Module:
    """A copy of a model, without gradients.

    Raises:
        ModelError: it has no parameters, or cannot be copied.
    """
    name = type(model).__name__
    if not any(True for _ in model.parameters()):
        raise ModelError(f"{name} has no parameters; there is nothing to probe")
    check_initialized(model)
    try:
        own = copy.deepcopy(model)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ModelError(
            f"{name} cannot be copied ({error}), and a probe runs copies; give a model that can"
        ) from error
    own.zero_grad()
    return own


@contextmanager
def unchanged_generators(device: torch.device) -> Iterator[None]:
    """While active, random numbers may be drawn; afterwards the generators are where they were."""
    kept, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(kept)
        np.random.set_state(numpys)
