"""Values to be read and not written: those of a weight that is kept as codes, which no write would reach."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import ModelError


_IN_PLACE = {
    f"__{name}__"
    for name in (
        "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift", "irshift",
        "idiv", "setitem",
    )
}  # fmt: skip
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_HARMLESS = ("requires_grad_", "retain_grad_")


class ReadOnly(nn.Parameter):
    """A read-only parameter, in whose place nothing is written: functions of it give plain tensors and
    read-only views, in-place ones are refused, and copies are plain."""

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
        alias = isinstance(result, Tensor) and any(_shares(result, arg) for arg in args if isinstance(arg, cls))
        return result.as_subclass(cls) if alias else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = memo.setdefault(id(self), self.as_subclass(Tensor).clone())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _shares(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors lie in the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0


def read_only(values: Tensor) -> ReadOnly:
    """The values, to be read."""
    return values.as_subclass(ReadOnly)
