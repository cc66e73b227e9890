"""What runs beside the user's own work: copies of models, and random generators that are left as they were."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from halfstep.errors import ModelError
from halfstep.ops.subclasses import check_initialized


def copied(model: nn.Module) -> nn.Module:
    """A copy of a model, without gradients.

    Raises:
        ModelError: it has no parameters, or cannot be copied; or a forward that was set on an instance calls the model
            itself, as the copy's would.
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
    originals = set(map(id, model.modules()))
    for path, module in own.named_modules():
        if _reaches(vars(module).get("forward"), originals):
            raise ModelError(
                f"{name}: {path or 'the model'} has a forward that was set on the instance and calls the original, so "
                "that a copy would compute with the original's weights. Give the model without it: del model.forward, "
                "or accelerator.unwrap_model(model, keep_fp32_wrapper=False)"
            )
    own.zero_grad()
    return own


def _reaches(start: Any, modules: set[int]) -> bool:
    """Whether a callable holds one of the modules: in closures, wrapped functions, bound and partial arguments."""
    seen, left = set[int](), [start]
    while left and len(seen) < 1000:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, nn.Module):
            if id(one) in modules:
                return True
            continue
        if isinstance(one, FunctionType):
            left += [cell.cell_contents for cell in one.__closure__ or () if cell != CellType()]
            left += [*(one.__defaults__ or ()), *vars(one).values()]
        elif isinstance(one, MethodType):
            left += [one.__self__, one.__func__]
        elif isinstance(one, partial):
            left += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, (tuple, list)):
            left += one
        elif callable(one) and hasattr(one, "__dict__") and not isinstance(one, type):
            left += vars(one).values()
    return False


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
