"""Checks for tensors that kernels must not read: other libraries' subclasses, DTensors, uninitialized parameters."""

from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from halfstep.errors import ModelError


def foreign(tensor: Tensor) -> str | None:
    """The name of a tensor subclass that no kernel of ours may read, such as `torchao.Float8Tensor` or `DTensor`; None
    for torch's own classes, and so for the tensors of a traced graph.

    Quantized weights of torchao and bitsandbytes are such subclasses, which compute by their own dispatch.
    """
    kind: Any = type(tensor)
    if hasattr(tensor, "device_mesh"):
        return "DTensor"
    return None if f"{kind.__module__}.".startswith("torch.") else f"{kind.__module__.split('.')[0]}.{kind.__name__}"


def arrived(tensor: Any) -> Tensor:
    """The tensor; an AsyncCollectiveTensor is waited for and returned as a plain tensor that kernels can read."""
    if type(tensor).__name__ != "AsyncCollectiveTensor":
        return tensor  # type: ignore[no-any-return]
    return tensor.clone() if tensor.requires_grad else tensor.wait()  # type: ignore[no-any-return]


def check_plain(tensor: Tensor) -> None:
    """Raise if the tensor cannot be rounded as one.

    Raises:
        ModelError: it is a DTensor or another library's subclass.
    """
    if (name := foreign(tensor)) is None:
        return
    if name == "DTensor":
        raise ModelError(
            "a recipe rounds the operands of a matmul with a sharded weight (a DTensor), but supports tensor "
            "parallelism for nn.Linear alone: shard by fully_shard, keep these layers by module_filter, or take a "
            "recipe without rules, such as bf16-mixed"
        )
    raise ModelError(
        f"a recipe rounds the operands of a matmul with a weight that is a {name}: halfstep.revert the model before "
        "another library quantises it, or keep these layers by module_filter"
    )


def check_initialized(model: nn.Module) -> None:
    """Raise if the model has uninitialized parameters or buffers.

    Raises:
        ModelError: a parameter or buffer has no shape yet (torch's lazy modules).
    """
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if is_lazy(tensor):
                raise ModelError(
                    f"{type(model).__name__}: {f'{path}.{name}'.lstrip('.')} of a {type(module).__name__} has no shape "
                    "before the first forward; call the model with a batch first"
                )
