"""Fast paths for CUDA tensors, in Triton: `run` of a file each, as in `kernels.cpu`.

Here: which tensors they take, and how they are launched.
"""

from contextlib import nullcontext
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from halfstep.quant.rounding import Seed
from halfstep.quant.tracing import has_memory


OLDEST = (3, 6)
"""The oldest Triton that the kernels were proven with."""
BLOCK = 2048
"""Elements of a program, where a kernel goes over a tensor element by element."""
UNIT = 16
"""Rows of a multiple of so many elements start where 16 bytes do: with any number, registers would spill."""

_BITS = {
    torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16,
    torch.uint16: torch.int16, torch.uint32: torch.int32,
}  # fmt: skip
KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""Dtypes of numbers, as kernels are told them: what they load are bits."""


# ---- availability ----------------------------------------------------------------------------------------------------


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of an NVIDIA GPU; (0, 0) of other devices."""
    there = device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available()
    return torch.cuda.get_device_capability(device) if there else (0, 0)


@cache
def missing() -> str | None:
    """Why no Triton kernels run here; None where they do."""
    if torch.version.hip is not None:
        return "ROCm: the Triton kernels are proven for NVIDIA's GPUs alone"
    if find_spec("triton") is None:
        return "triton is not installed: torch for CUDA brings it on Linux, and so does halfstep[gpu]"
    found = version("triton")
    if tuple(map(int, found.split(".")[:2])) < OLDEST:
        return f"triton {found}: the kernels need {'.'.join(map(str, OLDEST))} or newer"
    return None


def here(tensor: Tensor) -> bool:
    """Whether Triton kernels run where this tensor is, and can read it."""
    return tensor.is_cuda and has_memory(tensor) and missing() is None


# ---- tensors that kernels take ---------------------------------------------------------------------------------------


def plain(tensor: Tensor, *dtypes: torch.dtype) -> bool:
    """Whether this is a dense contiguous tensor of one of the dtypes (fp32, bf16 and fp16 where none is named) where
    Triton kernels run."""
    return here(tensor) and lies_plain(tensor, *dtypes)


def lies_plain(tensor: Tensor, *dtypes: torch.dtype) -> bool:
    """The same but for where the tensor is."""
    return (
        tensor.dtype in (dtypes or KINDS)
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def bits(tensor: Tensor) -> Tensor:
    """A tensor as the integers that kernels load and store; integers and bytes as they are."""
    tensor = tensor.detach()
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor.view(_BITS.get(tensor.dtype, tensor.dtype))


def halves(seed: Seed | None) -> tuple[int, int, int]:
    """A seed as kernels take it: two 32-bit halves, lower first, as signed numbers (a kernel's integers are signed),
    and 0; of one in the GPU's memory the halves of its address, and 1. Either way it is the same kernel, so that eager
    steps compile what a CUDA graph captures."""
    if seed is None:
        return 0, 0, 0
    number = seed.data_ptr() if isinstance(seed, Tensor) else seed
    low, high = (number >> shift & 0xFFFFFFFF for shift in (0, 32))
    return low - (low >> 31 << 32), high - (high >> 31 << 32), int(isinstance(seed, Tensor))


# ---- launches --------------------------------------------------------------------------------------------------------


@cache
def functions(name: str) -> ModuleType:
    """The module of `kernels.gpu.jit` of that name."""
    return import_module(f"halfstep.kernels.gpu.jit.{name}")


class Launch:
    """Runs programs of a kernel on a device's current stream, by constants that are given once.

    Triton asks at each launch what its arguments are, for every constant of a kernel too: that takes longer than the
    launch. So what it compiled is kept by which arguments are there and begin at a multiple of 16 bytes: the dtypes of
    tensors do not change from call to call, nor whether whole numbers fit 32 bits.

    Multiplications and additions are never contracted, which would round once where the reference rounds twice.

    Args:
        as_bits: the kernel takes all tensors as integers (`bits`): calls need not.
        varying: the places of the arguments that are not alike in all calls: a tensor or None, or one that may begin
            elsewhere. None: all are asked.
    """

    def __init__(
        self,
        kernel: Any,
        device: torch.device,
        warps: int = 4,
        as_bits: bool = False,
        varying: tuple[int, ...] | None = None,
        **constants: Any,
    ) -> None:
        self._kernel, self._device, self._as_bits, self._varying = kernel, device, as_bits, varying
        self._options = {**constants, "num_warps": warps, "enable_fp_fusion": False}
        self._values = [constants[name] for name in kernel.arg_names if name in constants]
        self._compiled: dict[tuple[bool | None, ...], Any] = {}

    def __call__(self, grid: int, *arguments: Any) -> None:
        asked = arguments if self._varying is None else [arguments[place] for place in self._varying]
        key = tuple([a.data_ptr() % 16 == 0 if isinstance(a, Tensor) else None for a in asked])
        compiled, index = self._compiled.get(key), self._device.index
        if compiled is not None and grid and (index is None or index == torch._C._cuda_getDevice()):
            compiled[(grid, 1, 1)](*arguments, *self._values)
        elif grid:
            with torch.cuda.device(index) if index is not None else nullcontext():
                self._first(grid, key, arguments)

    def _first(self, grid: int, key: tuple[bool | None, ...], arguments: tuple[Any, ...]) -> None:
        """A call that Triton makes: it compiles, where it has not; its interpreter never does."""
        if self._as_bits:
            arguments = tuple([bits(a) if isinstance(a, Tensor) else a for a in arguments])
        compiled = self._kernel[(grid,)](*arguments, **self._options)
        if compiled is not None:
            self._compiled[key] = compiled


def launch(kernel: Any, grid: int, *arguments: Any, device: torch.device, warps: int = 4, **constants: Any) -> None:
    """Run `grid` programs of a kernel: by a `Launch` that is made once of these constants and kinds of arguments."""
    kinds = tuple([_kind(argument) for argument in arguments])
    prepared(kernel, device, warps, kinds=kinds, **constants)(grid, *arguments)


def _kind(argument: Any) -> Any:
    """The dtype of a tensor, and whether a whole number has more than 32 bits."""
    return argument.dtype if isinstance(argument, Tensor) else argument and argument.bit_length() > 31


@lru_cache(maxsize=4096)
def prepared(
    kernel: Any,
    device: torch.device,
    warps: int = 4,
    as_bits: bool = False,
    varying: tuple[int, ...] | None = None,
    kinds: object = None,
    **constants: Any,
) -> Launch:
    """The `Launch` of a kernel and constants, for arguments of those `kinds`: the same one for the same."""
    return Launch(kernel, device, warps, as_bits, varying, **constants)
