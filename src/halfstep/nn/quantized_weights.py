"""A layer's weights for inference: a parameter replaced by buffers with its codes and scales."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import ops
from halfstep.errors import CheckpointError, ModelError
from halfstep.nn.adopt import Shown, extend
from halfstep.nn.scaling import PREFIX, states_of
from halfstep.ops.few_rows import Reader, StoredWeight
from halfstep.ops.linear_passes import product_dtype
from halfstep.ops.operand import Operand, operand, state_or_current, stored
from halfstep.ops.part import part_of
from halfstep.ops.places import Layout, rounded
from halfstep.quant import Quantizer
from halfstep.quant.description import label


@dataclass(frozen=True)
class Weight:
    """A parameter that a layer multiplies by: a matrix (out, in), one such matrix an expert, or filters."""

    name: str
    product: str = ""
    """Which of the layer's matmuls takes it, if it has several."""
    transposed: bool = False
    """Whether the parameter is (in, out)."""
    layout: Layout | None = None
    """For a convolution's filters: how they are rearranged to rows."""
    stacked: bool = False
    """Whether the parameter holds one matrix an expert."""
    whole: str = ""
    """Why it is not stored as codes for inference; empty if it is."""


@dataclass(frozen=True)
class Kind:
    """An adapter: how one kind of layer follows a `LinearSpec`."""

    name: str
    forward_of: tuple[Any, ...]
    """The classes, or their full names, whose forward it replaces."""
    weights: Callable[[Any], tuple[Weight, ...]]
    """The parameters that a module's matmuls take."""
    forward: Callable[..., Any]
    """forward(stock, module, *args, **kwargs), with the spec at module._halfstep.linear."""
    fits: Callable[[Any], bool] | None = None
    """Whether it supports a module with such a forward; None: all of them."""


@dataclass(frozen=True)
class Stored:
    """The record of a parameter stored as codes: the buffers NAME_part hold `parts` of its matrices (out, in)."""

    weight: Weight
    quantizer: Quantizer
    shape: tuple[int, ...]
    """The shape of one matrix."""
    dtype: torch.dtype
    """The dtype of the parameter before."""
    parts: tuple[str, ...]
    reader: Reader = field(default_factory=Reader, repr=False, compare=False)
    """The kernel's cache, of one of its matrices at a time."""

    @property
    def label(self) -> bytes:
        """The quantizer's description, stored with the codes and compared when they are loaded."""
        return label(self.quantizer).encode()

    def values(self, module: Any) -> Tensor:
        """The parameter's rounded values, decoded from the module's buffers."""
        matrices = [quantized.dequantize() for quantized in matrices_of(module, self)]
        matrices = [matrix.t() if self.weight.transposed else matrix for matrix in matrices]
        stacked = getattr(module, f"{self.weight.name}_codes").dim() == 3
        return torch.stack(matrices) if stacked else matrices[0].contiguous()


def quantized_weight(module: Any, name: str, x: Tensor, expert: int | None = None) -> Operand | StoredWeight:
    """The layer's parameter `name`, or one expert's matrix of it, rounded, for a matmul with x, in its own layout.

    A `StoredWeight` of its codes; or the operand that its values are rounded to, if it is not stored as codes.
    """
    own = part_of(module)
    dtype, entry = product_dtype(x), own.stored[name]
    if isinstance(entry, Stored):
        held = _tensors(module, entry, expert)
        codes = StoredWeight(entry.quantizer, entry.shape, entry.dtype, held, dtype, False, entry.reader)
        return codes.t() if entry.weight.transposed else codes
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        whole, quantizer, flipped = getattr(module, name), own.spec.output.rhs, entry.transposed
        if entry.layout is not None:
            state = state_or_current(whole, quantizer, states_of(module, entry.product).get("weight"))
            return rounded(whole, entry.layout, quantizer, dtype, state)
        plain = whole if expert is None else whole[expert]
        plain = plain.t() if flipped else plain
        state = state_or_current(plain, quantizer, states_of(module, entry.product).get("weight"))
        matrix = operand(plain, quantizer, dtype, state)
    return matrix.t() if flipped else matrix


def rows_of(module: Any, name: str) -> int:
    """The number of rows of the layer's parameter `name`, or of one expert's matrix in it."""
    entry = part_of(module).stored[name]
    return entry.shape[entry.weight.transposed] if isinstance(entry, Stored) else int(getattr(module, name).shape[-2])


