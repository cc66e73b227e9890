"""The objects that a pickle of torch may contain, as records without code: storages and views of them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from halfstep.bits.values import TYPES
from halfstep.errors import CheckpointError
from halfstep.inspection.files import DIMENSIONS, TEXT
from halfstep.inspection.pickles import Allowed, Name, Pairs, Record
from halfstep.text import some


_STORAGES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16",
    "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
    "ComplexFloat": "complex64", "ComplexDouble": "complex128", "Untyped": "uint8",
}  # fmt: skip

ARRAY = "numpy.ndarray"
"""The record of a numpy array, whose values are inside the pickle."""

_PARAMETERS = "torch.nn.ParameterDict"
"""The record of a container of parameters."""


_DEPTH = 64
_OBJECTS = 5_000_000


@dataclass(frozen=True, slots=True)
class Storage:
    """The bytes of one or more tensors: `numel` values of `dtype` with the name `key`."""

    key: str
    dtype: str
    numel: int


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """A tensor: a view of a storage, with offset and strides in values of `dtype`."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def storage(identity: tuple[Any, ...]) -> Storage:
    """The storage of a persistent id: ("storage", its class, its key, a device, the number of values)."""
    match identity:
        case ("storage", Name() as kind, str() as key, _, int() as numel, *_) if (
            _storage_type(kind) and 0 <= numel < 1 << 62
        ):
            return Storage(key, _storage_type(kind), numel)
    raise _odd("persistent id", identity)


def _storage_type(kind: Name) -> str:
    name = kind.name.rpartition(".")[2]
    return _STORAGES.get(name.removesuffix("Storage"), "") if name.endswith("Storage") else ""


def _view(args: tuple[Any, ...]) -> View:
    """torch._utils._rebuild_tensor and _v2: storage, offset, size, strides, ..., metadata."""
    match args:
        case (Storage() as held, int() as offset, tuple() as size, tuple() as strides, *rest):
            _check_plain(rest[2:])
            return _checked(View(held, held.dtype, offset, size, strides))
    raise _odd("tensor", args)


def _typed_view(args: tuple[Any, ...]) -> View:
    """torch._utils._rebuild_tensor_v3: as v2, with the dtype as an argument of its own."""
    match args:
        case (Storage() as held, int() as offset, tuple() as size, tuple() as strides, _, _, Name() as dtype, *rest):
            _check_plain(rest)
            return _checked(View(held, dtype.name.removeprefix("torch."), offset, size, strides))
    raise _odd("tensor", args)


def _check_plain(metadata: list[Any]) -> None:
    if any(isinstance(found, Pairs) and found.items for found in metadata):
        raise CheckpointError(
            "a tensor is the conjugate or the negative of what is stored; save `tensor.resolve_conj().resolve_neg()`"
        )


def _checked(view: View) -> View:
    numbers = (view.offset, *view.shape, *view.strides)
    if len(view.shape) != len(view.strides) or len(view.shape) > DIMENSIONS or view.dtype not in TYPES:
        raise _odd("tensor", (view.dtype, view.shape, view.strides))
    if any(type(number) is not int or not 0 <= number < 1 << 62 for number in numbers):
        raise _odd("tensor", numbers)
    return view


def _parameter(args: tuple[Any, ...]) -> View:
    match args:
        case (View() as view, *_):
            return view
    raise _odd("parameter", args)


def _subclass(args: tuple[Any, ...]) -> Any:
    """torch._tensor._rebuild_from_type_v2: a function, the class (allowed ones only), the function's arguments."""
    match args:
        case (Name(name="torch._utils._rebuild_wrapper_subclass"), Name(), tuple(), Pairs() as inside):
            return Inside(inside.items)
        case (Name(make=function), Name(), tuple() as inner, *_) if function is not None and function is not _subclass:
            return function(inner)
    raise _odd("tensor with attributes", args)


@dataclass(slots=True, eq=False)
class Inside(Pairs):
    """The attributes of a tensor subclass that wraps other tensors, as torchao's do."""


def _wrapper(args: tuple[Any, ...]) -> Any:
    raise CheckpointError("a tensor subclass without what it wraps; the file is broken")


def _sparse(args: tuple[Any, ...]) -> Pairs:
    """torch._utils._rebuild_sparse_tensor: the layout, and its indices and values."""
    names: tuple[str, ...]
    match args:
        case ("torch.sparse_coo", (View(), View(), *_) as parts):
            names = ("indices", "values")
        case ("torch.sparse_csr" | "torch.sparse_bsr", (View(), View(), View(), *_) as parts):
            names = ("crow_indices", "col_indices", "values")
        case ("torch.sparse_csc" | "torch.sparse_bsc", (View(), View(), View(), *_) as parts):
            names = ("ccol_indices", "row_indices", "values")
        case _:
            raise _odd("sparse tensor", args)
    return Pairs(list(zip(names, parts, strict=False)))


def _dictionary(args: tuple[Any, ...]) -> Pairs:
    match args:
        case () | (Name(),) | (None,):  # a defaultdict's factory is never called
            return Pairs()
        case (Pairs() as pairs,):
            return pairs
        case (list() as items,) if all(isinstance(item, tuple | list) and len(item) == 2 for item in items):
            return Pairs([(key, value) for key, value in items])
    raise _odd("dictionary", args)


def _only(args: tuple[Any, ...]) -> Any:
    return args[0] if len(args) == 1 else args


def _elements(args: tuple[Any, ...]) -> Any:
    """The elements of a deque, to which a pickle may append."""
    return args[0] if args and isinstance(args[0], list) else []


