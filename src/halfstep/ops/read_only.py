"""Values to be read and not written: those of a weight that is kept as codes, which no write would reach."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ModelError


_IN_PLACE = {
    f"__{name}__"
    for name in (
        "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift", "irshift",
        "idiv", "setitem",
    )
}  # fmt: skip
_ALIASES = (Tensor.data.__get__, Tensor.detach)  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_HARMLESS = ("requires_grad_", "retain_grad_")


class ReadOnly(Tensor):
    """A tensor in whose place nothing is written: functions of it give plain tensors, and in-place ones are refused."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        writes = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__") and name not in _HARMLESS)
        if (args and isinstance(args[0], cls) and (writes or func == _SET_DATA)) or isinstance(kwargs.get("out"), cls):
            raise ModelError(
                f"{name} writes to the values of a weight that is kept as codes (halfstep.quantize_model), where it "
                "would be lost. To merge adapters, or to change weights, call halfstep.dequantize_model(model) first: "
                "it puts values in the place of the codes"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return result.as_subclass(cls) if func in _ALIASES else result


def read_only(values: Tensor) -> ReadOnly:
    """The values, to be read."""
    return values.as_subclass(ReadOnly)