@torch.no_grad()
def store_weight(module: Any, weight: Weight, state: Tensor | None) -> int:
    """Replace a parameter by the codes and scales of its values; returns its number of elements."""
    parameter: Tensor = getattr(module, weight.name)
    quantizer: Any = part_of(module).spec.output.rhs
    matrices = [parameter] if parameter.dim() == 2 else list(parameter)
    matrices = [matrix.t().contiguous() if weight.transposed else matrix for matrix in matrices]
    return place_codes(module, weight, [stored(matrix, quantizer, state) for matrix in matrices])


def place_codes(module: Any, weight: Weight, found: Sequence[ops.Quantized]) -> int:
    """Replace a parameter by buffers with the given codes and scales; returns its number of elements."""
    parameter: Tensor = getattr(module, weight.name)
    first, parts = found[0], tuple(sorted(found[0].tensors))
    entry = Stored(weight, first.quantizer, first.shape, parameter.dtype, parts)
    delattr(module, weight.name)
    for part in parts:
        whole = torch.stack([q.tensors[part] for q in found]) if weight.stacked else first.tensors[part]
        module.register_buffer(f"{weight.name}_{part}", whole)
    text = torch.frombuffer(bytearray(entry.label), dtype=torch.uint8)
    module.register_buffer(f"{weight.name}_format", text.to(first.codes.device))
    part_of(module).stored[weight.name] = entry
    extend(module, Shown(weight.name, _restored))
    return parameter.numel()


def check_before_loading(module: Any, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
    """A hook of load_state_dict: check that codes are of the module's format, and register or drop the buffers with
    factors of activations to match the state dict.

    Raises:
        CheckpointError: the codes are of another format.
    """
    for name, entry in part_of(module).stored.items():
        saved = state_dict.get(f"{prefix}{name}_format" if isinstance(entry, Stored) else f"{prefix}{name}")
        if saved is None:
            continue
        found = bytes(saved.tolist()) if isinstance(entry, Stored) else b""
        if isinstance(entry, Stored) and found != entry.label:
            raise CheckpointError(
                f"{prefix}{name} was saved as {found.decode(errors='replace')!r}; here it is {entry.label.decode()!r}. "
                "Quantise the model with the recipe that the file was written under"
            )
        accept_factors(module, [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)])


def matrices_of(module: Any, entry: Stored) -> list[ops.Quantized]:
    """The codes and scales of each of a parameter's matrices (out, in)."""
    codes = getattr(module, f"{entry.weight.name}_codes")
    return [
        ops.Quantized(entry.quantizer, entry.shape, entry.dtype, _tensors(module, entry, expert))
        for expert in ([None] if codes.dim() < 3 else range(len(codes)))
    ]


def _tensors(module: Any, entry: Stored, expert: int | None = None) -> dict[str, Tensor]:
    name, buffers = entry.weight.name, module._buffers
    tensors = {part: buffers[f"{name}_{part}"] for part in entry.parts}
    return tensors if expert is None else {part: tensor[expert] for part, tensor in tensors.items()}


def _restored(module: Any, name: str) -> Tensor:
    """The value of the property that replaces the parameter: its decoded values, read-only, in its dtype and shape."""
    return read_only(part_of(module).stored[name].values(module))


def freeze(module: nn.Module, states: Mapping[str, Tensor]) -> None:
    """Store the factors in use of scaling states, by operand, in persistent buffers, for inference."""
    for name, state in states.items():
        module.register_buffer(PREFIX + name, state[:1].clone())


def accept_factors(module: nn.Module, saved: Collection[str]) -> None:
    """Register the buffers of `freeze` that a state dict has, and remove others, so that it can be loaded."""
    anything: Tensor = next(chain(module.buffers(), module.parameters()))
    names = {name for name in saved if name.startswith(PREFIX)}
    for name in [name for name in module._buffers if name.startswith(PREFIX) and name not in names]:
        delattr(module, name)
    for name in names - module._buffers.keys():
        module.register_buffer(name, torch.ones(1, dtype=torch.float32, device=anything.device))


_IN_PLACE = {
    f"__{name}__"
    for name in (
        "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift", "irshift",
        "idiv", "setitem",
    )
}  # fmt: skip
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class ReadOnly(nn.Parameter):
    """A parameter that raises on in-place functions, whose views are read-only too; other results and copies are plain
    tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        harmless = name.endswith("__") or name in ("requires_grad_", "retain_grad_")
        writes = name in _IN_PLACE or (name.endswith("_") and not harmless)
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
    """Whether two tensors share a storage."""
    with torch._C.DisableTorchFunctionSubclass():
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0


def read_only(values: Tensor) -> ReadOnly:
    """The tensor as a `ReadOnly` parameter."""
    return values.as_subclass(ReadOnly)