def _nothing(args: tuple[Any, ...]) -> None:
    """For objects without tensors: a path, a slice, a date."""


def _odd(what: str, args: tuple[Any, ...]) -> CheckpointError:
    kinds = ", ".join(value.name if isinstance(value, Name) else type(value).__name__ for value in args[:8])
    return CheckpointError(f"a {what} is made of ({kinds[:200]}), which torch does not write; the file is broken")


def record(name: str) -> Allowed:
    """An entry of `allowed`: a call of `name` makes a `Record`."""
    return {name: lambda args: Record(name, args)}


_BUILTINS: Allowed = {
    **dict.fromkeys(("set", "frozenset", "bytearray", "complex"), _only),
    **dict.fromkeys(("slice", "range", "xrange"), _nothing),
    **dict.fromkeys(("list", "dict", "tuple", "int", "long", "float", "str", "unicode", "bool", "bytes")),
}
"""Python's own types, as Python 2 and 3 name them; the last ones are factories of a defaultdict."""


BASIC: Allowed = {
    **{f"torch.{name}": None for name in TYPES},
    "torch.Size": _only,
    "torch.serialization._get_layout": _only,
    "torch.strided": None,
}
"""The names that every pickle of torch may refer to."""

TENSORS: Allowed = {
    **BASIC,
    **{f"{module}.{kind}Storage": None for kind in _STORAGES for module in ("torch", "torch.cuda")},
    "torch.storage.UntypedStorage": None,
    "torch._utils._rebuild_tensor": _view,
    "torch._utils._rebuild_tensor_v2": _view,
    "torch._utils._rebuild_tensor_v3": _typed_view,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._tensor._rebuild_from_type_v2": _subclass,
    "torch.Tensor": None,
    "torch.nn.parameter.Parameter": None,
    "torch.device": _only,
    "collections.OrderedDict": _dictionary,
    "collections.Counter": _dictionary,
    "collections.defaultdict": _dictionary,
    "collections.deque": _elements,
    "_codecs.encode": _only,
    **{f"{module}.{kind}": make for module in ("__builtin__", "builtins") for kind, make in _BUILTINS.items()},
    **{
        f"{module}.{kind}Path": _nothing
        for module in ("pathlib", "pathlib._local")
        for kind in ("", "Posix", "Windows", "Pure", "PurePosix", "PureWindows")
    },
    **{f"datetime.{kind}": _nothing for kind in ("datetime", "date", "time", "timedelta", "timezone")},
    **record("argparse.Namespace"),
    **record("types.SimpleNamespace"),
    **{
        f"torch.nn.modules.container.Parameter{kind}": lambda args: Record(_PARAMETERS, args)
        for kind in ("Dict", "List")
    },
    **{f"numpy.{core}.multiarray.scalar": _only for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray._reconstruct": lambda args: Record(ARRAY, args) for core in ("core", "_core")},
    "numpy.ndarray": None,
    **record("numpy.dtype"),
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
    "torchao.*": lambda args: Record("torchao", args),
}
"""The names that a pickle of tensors may refer to: torch's own list; the types of options and logs (namespaces, paths,
dates, slices, collections); torch's two containers of parameters; numpy's scalars and arrays (states of random number
generators); and all of torchao, which wraps plain tensors."""


def views(root: Any, what: str, arrays: list[str] | None = None) -> Iterator[tuple[str, View]]:
    """The tensors in nested dictionaries and lists by dotted name; scalars and strings are skipped.

    A file of one tensor gives the name "tensor". The names of numpy's arrays are appended to `arrays`.

    Raises:
        CheckpointError: nesting deeper than 64, a cycle, or names that would fill the memory.
    """
    if isinstance(root, View):
        yield "tensor", root
        return
    levels, visited, written = [_items("", root)], 0, 0
    while levels:
        name, value = next(levels[-1], (None, None))
        if name is None:
            levels.pop()
            continue
        visited += 1
        written += len(name)
        if visited > _OBJECTS or written > TEXT or len(levels) > _DEPTH:
            raise CheckpointError(
                f"{what}: objects nested {len(levels)} deep, {visited} in all, with {written} characters of names; "
                f"expected at most {_DEPTH}, {_OBJECTS} and {TEXT}"
            )
        if isinstance(value, View):
            yield name, value
        elif isinstance(value, Record) and value.name == ARRAY and arrays is not None:
            arrays.append(name)
        else:
            levels.append(_items(name, value))


def _items(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The items of a container, each with its full name; none for a scalar."""
    if isinstance(value, Record) and isinstance(value.state, Pairs):  # a namespace, or a module
        value = value.state.text_keys().get("_parameters") if value.name == _PARAMETERS else value.state
    if isinstance(value, Pairs):
        items: Iterable[tuple[Any, Any]] = value.items
    else:
        items = enumerate(value) if isinstance(value, list | tuple) else ()
    between = "_" if isinstance(value, Inside) else "."  # as torchao calls them in safetensors files
    return ((_joined(prefix, key, between), item) for key, item in items)


def _joined(prefix: str, key: Any, between: str) -> str:
    short = isinstance(key, str | float) or (isinstance(key, int) and abs(key) < 1 << 64)
    text = str(key) if short else f"({type(key).__name__})"
    return f"{prefix}{between}{text}" if prefix else text


def passed_over(arrays: list[str]) -> tuple[str, ...]:
    """A remark on numpy's arrays, if there are any."""
    if not arrays:
        return ()
    return (f"not read: numpy arrays inside the pickle: {some([repr(name[:80]) for name in arrays], 1)}",)
