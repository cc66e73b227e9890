"""Classification of torch's functions for unit scaling: one canonical name for each operation."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from halfstep.unit.activations import IN_PLACE


_NAMES = {
    "add": ("add", "add_", "__add__", "__radd__", "__iadd__"),
    "sub": ("sub", "sub_", "subtract", "__sub__", "__rsub__", "rsub", "__isub__"),
    "mul": ("mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"),
    "div": ("div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__"),
    "matmul": ("matmul", "bmm", "__matmul__"),
    "softmax": ("softmax", "_softmax"),
    "dropout": ("dropout", "dropout_", "feature_dropout", "dropout1d", "dropout2d", "dropout3d"),
}  # fmt: skip
_CANONICAL = {name: canonical for canonical, names in _NAMES.items() for name in names}
_SCALARS = {"add": "shift", "sub": "shift", "mul": "scale", "div": "scale"}
"""The canonical names of these operations if one operand is a scalar."""

ELEMENTWISE = frozenset(
    ("celu", "elu", "gelu", "hardswish", "leaky_relu", "logsigmoid", "mish", "relu", "relu_", "relu6", "selu",
     "sigmoid", "silu", "softplus", "softsign", "tanh")
)  # fmt: skip
"""Elementwise functions of one tensor."""

VIEWS = frozenset(
    ("T", "H", "mT", "mH", "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "transpose", "swapaxes",
     "swapdims", "permute", "movedim", "contiguous", "chunk", "split", "split_with_sizes", "tensor_split", "unbind",
     "__getitem__", "select", "narrow", "unsqueeze", "squeeze", "expand", "expand_as", "broadcast_to", "to", "type",
     "type_as", "float", "half", "bfloat16", "clone", "t", "roll", "flip", "repeat", "repeat_interleave",
     "index_select", "gather", "take_along_dim", "clamp", "real", "imag", "cuda", "cpu", "double", "requires_grad_",
     "checkpoint_name", "tile", "masked_select")
)  # fmt: skip
"""Functions of one tensor that keep its mean square, apart from the choice of elements."""

SAME = frozenset(("neg", "__neg__", "abs"))
"""Functions of one tensor that keep the magnitude of each element."""

ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""The arguments of `scaled_dot_product_attention`."""
JOINS = frozenset(("cat", "concat", "concatenate", "stack", "hstack", "vstack"))
NORMS = frozenset(("layer_norm", "rms_norm", "group_norm", "batch_norm"))
CHOICES = frozenset(("where", "masked_fill", "masked_fill_"))
DETACHED = frozenset(("detach", "detach_", "data", "grad", "argmax", "argmin", "sign", "isinf", "isnan", "isfinite"))


def raw_name(func: Callable[..., Any]) -> str:
    """torch's name of a function; for a property's getter, the property's name."""
    name: str = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return name


def canonical(func: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """The canonical name of a call's operation; `scale` and `shift` for a scalar operand."""
    name = _CANONICAL.get(raw_name(func)) or raw_name(func)
    if name in _SCALARS and sum(isinstance(x, Tensor) and x.dim() > 0 for x in args[:2]) < 2:
        return _SCALARS[name]
    return name


def activation(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """The name in `unit.activations.IN_PLACE` of a call of an elementwise function; None if it has none."""
    named = f"{name}_tanh" if kwargs.get("approximate") == "tanh" else name
    return named if (len(args) == 1 and kwargs.keys() <= {"approximate", "inplace"}) and named in IN_PLACE else None


def is_in_place(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call writes to its first argument."""
    name = raw_name(func)
    return (
        bool(kwargs.get("inplace"))
        or name in ("__iadd__", "__isub__", "__imul__", "__itruediv__")
        or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")
    )


def tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[int, Tensor]]:
    """(index, tensor) for the tensors among the flattened arguments of a call."""
    return [(i, x) for i, x in enumerate(tree_leaves((args, dict(kwargs)))) if isinstance(x, Tensor)]


def named(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by name; `names` are those of positional arguments."""
    return {**dict(zip(names[: len(args)], args, strict=True)), **kwargs}


def number(func: Callable[..., Any], args: tuple[Any, ...]) -> float | None:
    """The factor of x in `x * c`, `c * x` or `x / c` (1 / c); None for `c / x`."""
    tensor, other = args[:2]
    divides = _CANONICAL.get(raw_name(func)) == "div"
    if not isinstance(tensor, Tensor) or (tensor.dim() == 0 and isinstance(other, Tensor)):
        return None if divides else float(tensor)
    value = float(other)
    return (1 / value if value else None) if divides else value


def signature(name: str, args: tuple[Any, ...]) -> str:
    """The operation's name, for arithmetic with its operands' numbers of dimensions, by which calls are recognized."""
    if name in ("add", "sub", "mul", "div"):
        return f"{name} of {' and '.join(str(x.dim()) if isinstance(x, Tensor) else 's' for x in args[:2])} dimensions"
    return name


def is_floating(x: Any) -> bool:
    """Whether x is a floating-point or complex tensor."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def counts(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call has floating tensors among its arguments, so that it may be scaled."""
    return any(map(is_floating, (*args[:3], *kwargs.values())))
