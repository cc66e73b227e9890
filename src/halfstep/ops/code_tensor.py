"""A tensor subclass stored as codes and scales that behaves as its values: reading decodes, writing rounds."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from halfstep.errors import QuantizationError
from halfstep.ops.codes import decode_parts, encode_parts
from halfstep.quant import Quantizer
from halfstep.quant.tracing import untraced
from halfstep.recipe.storage import scaled_dtype


# ---- arguments of torch's functions ----------------------------------------------------------------------------------


def check(func: Any) -> None:
    """Raise for functions that a wrapper subclass cannot support: c10d's, bit views, and in-place views."""
    if getattr(func, "namespace", "") == "c10d":  # their schemas do not say which arguments they write to
        raise QuantizationError(
            f"{func} of a tensor stored as codes, which collectives do not send: send tensor.detach().clone(), and "
            "copy the result back (tensor.copy_)"
        )
    if func is _aten.view.dtype or torch.Tag.inplace_view in getattr(func, "tags", ()):
        raise QuantizationError(
            f"{func} of a tensor stored as codes: its bits cannot be viewed in another dtype, nor its shape be changed "
            "in place. Call it on tensor.detach().clone()"
        )


@cache
def _writable(func: Any) -> tuple[tuple[int, str], ...]:
    """The position and name of each argument that an operator writes to, by its schema."""
    arguments = func._schema.arguments if hasattr(func, "_schema") else ()
    return tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments that a call writes to."""
    for place, name in _writable(func):
        yield from tree_leaves(args[place] if place < len(args) else kwargs.get(name))


def read_only(array: np.ndarray) -> np.ndarray:
    """The same array, made read-only."""
    array.flags.writeable = False
    return array


def as_bytes(part: Tensor) -> Tensor:
    """A uint8 view of a tensor of an 8-bit float dtype, which more of torch's functions and pickle support; other
    tensors unchanged."""
    return part.view(torch.uint8) if part.is_floating_point() and part.itemsize == 1 else part


# ---- the tensor ------------------------------------------------------------------------------------------------------

_aten = torch.ops.aten
_FACTORS: dict[Any, Any] = {
    _aten.mul_.Tensor: Tensor.mul_,
    _aten.mul_.Scalar: Tensor.mul_,
    _aten.div_.Tensor: Tensor.div_,
}


class CodeTensor(Tensor):
    """A wrapper subclass that stores codes and scales and has the shape and dtype of their values.

    Functions that read it, autograd included, get its values, decoded for that one call. A write (in place, by `out=`,
    by `.data =`, through a view) changes the values, and all of them are rounded again with new scales. A view is a
    CodeTensor over the same codes. All other results of functions are plain tensors, clones too.

    With one scale for the whole tensor and a format that torch has a dtype for, `codes` is of that dtype with the
    strides of the values, and `scale` is a float32 scalar. Otherwise they are laid out as in `Quantized`, and a write
    through a view is an error, since it would round other elements of its tiles too.

    Parameters of this class are copied and pickled with their codes; other tensors of it as plain tensors of values.

    Args:
        parts: the plain tensors that are stored, by name: `codes`, `scale` and others of the quantizer.
        shape: the shape of all values that the parts hold.
        dtype: the dtype of the values.
        scalable: whether a multiplication by a scalar may go into the scale, which loses nothing: for gradients, which
            are clipped. (Weights keep a power of two as their scale.)
        view: a view of `whole` with this tensor's shape, strides and offset. None: this is the whole tensor.
    """

    quantizer: Quantizer
    scalable: bool
    codes: Tensor
    scale: Tensor
    _names: tuple[str, ...]
    whole: Tensor
    """A tensor with the shape and strides of all values: the codes themselves, or a meta tensor."""
    is_whole: bool
    """Whether this has the shape and strides of `whole`: it is no view of a part, and not transposed."""
    _flat: bool
    """Whether the codes have the strides of the values, one element each."""
    grads: Quantizer | None
    """The quantizer that a parameter's gradient is rounded by once it has been accumulated."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: "type[CodeTensor]",
        parts: Mapping[str, Tensor],
        quantizer: Quantizer,
        shape: Sequence[int],
        dtype: torch.dtype,
        scalable: bool = False,
        view: Tensor | None = None,
    ) -> "CodeTensor":
        flat = scaled_dtype(quantizer) is not None
        whole = parts["codes"] if flat else torch.empty(shape, device="meta", dtype=torch.float32)
        like = whole if view is None else view
        made: Any = Tensor._make_wrapper_subclass(
            cls, like.size(), like.stride(), like.storage_offset(), dtype=dtype, device=parts["codes"].device
        )
        made.quantizer, made.scalable, made.whole, made.grads = quantizer, scalable, whole, None
        made.is_whole = whole.size() == like.size() and whole.stride() == like.stride()
        made._flat, made._names = flat, tuple(parts)
        for name, part in parts.items():
            setattr(made, name, part)
        return made  # type: ignore[no-any-return]

    @classmethod
    def encode(cls, x: Tensor, quantizer: Quantizer, scalable: bool = False) -> "CodeTensor":
        """A CodeTensor of x, rounded by the quantizer."""
        x = x.detach()
        return cls(encode_parts(x, quantizer), quantizer, x.shape, x.dtype, scalable)

    @property
    def parts(self) -> dict[str, Tensor]:
        """The plain tensors that are stored, by name."""
        return {name: getattr(self, name) for name in self._names}

    def values(self) -> Tensor:
        """The decoded values, a new plain tensor, without dispatch and without autograd."""
        return self._all_values() if self.is_whole else self._part_of(self._all_values()).clone()

    def write(self, values: Tensor) -> None:
        """Overwrite this tensor with `values`, rounded, without dispatch. It increments the version.

        Raises:
            QuantizationError: this is a view of a tensor in tiles.
        """
        if not self.is_whole:
            if not self._flat:
                raise QuantizationError(
                    f"a write through a view of a tensor that is stored as {self.quantizer.format.name} in tiles "
                    f"({self.quantizer.scales}): it would round other elements of these tiles too. Write to a clone of "
                    "the whole tensor, and copy that back (tensor.copy_(clone))"
                )
            whole = self._all_values()
            self._part_of(whole).copy_(values)
            values = whole
        for name, part in encode_parts(values.detach(), self.quantizer).items():
            own = getattr(self, name)
            (own if own.shape == part.shape else own.resize_(part.shape)).copy_(part)  # there may be more outliers
        torch.autograd.graph.increment_version(self)  # torch does it for its own functions, but not for foreach ones

    def _all_values(self) -> Tensor:
        return decode_parts(self.parts, self.quantizer, tuple(self.whole.shape), self.dtype)

    def _part_of(self, whole: Tensor) -> Tensor:
        """The view of a tensor, which has the strides of `self.whole`, that this tensor is of `self.whole`."""
        return whole.as_strided(self.size(), self.stride(), self.storage_offset() - self.whole.storage_offset())

    # ---- what torch asks ----------------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        check(func)
        first = args[0] if args else None
        if getattr(func, "is_view", False) and isinstance(first, CodeTensor):
            viewed = first._viewed(func, args[1:], kwargs)
            return return_and_correct_aliasing(func, args, kwargs, viewed)  # type: ignore[no-untyped-call]
        if func in _FACTORS and isinstance(first, CodeTensor) and first._takes_factor(args[1]):
            _FACTORS[func](first.scale, args[1])
            return first
        if func is _aten.copy_.default and isinstance(first, CodeTensor) and first._stores_as(args[1]):
            for name, part in args[1].parts.items():
                getattr(first, name).copy_(part)
            return first
        decoded: dict[int, Tensor] = {}

        def values(tensor: "CodeTensor") -> Tensor:
            return decoded.setdefault(id(tensor), tensor.values())

        plain = tree_map_only(CodeTensor, values, (args, dict(kwargs)))
        result = func(*plain[0], **plain[1])
        changed = {id(decoded[id(t)]): t for t in written(func, args, kwargs) if isinstance(t, CodeTensor)}
        for tensor in changed.values():
            new = decoded[id(tensor)]
            if new.shape != tensor.shape:
                raise QuantizationError(
                    f"{func} would change the shape of a tensor stored as codes from {tuple(tensor.shape)} to "
                    f"{tuple(new.shape)}; write to a new tensor"
                )
            tensor.write(new)
        return tree_map_only(Tensor, lambda out: changed.get(id(out), out), result) if changed else result

    def _takes_factor(self, x: Any) -> bool:
        """Whether an in-place multiplication by x can multiply the scale instead of the values."""
        number = isinstance(x, (int, float)) or (
            isinstance(x, Tensor) and not x.dim() and not isinstance(x, CodeTensor)
        )
        return number and self.scalable and self.is_whole and self._flat

    def _stores_as(self, other: Any) -> bool:
        """Whether `copy_` from `other` can copy its parts: both are whole, with one quantizer and parts of equal
        shapes."""
        return (
            isinstance(other, CodeTensor)
            and (self.quantizer, self.scalable) == (other.quantizer, other.scalable)
            and self.is_whole
            and other.is_whole
            and all(getattr(self, name).shape == part.shape for name, part in other.parts.items())
        )

    def _viewed(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        like = func(self._part_of(self.whole), *args, **kwargs)
        shape = self.whole.shape
        with torch.inference_mode(self.is_inference()):  # as torch's views: of the kind of their base
            return tree_map_only(
                Tensor,
                lambda view: CodeTensor(self.parts, self.quantizer, shape, self.dtype, self.scalable, view),
                like,
            )

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """The names of the stored tensors, for torch.compile, and the other arguments that rebuild this tensor."""
        offset = None if self.is_whole else self.storage_offset() - self.whole.storage_offset()
        return list(self._names), (self.quantizer, tuple(self.whole.shape), self.dtype, self.scalable, offset)

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "CodeTensor":
        quantizer, shape, dtype, scalable, offset = context
        made = CodeTensor(parts, quantizer, shape, dtype, scalable)
        if offset is None:
            return made
        view = made.whole.as_strided(size, stride, offset + made.whole.storage_offset())
        return CodeTensor(parts, quantizer, shape, dtype, scalable, view)

    @property
    def data(self) -> Tensor:
        """The same codes, detached from autograd. Assigning copies the values: the assigned storage is not adopted."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        if (values.shape, values.dtype, values.device) != (self.shape, self.dtype, self.device):
            raise QuantizationError(
                f"data = {tuple(values.shape)} {values.dtype} on {values.device}; this tensor is {tuple(self.shape)} "
                f"{self.dtype} on {self.device}, stored as codes: halfstep.revert the model first, or cast and move it "
                "before halfstep.prepare"
            )
        part = not isinstance(values, CodeTensor) and values.untyped_storage().nbytes() != values.nbytes
        if part or not self.is_whole:
            raise QuantizationError(
                "data = of a view of a tensor stored as codes, or = a view of a larger tensor: the values would be "
                "copied, not shared. Call copy_ instead (under torch.no_grad)"
            )
        self.write(values.values() if isinstance(values, CodeTensor) else values)

    def numpy(self, *, force: bool = False) -> Any:
        """A read-only array with a copy of the values.

        Raises:
            RuntimeError: the tensor requires a gradient and `force` is False, as in torch.
        """
        if self.requires_grad and not force:
            raise RuntimeError("this tensor requires grad; call tensor.detach().numpy()")
        return read_only(self.values().numpy(force=force))

    def tolist(self) -> Any:
        """The values as nested lists of floats."""
        return self.values().tolist()

    def data_ptr(self) -> int:
        """Refused: no memory holds the values.

        Raises:
            QuantizationError: always.
        """
        raise QuantizationError(
            "this tensor is stored as codes, so no address holds its values: take tensor.detach().clone(), or "
            "model.state_dict() for files"
        )

    def storage(self) -> Any:
        """Refused, as `data_ptr` is."""
        return self.data_ptr()

    def __dlpack__(self, **_: Any) -> Any:
        """Refused, as `data_ptr` is."""
        return self.data_ptr()

    def share_memory_(self) -> "CodeTensor":
        """Move the codes and scales to shared memory, in place; returns this tensor."""
        for part in self.parts.values():
            part.share_memory_()  # type: ignore[no-untyped-call]
        return self

    def is_shared(self) -> bool:
        """Whether the codes and scales are in shared memory."""
        return all(part.is_shared() for part in self.parts.values())  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            parts = {name: part.clone() for name, part in self.parts.items()}
            memo[id(self)] = self._twin(parts) if isinstance(self, nn.Parameter) else self.values()
        return memo[id(self)]  # type: ignore[no-any-return]

    def _twin(self, parts: Mapping[str, Tensor]) -> "CodeTensor":
        shape = self.whole.shape
        return parameter(CodeTensor(parts, self.quantizer, shape, self.dtype), self.requires_grad, self.grads)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not isinstance(self, nn.Parameter):
            return self.values().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        parts = {name: as_bytes(part) for name, part in self.parts.items()}
        kind = self.quantizer, tuple(self.whole.shape), self.dtype
        return _restored, (parts, *kind, self.requires_grad, self.grads)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        kind = "Parameter of codes" if isinstance(self, nn.Parameter) else "CodeTensor"
        return f"{kind} in {self.quantizer.format.name}, {self.quantizer.scales}:\n{self.values()!r}"


# ---- parameters and gradients ----------------------------------------------------------------------------------------


def parameter(tensor: CodeTensor, requires_grad: bool = True, grads: Quantizer | None = None) -> CodeTensor:
    """A parameter of the CodeTensor, whose gradients are rounded by `grads` if given."""
    made: Any = nn.Parameter(tensor, requires_grad)
    if grads is not None:
        round_gradients(made, grads)
    return made  # type: ignore[no-any-return]


def round_gradients(weight: CodeTensor, quantizer: Quantizer) -> None:
    """Register a hook that stores the parameter's gradient as codes after each accumulation: a stored gradient is
    decoded, added to and encoded again."""
    trained, weight.grads = weight.requires_grad, quantizer
    weight.requires_grad_()  # torch takes hooks only then, and the caller may unfreeze a frozen parameter later
    weight.register_post_accumulate_grad_hook(round_gradient)  # type: ignore[no-untyped-call]
    weight.requires_grad_(trained)
    round_gradient(weight)


@untraced
def round_gradient(weight: Any) -> None:
    """Replace the parameter's gradient, if it has one, by codes; not if several processes train, since DDP reduces the
    unrounded gradient."""
    if weight.grad is not None and not isinstance(weight.grad, CodeTensor) and ranks() == 1:
        weight.grad = CodeTensor.encode(weight.grad, weight.grads, scalable=True)


def ranks() -> int:
    """The world size of torch.distributed; 1 if it is not initialized."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _restored(
    parts: Mapping[str, Tensor],
    quantizer: Quantizer,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    grads: Quantizer | None,
) -> CodeTensor:
    own = scaled_dtype(quantizer)
    codes = parts["codes"] if own is None else parts["codes"].view(own)
    return parameter(CodeTensor({**parts, "codes": codes}, quantizer, shape, dtype), requires_grad, grads)
