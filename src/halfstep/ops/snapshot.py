"""The values of a CodeTensor as plain tensors: `Snapshot`, which state dicts hold, and `values_of`, for matmuls."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from halfstep.ops.code_tensor import CodeTensor, read_only, written
from halfstep.ops.function import SavesNothing


class Snapshot(Tensor):
    """The decoded values of a CodeTensor in storage of their own, as state dicts hold them.

    Files and arrays read it as any other tensor. A write in place, through views too, is also written to the codes, as
    a write to an entry of a stock state dict changes the parameter (averages of state dicts,
    torch.distributed.checkpoint's load); the snapshot then has the rounded values. Pickles and copies are plain
    tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: "type[Snapshot]", source: CodeTensor, whole: Tensor, view: Tensor | None = None) -> "Snapshot":
        made: Any = Tensor._make_subclass(cls, whole if view is None else view)
        made._source, made._whole, made._plain = source, whole, whole if view is None else view
        return made  # type: ignore[no-any-return]

    _source: CodeTensor
    _whole: Tensor
    _plain: Tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        plain = tree_map_only(Snapshot, Snapshot.values, (args, dict(kwargs)))
        result = func(*plain[0], **plain[1])
        if getattr(func, "is_view", False) and isinstance(args[0], Snapshot):
            source, whole = args[0]._source, args[0]._whole
            return tree_map_only(Tensor, lambda view: Snapshot(source, whole, view), result)
        changed = {id(t._plain): t for t in written(func, args, kwargs) if isinstance(t, Snapshot)}
        for tensor in changed.values():
            tensor._source.write(tensor._whole)
            tensor._whole.copy_(tensor._source.values())
        return tree_map_only(Tensor, lambda out: changed.get(id(out), out), result) if changed else result

    def values(self) -> Tensor:
        """A plain tensor with the same storage."""
        return self._plain

    @property
    def data(self) -> Tensor:
        """The detached snapshot. Assigning copies the values."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        with torch.no_grad():
            self.copy_(values)

    def numpy(self, *, force: bool = False) -> Any:
        """The values as a read-only array that shares their memory."""
        return read_only(self._plain.numpy(force=force))

    def tolist(self) -> Any:
        """The values as nested lists of floats."""
        return self._plain.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = memo.setdefault(id(self), self._plain.clone())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self._plain)


def snapshot(tensor: CodeTensor) -> Snapshot:
    """The `Snapshot` of a CodeTensor, an entry for a state dict."""
    with torch.inference_mode(False), torch.no_grad():  # an entry may be written to after the block
        return Snapshot(tensor.detach(), tensor.values())  # type: ignore[arg-type]


def values_of(tensor: Tensor) -> Tensor:
    """The values of a CodeTensor or Snapshot as a plain tensor, with autograd, at a third of the cost of dispatch;
    other tensors are returned as they are."""
    if not isinstance(tensor, (CodeTensor, Snapshot)):
        return tensor
    return tensor.clone() if torch.compiler.is_compiling() else _Values.apply(tensor)  # type: ignore[no-untyped-call]


class _Values(SavesNothing):
    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: CodeTensor | Snapshot) -> Tensor:
        return tensor.values()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]
