"""Triton kernels for CUDA tensors: each file has a `run`, as in `kernels.cpu`.

This file decides which tensors they support and launches them.
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
"""The oldest Triton version with which the kernels were tested against the reference."""
BLOCK = 2048
"""Elements per program of an elementwise kernel."""
UNIT = 16
"""Rows whose length is a multiple of this start at multiples of 16 bytes, which kernels rely on; for rows of any length
registers would spill."""

_BITS = {
    torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16,
    torch.uint16: torch.int16, torch.uint32: torch.int32,
}  # fmt: skip
KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""Floating dtypes by the names that kernels take: they load tensors as integers."""


# ---- availability ----------------------------------------------------------------------------------------------------


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of an NVIDIA GPU; (0, 0) for other devices."""
    there = device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available()
    return torch.cuda.get_device_capability(device) if there else (0, 0)


@cache
def missing() -> str | None:
    """Why Triton kernels cannot run on this machine; None where they can."""
    if torch.version.hip is not None:
        return "ROCm: the Triton kernels are proven for NVIDIA's GPUs alone"
    if find_spec("triton") is None:
        return "triton is not installed: torch for CUDA brings it on Linux, and so does halfstep[gpu]"
    found = version("triton")
    if tuple(map(int, found.split(".")[:2])) < OLDEST:
        return f"triton {found}: the kernels need {'.'.join(map(str, OLDEST))} or newer"
    return None


def here(tensor: Tensor) -> bool:
    """Whether Triton kernels run on this tensor's device and can read its storage."""
    return tensor.is_cuda and has_memory(tensor) and missing() is None


# ---- tensors that kernels take ---------------------------------------------------------------------------------------


def plain(tensor: Tensor, *dtypes: torch.dtype) -> bool:
    """Whether this is a dense contiguous CUDA tensor of one of the dtypes (default: fp32, bf16 and fp16), and Triton
    kernels run here."""
    return here(tensor) and is_dense(tensor, *dtypes)


def is_dense(tensor: Tensor, *dtypes: torch.dtype) -> bool:
    """Whether this is a dense contiguous tensor of one of the dtypes (default: fp32, bf16 and fp16), on any device."""
    return (
        tensor.dtype in (dtypes or KINDS)
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def bits(tensor: Tensor) -> Tensor:
    """A view of the tensor as the integers that kernels load and store; integer and byte tensors as they are."""
    tensor = tensor.detach()
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor.view(_BITS.get(tensor.dtype, tensor.dtype))


def halves(seed: Seed | None) -> tuple[int, int, int]:
    """A seed as the three ints that kernels take: (low, high, 0), its 32-bit halves as signed ints, since kernel
    arguments are signed; for a seed on the GPU the halves of its address, and 1. Both use one kernel, so that eager
    steps compile what a CUDA graph captures."""
    if seed is None:
        return 0, 0, 0
    number = seed.data_ptr() if isinstance(seed, Tensor) else seed
    low, high = (number >> shift & 0xFFFFFFFF for shift in (0, 32))
    return low - (low >> 31 << 32), high - (high >> 31 << 32), int(isinstance(seed, Tensor))


# ---- launches --------------------------------------------------------------------------------------------------------


@cache
def functions(name: str) -> ModuleType:
    """The module of `kernels.gpu.jit` with that name."""
    return import_module(f"halfstep.kernels.gpu.jit.{name}")


class Launch:
    """Launches a Triton kernel with fixed constants on a device's current stream.

    Triton inspects all arguments and constants at each launch, which takes longer than the launch itself. So compiled
    kernels are cached here by which arguments are tensors and which of these are 16-byte aligned. The dtypes of
    tensors, and whether ints fit 32 bits, must not change between calls.

    FMA contraction is off: it would round once where the reference rounds twice.

    Args:
        as_bits: convert tensor arguments to integers (`bits`) on the first launch, so that callers need not.
        varying: the indices of arguments that may be a tensor or None, or of another alignment, from call to call.
            None: all are checked.
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
        """Launch through Triton, which compiles the kernel if needed; in Triton's interpreter nothing is compiled or
        cached."""
        if self._as_bits:
            arguments = tuple([bits(a) if isinstance(a, Tensor) else a for a in arguments])
        compiled = self._kernel[(grid,)](*arguments, **self._options)
        if compiled is not None:
            self._compiled[key] = compiled


def launch(kernel: Any, grid: int, *arguments: Any, device: torch.device, warps: int = 4, **constants: Any) -> None:
    """Launch `grid` programs of a kernel through a cached `Launch` for these constants and kinds of arguments."""
    kinds = tuple([_kind(argument) for argument in arguments])
    prepared(kernel, device, warps, kinds=kinds, **constants)(grid, *arguments)


def _kind(argument: Any) -> Any:
    """The dtype of a tensor; of an int, whether it needs more than 32 bits."""
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
    """The cached `Launch` of a kernel with these constants; a different `kinds` gives another `Launch`."""
    return Launch(kernel, device, warps, as_bits, varying, **constants)
